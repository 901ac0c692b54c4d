"""A divided module by its own code, for calls that no capture is worth: with objects that change from call to call (a cache of keys).

In: the module and its parts. Out: a block in which its parameters and buffers are whole, without gradients. Every rank that has a part
enters it, since each gathers what the others have. Not modelled: weights that stay gathered from call to call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from weft.lower.redistribute import redistribute
from weft.plan.mesh import Mesh
from weft.plan.placement import R, is_shard
from weft.run.training_parts import Parts
from weft.world import private
from weft.world.world import World


@contextmanager
def with_whole_weights(model: nn.Module, parts: Parts, mesh: Mesh, world: World) -> Iterator[None]:
    """A block without gradients in which every part of `model` holds whole tensors."""
    held: dict[str, Tensor] = {**parts.buffers, **parts.parameters}
    whole: dict[int, Tensor] = {}
    for v in (*parts.graph.parameters, *parts.graph.buffers):
        x, cuts = held[v.name], [(axis, form) for axis, form in parts.stored(v).items() if is_shard(form)]
        with private.as_plain():
            made = x.detach()
            for axis, form in reversed(cuts):
                made = redistribute(made, form, R, world.group(mesh.group(world.rank, axis)))
        if cuts:
            whole[id(x)] = made
    tables = [(table, dict(table)) for module in model.modules() for table in private.tensors_of(module)]
    try:
        for table, before in tables:
            table.update({key: whole[id(x)] for key, x in before.items() if id(x) in whole})
        yield
    finally:
        for table, before in tables:
            table.update(before)
