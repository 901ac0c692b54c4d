"""ZeRO in a plain loop: parameters are sharded over data ranks and all-gathered while the model computes.

In the lowered graph every sharded parameter (`RankModel.zero_shards`) is all-gathered before its first reader and freed after its last one;
its gradient is reduce-scattered. So parameters, gradients and optimizer state are shards, with zero=1 and zero=2 alike. With zero=3
autograd saves no full weight either: a saved weight is gathered again in backward.

Not modelled: prefetched gathers; a copy in another dtype that autocast makes of a weight, which autograd saves in full.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.errors import UsageError
from shardwise.lower.lowering import bind_named
from shardwise.lower.redistribute import redistribute, redistribute_forward
from shardwise.plan.ir.placement import Placement, R, Shard
from shardwise.world import private
from shardwise.world.world import Group


@dataclass(frozen=True)
class ZeroShard:
    """A parameter stored with one placement over `group` and read with another (replicated, or with partial gradients)."""

    name: str
    placement: Shard
    read_placement: Placement
    group: Group


def insert_gathers(module: fx.GraphModule, zero_shards: Mapping[int, ZeroShard], weight_saver: GatheredWeightSaver) -> fx.GraphModule:
    """Return the graph with an all-gather before the first reader of each placeholder that is a shard."""
    graph = fx.Graph()
    out = graph.graph_copy(module.graph, {})
    graph.output(out)
    order = {node: i for i, node in enumerate(graph.nodes)}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for position, shard in zero_shards.items():
        part = inputs[position]
        readers = [node for node in part.users if node.op != "output"]
        first = min(readers or part.users, key=order.__getitem__, default=None)
        if first is None:
            continue
        with graph.inserting_before(first):
            gathered = graph.call_function(bind_named(weight_saver.gather, shard), (part,))
        part.replace_all_uses_with(gathered, delete_user_cb=lambda user, full=gathered: user is not full)
    graph.lint()
    return fx.GraphModule(module, graph)


@dataclass(frozen=True)
class _GatheredView:
    """A saved view of a gathered weight, without its memory."""

    zero_shard: ZeroShard
    local_shard: Tensor
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class GatheredWeightSaver:
    """Saved tensors of a graph. `gathers_in_backward`: gathered weights are not saved but gathered again for backward."""

    gathers_in_backward: bool
    _gathered: dict[int, tuple[weakref.ref[Tensor], ZeroShard, Tensor]] = field(default_factory=dict)

    def gather(self, zero_shard: ZeroShard, local_shard: Tensor) -> Tensor:
        """Gather the full tensor of a shard."""
        full = redistribute(local_shard, zero_shard.placement, zero_shard.read_placement, zero_shard.group)
        if self.gathers_in_backward:
            base = private.view_base(full)
            self._gathered[id(base)] = (weakref.ref(base), zero_shard, local_shard)
        return full

    def saved_tensor_hooks(self) -> AbstractContextManager[Any]:
        """Return a context in which autograd saves no full weight, if `gathers_in_backward`."""
        if not (self.gathers_in_backward and torch.is_grad_enabled()):
            return nullcontext()
        self._gathered.clear()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack_saved)

    def _pack(self, x: Tensor) -> Tensor | _GatheredView:
        base = private.view_base(x)
        alive, pieces, part = self._gathered.get(id(base), (None, None, None))
        if alive is None or pieces is None or part is None or alive() is not base:
            return x
        return _GatheredView(pieces, part, private.version_of(part), tuple(x.shape), x.stride(), int(x.storage_offset()))


def _unpack_saved(saved: Tensor | _GatheredView) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    if private.version_of(saved.local_shard) != saved.version:
        raise UsageError(
            f"weights were changed after the model computed with {saved.zero_shard.name}, and before backward, which needs it as it was: "
            f"call "
            "backward before the optimizer's step"
        )
    shard = saved.zero_shard
    full = redistribute_forward(saved.local_shard.detach().as_subclass(Tensor), shard.placement, R, shard.group)
    return full.as_strided(saved.size, saved.stride, saved.offset)
