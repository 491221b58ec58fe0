"""What moves between machines, and what it costs."""
