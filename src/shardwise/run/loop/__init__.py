"""A sharded module in the user's own training loop: its parameters are this rank's shards, its forward is the lowered graph."""
