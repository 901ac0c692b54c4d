"""Process groups of a stage: one per sharded axis, and the inner and outer groups of an axis whose ranks exchange attention heads."""

from __future__ import annotations

from shardwise.model.dims.fused_dims import find_fused_dims
from shardwise.model.graph import Graph
from shardwise.model.sharding.sharding import Sharding, num_exchanging_ranks
from shardwise.plan.ir.mesh import Mesh
from shardwise.world.world import Group, World


def groups_of(graph: Graph, sharding: Sharding, mesh: Mesh, world: World) -> dict[str, Group]:
    """Return this rank's group of each axis by name; also those that `inner_group_name` and `outer_group_name` name."""
    groups = {}
    for axis in sharding.sizes:
        ranks = mesh.group(world.rank, axis)
        groups[axis], at = world.group(ranks), ranks.index(world.rank)
        rows = find_fused_dims(graph).rules
        counts = {
            num_exchanging_ranks(sharding, op, rows[op.name], axis, graph.tensors[op.inputs[0]].shape)
            for op in graph.operators
            if op.inputs
        }
        for n in counts - {1}:
            groups[inner_group_name(axis, n)] = world.group(ranks[at - at % n : at - at % n + n])
            groups[outer_group_name(axis, n)] = world.group(ranks[at % n :: n])
    return groups


def inner_group_name(axis: str, n: int) -> str:
    """Return the name of the inner group: n adjacent ranks of an axis."""
    return f"{n} of {axis}"


def outer_group_name(axis: str, n: int) -> str:
    """Return the name of the outer group: ranks with equal index within their inner group of size n."""
    return f"{axis} by {n}"
