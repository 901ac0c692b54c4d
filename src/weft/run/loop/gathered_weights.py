"""A divided module by its own code, for calls that no capture is worth: with objects that change from call to call (a cache of keys).

In: the module and its parts. Out: a block in which its parameters and buffers are whole, without gradients. Every rank that has a part
enters it, since each gathers what the others have. What is gathered stays until weights change or the module learns: the next token needs
it again.
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
    """The weights and buffers of a module of which ranks have parts, gathered."""

    world: World
    _full: dict[str, Tensor] = field(default_factory=dict)
    _versions: tuple[int, ...] = ()

    @contextmanager
    def held_by(self, model: nn.Module, parts: Parts, mesh: Mesh) -> Iterator[None]:
        """A block without gradients in which every part of `model` holds whole tensors."""
        held: dict[str, Tensor] = {**parts.buffers, **parts.parameters}
        cuts: dict[str, list[tuple[str, Placement]]] = {
            v.name: [(axis, form) for axis, form in parts.stored(v).items() if is_shard(form)]
            for v in (*parts.graph.parameters, *parts.graph.buffers)
        }
        self._gather(held, {name: those for name, those in cuts.items() if those}, mesh)
        full = {id(held[name]): x for name, x in self._full.items()}
        tables = [(table, dict(table)) for module in model.modules() for table in private.tensors_of(module)]
        try:
            for table, before in tables:
                table.update({key: full[id(x)] for key, x in before.items() if id(x) in full})
            yield
        finally:
            for table, before in tables:
                table.update(before)

    def _gather(self, held: Mapping[str, Tensor], cuts: Mapping[str, list[tuple[str, Placement]]], mesh: Mesh) -> None:
        """Gather what changed on any rank since it was gathered."""
        versions = tuple(private.version_of(held[name]) for name in cuts)
        if not cuts or not self.world.maximum([int(versions != self._versions or not self._full)])[0]:
            return
        for name, those in cuts.items():
            with private.as_base_tensor():
                x = held[name].detach()
                for axis, form in reversed(those):
                    x = redistribute(x, form, R, self.world.group(mesh.group(self.world.rank, axis)))
            self._full[name] = x
        self._versions = versions

    def let_go(self) -> None:
        """Keep nothing of it: the module learns."""
        self._full.clear()
