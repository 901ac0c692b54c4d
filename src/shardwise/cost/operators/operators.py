"""Seconds of a layout's operators and collectives, one microbatch of a rank. In: a graph's inventory, a cluster, a batch, a layout. Out:
arrays by operator, which `shardwise.cost.step` combines into stages and a step.

Results that equally sharded layouts share are computed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster.cluster import Cluster
from shardwise.cost.calibration.efficiency import EfficiencySet
from shardwise.cost.devices import devices_of
from shardwise.cost.devices.devices import AS_COUNTED, Array, Devices, LayerSaving
from shardwise.cost.devices.kernels import LocalKernel
from shardwise.cost.memory.memory import Inventory
from shardwise.cost.network.axes import group_of
from shardwise.cost.network.network import RankGroup, collective_s
from shardwise.cost.operators.build_inventory import OperatorFacts, build_sharded_inventory
from shardwise.cost.operators.chunked_loss import chunk_inventory, is_weight_gradient_immediate
from shardwise.cost.operators.layer_saving import apply_layer_saving
from shardwise.cost.operators.ring_attention import RING
from shardwise.cost.operators.sharded_inventory import Collective, ShardedInventory
from shardwise.cost.operators.sharding_choice import choose_sharding, placement_axis_sizes
from shardwise.model.dims.labels import expert_weights
from shardwise.model.graph import Graph
from shardwise.model.sharding.sharding import Sharding, priced_num_samples
from shardwise.model.strides.autocast_dtypes import CAST
from shardwise.model.work import MATMUL_KINDS, model_flops
from shardwise.ops.experts import expected_ranks_per_token
from shardwise.plan.ir.axis import EXPERT, axis_of
from shardwise.plan.ir.grid import TENSOR
from shardwise.plan.ir.precision import PRECISIONS
from shardwise.plan.layout import Layout
from shardwise.plan.microbatches import max_rows

COPIED = ("all_gather", "reduce_scatter")  # they join or split pieces of positions, behind the dim of samples
NARROW = ("linear", "attention", "convolution", "recurrent", "activation")  # results are bfloat16 under autocast

# The sharding axes, sequence and sample parallelism, the attention of sharded sequences, and the samples per rank that decided it.
ShardingKey = tuple[tuple[tuple[str, int], ...], bool, bool, str, int]


@dataclass
class OperatorPricer:
    """Cost model of the operators of one graph on one cluster for one batch, with caches of what layouts share.

    `stack`: an efficiency set in place of the cluster's own (GPUs only). `bucket_bytes`: size of a gradient bucket; 0: the
    best of each layout.
    """

    graph: Graph
    cluster: Cluster
    batch_size: int
    optimizer_states: int = 2
    shards: Mapping[str, tuple[tuple[str, int], ...]] | None = None
    stack: EfficiencySet | None = None
    bucket_bytes: float = 0.0
    busy: tuple[int, int] | None = None  # CPUs: (concurrent ranks, threads of each); None for those of a layout
    replicas: tuple[int, int] | None = None  # range of replicas with unequal shares that this pricer prices; None for all
    placement_batch_size: int = 0  # the batch size that decides the sharding, if this pricer is for the smaller of unequal microbatches
    is_plain_loop: bool = False  # the user's own loop instead of an engine
    _shardings: dict[ShardingKey, Sharding | None] = field(default_factory=dict)
    _canonical: dict[ShardingKey, ShardingKey] = field(default_factory=dict)  # the first key with an equal sharding
    _parts: dict[ShardingKey, ShardedInventory] = field(default_factory=dict)
    _cast_parts: dict[tuple[str, ShardingKey], ShardedInventory] = field(default_factory=dict)
    _chunked_parts: dict[tuple[str, int, bool, ShardingKey], ShardedInventory] = field(default_factory=dict)
    _saving_parts: dict[tuple[int, LayerSaving], tuple[ShardedInventory, ShardedInventory]] = field(default_factory=dict)
    _cast_facts: dict[str, OperatorFacts] = field(default_factory=dict)
    _times: dict[tuple[object, ...], tuple[Array, Array, Array, Array, Array]] = field(default_factory=dict)
    _network: dict[tuple[str, float, int, int, int], float] = field(default_factory=dict)

    @cached_property
    def inventory(self) -> Inventory:
        return Inventory.of(self.graph, self.devices.kernel_memory)

    @cached_property
    def operator_facts(self) -> OperatorFacts:
        """Facts about operators that do not depend on the sharding."""
        return OperatorFacts(self.inventory, self._narrow)

    def cast_operator_facts(self, mode: str) -> OperatorFacts:
        """Return the same under autocast."""
        if mode not in self._cast_facts:
            self._cast_facts[mode] = OperatorFacts(Inventory.of(self.graph, self.devices.cast_memory, mode), self._narrow)
        return self._cast_facts[mode]

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
        """FLOPs of one step on the whole batch, as `shardwise.model.work.model_flops` counts them."""
        return self._flops * self.batch_size / self.graph.batch_size

    @cached_property
    def _flops(self) -> float:
        return model_flops(self.graph)

    def _sharding_key(self, layout: Layout) -> ShardingKey:
        sizes = tuple((axis, n) for axis, n in placement_axis_sizes(layout, self.graph.batch_size).items() if n > 1)
        samples = -(-(self.placement_batch_size or self.batch_size) // (layout.data * layout.microbatches))
        weighed_samples = priced_num_samples(samples if layout.replica_ranks > 1 else 1)
        return sizes, layout.sequence_parallel == "on", layout.sample_parallel == "on", layout.attention, weighed_samples

    def set_sharding(self, layout: Layout, sharding: Sharding) -> None:
        """Set the sharding under which a layout is priced, in place of the best one."""
        asked = self._sharding_key(layout)
        self._canonical[asked], self._shardings[asked] = asked, sharding

    def _canonical_key(self, layout: Layout) -> ShardingKey:
        """Return the key of a layout's sharding: of equally sharded layouts that of the first."""
        requested = self._sharding_key(layout)
        if requested not in self._canonical:
            sizes, *_, samples = requested
            sharding = choose_sharding(self.graph, self.cluster, layout, samples, self.shards) if sizes else None
            equal_keys = (key for key, candidate in self._shardings.items() if key[:-1] == requested[:-1] and candidate == sharding)
            self._canonical[requested] = key = next(equal_keys, requested)
            self._shardings.setdefault(key, sharding)
        return self._canonical[requested]

    def sharding(self, layout: Layout) -> Sharding | None:
        """Return the sharding over data and tensor axes (`placement_axis_sizes`) at the samples of a rank; None for one rank per stage."""
        return self._shardings[self._canonical_key(layout)]

    def samples(self, layout: Layout) -> int:
        """Return the samples of a microbatch on one rank: the maximum over unequal microbatches and over the priced replicas."""
        return max_rows(self.batch_size, layout, self.replicas)

    def microbatch(self, layout: Layout) -> float:
        """Return the size of the global microbatch (the larger of unequal ones) relative to the graph's batch."""
        return self.samples(layout) * layout.data / self.graph.batch_size

    def sharded_inventory(self, layout: Layout) -> ShardedInventory:
        """Return the inventory under the layout's sharding."""
        key = self._canonical_key(layout)
        if key not in self._parts:
            self._parts[key] = build_sharded_inventory(self.operator_facts, self.sharding(layout))
        return self._in_chunks(layout, "", self._parts[key], self.operator_facts)

    def _in_chunks(self, layout: Layout, mode: str, parts: ShardedInventory, facts: OperatorFacts) -> ShardedInventory:
        """Return an inventory with losses in the layout's chunks."""
        if layout.loss_chunks == 1:
            return parts
        key = mode, layout.loss_chunks, self.devices.is_half(layout), self._canonical_key(layout)
        if key not in self._chunked_parts:
            self._chunked_parts[key] = chunk_inventory(parts, facts, self.sharding(layout), *key[1:3])
        return self._chunked_parts[key]

    @cached_property
    def weighted(self) -> NDArray[np.bool_]:
        """[operator] -> whether it is a matrix product with a trainable weight."""
        trained = {v.value for v in self.graph.parameters if v.trainable and len(v.tensor.shape) > 1}
        works, operators = self.inventory.works, self.graph.operators
        return np.array([works[op.name].kind in MATMUL_KINDS and any(v in trained for v in op.inputs) for op in operators], dtype=bool)

    def weighted_under(self, layout: Layout) -> NDArray[np.bool_]:
        """[operator] -> the same, of those whose weight gradient a split backward can delay."""
        return self.weighted if layout.loss_chunks == 1 else self._weighted_later

    @cached_property
    def _weighted_later(self) -> NDArray[np.bool_]:
        """[operator] -> the same with losses in chunks."""
        return self.weighted & ~is_weight_gradient_immediate(self.graph, self.operator_facts.position)

    def cast_sharded_inventory(self, layout: Layout) -> ShardedInventory:
        """Return the sharded inventory in the dtypes of the layout's precision."""
        if not (mode := self.devices.cast_mode(layout)):
            return self.sharded_inventory(layout)
        key = mode, self._canonical_key(layout)
        if key not in self._cast_parts:
            self._cast_parts[key] = build_sharded_inventory(self.cast_operator_facts(mode), self.sharding(layout))
        return self._in_chunks(layout, mode, self._cast_parts[key], self.cast_operator_facts(mode))

    def with_layer_saving(self, layout: Layout, parts: ShardedInventory) -> ShardedInventory:
        """Return an inventory with what the devices' software saves in layers."""
        saving = self.devices.layer_saving(layout)
        if saving == AS_COUNTED:
            return parts
        key = id(parts), saving
        if key not in self._saving_parts:
            self._saving_parts[key] = parts, apply_layer_saving(parts, saving)
        return self._saving_parts[key][1]

    def inventory_in_precision(self, layout: Layout) -> Inventory:
        """Return the inventory in the dtypes of the layout's precision."""
        mode = self.devices.cast_mode(layout)
        return self.cast_operator_facts(mode).inventory if mode else self.inventory

    def operator_seconds(self, layout: Layout) -> tuple[Array, Array, Array, Array]:
        """Return seconds by operator: forward and backward of compute, forward and backward of collectives, as they show."""
        return self._all_seconds(layout)[:4]

    def hidden_seconds(self, layout: Layout) -> Array:
        """Return, by operator, seconds of collectives that run beside its backward."""
        return self._all_seconds(layout)[4]

    def gathers_again(self, layout: Layout) -> bool:
        """Return whether column-cut linear layers gather again in backward: a plain loop keeps what was gathered."""
        return not self.is_plain_loop and self.devices.gathers_again(layout)

    def _all_seconds(self, layout: Layout) -> tuple[Array, Array, Array, Array, Array]:
        key = (*self._canonical_key(layout), layout.axes, layout.threads, layout.microbatches, layout.precision, layout.compile,
            layout.batch_norm, layout.shares, layout.begins[-1:], layout.loss_chunks, self.devices.fuses_products(layout),
            self.gathers_again(layout))  # fmt: skip
        if key not in self._times:
            parts = self.cast_sharded_inventory(layout) if self.devices.times_casts(layout) else self.sharded_inventory(layout)
            compute = self.devices.operator_seconds(layout, self._scaled_kernels(layout, parts), parts.index, parts.in_block)
            forward_s = parts.num_chunks * compute[0]
            compute = forward_s, parts.num_chunks * compute[1] + forward_s * (parts.num_chunks > 1)  # chunks run again in backward
            self._times[key] = (*compute, *self._collective_seconds(layout, compute))
        return self._times[key]

    def _scaled_kernels(self, layout: Layout, parts: ShardedInventory) -> list[tuple[LocalKernel, Fraction]]:
        """Return the distinct operators' kernels, each with the factor from the graph's rows to those of one rank."""
        share = Fraction(self.samples(layout), self.graph.batch_size)
        once = Fraction(1)
        factors = {(True, True): share, (True, False): share * layout.data, (False, True): once / layout.data, (False, False): once}
        return [(local.kernel, factors[local.batched, local.data_sharded] / local.num_chunks) for local in parts.compute]

    def _collective_seconds(self, layout: Layout, compute: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Return, by operator, shown seconds of collectives forward and backward, and those that run beside its backward."""
        parts = self.sharded_inventory(layout)
        costs = self.devices.layer_collectives(layout)
        if self.samples(layout) == 1:  # its positions come first
            costs = replace(costs, copy_s_per_byte=0.0)
        by_collective, alone, hidden_by = [], [], []
        for collective, size_bytes in zip(parts.collectives, self.collective_bytes(layout), strict=True):
            group = self.collective_group(layout, collective)
            is_gathered = costs.gathers_keys and collective.name == RING
            size_bytes *= collective.repeats if is_gathered else 1.0
            seconds = self.collective(collective.name, size_bytes, group) if size_bytes else 0.0
            copied_s = costs.copy_s_per_byte * size_bytes * (collective.name in COPIED and collective.axis == TENSOR and seconds > 0)
            by_collective.append(costs.slowdown * seconds + copied_s + costs.rendezvous_s * (seconds > 0))
            alone.append(seconds + copied_s)
            # Ring passes overlap with the compute of all blocks but the last, a gather of all keys with that of the first.
            behind = 1 / group.size if is_gathered and not collective.is_float32 else 1 - 1 / group.size
            hidden_by.append(behind * costs.ring_overlap if collective.name == RING else 0.0)
        unique, hidden_fraction = np.array([*by_collective, 0.0]), np.array([*hidden_by, 0.0])
        rounds = np.array([*(collective.name == RING for collective in parts.collectives), False])
        passes = []
        for (operators, entries), fraction, busy, fused in (
            (parts.forward, 1.0, compute[0], "all_gather"),
            (parts.backward, costs.exposed_backward, compute[1], "reduce_scatter"),
        ):
            shown = np.full(len(entries), fraction)
            if costs.fused_share < 1:
                shown *= np.array([costs.fused_share if _is_of_tensor(one, fused) else 1.0 for one in parts.collectives])[entries]
            if fused == "all_gather" and costs.gather_width < 1:
                shown *= np.array([costs.gather_width if _is_of_tensor(one, fused) else 1.0 for one in parts.collectives])[entries]
            if fused == "reduce_scatter" and costs.scatters_alone:
                unique = np.array([
                    alone_s if _is_of_tensor(one, fused) else s for one, alone_s, s in zip(parts.collectives, alone, unique, strict=False)
                ])  # fmt: skip
            total, ring_s, hidden = (np.zeros(len(parts.index)) for _ in range(3))
            np.add.at(total, operators, np.where(rounds[entries], 0.0, shown * unique[entries]))
            np.add.at(ring_s, operators, np.where(rounds[entries], unique[entries], 0.0))
            np.maximum.at(hidden, operators, hidden_fraction[entries])
            passes.append(total + np.maximum(0.0, ring_s - hidden * busy))
        if not self.gathers_again(layout):
            return passes[0], passes[1], np.zeros(len(parts.index))
        is_fused = np.array([*(costs.fused_share < 1 and _is_of_tensor(one, "reduce_scatter") for one in parts.collectives), False])
        more, beside = parts.column_gathers.backward_seconds(costs, unique, compute[1], is_fused)
        return passes[0], passes[1] + more, beside

    def fused_workspace_bytes(self, layout: Layout) -> float:
        """Return the bytes of symmetric memory that fused products use: two pieces of the largest tensor that they gather or scatter, as
        torch's pipelined scatter does."""
        if not self.devices.fuses_products(layout):
            return 0.0
        sizes = zip(self.sharded_inventory(layout).collectives, self.collective_bytes(layout), strict=True)
        return max((2 * size / layout.tensor for one, size in sizes if _is_of_tensor(one, "all_gather")), default=0.0)

    def collective_group(self, layout: Layout, one: Collective) -> RankGroup:
        """Return the rank group of a collective; reductions over replicas, placed over data alone, include the expert axis."""
        group = self.group(layout, one.axis, *((EXPERT,) if axis_of(one.axis).shards_samples else ()))
        return RankGroup(one.subgroup[0], one.subgroup[1] * group.stride, group.num_ranks) if one.subgroup else group

    def expert_divisor(self, layout: Layout) -> float:
        """Return the experts of the widest layer over the most on one rank: the size of the expert axis, if it divides them."""
        max_local = -(-self._max_experts // layout.expert)
        return max(1.0, self._max_experts / max_local) if layout.expert > 1 else 1.0

    @cached_property
    def _max_experts(self) -> int:
        return max((self.graph.tensors[value].shape[0] for value in expert_weights(self.graph)), default=1)

    def collective_bytes(self, layout: Layout) -> list[float]:
        """Return the full tensor's bytes of each collective, at the layout's precision; 0 if nothing is sent."""
        scale, amounts = self.microbatch(layout), []
        for collective in self.sharded_inventory(layout).collectives:
            size = collective.size_bytes * (scale if collective.batched else 1.0) / (layout.data if collective.data_sharded else 1)
            if axis_of(collective.axis).shards_experts:
                size *= layout.expert  # tokens of all ranks
                experts, top = collective.experts
                if top:  # a token is sent once to each rank that has any of its experts
                    size *= expected_ranks_per_token(experts, top, layout.expert) / top
            # Only statistics are always float32 over samples.
            is_sent = self.collective_group(layout, collective).size > 1 and not (
                collective.is_float32 and collective.axis in layout.local_statistics_axes
            )
            amounts.append(size * self._width_factor(layout, collective.is_narrow, collective.is_float32) if is_sent else 0.0)
        return amounts

    def _width_factor(self, layout: Layout, narrow: bool, wide: bool = False) -> float:
        """Return the width of communicated elements relative to float32."""
        if layout.precision == "float64":
            return 2.0
        precision, devices = PRECISIONS[layout.precision], self.devices
        has_wide_streams = (devices.uses_autocast or devices.cast_mode(layout) == CAST) and not precision.held_dtype
        if wide or not precision.product_dtype or (has_wide_streams and not narrow):
            return 1.0
        return 0.5

    def collective(self, name: str, size_bytes: float, group: RankGroup) -> float:
        """Seconds of a collective on this cluster, cached."""
        key = (name, size_bytes, group.size, group.stride, group.num_ranks)  # cheaper to hash than a group
        if key not in self._network:
            self._network[key] = collective_s(self.cluster, name, size_bytes, group)
        return self._network[key]

    def group(self, layout: Layout, *axes: str) -> RankGroup:
        """Return the group of ranks along `axes`."""
        return group_of(layout, *axes)


def _is_of_tensor(one: Collective, name: str) -> bool:
    return one.axis == TENSOR and one.name == name
