"""Construction of a `ShardedInventory` from an inventory and a sharding.

Operators of repeated layers are equal, and a fold shards them equally (`model.sharding.fold`), so each distinct operator is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, cached_property, partial

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.devices.convolutions import NEVER, NO_PADDING
from shardwise.cost.devices.kernels import NO_TRAFFIC, KernelTraffic, LocalKernel
from shardwise.cost.devices.recurrent import extra_bytes, num_single_steps, shards_hidden_units
from shardwise.cost.memory.block_runs import BatchBytes, BatchBytesColumns
from shardwise.cost.memory.memory import Inventory
from shardwise.cost.memory.storages import StorageMap
from shardwise.cost.operators.column_gathers import ColumnGathers, find_column_gathers
from shardwise.cost.operators.ring_attention import (
    RING,
    SubgroupSpan,
    attention_collectives,
    in_transit_bytes,
    merge_bytes,
    saved_by_exchange,
)
from shardwise.cost.operators.sharded_inventory import ANY_EXPERTS, Collective, LocalOperator, ShardedInventory, block_of, dispatched_values
from shardwise.cost.shard_counts import (
    is_operator_sharded,
    is_sharded_over_data,
    num_shards,
    num_shards_during_move,
    num_work_shards,
    tensor_axes,
)
from shardwise.model.graph import Graph, Operator
from shardwise.model.sharding.convolution_as_product import is_run_as_product
from shardwise.model.sharding.fold import operator_classes
from shardwise.model.sharding.sharding import Redistribution, Sharding
from shardwise.model.stages.core_attention import core_attention_numbers
from shardwise.model.work import num_steps
from shardwise.ops import is_cheap_to_recompute, record_of
from shardwise.ops.attention import is_causal
from shardwise.ops.recurrent import gathered_steps
from shardwise.ops.vocabulary import GradientMemory, MatmulKind, Reduction
from shardwise.plan.ir.axis import DATA, EXPERT, SAMPLES, axis_of
from shardwise.plan.ir.placement import Placement, R, Shard, dual_of, is_fully_replicated, is_halo, is_shard
from shardwise.plan.ir.transition import LOCAL_COLLECTIVES, is_gathered_for_columns, sent_fraction, transition_between


class _UniqueNumbers:
    """Numbers distinct keys in the order of their first occurrence."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}

    def __call__(self, thing: Hashable) -> int:
        return self.numbers.setdefault(thing, len(self.numbers))


def _sent_factors(move: Redistribution, n: int) -> tuple[float, float]:
    """Return the ratio, forward and backward, of the bytes sent by the busiest rank to those with equal shards; for halos, to the value."""
    if is_halo(move.target) and is_shard(move.source):
        part = sent_fraction(move.source, move.target, n)
        return part or 1.0, part or 1.0
    return _longest_shard_factor(move.source, move.target, n), _longest_shard_factor(dual_of(move.target), dual_of(move.source), n)


def _longest_shard_factor(source: Placement, target: Placement, n: int) -> float:
    equal = [Shard(form.dim) if is_shard(form) else form for form in (source, target)]
    return (
        sent_fraction(source, target, n) / sent_fraction(equal[0], equal[1], n)
        if transition_between(source, target).collective not in LOCAL_COLLECTIVES
        else 1.0
    )


