"""A model for the tools of Hugging Face: `export` writes it as a folder, `push` uploads it."""
