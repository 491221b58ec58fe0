"""What travels between machines: messages, bytes, signatures, chunks. Knows neither HTTP nor torch."""
