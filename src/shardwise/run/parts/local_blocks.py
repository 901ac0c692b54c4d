"""Local shards of a model's parameters and buffers on one rank: which block each is, and how it is initialised.

In: the rank's mesh coordinates, the sharding, the stages and their program. Out: `LocalParameter`s, and the filter that
`ModelSource.materialize_tensors` calls on each initial value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from shardwise.model.graph import Graph, Variable, written_buffers
from shardwise.model.sharding.sharding import Sharding
from shardwise.model.stages.stages import Stage
from shardwise.plan.ir.axis import DATA
from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.ir.placement import Shard, has_single_owner, is_shard, shard
from shardwise.plan.ir.program import Program
from shardwise.run.parts.rank_model import pipeline_ranks_reading
from shardwise.run.state.block_ranges import BlockRanges, block_of, block_shape, full_ranges, shard_block
from shardwise.run.state.optimizer import OptimizerSpec
from shardwise.run.state.parameters import FlatGroup, LocalParameter

LayerIds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LocalBlocks:
    """Position of a rank in a sharded model, from which its local shards follow.

    `coordinates`: on the mesh. `across_meshes`: values that stages of different meshes read. `always_summed_axes`: axes over which every
    gradient is reduced, even if the graph does not need it, since a plain loop may use a parameter elsewhere. `updates_per_replica`: a
    replica updates weights without the others, or for them, and so counts its own shards in the gradient norm.
    """

    mesh: Mesh
    coordinates: Mapping[str, int]
    sharding: Sharding
    stages: Sequence[Stage]
    program: Program
    across_meshes: AbstractSet[str]
    always_summed_axes: tuple[str, ...]
    updates_per_replica: bool = False

    def block_ranges(self, v: Variable) -> BlockRanges:
        """Return the ranges of this rank's block of a parameter or buffer."""
        spans = full_ranges(v.tensor.shape)
        for axis, placement in self.sharding.placements[v.value].items():
            if is_shard(placement):
                spans = shard_block(spans, placement, self.sharding.sizes[axis], self.coordinates[axis])
        return spans

    def is_stored_here(self, v: Variable) -> bool:
        """Return whether this rank stores a variable: one of its stages reads it (unread: the first rank), and no other rank owns it."""
        if any(has_single_owner(form) and form.rank != self.coordinates[axis] for axis, form in self.sharding.placements[v.value].items()):
            return False
        return self.coordinates["pipeline"] in pipeline_ranks_reading(self.stages, self.program, v.value)

    def local_parameters(
        self, graph: Graph, trainable: AbstractSet[str], optimizer: OptimizerSpec, dtype: torch.dtype, layers: Mapping[str, LayerIds]
    ) -> dict[str, LocalParameter]:
        """Return this rank's parameters by name. `trainable`: graph values; `layers`: the layers that read each."""
        first_use = {value: i for i, op in reversed(list(enumerate(graph.operators))) for value in op.inputs}
        written = written_buffers(graph)
        return {
            v.name: replace(
                self._local_parameter(v, optimizer, v.value in trainable, dtype),
                gradient_order=-first_use.get(v.value, -1),
                is_written_by_model=v.value in written,
                layers=layers.get(v.value, ()),
            )
            for v in graph.parameters
            if self.is_stored_here(v)
        }

    def _local_parameter(self, v: Variable, optimizer: OptimizerSpec, trainable: bool, dtype: torch.dtype) -> LocalParameter:
        mesh, at = self.mesh, self.coordinates
        holders = pipeline_ranks_reading(self.stages, self.program, v.value)
        spans = self.block_ranges(v)
        sharded_axes = {axis for axis, form in self.sharding.placements[v.value].items() if is_shard(form) or has_single_owner(form)}
        axes = tuple(
            dict.fromkeys(a for a in (*self.sharding.gradient_axes.get(v.value, ()), *self.always_summed_axes) if a not in sharded_axes)
        )
        if v.value in self.across_meshes:  # every rank of these stages has a share of the gradient, see `gradient_shares`
            ranks = [rank for holder in holders for rank in mesh.stage_ranks(holder)]
            axes = ()
        else:
            ranks = [rank for holder in holders for rank in mesh.group(mesh.rank_at({**at, "pipeline": holder}), *axes)]
        # Each element is counted once, by the first rank that stores the block.
        replicated = [a for a in mesh.stage_axes if a not in sharded_axes]
        counted = at["pipeline"] == holders[0] and all(at[a] == 0 for a in replicated)
        counted_piece = v.value in self.across_meshes or all(at[a] == 0 for a in replicated if a not in axes)
        if self.updates_per_replica:
            counted_piece = at["pipeline"] == holders[0] and all(at[a] == 0 for a in replicated if a != DATA)
        return LocalParameter(
            v.name,
            v.tensor.shape,
            spans,
            dtype if v.tensor.is_float else getattr(torch, v.tensor.dtype),
            trainable and v.trainable,
            tuple(sorted(ranks)),
            counted,
            counted_piece,
            optimizer.decays(v.tensor.shape),
            (tuple(holders), tuple(sorted(sharded_axes)), tuple(axes)),
            is_on_several_stages=len(holders) > 1,
        )


