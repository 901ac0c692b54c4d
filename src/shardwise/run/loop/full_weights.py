"""Full weights of a sharded module, for calls that run the model's own code: generation without gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from shardwise.lower.redistribute import redistribute
from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.ir.placement import Placement, R, is_shard
from shardwise.run.parts.rank_model import RankModel
from shardwise.world import private
from shardwise.world.world import World


@dataclass
class FullWeightCache:
    """The sharded weights and buffers of a module, gathered and cached."""

    world: World
    _full: dict[str, Tensor] = field(default_factory=dict)
    _versions: tuple[int, ...] = ()

    @contextmanager
    def full_weights_in(self, model: nn.Module, rank_model: RankModel, mesh: Mesh) -> Iterator[None]:
        """Give every submodule of `model` full tensors within a block without gradients."""
        tensors: dict[str, Tensor] = {**rank_model.buffers, **rank_model.parameters}
        cuts: dict[str, list[tuple[str, Placement]]] = {
            v.name: [(axis, form) for axis, form in rank_model.stored_placements(v).items() if is_shard(form)]
            for v in (*rank_model.graph.parameters, *rank_model.graph.buffers)
        }
        self._gather(tensors, {name: sharded_axes for name, sharded_axes in cuts.items() if sharded_axes}, mesh)
        full = {id(tensors[name]): x for name, x in self._full.items()}
        tables = [(table, dict(table)) for module in model.modules() for table in private.tensor_tables(module)]
        try:
            for table, original in tables:
                table.update({key: full[id(x)] for key, x in original.items() if id(x) in full})
            yield
        finally:
            for table, original in tables:
                table.update(original)

    def _gather(self, local_tensors: Mapping[str, Tensor], axes_by_name: Mapping[str, list[tuple[str, Placement]]], mesh: Mesh) -> None:
        """Gather all sharded tensors again if any rank's have changed."""
        versions = tuple(private.version_of(local_tensors[name]) for name in axes_by_name)
        if not axes_by_name or not self.world.all_reduce_max([int(versions != self._versions or not self._full)])[0]:
            return
        for name, sharded_axes in axes_by_name.items():
            with private.as_base_tensor():
                x = local_tensors[name].detach()
                for axis, placement in reversed(sharded_axes):
                    x = redistribute(x, placement, R, self.world.group(mesh.group(self.world.rank, axis)))
            self._full[name] = x
        self._versions = versions

    def clear(self) -> None:
        """Free the gathered weights: the module trains."""
        self._full.clear()
