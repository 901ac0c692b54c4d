"""How values lie in memory: order, width."""
