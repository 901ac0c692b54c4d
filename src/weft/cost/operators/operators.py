"""Seconds of a layout's operators and collectives, one microbatch of a rank. In: a graph's inventory, a cluster, a batch, a layout. Out:
arrays by operator, which `weft.cost.step` combines into stages and a step.

Results that equally sharded layouts share are computed once.
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

# The sharding axes, sequence and sample parallelism, the attention of sharded sequences, and the samples per rank that decided it.
Cutting = tuple[tuple[tuple[str, int], ...], bool, bool, str, int]


@dataclass
class OperatorPricer:
    """Cost model of the operators of one graph on one cluster for one batch, with caches of what layouts share.

    `stack`: an efficiency set in place of the cluster's own (GPUs only). `bucket_bytes`: size of a gradient bucket.
    """

    graph: Graph
    cluster: Cluster
    batch_size: int
    optimizer_states: int = 2
    shards: Mapping[str, tuple[tuple[str, int], ...]] | None = None
    stack: Stack | None = None
    bucket_bytes: float = BUCKET_BYTES
    busy: tuple[int, int] | None = None  # CPUs: (concurrent ranks, threads of each); None for those of a layout
    replicas: tuple[int, int] | None = None  # range of replicas with unequal shares that this pricer prices; None for all
    placed_for: int = 0  # the batch size that decides the sharding, if this pricer is for the smaller of unequal microbatches
    _shardings: dict[Cutting, Sharding | None] = field(default_factory=dict)
    _canonical: dict[Cutting, Cutting] = field(default_factory=dict)  # the first key with an equal sharding
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
        """Facts about operators that do not depend on the sharding."""
        return Unplaced(self.inventory, self._narrow)

    @cached_property
    def cast_unplaced(self) -> Unplaced:
        """The same under autocast."""
        return Unplaced(self.cast_inventory, self._narrow)

    @cached_property
    def devices(self) -> Devices:
        """The device model of the cluster."""
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
        weighed_samples = weighed(samples if layout.replica_ranks > 1 else 1)
        return sizes, layout.sequence_parallel == "on", layout.sample_parallel == "on", layout.attention, weighed_samples

    def place(self, layout: Layout, sharding: Sharding) -> None:
        """Set the sharding under which a layout is priced, in place of the best one."""
        asked = self._asked(layout)
        self._canonical[asked], self._shardings[asked] = asked, sharding

    def _cut(self, layout: Layout) -> Cutting:
        """Return the key of a layout's sharding: of equally sharded layouts that of the first."""
        requested = self._asked(layout)
        if requested not in self._canonical:
            sizes, *_, samples = requested
            sharding = placed(self.graph, self.cluster, layout, samples, self.shards) if sizes else None
            equal_keys = (key for key, candidate in self._shardings.items() if key[:-1] == requested[:-1] and candidate == sharding)
            self._canonical[requested] = key = next(equal_keys, requested)
            self._shardings.setdefault(key, sharding)
        return self._canonical[requested]

    def sharding(self, layout: Layout) -> Sharding | None:
        """Return the sharding over data and tensor axes (`placement_axis_sizes`) at the samples of a rank; None for one rank per stage."""
        return self._shardings[self._cut(layout)]

    def samples(self, layout: Layout) -> int:
        """Return the samples of a microbatch on one rank: the maximum over unequal microbatches and over the priced replicas."""
        return most_rows(self.batch_size, layout, self.replicas)

    def microbatch(self, layout: Layout) -> float:
        """Return the size of the global microbatch (the larger of unequal ones) relative to the graph's batch."""
        return self.samples(layout) * layout.data / self.graph.batch_size

    def parts(self, layout: Layout) -> Parts:
        """Return the inventory under the layout's sharding."""
        key = self._cut(layout)
        if key not in self._parts:
            self._parts[key] = gather(self.unplaced, self.sharding(layout))
        return self._parts[key]

    def held_parts(self, layout: Layout) -> Parts:
        """Return the sharded inventory in the dtypes of the layout's precision."""
        if not self.devices.is_cast(layout):
            return self.parts(layout)
        key = self._cut(layout)
        if key not in self._cast_parts:
            self._cast_parts[key] = gather(self.cast_unplaced, self.sharding(layout))
        return self._cast_parts[key]

    def held_inventory(self, layout: Layout) -> Inventory:
        """Return the inventory in the dtypes of the layout's precision."""
        return self.cast_inventory if self.devices.is_cast(layout) else self.inventory

    def operator_seconds(self, layout: Layout) -> tuple[Array, Array, Array, Array]:
        """Return seconds by operator: forward and backward of compute, forward and backward of collectives."""
        key = (*self._cut(layout), layout.axes, layout.threads, layout.microbatches, layout.precision, layout.compile, layout.batch_norm,
               layout.shares, layout.begins[-1:])  # fmt: skip
        if key not in self._times:
            parts = self.held_parts(layout)
            compute = self.devices.operator_seconds(layout, self._sized(layout, parts), parts.index, parts.repeated)
            self._times[key] = (*compute, *self._collectives(layout, compute))
        return self._times[key]

    def _sized(self, layout: Layout, parts: Parts) -> list[tuple[Kernel, Fraction]]:
        """Return the distinct operators' kernels, each with the factor from the graph's rows to those of one rank."""
        share = Fraction(self.samples(layout), self.graph.batch_size)
        once = Fraction(1)
        factors = {(True, True): share, (True, False): share * layout.data, (False, True): once / layout.data, (False, False): once}
        return [(local.kernel, factors[local.batched, local.shared]) for local in parts.compute]

    def _collectives(self, layout: Layout, compute: tuple[Array, Array]) -> tuple[Array, Array]:
        parts = self.parts(layout)
        costs = self.devices.talk(layout)
        by_collective, hidden_by = [], []
        for collective, size_bytes in zip(parts.collectives, self.moved_bytes(layout), strict=True):
            group = self.moving(layout, collective)
            seconds = self.collective(collective.name, size_bytes, group) if size_bytes else 0.0
            by_collective.append(costs.slower * seconds + costs.meeting_s * (seconds > 0))
            # Ring passes overlap with the compute of all blocks but the last.
            hidden_by.append((1 - 1 / group.size) * costs.rounds_hide if collective.name == ROUND else 0.0)
        unique, hidden_fraction = np.array([*by_collective, 0.0]), np.array([*hidden_by, 0.0])
        rounds = np.array([*(collective.name == ROUND for collective in parts.collectives), False])
        passes = []
        for (operators, entries), fraction, busy in ((parts.forward, 1.0, compute[0]), (parts.backward, costs.shown, compute[1])):
            total, ring_s, hidden = (np.zeros(len(parts.index)) for _ in range(3))
            np.add.at(total, operators, np.where(rounds[entries], 0.0, fraction * unique[entries]))
            np.add.at(ring_s, operators, np.where(rounds[entries], unique[entries], 0.0))
            np.maximum.at(hidden, operators, hidden_fraction[entries])
            passes.append(total + np.maximum(0.0, ring_s - hidden * busy))
        return passes[0], passes[1]

    def moving(self, layout: Layout, one: Collective) -> Group:
        """Return the rank group of a collective; reductions over replicas, placed over data alone, include the expert axis."""
        group = self.group(layout, one.axis, *((EXPERT,) if axis_of(one.axis).cuts_samples else ()))
        return Group(one.among[0], one.among[1] * group.stride, group.num_ranks) if one.among else group

    def expert_ways(self, layout: Layout) -> float:
        """Return the experts of the widest layer over the most on one rank: the size of the expert axis, if it divides them."""
        max_local = -(-self._most_experts // layout.expert)
        return max(1.0, self._most_experts / max_local) if layout.expert > 1 else 1.0

    @cached_property
    def _most_experts(self) -> int:
        return max((self.graph.tensors[value].shape[0] for value in expert_weights(self.graph)), default=1)

    def moved_bytes(self, layout: Layout) -> list[float]:
        """Return the full tensor's bytes of each collective, at the layout's precision; 0 if nothing is sent."""
        scale, amounts = self.microbatch(layout), []
        for collective in self.parts(layout).collectives:
            size = collective.size_bytes * (scale if collective.batched else 1.0) / (layout.data if collective.shared else 1)
            if axis_of(collective.axis).cuts_experts:
                size *= layout.expert  # tokens of all ranks
                if collective.of[1]:  # a token is sent once to each rank that has any of its experts
                    size *= ranks_reached(*collective.of, layout.expert) / collective.of[1]
            # Only statistics are always float32 over samples.
            is_sent = self.moving(layout, collective).size > 1 and not (collective.wide and collective.axis in layout.local_statistics)
            amounts.append(size * self._width(layout, collective.narrow, collective.wide) if is_sent else 0.0)
        return amounts

    def _width(self, layout: Layout, narrow: bool, wide: bool = False) -> float:
        """Return the width of communicated elements relative to float32."""
        if layout.precision == "float64":
            return 2.0
        if wide or not PRECISIONS[layout.precision].products or (self.devices.casts and not narrow):
            return 1.0
        return 0.5

    def collective(self, name: str, size_bytes: float, group: Group) -> float:
        """Seconds of a collective on this cluster, cached."""
        key = (name, size_bytes, group.size, group.stride, group.num_ranks)  # cheaper to hash than a group
        if key not in self._network:
            self._network[key] = collective_s(self.cluster, name, size_bytes, group)
        return self._network[key]

    def group(self, layout: Layout, *axes: str) -> Group:
        """Return the group of ranks along `axes`."""
        return group_of(layout, *axes)
