"""ZeRO in a plain loop: parameters of which each data rank has a piece, whole only while the model computes.

In: a lowered graph, and of its parameters that lie as pieces (`Parts.pieces`) how they come together. Out: the same graph, each of whose
operators finds the whole: it is gathered in front of its first reader and let go of behind its last one; its gradient is summed into the
pieces. So `parameters()` are pieces, and the gradients and the optimizer's state that belong to them are, with zero=1 and zero=2 alike.
With zero=3 autograd keeps no whole weight either: what it saves of one is gathered once more when backward asks for it.

Not modelled: gathers that run ahead of their layer; a copy in another dtype that autocast makes of a weight, which autograd keeps.
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
    """A parameter that lies as `form` over `group`, and is read as `read`."""

    name: str
    form: Shard
    read: Placement
    group: Group


def gathering(module: fx.GraphModule, pieces: Mapping[int, Pieces], saved: Saved) -> fx.GraphModule:
    """The graph with a gather in front of the first reader of each placeholder that is given as a piece."""
    graph = fx.Graph()
    out = graph.graph_copy(module.graph, {})
    graph.output(out)
    order = {node: i for i, node in enumerate(graph.nodes)}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for position, one in pieces.items():
        part = inputs[position]
        readers = [node for node in part.users if node.op != "output"]
        first = min(readers or part.users, key=order.__getitem__, default=None)
        if first is None:
            continue
        with graph.inserting_before(first):
            gathered = graph.call_function(bind(saved.gathered, one), (part,))
        part.replace_all_uses_with(gathered, delete_user_cb=lambda user, full=gathered: user is not full)
    graph.lint()
    return fx.GraphModule(module, graph)


@dataclass(frozen=True)
class _View:
    """A view of a gathered weight, which is not kept."""

    of: Pieces
    part: Tensor
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class Saved:
    """What autograd saves while a graph computes. `again`: whether weights are gathered once more for backward."""

    again: bool
    _full: dict[int, tuple[weakref.ref[Tensor], Pieces, Tensor]] = field(default_factory=dict)

    def gathered(self, pieces: Pieces, part: Tensor) -> Tensor:
        """The whole of a part."""
        full = redistribute(part, pieces.form, pieces.read, pieces.group)
        if self.again:
            held = private.viewed(full)
            self._full[id(held)] = (weakref.ref(held), pieces, part)
        return full

    def kept(self) -> AbstractContextManager[Any]:
        """A block in which autograd keeps no whole weight, if that is asked for."""
        if not (self.again and torch.is_grad_enabled()):
            return nullcontext()
        self._full.clear()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, x: Tensor) -> Tensor | _View:
        held = private.viewed(x)
        alive, pieces, part = self._full.get(id(held), (None, None, None))
        if alive is None or pieces is None or part is None or alive() is not held:
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
    of = saved.of
    full = moved(saved.part.detach().as_subclass(Tensor), of.form, R, of.group)
    return full.as_strided(saved.size, saved.stride, saved.offset)
