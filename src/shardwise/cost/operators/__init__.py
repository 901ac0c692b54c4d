"""Operators under a sharding: inventory and prices."""
