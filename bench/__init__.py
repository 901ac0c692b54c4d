"""Measurements of shardwise beside its peers; started by `scripts/bench NAME`, not part of the installed package."""
