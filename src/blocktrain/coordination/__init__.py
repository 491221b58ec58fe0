"""Rounds by deadline, merging, durable storage: what turns the updates of many machines into versions of one model."""
