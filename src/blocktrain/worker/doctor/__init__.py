"""Why a worker does not join, and what fixes it."""
