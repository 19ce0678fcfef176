"""The token loop over shards and stations."""
