"""Inventory of a graph under a sharding: distinct operators, collectives and storages (`ShardedInventory`), computed once per sharding.

Operators of equal cost are one entry (layers repeat), so a layout is priced in the time of one layer. The batch is divided later: entries
state whether they scale with it and whether it is sharded over replicas. Not modelled: data-sharded values without a batch dimension.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.devices.kernels import LocalKernel
from shardwise.cost.memory.block_runs import NO_BYTES, BatchBytes, BatchBytesColumns
from shardwise.cost.memory.memory import Inventory
from shardwise.cost.memory.storages import SavedStorage
from shardwise.cost.operators.column_gathers import ColumnGathers
from shardwise.cost.operators.ring_attention import SubgroupSpan
from shardwise.cost.shard_counts import num_shards
from shardwise.model.dims.labels import expert_weights
from shardwise.model.graph import Graph, Operator
from shardwise.model.sharding.sharding import Sharding
from shardwise.model.stages.stages import StageCut
from shardwise.ops import record_of
from shardwise.ops.experts import experts_and_top_k
from shardwise.ops.vocabulary import LoweringKind
from shardwise.plan.ir.axis import DATA, EXPERT, axis_of

RoutedExperts = tuple[int, int]  # number of experts, and experts per token (top-k)
ANY_EXPERTS: RoutedExperts = (0, 0)
CountedStorages = set[tuple[str, str]]  # storages already counted: (root, name of a copy in another dtype)


@dataclass(frozen=True, slots=True)
class LocalOperator:
    """An operator on one tensor rank, with the samples of all data replicas. `num_chunks`: it runs so often, each time on a part of its
    rows."""

    kernel: LocalKernel
    batched: bool
    data_sharded: bool  # over data replicas
    num_chunks: int = 1


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective on `size_bytes` (float32, unsharded along `axis`, the graph's batch). `is_narrow`: 16-bit under autocast. `experts`: the
    experts that its rows belong to. `repeats`: query heads of each key head that a ring passes."""

    name: str
    axis: str
    size_bytes: float
    batched: bool
    data_sharded: bool
    is_narrow: bool
    is_float32: bool = False  # float32 whatever the precision
    subgroup: SubgroupSpan = None  # a subgroup of the axis; None for all
    experts: RoutedExperts = ANY_EXPERTS
    repeats: float = 1.0


