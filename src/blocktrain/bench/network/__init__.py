"""Hosts and links that behave as badly as one asks for."""
