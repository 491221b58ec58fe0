"""Files that every export contains. They leave the package, and know torch and transformers."""