@dataclass(frozen=True)
class ShardedInventory:
    """Operator i is `compute[index[i]]`. `forward` and `backward`: (operators, entries of `collectives`). `column_gathers`: gathers that
    backward may repeat."""

    compute: tuple[LocalOperator, ...]
    index: NDArray[np.intp]
    collectives: tuple[Collective, ...]
    forward: tuple[NDArray[np.intp], NDArray[np.intp]]
    backward: tuple[NDArray[np.intp], NDArray[np.intp]]
    column_gathers: ColumnGathers
    saved: tuple[tuple[SavedStorage, ...], ...]
    reads: tuple[tuple[tuple[int, SavedStorage], ...], ...]  # (number of the producer, storage) of each operand
    arrivals: tuple[tuple[SavedStorage, ...], ...]  # the same storages after redistribution, as the operator reads them
    outputs: tuple[tuple[SavedStorage, ...], ...]
    extra_bytes: NDArray[np.float64]  # float32 tensors saved by each operator that are no value of the graph
    working_bytes: NDArray[np.float64]  # workspace of each operator's backward; scales with the batch if the operator does
    torch_bytes: NDArray[np.float64]  # the same with torch's own convolution kernel, as float32
    weight_bytes: NDArray[np.float64]  # the same of weights' gradients
    waiting_gradients: BatchBytesColumns  # gradients alive meanwhile: of values produced before the operator and read after it
    data_sharded: NDArray[np.bool_]
    attention: NDArray[np.bool_]
    blocks: tuple[str, ...]  # the numbered block of each operator, the unit of recomputation; "" for none
    cheap: tuple[bool, ...]  # [operator] -> whether recompute=cheap runs it again
    attention_core: tuple[int, ...]  # the attention core of each operator, the unit of selective recomputation; -1 for none

    @cached_property
    def batched(self) -> NDArray[np.bool_]:
        """[operator] -> whether its size scales with the batch."""
        return np.array([local.batched for local in self.compute], dtype=bool)[self.index]

    @cached_property
    def extra(self) -> dict[int, BatchBytes]:
        """Saved bytes that are no value of the graph, by operator, where there are any."""
        amounts = {}
        for i in np.flatnonzero(self.extra_bytes).tolist():
            size = float(self.extra_bytes[i])
            amounts[i] = (
                BatchBytes(data_sharded=size)
                if self.data_sharded[i]
                else BatchBytes(batched=size)
                if self.batched[i]
                else BatchBytes(fixed=size)
            )
        return amounts

    @cached_property
    def extra_half(self) -> dict[int, BatchBytes]:
        """The same if every float tensor is 16-bit: besides log-probabilities of losses these are masks, a byte per element."""
        mask_operators = {i for i in self.extra if self.compute[self.index[i]].kernel.kind == "elementwise"}
        return {i: BatchBytes(*(0.25 * n for n in amount)) if i in mask_operators else amount for i, amount in self.extra.items()}

    @cached_property
    def torch_kernels(self) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
        """[operator] -> the fields `samples`, `alone`, `thin` of its `TorchKernel`, as three arrays."""
        owns = [local.kernel.torch_kernel for local in self.compute]
        samples, alone, thin = (np.array([getattr(k, name) for k in owns])[self.index] for name in ("samples", "alone", "thin"))
        return samples, alone, thin

    @cached_property
    def num_chunks(self) -> NDArray[np.float64]:
        """[operator] -> the number of parts of its rows that it runs on, one after another."""
        return np.array([local.num_chunks for local in self.compute], dtype=float)[self.index]

    @cached_property
    def products(self) -> NDArray[np.bool_]:
        """[operator] -> whether it is the product of a linear layer."""
        return np.array([local.kernel.kind == "linear" for local in self.compute], dtype=bool)[self.index]

    @cached_property
    def in_block(self) -> NDArray[np.bool_]:
        """[operator] -> whether it is in a numbered block."""
        return np.array([bool(name) for name in self.blocks], dtype=bool)

    @cached_property
    def block_numbers(self) -> NDArray[np.intp]:
        """[operator] -> the number of its block."""
        numbers = {name: i for i, name in enumerate(dict.fromkeys(self.blocks))}
        return np.array([numbers[name] for name in self.blocks], dtype=np.intp)

    @cached_property
    def recomputed(self) -> NDArray[np.bool_]:
        """[operator] -> whether full recomputation runs it twice: those in numbered blocks, or all if there are no blocks."""
        return self.in_block if self.in_block.any() else np.ones(len(self.blocks), dtype=bool)


def block_of(site: str) -> str:
    """Return the outermost numbered block of a site, the unit that models repeat; "" for none.

    >>> block_of("layers.3.mlp.up/linear"), block_of("head/linear")
    ('layers.3', '')
    """
    path = site.partition("/")[0].split(".")
    return ".".join(path[: next((i + 1 for i, part in enumerate(path) if part.isdigit()), 0)])


def count_storages(
    items: Iterable[SavedStorage], half: bool, seen: CountedStorages, besides: Container[tuple[str, str]] = ()
) -> BatchBytes:
    """Return the bytes of the storages in neither `seen` nor `besides`, and add them to `seen`. `half`: every float tensor is 16-bit."""
    shared = batched = fixed = 0.0
    for item in items:
        key = (item.root, item.copy)
        if key in seen or key in besides or (item.is_persistent and not item.copy):
            continue
        seen.add(key)
        size = item.size_bytes * (0.5 if item.is_float and half else 1.0)
        if not item.batched:
            fixed += size
        elif item.data_sharded:
            shared += size
        else:
            batched += size
    return BatchBytes(shared, batched, fixed)


def saved_by_operator(
    parts: ShardedInventory, operators: Iterable[int], half: bool = False, seen: CountedStorages | None = None
) -> list[BatchBytes]:
    """Return, by operator, the bytes that it saves for backward and no earlier one does. `seen`: storages already counted; it is updated.

    `half`: every float tensor is 16-bit, as on GPUs; under autocast the inventory itself has the dtypes.
    """
    seen, amounts, extras = CountedStorages() if seen is None else seen, [], parts.extra_half if half else parts.extra
    for i in operators:
        saved = count_storages(parts.saved[i], half, seen) if parts.saved[i] else NO_BYTES
        amounts.append(saved + extras[i] if i in extras else saved)
    return amounts


