"""Reductions over ranks: of gradients, exact or compressed, all-reduced or scattered, synchronous or stale; and of written buffers."""
