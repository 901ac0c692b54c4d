"""All-gathered weights for calls of a sharded module's own code: generation, where an object (a key-value cache) changes in every call.

Within a block the module's parameters and buffers are full tensors, without gradients; every rank that stores a shard must enter it. The
gathered weights are cached until weights change or the module trains, since the next token needs them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from weft.lower.redistribute import redistribute
from weft.plan.mesh import Mesh
from weft.plan.placement import Placement, R, is_shard
from weft.run.training_parts import Parts
from weft.world import private
from weft.world.world import World


@dataclass
class GatheredWeights:
    """The sharded weights and buffers of a module, gathered and cached."""

    world: World
    _full: dict[str, Tensor] = field(default_factory=dict)
    _versions: tuple[int, ...] = ()

    @contextmanager
    def held_by(self, model: nn.Module, parts: Parts, mesh: Mesh) -> Iterator[None]:
        """Give every submodule of `model` full tensors within a block without gradients."""
        tensors: dict[str, Tensor] = {**parts.buffers, **parts.parameters}
        cuts: dict[str, list[tuple[str, Placement]]] = {
            v.name: [(axis, form) for axis, form in parts.stored(v).items() if is_shard(form)]
            for v in (*parts.graph.parameters, *parts.graph.buffers)
        }
        self._gather(tensors, {name: sharded_axes for name, sharded_axes in cuts.items() if sharded_axes}, mesh)
        full = {id(tensors[name]): x for name, x in self._full.items()}
        tables = [(table, dict(table)) for module in model.modules() for table in private.tensors_of(module)]
        try:
            for table, original in tables:
                table.update({key: full[id(x)] for key, x in original.items() if id(x) in full})
            yield
        finally:
            for table, original in tables:
                table.update(original)

    def _gather(self, held: Mapping[str, Tensor], cuts: Mapping[str, list[tuple[str, Placement]]], mesh: Mesh) -> None:
        """Gather all sharded tensors again if any rank's have changed."""
        versions = tuple(private.version_of(held[name]) for name in cuts)
        if not cuts or not self.world.maximum([int(versions != self._versions or not self._full)])[0]:
            return
        for name, sharded_axes in cuts.items():
            with private.as_base_tensor():
                x = held[name].detach()
                for axis, placement in reversed(sharded_axes):
                    x = redistribute(x, placement, R, self.world.group(mesh.group(self.world.rank, axis)))
            self._full[name] = x
        self._versions = versions

    def let_go(self) -> None:
        """Free the gathered weights: the module trains."""
        self._full.clear()
