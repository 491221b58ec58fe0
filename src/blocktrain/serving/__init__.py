"""The trained blocks at work: stages that hold them, the entry that users talk to, and the lines between."""
