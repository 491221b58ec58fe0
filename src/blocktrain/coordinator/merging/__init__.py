"""How the updates of a round become the next version of a block."""
