"""The groups of ranks that a stage talks over: of every axis that cuts something, and of parts of an axis whose ranks exchange heads.

In: a graph's sharding, the mesh, the world. Out: groups by name.
"""

from __future__ import annotations

from weft.model.graph import Graph
from weft.model.sharding.sharding import Sharding, exchanged
from weft.plan.mesh import Mesh
from weft.world.world import Group, World


def groups_of(graph: Graph, sharding: Sharding, mesh: Mesh, world: World) -> dict[str, Group]:
    """This rank's group of each axis by its name; also those that `beside` and `apart` name."""
    groups = {}
    for axis in sharding.sizes:
        ranks = mesh.group(world.rank, axis)
        groups[axis], at = world.group(ranks), ranks.index(world.rank)
        rows = graph.fused.rules
        counts = {exchanged(sharding, op, rows[op.name], axis, graph.tensors[op.inputs[0]].shape) for op in graph.operators if op.inputs}
        for n in counts - {1}:
            groups[beside(axis, n)] = world.group(ranks[at - at % n : at - at % n + n])
            groups[apart(axis, n)] = world.group(ranks[at % n :: n])
    return groups


def beside(axis: str, n: int) -> str:
    """The name of the group of n ranks of an axis that lie side by side."""
    return f"{n} of {axis}"


def apart(axis: str, n: int) -> str:
    """The name of the group of the ranks of an axis that have the same place among n that lie side by side."""
    return f"{axis} by {n}"
