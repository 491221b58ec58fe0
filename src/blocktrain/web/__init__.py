"""The HTTP front and the pages."""
