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

from weft.model.graph import Graph, Variable, written_buffers
from weft.model.sharding.sharding import Sharding
from weft.model.stages.stages import Stage
from weft.plan.axis import DATA
from weft.plan.mesh import Mesh
from weft.plan.placement import Shard, is_owned, is_shard, shard
from weft.plan.program import Program
from weft.run.state.optimizer import OptimizerSpec
from weft.run.state.parameters import FlatGroup, LocalParameter
from weft.run.state.spans import Spans, block_of, cut_again, full_spans, shape_of
from weft.run.training_parts import holders_of

Units = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Blocks:
    """Position of a rank in a sharded model, from which its local shards follow.

    `coordinates`: on the mesh. `across_meshes`: values that stages of different meshes read. `always_summed_axes`: axes over which every
    gradient is reduced, even if the graph does not need it, since a plain loop may use a parameter elsewhere. `updates_per_replica`: a
    replica updates weights without the others, or for them, and so counts its own shards in the gradient norm.
    """

    mesh: Mesh
    at: Mapping[str, int]
    sharding: Sharding
    stages: Sequence[Stage]
    program: Program
    across: AbstractSet[str]
    always: tuple[str, ...]
    apart: bool = False

    def of(self, v: Variable) -> Spans:
        """Return the ranges of this rank's block of a parameter or buffer."""
        spans = full_spans(v.tensor.shape)
        for axis, placement in self.sharding.forms[v.value].items():
            if is_shard(placement):
                spans = cut_again(spans, placement, self.sharding.sizes[axis], self.at[axis])
        return spans

    def holds(self, v: Variable) -> bool:
        """Return whether this rank stores a variable: one of its stages reads it (unread: the first rank), and no other rank owns it."""
        if any(is_owned(form) and form.rank != self.at[axis] for axis, form in self.sharding.forms[v.value].items()):
            return False
        return self.at["pipeline"] in holders_of(self.stages, self.program, v.value)

    def specs(
        self, graph: Graph, trainable: AbstractSet[str], optimizer: OptimizerSpec, dtype: torch.dtype, units: Mapping[str, Units]
    ) -> dict[str, LocalParameter]:
        """Return this rank's parameters by name. `trainable`: graph values; `layers`: the layers that read each."""
        first_use = {value: i for i, op in reversed(list(enumerate(graph.operators))) for value in op.inputs}
        written = written_buffers(graph)
        return {
            v.name: replace(
                self._spec(v, optimizer, v.value in trainable, dtype),
                ready=-first_use.get(v.value, -1),
                written=v.value in written,
                units=units.get(v.value, ()),
            )
            for v in graph.parameters
            if self.holds(v)
        }

    def _spec(self, v: Variable, optimizer: OptimizerSpec, trainable: bool, dtype: torch.dtype) -> LocalParameter:
        mesh, at = self.mesh, self.at
        holders = holders_of(self.stages, self.program, v.value)
        spans = self.of(v)
        sharded_axes = {axis for axis, form in self.sharding.forms[v.value].items() if is_shard(form) or is_owned(form)}
        axes = tuple(dict.fromkeys(a for a in (*self.sharding.gradients.get(v.value, ()), *self.always) if a not in sharded_axes))
        if v.value in self.across:  # every rank of these stages has a share of the gradient, see `gradient_shares`
            ranks = [rank for holder in holders for rank in mesh.stage(holder)]
            axes = ()
        else:
            ranks = [rank for holder in holders for rank in mesh.group(mesh.rank({**at, "pipeline": holder}), *axes)]
        # Each element is counted once, by the first rank that stores the block.
        replicated = [a for a in mesh.inside if a not in sharded_axes]
        counted = at["pipeline"] == holders[0] and all(at[a] == 0 for a in replicated)
        counted_piece = v.value in self.across or all(at[a] == 0 for a in replicated if a not in axes)
        if self.apart:
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
            across=len(holders) > 1,
        )


def zero_pieces(graph: Graph, sharding: Sharding) -> dict[str, Shard]:
    """Choose the dim that ZeRO shards over data ranks in a plain loop, by parameter name: the first divisible one that no other axis
    shards, else one with shards that differ by one. One-dimensional parameters and those that the model writes stay replicated."""
    n = sharding.sizes.get(DATA, 1)
    written = written_buffers(graph)
    shards = {}
    for v in graph.parameters:
        sharded_dims = {form.dim for form in sharding.forms[v.value].values() if is_shard(form)}
        shape = v.tensor.shape
        dims = [dim for dim, length in enumerate(shape) if dim not in sharded_dims and length >= n > 1]
        owned = any(is_owned(form) for form in sharding.forms[v.value].values())
        if dims and v.trainable and len(shape) > 1 and not (owned or v.pairs or v.value in written):
            dim = next((dim for dim in dims if shape[dim] % n == 0), dims[0])
            shards[v.name] = shard(dim, shape[dim], n)
    return shards


def in_pieces(sharding: Sharding, graph: Graph, pieces: Mapping[str, Shard]) -> Sharding:
    """Return the sharding of parameters as stored with ZeRO shards, whose gradients are then not partial over data."""
    stored = {v.value: pieces[v.name] for v in graph.parameters if v.name in pieces}
    forms = {value: {**by, DATA: stored[value]} if value in stored else by for value, by in sharding.forms.items()}
    return replace(sharding, forms=forms)


@dataclass(frozen=True)
class Initial:
    """Takes this rank's block of each full initial tensor: a parameter's into its allocated tensor, a buffer's as a new tensor.

    `buffers`: by name (variable, ranges of its block).
    """

    specs: Mapping[str, LocalParameter]
    parameters: Mapping[str, nn.Parameter]
    groups: Sequence[FlatGroup]
    buffers: Mapping[str, tuple[Variable, Spans]]
    device: torch.device
    dtype: torch.dtype

    @cached_property
    def in_pieces(self) -> dict[str, FlatGroup]:
        """Groups of ZeRO-3 parameters, by parameter name."""
        return {spec.name: group for group in self.groups if group.gathered for spec in group.members}

    def take(self, name: str, tensor: Tensor) -> Tensor | None:
        """Store a parameter's block and return None, or return a buffer's block."""
        if name in self.specs:
            self._fill(name, tensor)
            return None
        if name not in self.buffers:
            return None
        view = block_of(tensor, self.buffers[name][1])
        floating = view.is_floating_point() and self.dtype is torch.float64
        return view.to(device=self.device, dtype=torch.float64 if floating else view.dtype, copy=True)

    def rooms(self) -> dict[str, Tensor]:
        """Allocate the buffers without values."""
        dtypes = ((name, v.tensor.dtype, spans) for name, (v, spans) in self.buffers.items())
        return {name: torch.empty(shape_of(spans), dtype=getattr(torch, dtype), device=self.device) for name, dtype, spans in dtypes}

    def _fill(self, name: str, tensor: Tensor) -> None:
        spec = self.specs[name]
        view = block_of(torch.view_as_real(tensor) if len(spec.shape) > tensor.dim() else tensor, spec.spans)
        with torch.no_grad():
            if name in self.in_pieces:
                self.in_pieces[name].fill(name, view)
            else:
                self.parameters[name].copy_(view)
