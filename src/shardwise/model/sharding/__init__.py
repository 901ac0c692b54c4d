"""Sharding propagation: from factor rules to the placement of every value."""
