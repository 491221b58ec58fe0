"""Join, fetch, train, send."""
