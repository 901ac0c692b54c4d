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

from weft.errors import UsageError
from weft.lower.lowering import bind
from weft.lower.redistribute import moved, redistribute
from weft.plan.placement import Placement, R, Shard
from weft.world import private
from weft.world.world import Group


@dataclass(frozen=True)
class Pieces:
    """A parameter stored with one placement over `group` and read with another (replicated, or with partial gradients)."""

    name: str
    form: Shard
    read: Placement
    group: Group


def gathering(module: fx.GraphModule, pieces: Mapping[int, Pieces], saved: Saved) -> fx.GraphModule:
    """Return the graph with an all-gather before the first reader of each placeholder that is a shard."""
    graph = fx.Graph()
    out = graph.graph_copy(module.graph, {})
    graph.output(out)
    order = {node: i for i, node in enumerate(graph.nodes)}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for position, shard in pieces.items():
        part = inputs[position]
        readers = [node for node in part.users if node.op != "output"]
        first = min(readers or part.users, key=order.__getitem__, default=None)
        if first is None:
            continue
        with graph.inserting_before(first):
            gathered = graph.call_function(bind(saved.gathered, shard), (part,))
        part.replace_all_uses_with(gathered, delete_user_cb=lambda user, full=gathered: user is not full)
    graph.lint()
    return fx.GraphModule(module, graph)


@dataclass(frozen=True)
class _View:
    """A saved view of a gathered weight, without its memory."""

    of: Pieces
    part: Tensor
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class Saved:
    """Saved tensors of a graph. `gathers_in_backward`: gathered weights are not saved but gathered again for backward."""

    again: bool
    _full: dict[int, tuple[weakref.ref[Tensor], Pieces, Tensor]] = field(default_factory=dict)

    def gathered(self, pieces: Pieces, part: Tensor) -> Tensor:
        """Gather the full tensor of a shard."""
        full = redistribute(part, pieces.form, pieces.read, pieces.group)
        if self.again:
            base = private.viewed(full)
            self._full[id(base)] = (weakref.ref(base), pieces, part)
        return full

    def kept(self) -> AbstractContextManager[Any]:
        """Return a context in which autograd saves no full weight, if `gathers_in_backward`."""
        if not (self.again and torch.is_grad_enabled()):
            return nullcontext()
        self._full.clear()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, x: Tensor) -> Tensor | _View:
        base = private.viewed(x)
        alive, pieces, part = self._full.get(id(base), (None, None, None))
        if alive is None or pieces is None or part is None or alive() is not base:
            return x
        return _View(pieces, part, private.version_of(part), tuple(x.shape), x.stride(), int(x.storage_offset()))


def _unpack(saved: Tensor | _View) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    if private.version_of(saved.part) != saved.version:
        raise UsageError(
            f"weights were changed after the model computed with {saved.of.name}, and before backward, which needs it as it was: call "
            "backward before the optimizer's step"
        )
    shard = saved.of
    full = moved(saved.part.detach().as_subclass(Tensor), shard.form, R, shard.group)
    return full.as_strided(saved.size, saved.stride, saved.offset)
