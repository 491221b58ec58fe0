"""Serving a trained model: stages compute its blocks, users talk to the entry."""
