"""Members that attack a run: what they make of an honest update."""
