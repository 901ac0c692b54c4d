"""Seconds of a layout's operators and collectives, one microbatch of a rank. In: a graph's inventory, a cluster, a batch, a layout. Out:
arrays by operator; what stages and a step make of them says `weft.cost.step`.

What layouts that are cut alike share is found once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

import numpy as np

from weft.cluster.cluster import Cluster
from weft.cost.calibration.efficiency import Stack
from weft.cost.devices import devices_of
from weft.cost.devices.devices import Array, Devices
from weft.cost.devices.kernels import Kernel
from weft.cost.memory.memory import Inventory
from weft.cost.network.axes import group_of
from weft.cost.network.network import Group, collective_s
from weft.cost.operators.gather import Unplaced, gather
from weft.cost.operators.parts import Collective, Parts
from weft.cost.operators.placed import placed, placed_sizes
from weft.cost.operators.rounds import ROUND
from weft.model.dims.labels import expert_weights
from weft.model.graph import Graph
from weft.model.sharding.sharding import Sharding, weighed
from weft.model.work import model_flops
from weft.ops.experts import ranks_reached
from weft.plan.axis import EXPERT, axis_of
from weft.plan.layout import Layout
from weft.plan.microbatches import most_rows
from weft.plan.plan import BUCKET_BYTES
from weft.plan.precision import PRECISIONS

NARROW = ("linear", "attention", "convolution", "recurrent", "activation")  # results are bfloat16 under autocast

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
    _canonical: dict[Cutting, Cutting] = field(default_factory=dict)  # of those that cut alike, the first
    _parts: dict[Cutting, Parts] = field(default_factory=dict)
    _cast_parts: dict[Cutting, Parts] = field(default_factory=dict)
    _times: dict[tuple[object, ...], tuple[Array, Array, Array, Array]] = field(default_factory=dict)
    _network: dict[tuple[str, float, int, int, int], float] = field(default_factory=dict)

    @cached_property
    def inventory(self) -> Inventory:
        return Inventory.of(self.graph, self.devices.kernel_memory)

    @cached_property
    def cast_inventory(self) -> Inventory:
        """The inventory under autocast."""
        return Inventory.of(self.graph, self.devices.kernel_memory, is_cast=True)

    @cached_property
    def unplaced(self) -> Unplaced:
        """What is asked of the inventory whatever the sharding."""
        return Unplaced(self.inventory, self._narrow)

    @cached_property
    def cast_unplaced(self) -> Unplaced:
        """The same under autocast."""
        return Unplaced(self.cast_inventory, self._narrow)

    @cached_property
    def devices(self) -> Devices:
        """What is asked of the cluster's kind of devices."""
        return devices_of(self.cluster, self.stack, self.busy)

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

    def _asked(self, layout: Layout) -> Cutting:
        sizes = tuple((axis, n) for axis, n in placed_sizes(layout, self.graph.batch_size).items() if n > 1)
        samples = -(-(self.placed_for or self.batch_size) // (layout.data * layout.microbatches))
        each = weighed(samples if layout.replica_ranks > 1 else 1)
        return sizes, layout.sequence_parallel == "on", layout.sample_parallel == "on", layout.attention, each

    def place(self, layout: Layout, sharding: Sharding) -> None:
        """Price a layout under `sharding`, not under the best that there is."""
        asked = self._asked(layout)
        self._canonical[asked], self._shardings[asked] = asked, sharding

    def _cut(self, layout: Layout) -> Cutting:
        """What of a layout decides the sharding; of layouts that are cut alike that of the first."""
        asked = self._asked(layout)
        if asked not in self._canonical:
            sizes, *_, each = asked
            sharding = placed(self.graph, self.cluster, layout, each, self.shards) if sizes else None
            like = (key for key, other in self._shardings.items() if key[:-1] == asked[:-1] and other == sharding)
            self._canonical[asked] = key = next(like, asked)
            self._shardings.setdefault(key, sharding)
        return self._canonical[asked]

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
            self._parts[key] = gather(self.unplaced, self.sharding(layout))
        return self._parts[key]

    def held_parts(self, layout: Layout) -> Parts:
        """The same with what operators keep and work on in the dtypes that the layout's precision gives them."""
        if not self.devices.is_cast(layout):
            return self.parts(layout)
        key = self._cut(layout)
        if key not in self._cast_parts:
            self._cast_parts[key] = gather(self.cast_unplaced, self.sharding(layout))
        return self._cast_parts[key]

    def held_inventory(self, layout: Layout) -> Inventory:
        """What operators keep and work on in the dtypes that the layout's precision gives them."""
        return self.cast_inventory if self.devices.is_cast(layout) else self.inventory

    def operator_seconds(self, layout: Layout) -> tuple[Array, Array, Array, Array]:
        """Forward and backward of compute, forward and backward of collectives, by operator."""
        key = (*self._cut(layout), layout.axes, layout.threads, layout.microbatches, layout.precision, layout.compile, layout.batch_norm,
               layout.shares, layout.begins[-1:])  # fmt: skip
        if key not in self._times:
            parts = self.held_parts(layout)
            compute = self.devices.operator_seconds(layout, self._sized(layout, parts), parts.index, parts.repeated)
            self._times[key] = (*compute, *self._collectives(layout, compute))
        return self._times[key]

    def _sized(self, layout: Layout, parts: Parts) -> list[tuple[Kernel, Fraction]]:
        """Unique operators, and how many times the graph's rows one rank has of each."""
        mine = Fraction(self.samples(layout), self.graph.batch_size)
        by = {(True, True): mine, (True, False): mine * layout.data, (False, True): Fraction(1, layout.data), (False, False): Fraction(1)}
        return [(local.kernel, by[local.batched, local.shared]) for local in parts.compute]

    def _collectives(self, layout: Layout, compute: tuple[Array, Array]) -> tuple[Array, Array]:
        parts = self.parts(layout)
        talk = self.devices.talk(layout)
        by_operator, behind = [], []
        for one, size_bytes in zip(parts.collectives, self.moved_bytes(layout), strict=True):
            group = self.moving(layout, one)
            seconds = self.collective(one.name, size_bytes, group) if size_bytes else 0.0
            by_operator.append(talk.slower * seconds + talk.meeting_s * (seconds > 0))
            # What goes round does so while all blocks but the last are computed.
            behind.append((1 - 1 / group.size) * talk.rounds_hide if one.name == ROUND else 0.0)
        unique, hides = np.array([*by_operator, 0.0]), np.array([*behind, 0.0])
        rounds = np.array([*(one.name == ROUND for one in parts.collectives), False])
        both = []
        for (where, what), part, busy in ((parts.forward, 1.0, compute[0]), (parts.backward, talk.shown, compute[1])):
            total, going, hidden = (np.zeros(len(parts.index)) for _ in range(3))
            np.add.at(total, where, np.where(rounds[what], 0.0, part * unique[what]))
            np.add.at(going, where, np.where(rounds[what], unique[what], 0.0))
            np.maximum.at(hidden, where, hides[what])
            both.append(total + np.maximum(0.0, going - hidden * busy))
        return both[0], both[1]

    def moving(self, layout: Layout, one: Collective) -> Group:
        """Ranks among which a collective goes: what replicas sum is placed over data alone, for all of them."""
        group = self.group(layout, one.axis, *((EXPERT,) if axis_of(one.axis).cuts_samples else ()))
        return Group(one.among[0], one.among[1] * group.stride, group.num_ranks) if one.among else group

    def expert_ways(self, layout: Layout) -> float:
        """All experts of the widest layer over those of the rank that has most: as many as there are ranks, where these divide."""
        most = -(-self._most_experts // layout.expert)
        return max(1.0, self._most_experts / most) if layout.expert > 1 else 1.0

    @cached_property
    def _most_experts(self) -> int:
        return max((self.graph.tensors[value].shape[0] for value in expert_weights(self.graph)), default=1)

    def moved_bytes(self, layout: Layout) -> list[float]:
        """Bytes of the whole tensor that each collective of the layout's parts moves, at its precision; 0 of what is not moved."""
        scale, amounts = self.microbatch(layout), []
        for one in self.parts(layout).collectives:
            size = one.size_bytes * (scale if one.batched else 1.0) / (layout.data if one.shared else 1)
            if axis_of(one.axis).cuts_experts:
                size *= layout.expert  # the tokens of all of its ranks
                if one.of[1]:  # which go once to each rank that has any of their experts
                    size *= ranks_reached(*one.of, layout.expert) / one.of[1]
            # Over samples only statistics are always float32.
            moves = self.moving(layout, one).size > 1 and not (one.wide and one.axis in layout.local_statistics)
            amounts.append(size * self._width(layout, one.narrow, one.wide) if moves else 0.0)
        return amounts

    def _width(self, layout: Layout, narrow: bool, wide: bool = False) -> float:
        """Width of what moves against float32."""
        if layout.precision == "float64":
            return 2.0
        if wide or not PRECISIONS[layout.precision].products or (self.devices.casts and not narrow):
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
