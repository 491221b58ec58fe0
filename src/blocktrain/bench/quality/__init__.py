"""What compositions are worth."""