def total_saved(parts: ShardedInventory, operators: Iterable[int], half: bool = False, seen: CountedStorages | None = None) -> BatchBytes:
    """Return the bytes that these operators save together."""
    return sum(saved_by_operator(parts, operators, half, seen), NO_BYTES)


@dataclass(frozen=True, slots=True)
class StageParameters:
    """Numbers of a stage's parameters on one tensor rank: all, trainable ones, and those whose gradients are reduced over each set of axes.

    `num_expert` of them are experts' (all trainable), which are reduced only over replicas of the same experts.

    `num_tied` of the trainable ones are shared with another stage. `buffer_bytes`: of the model's buffers that the stage reads.
    """

    num_parameters: float
    num_trainable: float
    reductions: tuple[tuple[tuple[str, ...], float], ...]
    num_tied: float
    num_expert: float = 0.0
    buffer_bytes: float = 0.0

    @property
    def num_unreduced(self) -> float:
        """Number of trainable parameters whose gradients are not reduced, since they are equal on every rank."""
        return self.num_trainable - sum(n for axes, n in self.reductions if any(axis_of(a).always_shards for a in axes))


def stage_parameters(
    graph: Graph,
    sharding: Sharding | None,
    used: Sequence[str],
    readers: Mapping[str, int],
    experts: frozenset[str] = frozenset(),
) -> StageParameters:
    """Count a stage's parameters. `used`: values that the stage reads. `readers`: number of stages that
    read each. `experts`: those sharded by experts."""
    number = trainable = tied = expert = 0.0
    parameters, buffers = ({v.value: v for v in variables} for variables in (graph.parameters, graph.buffers))
    buffer_bytes = sum(buffers[v].tensor.size_bytes / num_shards(sharding, v) for v in used if v in buffers)
    sums: dict[tuple[str, ...], float] = {}
    for value in used:
        variable = parameters.get(value)
        if variable is None:
            continue
        num_local = variable.tensor.size / num_shards(sharding, value)
        number += num_local
        if not variable.trainable:
            continue
        trainable += num_local
        if readers[value] > 1:
            tied += num_local
        axes = () if sharding is None else tuple(sharding.gradient_axes.get(value, ()))
        if value in experts:
            expert += num_local
        elif DATA in axes:
            axes = (*axes, EXPERT)
        if axes:
            sums[axes] = sums.get(axes, 0.0) + num_local
    return StageParameters(number, trainable, tuple(sums.items()), tied, expert, buffer_bytes)


def even_sites(cuts: Sequence[StageCut], num_stages: int) -> tuple[str, ...]:
    """Return the first sites of stages with equal numbers of blocks; () for one stage, or if blocks do not divide or send unequal bytes."""
    sites: dict[str, StageCut] = {}
    for cut in cuts:
        if name := block_of(cut.site):
            sites.setdefault(name, cut)
    if num_stages == 1 or len(sites) % num_stages or len({cut.size_bytes for cut in sites.values()}) > 1:
        return ()
    starts = [cut.site for cut in sites.values()]
    return tuple(starts[len(starts) * i // num_stages] for i in range(1, num_stages))


def dispatched_values(inventory: Inventory) -> dict[str, tuple[str, RoutedExperts]]:
    """Return the dispatched or combined value by operator, each once. For ragged rows also the experts: a token is sent once to each rank
    that has any of its experts (`ops.experts.ranks_reached`)."""
    by_expert, sent = set(expert_weights(inventory.graph).values()), set[str]()
    values: dict[str, tuple[str, RoutedExperts]] = {}
    for op in inventory.graph.operators:
        value = _dispatched_value(inventory, op, op.name in by_expert)
        if value and value not in sent:
            sent.add(value)
            values[op.name] = value, experts_and_top_k(op, inventory.graph.tensors) if record_of(op).expert_stage else ANY_EXPERTS
    return values


def _dispatched_value(inventory: Inventory, op: Operator, by_expert: bool) -> str:
    """Return the value that an operator dispatches or combines, "" for none: for expert products the narrower of operand and result, for
    ragged rows those of the first and last operator."""
    if ragged := record_of(op).expert_stage:
        return op.outputs[0] if ragged == LoweringKind.EXPERT_DISPATCH else op.inputs[0] if ragged == LoweringKind.EXPERT_COMBINE else ""
    if not by_expert:
        return ""
    operands = [v for v in (*op.inputs, op.outputs[0]) if v in inventory.batched]
    return min(operands, key=lambda v: inventory.graph.tensors[v].size, default="")
