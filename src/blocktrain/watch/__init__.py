"""What happens in a run, for people and for Prometheus."""
