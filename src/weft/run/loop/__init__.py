"""A module in the user's own training loop: this rank's shards as its parameters, the lowered graph as its forward."""
