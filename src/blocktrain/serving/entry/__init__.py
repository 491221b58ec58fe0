"""The process that users talk to."""
