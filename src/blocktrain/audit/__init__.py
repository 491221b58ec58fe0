"""The independent checker of a run."""
