"""Text per second, exactness and failover."""
