"""A process that serves blocks over TCP."""
