"""What bounds the disk and the memory of a run."""
