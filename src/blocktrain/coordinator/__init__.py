"""The run in memory, the pure decisions about it, and the calls on it."""