def zero_shards(graph: Graph, sharding: Sharding) -> dict[str, Shard]:
    """Choose the dim that ZeRO shards over data ranks in a plain loop, by parameter name: the first divisible one that no other axis
    shards, else one with shards that differ by one. One-dimensional parameters and those that the model writes stay replicated."""
    n = sharding.sizes.get(DATA, 1)
    written = written_buffers(graph)
    shards = {}
    for v in graph.parameters:
        sharded_dims = {form.dim for form in sharding.placements[v.value].values() if is_shard(form)}
        shape = v.tensor.shape
        dims = [dim for dim, length in enumerate(shape) if dim not in sharded_dims and length >= n > 1]
        owned = any(has_single_owner(form) for form in sharding.placements[v.value].values())
        if dims and v.trainable and len(shape) > 1 and not (owned or v.is_complex_pairs or v.value in written):
            dim = next((dim for dim in dims if shape[dim] % n == 0), dims[0])
            shards[v.name] = shard(dim, shape[dim], n)
    return shards


def shard_stored_parameters(sharding: Sharding, graph: Graph, shards: Mapping[str, Shard]) -> Sharding:
    """Return the sharding of parameters as stored with ZeRO shards, whose gradients are then not partial over data."""
    stored = {v.value: shards[v.name] for v in graph.parameters if v.name in shards}
    forms = {value: {**by, DATA: stored[value]} if value in stored else by for value, by in sharding.placements.items()}
    return replace(sharding, placements=forms)


@dataclass(frozen=True)
class InitialValues:
    """Takes this rank's block of each full initial tensor: a parameter's into its allocated tensor, a buffer's as a new tensor.

    `buffers`: by name (variable, ranges of its block).
    """

    local_parameters: Mapping[str, LocalParameter]
    parameters: Mapping[str, nn.Parameter]
    groups: Sequence[FlatGroup]
    buffers: Mapping[str, tuple[Variable, BlockRanges]]
    device: torch.device
    dtype: torch.dtype

    @cached_property
    def gathered_groups(self) -> dict[str, FlatGroup]:
        """Groups of ZeRO-3 parameters, by parameter name."""
        return {spec.name: group for group in self.groups if group.is_gathered for spec in group.members}

    def take_local(self, name: str, tensor: Tensor) -> Tensor | None:
        """Store a parameter's block and return None, or return a buffer's block."""
        if name in self.local_parameters:
            self._fill_parameter(name, tensor)
            return None
        if name not in self.buffers:
            return None
        view = block_of(tensor, self.buffers[name][1])
        floating = view.is_floating_point() and self.dtype is torch.float64
        return view.to(device=self.device, dtype=torch.float64 if floating else view.dtype, copy=True)

    def allocate_buffers(self) -> dict[str, Tensor]:
        """Allocate the buffers without values, in the dtypes that `take_local` gives them: float64 widens a graph's complex numbers, and no
        buffer's, which no checkpoint could store."""
        held = {"complex128": "complex64"}
        dtypes = ((name, held.get(v.tensor.dtype, v.tensor.dtype), spans) for name, (v, spans) in self.buffers.items())
        return {name: torch.empty(block_shape(spans), dtype=getattr(torch, dtype), device=self.device) for name, dtype, spans in dtypes}

    def _fill_parameter(self, name: str, tensor: Tensor) -> None:
        spec = self.local_parameters[name]
        view = block_of(torch.view_as_real(tensor) if len(spec.shape) > tensor.dim() else tensor, spec.block_ranges)
        with torch.no_grad():
            if name in self.gathered_groups:
                self.gathered_groups[name].fill_parameter(name, view)
            else:
                self.parameters[name].copy_(view)
