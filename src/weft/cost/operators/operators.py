"""Seconds of a layout's operators and collectives, one microbatch of a rank. In: a graph's inventory, a cluster, a batch, a layout. Out:
arrays by operator; what stages and a step make of them says `weft.cost.step`.

On processors operators cost what `Speed` measured, on GPUs what the `Stack` of the cluster says. What layouts that are cut alike share is
found once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from weft.cluster.cluster import Cluster, Speed
from weft.cost.calibration.efficiency import Stack, stack_of
from weft.cost.devices import kernels
from weft.cost.devices.compute import Rates
from weft.cost.devices.convolutions import FULL
from weft.cost.memory.memory import Inventory, Widths
from weft.cost.network.axes import group_of
from weft.cost.network.network import Group, collective_s
from weft.cost.operators.parts import Local, Parts, gather
from weft.cost.operators.placed import placed, placed_sizes
from weft.cost.operators.rounds import ROUND
from weft.model.graph import Graph
from weft.model.sharding.sharding import Sharding, weighed
from weft.model.work import Work, model_flops
from weft.plan.axis import EXPERT, axis_of
from weft.plan.layout import Layout
from weft.plan.microbatches import most_rows
from weft.plan.plan import BUCKET_BYTES
from weft.plan.precision import PRECISIONS

# What a collective inside layers costs between processors' hosts beside itself, since ranks that compute never come at once and find their
# caches used: measured over 124 plans of 15 models at 10 Gbit/s, 0.1 to 0.4 ms (`scripts/bench planned`).
MEET_S = 2e-4
NARROW = ("linear", "attention", "convolution", "recurrent", "activation")  # results are bfloat16 under autocast

Array = NDArray[np.float64]
# The axes that cut, sequence and sample parallelism, how pieces of sequences attend, and for how many samples of a rank that was decided.
Cutting = tuple[tuple[tuple[str, int], ...], bool, bool, str, int]


@dataclass
class OperatorPricer:
    """Prices operators of one graph on one cluster for one batch. It keeps what layouts share; nothing else changes.

    `stack`: an efficiency set in place of the cluster's own (GPUs only). `bucket_bytes`: of gradients that are summed at once.
    """

    graph: Graph
    cluster: Cluster
    batch_size: int
    optimizer_states: int = 2
    shards: Mapping[str, tuple[tuple[str, int], ...]] | None = None
    stack: Stack | None = None
    bucket_bytes: float = BUCKET_BYTES
    busy: tuple[int, int] | None = None  # processors: ranks that work at once, and threads of each; None for what a layout has
    replicas: tuple[int, int] | None = None  # those with unequal shares that this one prices, from one to another; None for all
    placed_for: int = 0  # the batch by which operators are placed, where this one is of the smaller of its unequal microbatches
    _shardings: dict[Cutting, Sharding | None] = field(default_factory=dict)
    _same: dict[Cutting, Cutting] = field(default_factory=dict)  # of those that cut alike, the first
    _parts: dict[Cutting, Parts] = field(default_factory=dict)
    _cast_parts: dict[Cutting, Parts] = field(default_factory=dict)
    _times: dict[tuple[object, ...], tuple[Array, Array, Array, Array]] = field(default_factory=dict)
    _network: dict[tuple[str, float, int, int, int], float] = field(default_factory=dict)
    _widths: dict[str, Widths] = field(default_factory=dict)

    @cached_property
    def inventory(self) -> Inventory:
        return Inventory.of(self.graph, self.cluster.is_cpu)

    @cached_property
    def cast_inventory(self) -> Inventory:
        """The inventory under autocast."""
        return Inventory.of(self.graph, self.cluster.is_cpu, is_cast=True)

    @cached_property
    def efficiency(self) -> Stack:
        """The efficiency set that GPUs are priced with."""
        return self.stack or stack_of(self.cluster.device, self.cluster.stack)

    @cached_property
    def _narrow(self) -> frozenset[str]:
        works = self.inventory.works
        return frozenset(v for op in self.graph.operators if works[op.name].kind in NARROW for v in op.outputs)

    @cached_property
    def model_flops(self) -> float:
        """FLOPs of one step on the whole batch, as `weft.model.work.model_flops` counts them."""
        return self._flops * self.batch_size / self.graph.batch_size

    @cached_property
    def _flops(self) -> float:
        return model_flops(self.graph)

    def speed(self, layout: Layout) -> Speed:
        if self.busy is not None:
            return self.cluster.speed(*self.busy)
        return self.cluster.speed(layout.num_ranks, layout.threads)

    def widths(self, layout: Layout) -> Widths:
        """Bytes of a parameter's state under the layout's precision. Sums of bfloat16 gradients are float32, as Megatron-LM has them."""
        if layout.precision not in self._widths:
            gradient = self.efficiency.gradient_bytes if layout.precision == "float16" else 4.0
            self._widths[layout.precision] = Widths.of(layout.precision, self.cluster.is_cpu, gradient)
        return self._widths[layout.precision]

    def _asked(self, layout: Layout) -> Cutting:
        sizes = tuple((axis, n) for axis, n in placed_sizes(layout, self.graph.batch_size).items() if n > 1)
        own = -(-(self.placed_for or self.batch_size) // (layout.data * layout.microbatches))
        each = weighed(own if layout.replica_ranks > 1 else 1)
        return sizes, layout.sequence_parallel == "on", layout.sample_parallel == "on", layout.attention, each

    def place(self, layout: Layout, sharding: Sharding) -> None:
        """Price a layout under `sharding`, not under the best that there is."""
        asked = self._asked(layout)
        self._same[asked], self._shardings[asked] = asked, sharding

    def _cut(self, layout: Layout) -> Cutting:
        """What of a layout decides the sharding; of layouts that are cut alike that of the first."""
        asked = self._asked(layout)
        if asked not in self._same:
            sizes, *_, each = asked
            found = placed(self.graph, self.cluster, layout, each, self.shards) if sizes else None
            like = (key for key, known in self._shardings.items() if key[:-1] == asked[:-1] and known == found)
            self._same[asked] = key = next(like, asked)
            self._shardings.setdefault(key, found)
        return self._same[asked]

    def sharding(self, layout: Layout) -> Sharding | None:
        """The sharding over data and the tensor axes (`placed_sizes`), at the samples that a rank has; None for one rank a stage."""
        return self._shardings[self._cut(layout)]

    def samples(self, layout: Layout) -> int:
        """Samples that one rank has of a microbatch; of unequal ones of the larger, and of the replica with most that this one prices."""
        return most_rows(self.batch_size, layout, self.replicas)

    def microbatch(self, layout: Layout) -> float:
        """Size of the whole microbatch, all data replicas together, against the graph's batch; of unequal ones the larger."""
        return self.samples(layout) * layout.data / self.graph.batch_size

    def parts(self, layout: Layout) -> Parts:
        """Unique operators and collectives under the layout's sharding."""
        key = self._cut(layout)
        if key not in self._parts:
            self._parts[key] = gather(self.inventory, self.sharding(layout), self._narrow)
        return self._parts[key]

    def held_parts(self, layout: Layout) -> Parts:
        """The same with what operators keep and work on in the dtypes that the layout's precision gives them."""
        if not self._is_cast(layout):
            return self.parts(layout)
        key = self._cut(layout)
        if key not in self._cast_parts:
            self._cast_parts[key] = gather(self.cast_inventory, self.sharding(layout), self._narrow)
        return self._cast_parts[key]

    def held_inventory(self, layout: Layout) -> Inventory:
        """What operators keep and work on in the dtypes that the layout's precision gives them."""
        return self.cast_inventory if self._is_cast(layout) else self.inventory

    def _is_cast(self, layout: Layout) -> bool:
        """Whether operators are cast by autocast, as on processors."""
        return self.cluster.is_cpu and bool(PRECISIONS[layout.precision].products)

    def is_half(self, layout: Layout) -> bool:
        """Whether what is kept is all of 16 bits, as on GPUs."""
        return not self.cluster.is_cpu and bool(PRECISIONS[layout.precision].products)

    def operator_seconds(self, layout: Layout) -> tuple[Array, Array, Array, Array]:
        """Forward and backward of compute, forward and backward of collectives, by operator."""
        key = (*self._cut(layout), layout.axes, layout.threads, layout.microbatches, layout.precision, layout.batch_norm, layout.shares)
        if key not in self._times:
            compute = self._compute(layout) if self.cluster.is_cpu else self._on_gpu(layout)
            self._times[key] = (*compute, *self._collectives(layout, compute))
        return self._times[key]

    def _compute(self, layout: Layout) -> tuple[Array, Array]:
        parts = self.held_parts(layout)
        rates = Rates.of(self.speed(layout), layout.precision)
        found = []
        for local, by in self._sized(layout, parts):
            k = kernels.scaled(local.kernel, by)
            is_own = layout.precision == "float32" and k.own.takes(by, rates.speed.threads)
            filling, columns = (FULL, k.own.columns_bytes * float(by)) if is_own else (k.filling, 0.0)
            work = Work(
                k.kind, flops=k.flops * filling.forward, backward_flops=k.backward_flops * filling.backward, bytes=k.bytes + columns,
                backward_bytes=k.backward_bytes and k.backward_bytes + 2 * columns, weight_bytes=k.weight_bytes, scores=k.scores,
                channels=filling.channels, steps=k.steps, cast_bytes=k.cast_bytes, backward_cast_bytes=k.backward_cast_bytes,
            )  # fmt: skip
            found.append(rates.seconds(work))
        return np.array([s.forward for s in found])[parts.index], np.array([s.backward for s in found])[parts.index]

    def _on_gpu(self, layout: Layout) -> tuple[Array, Array]:
        """Numbered blocks and what stands around them are two streams of kernels each way: the loss is waited for."""
        parts, device, stack = self.parts(layout), self.cluster.device, self.efficiency
        found = [kernels.scaled(local.kernel, by).seconds(device, stack, layout.precision) for local, by in self._sized(layout, parts)]
        both = []
        for way in ("forward", "backward"):
            host, busy = (np.array([getattr(pair[i], way) for pair in found])[parts.index] for i in (0, 1))
            total = np.empty(len(host))
            for stream in (parts.repeated, ~parts.repeated):
                total[stream] = kernels.together(host[stream], busy[stream])
            both.append(total)
        return both[0], both[1]

    def _sized(self, layout: Layout, parts: Parts) -> list[tuple[Local, Fraction]]:
        """Unique operators, and how many times the graph's rows one rank has of each."""
        mine = Fraction(self.samples(layout), self.graph.batch_size)
        by = {(True, True): mine, (True, False): mine * layout.data, (False, True): Fraction(1, layout.data), (False, False): Fraction(1)}
        return [(local, by[local.batched, local.shared]) for local in parts.compute]

    def _collectives(self, layout: Layout, compute: tuple[Array, Array]) -> tuple[Array, Array]:
        parts = self.parts(layout)
        slower = 1.0 if self.cluster.is_cpu else self.efficiency.tensor
        meeting = MEET_S if self._by_gloo(layout) else 0.0
        found = []
        for one, size_bytes in zip(parts.collectives, self.moved_bytes(layout), strict=True):
            seconds = self.collective(one.name, size_bytes, self.moving(layout, one.axis)) if size_bytes else 0.0
            found.append(slower * seconds + meeting * (seconds > 0))
        unique = np.array([*found, 0.0])
        shown = 1.0 if self.cluster.is_cpu else 1.0 - self.efficiency.tensor_overlap
        # What goes round does so while all blocks but the last are computed; on processors it takes the cores that compute.
        rounds = np.array([*(one.name == ROUND for one in parts.collectives), False])
        behind = [0.0 if self.cluster.is_cpu else 1 - 1 / self.moving(layout, one.axis).size for one in parts.collectives]
        hides = np.array([*behind, 0.0]) * rounds
        both = []
        for (where, what), part, busy in ((parts.forward, 1.0, compute[0]), (parts.backward, shown, compute[1])):
            total, going, hidden = (np.zeros(len(parts.index)) for _ in range(3))
            np.add.at(total, where, np.where(rounds[what], 0.0, part * unique[what]))
            np.add.at(going, where, np.where(rounds[what], unique[what], 0.0))
            np.maximum.at(hidden, where, hides[what])
            both.append(total + np.maximum(0.0, going - hidden * busy))
        return both[0], both[1]

    def moving(self, layout: Layout, axis: str) -> Group:
        """Ranks among which a collective along `axis` goes: what replicas sum is placed over data alone, for all of them."""
        return self.group(layout, axis, *((EXPERT,) if axis_of(axis).cuts_samples else ()))

    def moved_bytes(self, layout: Layout) -> list[float]:
        """Bytes of the whole tensor that each collective of the layout's parts moves, at its precision; 0 of what is not moved."""
        scale, found = self.microbatch(layout), []
        for one in self.parts(layout).collectives:
            size = one.size_bytes * (scale if one.batched else 1.0) / (layout.data if one.shared else 1)
            if axis_of(one.axis).cuts_experts:
                size *= layout.expert  # the tokens of all of its ranks
            # Over samples only statistics are always float32.
            moves = self.moving(layout, one.axis).size > 1 and not (one.wide and one.axis in layout.own_statistics)
            found.append(size * self._width(layout, one.narrow, one.wide) if moves else 0.0)
        return found

    def _width(self, layout: Layout, narrow: bool, wide: bool = False) -> float:
        """Width of what moves against float32."""
        if layout.precision == "float64":
            return 2.0
        if wide or layout.precision == "float32" or (self.cluster.is_cpu and not narrow):
            return 1.0
        return 0.5

    def collective(self, name: str, size_bytes: float, group: Group) -> float:
        """`collective_s` on this cluster, each question once."""
        key = (name, size_bytes, group.size, group.stride, group.num_ranks)  # which is compared in a fraction of a group's own time
        if key not in self._network:
            self._network[key] = collective_s(self.cluster, name, size_bytes, group)
        return self._network[key]

    def group(self, layout: Layout, *axes: str) -> Group:
        """Ranks along `axes`, as `group_of` has them."""
        return group_of(layout, *axes)

    def _by_gloo(self, layout: Layout) -> bool:
        """Whether ranks of processors lie on several hosts."""
        apart = self.cluster.ranks_per_node(layout.num_ranks) < layout.num_ranks or self.cluster.levels[0].link.protocol == "gloo"
        return self.cluster.is_cpu and apart
