"""ZeRO in a plain loop: parameters are sharded over data ranks and all-gathered while the model computes.

In the lowered graph the sharded parameters (`RankModel.zero_shards`) of a layer are all-gathered before its first reader of one, while the
layer before runs, and each is freed after its last reader; their gradients are reduce-scattered. So parameters, gradients and optimizer
state are shards, with zero=1 and zero=2 alike. With zero=3 autograd saves no full weight either: a layer's weights are gathered again in
backward (`bucket_gathers`).

With `precision=bfloat16-mixed` weights are gathered and read in 16 bits, and their gradients summed in all bits of the parameters.

Not modelled: a copy in another dtype that autocast makes of a weight, which autograd saves in full.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import getitem

import torch
from torch import Tensor, fx

from shardwise.errors import UsageError
from shardwise.lower.lowering import bind_named
from shardwise.run.loop.bucket_gathers import ForwardGathers, GatherBucket, Observer, ZeroShard, gather_weights
from shardwise.world import private


def insert_weight_reads(
    module: fx.GraphModule, reads: Sequence[tuple[ZeroShard | None, torch.dtype | None]], weight_saver: GatheredWeightSaver
) -> fx.GraphModule:
    """Return the graph with an all-gather before the first reader of each bucket of placeholders, or a cast before that of a placeholder.
    `reads`: of each, if any."""
    graph = fx.Graph()
    out = graph.graph_copy(module.graph, {})
    graph.output(out)
    order = {node: i for i, node in enumerate(graph.nodes)}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    members: dict[Hashable, list[tuple[int, fx.Node]]] = {}  # (position, first reader) of each placeholder, by bucket
    for position, (part, (shard, dtype)) in enumerate(zip(inputs, reads, strict=True)):
        readers = [node for node in part.users if node.op != "output"]
        first = min(readers or part.users, key=order.__getitem__, default=None)
        if first is not None and shard is not None:
            key = (_layer_of(first), shard.read_placement, id(shard.group), shard.held_dtype, shard.dtype, shard.placement.runs)
            members.setdefault(key, []).append((position, first))
        elif first is not None and dtype is not None:
            _insert_read(graph, part, first, bind_named(_cast_weight, dtype))
    in_order = sorted(members.values(), key=lambda bucket: min(order[first] for _, first in bucket))
    for number, bucket in enumerate(in_order):
        first = min((reader for _, reader in bucket), key=order.__getitem__)
        positions = tuple(position for position, _ in bucket)
        shards = tuple(shard for position in positions if (shard := reads[position][0]) is not None)
        weight_saver.buckets.append(GatherBucket(number, positions, shards, not first.meta.get("in_region", False)))
        with graph.inserting_before(first):
            gathered = graph.call_function(bind_named(weight_saver.gather, number), tuple(inputs[position] for position in positions))
            whole = [graph.call_function(getitem, (gathered, i)) for i in range(len(positions))]
        for position, weight in zip(positions, whole, strict=True):
            inputs[position].replace_all_uses_with(weight, delete_user_cb=lambda user, read=gathered: user is not read)
    graph.lint()
    return fx.GraphModule(module, graph)


def _insert_read(graph: fx.Graph, part: fx.Node, first: fx.Node, read: Callable[..., Tensor]) -> None:
    with graph.inserting_before(first):
        whole = graph.call_function(read, (part,))
    part.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)


def _layer_of(reader: fx.Node) -> Hashable:
    """Return the layer whose weights are gathered together; outside of layers those of one operator."""
    number, is_layer = reader.meta.get("part", (0, False))
    return number if is_layer else reader.name


def _cast_weight(dtype: torch.dtype, weight: Tensor) -> Tensor:
    return weight.to(dtype)


@dataclass(frozen=True)
class _GatheredView:
    """A saved view of a gathered weight, without its memory: weight `index` of bucket `number`."""

    gathers: ForwardGathers
    number: int
    index: int
    version: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def local_shard(self) -> Tensor:
        """This rank's shard of the weight."""
        return self.gathers.parameters[self.gathers.buckets[self.number].positions[self.index]]


@dataclass
class GatheredWeightSaver:
    """Saved tensors of a graph. `gathers_in_backward`: gathered weights are not saved but gathered again for backward. `observe`: called
    with every gather and release, for tests."""

    gathers_in_backward: bool
    buckets: list[GatherBucket] = field(default_factory=list)
    observe: Observer | None = None
    _running: ForwardGathers | None = None
    _gathered: dict[int, tuple[weakref.ref[Tensor], int, int]] = field(default_factory=dict)

    def gather(self, number: int, *local_shards: Tensor) -> tuple[Tensor, ...]:
        """Gather the whole weights of a bucket."""
        assert self._running is not None
        whole = gather_weights(self._running, number, local_shards)
        if self.gathers_in_backward:
            for index, full in enumerate(whole):
                base = private.view_base(full)
                self._gathered[id(base)] = (weakref.ref(base), number, index)
        return whole

    @contextmanager
    def run(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Context of a forward on these shards, by position, in which autograd saves no full weight, if `gathers_in_backward`."""
        if not self.buckets:
            yield
            return
        self._gathered.clear()
        self._running = gathers = ForwardGathers(self.buckets, parameters, self.observe)
        saves = self.gathers_in_backward and torch.is_grad_enabled()
        hooks = torch.autograd.graph.saved_tensors_hooks(partial(self._pack, gathers), _unpack_saved) if saves else nullcontext()
        try:
            with hooks:
                yield
            gathers.end()
        finally:
            self._running = None

    def _pack(self, gathers: ForwardGathers, x: Tensor) -> Tensor | _GatheredView:
        base = private.view_base(x)
        alive, number, index = self._gathered.get(id(base), (None, 0, 0))
        if alive is None or alive() is not base:
            return x
        local_shard = gathers.parameters[self.buckets[number].positions[index]]
        version, offset = private.version_of(local_shard), int(x.storage_offset())
        return _GatheredView(gathers, number, index, version, x.dtype, tuple(x.shape), x.stride(), offset)


def _unpack_saved(saved: Tensor | _GatheredView) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    if private.version_of(saved.local_shard) != saved.version:
        name = saved.gathers.buckets[saved.number].shards[saved.index].name
        raise UsageError(
            f"weights were changed after the model computed with {name}, and before backward, which needs it as it was: call backward "
            "before the optimizer's step"
        )
    full = saved.gathers.whole_weight(saved.number, saved.index)
    return full.to(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)
