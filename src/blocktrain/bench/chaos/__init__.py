"""A real run in which everything goes wrong, drawn from a seed, beside one without faults."""
