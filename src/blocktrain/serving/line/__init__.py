"""Connections between entry and stages."""