@dataclass(frozen=True)
class OperatorFacts:
    """Facts about a graph's operators that do not depend on the sharding. `narrow_values`: 16-bit values under autocast on CPUs."""

    inventory: Inventory
    narrow_values: frozenset[str]

    @cached_property
    def position(self) -> dict[str, int]:
        """Number of each operator, by name."""
        return {op.name: i for i, op in enumerate(self.inventory.graph.operators)}

    @cached_property
    def accumulated_operands(self) -> list[tuple[int, ...]]:
        """[operator] -> operands whose gradients are added to one computed earlier, into a third tensor."""
        operators, grads = self.inventory.graph.operators, self.inventory.grads
        last = {value: i for i, op in enumerate(operators) for value in op.inputs if op.outputs[0] in grads}
        joins = {value for value in last if value in grads and value in self.inventory.graph.producer_index}
        return [tuple(at for at, v in enumerate(op.inputs) if v in joins and last[v] > i) for i, op in enumerate(operators)]

    @cached_property
    def siblings(self) -> dict[str, float]:
        """Total rows of the weights multiplied with the same input, by operator: q, k and v run as one product."""
        by_input: dict[str, list[tuple[str, float]]] = {}
        for op in self.inventory.graph.operators:
            if record_of(op).product.kind == MatmulKind.LINEAR:
                by_input.setdefault(op.inputs[0], []).append((op.name, float(self.inventory.graph.tensors[op.inputs[1]].shape[0])))
        return {name: sum(rows for _, rows in rows_by_name) for rows_by_name in by_input.values() for name, _ in rows_by_name}

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        return tuple(block_of(op.site) for op in self.inventory.graph.operators)

    @cached_property
    def cheap(self) -> tuple[bool, ...]:
        return tuple(op.function is None and is_cheap_to_recompute(record_of(op)) for op in self.inventory.graph.operators)

    @cached_property
    def attention_core(self) -> tuple[int, ...]:
        return core_attention_numbers(self.inventory.graph, self.blocks)

    @cached_property
    def attention(self) -> NDArray[np.bool_]:
        return np.array([self.inventory.works[op.name].kind == "attention" for op in self.inventory.graph.operators])

    @cached_property
    def cost_classes(self) -> list[int]:
        """[operator] -> a class number, equal for operators with equal costs if their values are sharded equally."""
        inventory, unique = self.inventory, _UniqueNumbers()
        value_sets = (inventory.batched, inventory.grads, inventory.persistent_values, self.narrow_values)
        numbers = []
        for op, kind, joined in zip(inventory.graph.operators, operator_classes(inventory.graph), self.accumulated_operands, strict=True):
            operands, work, saved = (*op.inputs, *op.outputs), inventory.works[op.name], inventory.saved[op.name]
            key = (
                kind, joined, self.siblings.get(op.name), tuple([v in value_set for v in operands for value_set in value_sets]),
                tuple([operands.index(v) for v in operands]), astuple(replace(work, saved=())), tuple([v in work.saved for v in operands]),
                astuple(replace(saved, storages=())), id(op.function),
            )  # fmt: skip
            numbers.append(unique(key))
        return numbers

    def placement_keys(self, sharding: Sharding | None) -> Sequence[Hashable]:
        """[operator] -> a key, equal for operators of one cost class that share a fold's placement."""
        if sharding is None:
            return self.cost_classes
        if sharding.regions:
            return range(len(self.cost_classes))
        labels, needs, forms = sharding.labels, sharding.input_placements, sharding.placements
        return [
            (number, id(labels[op.name]), id(needs[op.name]), *[id(forms.get(v)) for v in (*op.inputs, *op.outputs)])
            for number, op in zip(self.cost_classes, self.inventory.graph.operators, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _OperatorEntry:
    """Data of one operator in the inventory, independent of names: entries of `compute` and `collectives`, bytes."""

    local: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    extra_bytes: float
    working_bytes: float
    torch_bytes: float
    weight_bytes: float
    data_sharded: bool


@dataclass
class _InventoryBuilder:
    """State of building one inventory."""

    source: OperatorFacts
    sharding: Sharding | None

    def __post_init__(self) -> None:
        self.inventory, self.graph = self.source.inventory, self.source.inventory.graph
        self.compute, self.collectives = _UniqueNumbers(), _UniqueNumbers()
        self.storage_map = StorageMap(self.inventory, self.sharding)
        self.axes = (DATA, *tensor_axes(self.sharding))
        self.dispatched = dispatched_values(self.inventory)
        self._experts = dict(self.dispatched.values())
        self._num_shards = cache(partial(num_shards, self.sharding))

    def add_collective(
        self,
        name: str,
        value: str,
        axis: str,
        size: float | None = None,
        by_row: bool = False,
        num_pieces: float = 0,
        among: SubgroupSpan = None,
        repeats: float = 1.0,
    ) -> int:
        """Add a collective on a value, or on `size` bytes, and return its entry."""
        is_shared = (is_sharded_over_data(self.sharding, value) or by_row) and not (
            axis_of(axis).has_replicas and axis_of(axis).shards <= {SAMPLES}
        )
        size_bytes = self.graph.tensors[value].size_bytes / (num_pieces or self._num_shards(value, axis)) if size is None else size
        is_batched = by_row or (size is None and value in self.inventory.batched)
        experts = self._experts[value] if axis == EXPERT else ANY_EXPERTS
        is_narrow, is_float32 = value in self.source.narrow_values, size is not None
        return self.collectives(Collective(name, axis, size_bytes, is_batched, is_shared, is_narrow, is_float32, among, experts, repeats))

    def add_moves(self) -> Iterator[tuple[Redistribution, int | None, int | None]]:
        """Yield (redistribution, entries forward and backward) of every one."""
        sharding = self.sharding
        for move in sharding.redistributions if sharding is not None else ():
            if sharding is None or move.op not in self.source.position:
                continue
            at = self.source.position[move.op]
            divisor: float = 0 if axis_of(move.axis).has_replicas else num_shards_during_move(sharding, self.graph.operators[at], move)
            there, back = _sent_factors(move, sharding.sizes[move.axis])
            divisor = divisor or self._num_shards(move.value, move.axis)
            backward = move.backward if move.value in self.inventory.grads else ""
            forward, backward_entry = (
                None if name in LOCAL_COLLECTIVES else self.add_collective(name, move.value, move.axis, num_pieces=divisor / factor)
                for name, factor in ((move.forward, there), (backward, back))
            )
            yield move, forward, backward_entry

    def build_entry(self, op: Operator, accumulated: Sequence[int]) -> _OperatorEntry:
        """Build the entry of an operator. `accumulated`: its `OperatorFacts.accumulated_operands`."""
        inventory, sharding, places, saved = self.inventory, self.sharding, self.storage_map, self.inventory.saved[op.name]
        local = self.compute(_local_operator(inventory, sharding, op, self.source.siblings))
        forward: list[int] = []
        backward: list[int] = []
        for axis in self.axes:
            if is_operator_sharded(sharding, op.name, axis):
                _add_kernel_collectives(inventory, sharding, op, axis, self.add_collective, forward, backward)
        divisor = num_work_shards(sharding, op)
        extra = extra_bytes(op, self.graph.tensors, sharding, inventory.works[op.name].extra_bytes, divisor)
        is_cut = any(is_operator_sharded(sharding, op.name, axis) for axis in self.axes)
        extra_workspace = saved.sharded_bytes if is_cut else saved.unsharded_bytes
        if any(_is_vocabulary_sharded(sharding, op, axis) for axis in self.axes):  # backward in place (`lower/kernels/vocabulary`)
            extra_workspace -= inventory.works[op.name].extra_bytes
        gradients = copies = 0.0
        if sharding is not None:
            gradients = _unsharded_gradient_bytes(inventory, places, op, divisor)
            copies = inventory.kernel_memory.sharded_copy_bytes(op, inventory.tensors_as_read(op), sharding, divisor)
        min_workspace = max(
            (2 * places.storage_of(op.inputs[at], places.num_shards_read(op, at)).size_bytes for at in accumulated), default=0.0
        )
        return _OperatorEntry(
            local, tuple(forward), tuple(backward), extra,
            max(min_workspace, (saved.working_bytes + extra_workspace) / divisor + gradients + copies),
            max(min_workspace, (saved.torch_bytes + extra_workspace) / divisor + gradients),
            saved.weight_bytes / divisor, is_operator_sharded(sharding, op.name, DATA),
        )  # fmt: skip


def build_sharded_inventory(source: OperatorFacts, sharding: Sharding | None) -> ShardedInventory:
    """Build the inventory of a graph under a sharding."""
    inventory, graph = source.inventory, source.inventory.graph
    work = _InventoryBuilder(source, sharding)
    places, makers, keys = work.storage_map, graph.producer_index, source.placement_keys(sharding)
    forward: list[tuple[int, int]] = []
    backward: list[tuple[int, int]] = []
    columns: dict[tuple[str, str], tuple[int, int | None]] = {}
    for move, forward_entry, backward_entry in work.add_moves():
        at = source.position[move.op]
        forward += [] if forward_entry is None else [(at, forward_entry)]
        backward += [] if backward_entry is None else [(at, backward_entry)]
        if forward_entry is not None and is_gathered_for_columns(move.source, move.target):
            columns[move.value, move.axis] = forward_entry, backward_entry
    data_of_key: dict[Hashable, _OperatorEntry] = {}
    per_operator, stored, reads, arrivals, makes = [], [], [], [], []
    for i, (op, key) in enumerate(zip(graph.operators, keys, strict=True)):
        if key not in data_of_key:
            data_of_key[key] = work.build_entry(op, source.accumulated_operands[i])
        per_operator.append(data := data_of_key[key])
        forward += [(i, entry) for entry in data.forward]
        backward += [(i, entry) for entry in data.backward]
        if op.name in work.dispatched:
            for entries in (forward, backward):
                entries.append((i, work.add_collective("all_to_all", work.dispatched[op.name][0], EXPERT)))
        arriving = places.operand_storages(op, key)
        places.add_outputs(op, arriving)
        saved_storages = (places.saved_storage(op, arriving, *item) for item in inventory.saved[op.name].storages)
        stored.append((*saved_storages, *places.padded_inputs(op), *saved_by_exchange(places, op)))
        makes.append(tuple(places.storages[v] for v in op.outputs))
        made = [v for v in dict.fromkeys(op.inputs) if v in makers]
        reads.append(tuple((makers[v], places.storages[v]) for v in made))
        arrivals.append(tuple(arriving[v] for v in made))
    return ShardedInventory(
        tuple(work.compute.numbers),  # type: ignore[arg-type]
        np.array([item.local for item in per_operator], dtype=np.intp),
        tuple(work.collectives.numbers),  # type: ignore[arg-type]
        _to_columns(forward),
        _to_columns(backward),
        ColumnGathers.of(graph, inventory.grads, find_column_gathers(graph, sharding, source.blocks) if sharding else (), columns),
        tuple(stored),
        tuple(reads),
        tuple(arrivals),
        tuple(makes),
        np.array([item.extra_bytes for item in per_operator]),
        np.array([item.working_bytes for item in per_operator]),
        np.array([item.torch_bytes for item in per_operator]),
        np.array([item.weight_bytes for item in per_operator]),
        _waiting_gradients(graph, inventory.grads, makers, [places.storage_of(v).amount for v in makers]),
        np.array([item.data_sharded for item in per_operator], dtype=bool),
        source.attention,
        source.blocks,
        source.cheap,
        source.attention_core,
    )


def _unsharded_gradient_bytes(inventory: Inventory, places: StorageMap, op: Operator, divide: float) -> float:
    """Return the bytes of gradients that are sharded less than the operator's work: of replicated operands and partial sums. A convolution
    also has that of its first operand in a blocked layout."""
    tensors, sharding = inventory.graph.tensors, places.sharding
    size = 0.0
    for at, value in enumerate(op.inputs):
        if value in inventory.grads and value not in inventory.persistent_values:
            copies = 2.0 if at == 0 and inventory.works[op.name].kind == "convolution" else 1.0
            divisor = places.num_shards_read(op, at)
            size += copies * tensors[value].size_bytes * max(0.0, 1 / divisor - 1 / divide)
            if record_of(op).view.concatenates and divisor < num_shards(sharding, value):  # a shard of its gradient is copied and sent
                size += tensors[value].size_bytes / divisor
    for value in op.outputs:
        if value in inventory.grads:
            size += tensors[value].size_bytes * max(0.0, 1 / num_shards(sharding, value) - 1 / divide)
    size += in_transit_bytes(inventory, sharding, op)
    return size


def _waiting_gradients(graph: Graph, grads: frozenset[str], makers: Mapping[str, int], sizes: Sequence[BatchBytes]) -> BatchBytesColumns:
    """[operator] -> bytes of gradients alive during its backward because a later operator computed them and the backward of their producer
    is still to come (skip connections). `sizes`: of the values in `makers`. A skip connection that is added to an operator's result shares
    the gradient of that result, one tensor, which counts as the operator's."""
    last = {value: i for i, op in enumerate(graph.operators) for value in op.inputs}
    first = {value: i for i, op in reversed([*enumerate(graph.operators)]) for value in op.inputs}
    rows = [[0.0] * (len(graph.operators) + 1) for _ in range(3)]
    for (value, maker), size in zip(makers.items(), sizes, strict=True):
        if value in grads and last.get(value, 0) > maker + 1:
            for row, amount in zip(rows, (size.data_sharded, size.batched, size.fixed), strict=True):
                row[maker + 1] += amount
                row[last[value]] -= amount
            reader = graph.operators[last[value]]
            other_makers = [makers[v] for v in reader.inputs if v in makers and first[v] == last[v] and makers[v] > maker]
            if record_of(reader).backward.gradient in (GradientMemory.ALIAS, GradientMemory.REDUCED) and len(other_makers) == 1:
                for row, amount in zip(rows, (size.data_sharded, size.batched, size.fixed), strict=True):
                    row[other_makers[0]] -= amount
                    row[other_makers[0] + 1] += amount
    return BatchBytesColumns(*(np.cumsum(row[:-1]) for row in rows))


def _to_columns(pairs: Sequence[tuple[int, int]]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    table = np.array(pairs, dtype=np.intp).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _local_operator(inventory: Inventory, sharding: Sharding | None, op: Operator, siblings: dict[str, float]) -> LocalOperator:
    work = inventory.works[op.name]
    tensors = inventory.graph.tensors
    if sharding is not None and op.name in sharding.off_rank:
        return LocalOperator(LocalKernel("view"), op.outputs[0] in inventory.batched, is_operator_sharded(sharding, op.name, DATA))
    divide = num_work_shards(sharding, op)
    m = n = k = scores = heads = head = 0.0
    share = visible = 1.0
    if record_of(op).product.kind == MatmulKind.LINEAR and len(tensors[op.inputs[1]].shape) == 2:
        rows, inner = tensors[op.inputs[1]].shape
        m, n, k = tensors[op.outputs[0]].size / rows, siblings[op.name], float(inner)
        share = rows / n
        for axis in tensor_axes(sharding):
            if sharding is not None and is_operator_sharded(sharding, op.name, axis):
                form, ranks = sharding.placements[op.inputs[1]].get(axis, R), sharding.work_split(op, axis)
                dim = form.dim if is_shard(form) else None
                m, n, k = (
                    (m, _shard_size(n, ranks), k)
                    if dim == 0
                    else (m, n, _shard_size(k, ranks))
                    if dim == 1
                    else (_shard_size(m, ranks), n, k)
                )
    elif work.kind == "attention":
        query, key = (tensors[v].shape for v in op.inputs[:2])
        heads = _shard_size(float(np.prod(query[:-2])), divide)
        scores = heads * query[-2] * key[-2]
        head = float(query[-1])
        visible = 0.5 if is_causal(op) else 1.0
    products = work.kind in ("linear", "convolution", "recurrent")
    weights = sum(tensors[v].size_bytes / num_shards(sharding, v) for v in op.inputs if products and v not in inventory.batched)
    weights *= num_steps(op, tensors)
    filling, torch_kernel = (
        inventory.kernel_memory.convolution_kernel(op, tensors, sharding) if work.kind == "convolution" else (NO_PADDING, NEVER)
    )
    kind = "linear" if is_run_as_product(op, tensors, sharding) else work.kind
    more = merge_bytes(inventory, sharding, op) if work.kind == "attention" else (0.0, 0.0)
    kernel = LocalKernel(
        kind, work.flops / divide, work.backward_flops / divide, (work.bytes + more[0]) / divide, (work.backward_bytes + more[1]) / divide,
        m, n, k, share, scores, heads, weights, filling if kind == "convolution" else NO_PADDING, torch_kernel,
        work.cast_bytes / divide, work.backward_cast_bytes / divide, num_single_steps(op, tensors, shards_hidden_units(sharding, op)),
        visible, head,
        _batch_independent_traffic(inventory, op, divide), work.taps / divide, work.backward_taps / divide,
    )  # fmt: skip
    return LocalOperator(kernel, op.outputs[0] in inventory.batched, is_operator_sharded(sharding, op.name, DATA))


def _shard_size(size: float, ways: float) -> float:
    """Return the size of a shard: of unequal shards the longest, an integer if the size is."""
    return size / ways if isinstance(ways, int) else round(size / ways, 6)


def _batch_independent_traffic(inventory: Inventory, op: Operator, divide: float) -> KernelTraffic:
    """Return the part of an operator's traffic that does not scale with the batch: weights, scalars, and their gradients."""
    work, tensors = inventory.works[op.name], inventory.graph.tensors
    fixed = [v for v in dict.fromkeys((*op.inputs, *op.outputs)) if v not in inventory.batched or not tensors[v].shape]
    if op.outputs[0] not in inventory.batched or op.function is not None or not fixed:
        return NO_TRAFFIC
    read = 0.0 if work.kind == "gather" else float(sum(tensors[v].size_bytes for v in fixed))
    backward_read = float(sum(tensors[v].size_bytes * ((v in inventory.grads) + (v in work.saved)) for v in fixed))
    casts = inventory.cast_bytes(op)
    cast, learned = (float(sum(size for v, size in casts.items() if v in subset)) for subset in (set(fixed), set(fixed) & inventory.grads))
    return KernelTraffic(*(min(full, part) / divide for full, part in (
        (work.bytes, read), (work.backward_bytes, backward_read), (work.cast_bytes, cast), (work.backward_cast_bytes, learned),
    )))  # fmt: skip


def _is_vocabulary_sharded(sharding: Sharding | None, op: Operator, axis: str) -> bool:
    """Return whether a loss of logits has its classes sharded over an axis."""
    if sharding is None or not record_of(op).backward.saves_log_softmax or not is_operator_sharded(sharding, op.name, axis):
        return False
    return is_fully_replicated(sharding.placements[op.outputs[0]].get(axis, R))


def _add_kernel_collectives(
    inventory: Inventory, sharding: Sharding | None, op: Operator, axis: str, add_collective: Callable[..., int],
    forward: list[int], backward: list[int],
) -> None:  # fmt: skip
    """Add to `forward` and `backward` the entries of collectives inside a sharded operator's own kernel, which no `Redistribution`
    shows."""
    assert sharding is not None
    record, out = record_of(op), op.outputs[0]
    placement = sharding.placements[out].get(axis, R)
    is_replicated = is_fully_replicated(placement)
    tensors = inventory.graph.tensors
    for ring in attention_collectives(inventory, sharding, op, axis):
        is_float32 = ring.size_bytes is not None
        repeats = tensors[op.inputs[0]].shape[-3] / tensors[ring.value].shape[-3] if ring.name == RING else 1.0
        entry = add_collective(ring.name, ring.value, axis, ring.size_bytes, is_float32, ring.num_shards, ring.subgroup, repeats)
        forward += [entry] * ring.forward
        backward += [entry] * ring.backward
    if is_operator_sharded(sharding, op.name, axis) and shards_hidden_units(sharding, op):
        steps, state = gathered_steps(op, tensors)
        forward += [add_collective("all_gather", out, axis, state, by_row=True)] * steps
        backward += [add_collective("reduce_scatter", out, axis, state, by_row=True)] * (steps if out in inventory.grads else 0)
    elif _is_vocabulary_sharded(sharding, op, axis):
        # Maximum, sum and target logit of every row.
        forward += [add_collective("all_reduce", out, axis, 4.0 * tensors[op.inputs[1]].size, by_row=True)] * 3
    elif record.statistics.over_samples and not (is_shard(placement) and placement.dim == 1) and len(op.args) > 5 and op.args[5] is True:
        # In training, over samples or positions; ranks with a shard of channels have the statistics of those.
        statistics = add_collective("all_reduce", out, axis, 8.0 * tensors[op.inputs[0]].shape[1])
        forward.append(statistics)
        backward.append(statistics)
    elif record.reduction in (Reduction.MAX, Reduction.MIN) and is_replicated:
        largest = add_collective("all_reduce", out, axis)
        forward.append(largest)
        backward.append(largest)
    elif inventory.works[op.name].kind in ("linear", "convolution") and is_replicated:
        forward.append(add_collective("all_reduce", out, axis))  # reduced before the bias is added
