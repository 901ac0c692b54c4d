"""Every collective and every weight of a sum in the runtime broken once, to see whether `verify` finds it.

Nothing here lists a line of shardwise: collectives are taken where all go through (`shardwise.world.comm.group`), by who called them;
weights are the
products and quotients that the syntax trees of `lower` and `run` have; duals are the functions of `lower.redistribute`.
"""
