"""Memory model of one rank. In: a stage's saved activations and state, a layout. Out: `MemoryBreakdown` by category.

On CPUs weights are float32 (bfloat16 is autocast over them), gradients float32, AdamW keeps two float32 moments: 16 bytes per
parameter. On GPUs 16-bit precisions are Megatron-LM's: 16-bit weights, gradients of the efficiency set's width, a float32 copy of the
weights besides the moments. Activations are the tensors that autograd saves for backward, each storage once, times the microbatches in
flight; with full recomputation only layer inputs and what lies outside layers, plus one layer's of one microbatch. Not modelled: the
allocator's fragmentation (a margin instead) and workspaces of kernels.

In the field's terms: peak memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.devices.devices import Widths
from shardwise.cost.devices.kernel_memory import BackwardWorkspace, KernelMemory
from shardwise.model.gradients import differentiable_values
from shardwise.model.graph import DTYPE_BYTES, Graph, Operator, Tensor
from shardwise.model.strides.autocast_dtypes import HELD, apply_autocast, cast_operands, narrow_parameters
from shardwise.model.work import OperatorWork, kind_of, operator_work, storage_roots, values_following_batch
from shardwise.ops import record_of
from shardwise.ops.attention import has_score_dropout
from shardwise.ops.recurrent import RECURRENT_WORKSPACE
from shardwise.ops.transforms import fft_dim_and_length
from shardwise.ops.vocabulary import GradientMemory, Linearity, ViewKind
from shardwise.plan.ir.compression import Compression
from shardwise.plan.layout import Layout
from shardwise.plan.plan import BUCKET_BYTES, MemoryBreakdown, unshared_bucket_bytes
from shardwise.schedules import FIRST_GRADIENTS, NO_GRADIENTS, LiveMicrobatches, schedule_of

MARGIN = 0.06  # of everything else: fragmentation and workspaces
# Additional memory for packing and unpacking a compressed bucket, in sizes of a bucket: measured.
PACKING = {"bfloat16": 2.0, "int8": 2.0, "topk": 4.0}


def state_bytes(num_parameters: float, zero: int, num_ranks: int, weight: float = 4, gradient: float = 4, optimizer: float = 8) -> float:
    """Return the bytes of weights, gradients and optimizer state on each of `num_ranks` data replicas under ZeRO.

    Rajbhandari et al. 2020, section 5, for any widths. Their mixed precision is weight=2, gradient=2, optimizer=12:
    4Φ + 12Φ/N at stage 1, 2Φ + 14Φ/N at stage 2, 16Φ/N at stage 3.
    """
    widths_and_stages = ((optimizer, 1), (gradient, 2), (weight, 3))
    return sum(num_parameters * width / (num_ranks if zero >= stage else 1) for width, stage in widths_and_stages)


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """Tensors that one operator saves for backward, and transient bytes of its own backward: with oneDNN (`working_bytes`), with torch's
    own convolution kernel, as float32 (`torch_bytes`), added if it is not sharded (`unsharded_bytes`) or is (`sharded_bytes`)."""

    # (value, name of a copy in another dtype or "", size relative to the value).
    storages: tuple[tuple[str, str, float], ...]
    working_bytes: float
    torch_bytes: float
    unsharded_bytes: float
    sharded_bytes: float
    weight_bytes: float  # gradients of its weights before accumulation, whatever the batch


@dataclass(frozen=True)
class Inventory:
    """Work, storages and saved tensors of a graph's operators, independent of any sharding."""

    graph: Graph
    works: Mapping[str, OperatorWork]
    grads: frozenset[str]
    batched: frozenset[str]
    storage_root: Mapping[str, str]
    persistent_values: frozenset[str]  # parameters, buffers, inputs and constants: never counted as activations
    kernel_memory: KernelMemory
    is_cast: bool = False  # by autocast; `graph` then has autocast's dtypes

    @classmethod
    def of(cls, graph: Graph, memory: type[KernelMemory] = KernelMemory, cast_mode: str = "") -> Inventory:
        """Build the inventory of a graph. `memory`: the model of kernel memory. `cast_mode`: see `Devices.cast_mode`."""
        held, is_cast = frozenset(v.value for v in (*graph.parameters, *graph.buffers, *graph.constants, *graph.inputs)), bool(cast_mode)
        graph = apply_autocast(graph, narrow_parameters(graph) if cast_mode == HELD else ()) if is_cast else graph
        works, grads = operator_work(graph, cast_operands if is_cast else None), frozenset(differentiable_values(graph))
        kernels = memory(graph, grads, held)
        for op in graph.operators:
            tensors = {**graph.tensors, **cast_operands(op, graph.tensors)} if is_cast else graph.tensors
            works[op.name] = kernels.work(op, tensors, works[op.name])
        return cls(
            graph,
            works,
            grads,
            frozenset(values_following_batch(graph)),
            storage_roots(graph, kernels.materialized),
            held,
            kernels,
            is_cast,
        )

    def tensors_as_read(self, op: Operator) -> Mapping[str, Tensor]:
        """Return the graph's tensors, an operator's operands in the dtypes in which it reads them."""
        tensors = self.graph.tensors
        return {**tensors, **read} if self.is_cast and (read := cast_operands(op, tensors)) else tensors

    def cast_bytes(self, op: Operator) -> dict[str, float]:
        """Return the bytes read and written to cast an operator's operands, by value."""
        tensors = self.graph.tensors
        read = cast_operands(op, tensors) if self.is_cast else {}
        return {v: float(tensors[v].size_bytes + t.size_bytes) for v, t in read.items()}

    @cached_property
    def saved(self) -> dict[str, SavedTensors]:
        """Saved tensors by operator; parameters only if a copy of them is saved in another dtype."""
        by_operator = {}
        for op in self.graph.operators:
            read = cast_operands(op, self.graph.tensors) if self.is_cast else {}
            tensors = {**self.graph.tensors, **read} if read else self.graph.tensors
            done = self.works[op.name]
            row_copies = self.kernel_memory.row_copies(op)
            saved = dict.fromkeys(self._saved_storage(op, v, read, v in row_copies) for v in done.saved)
            has_gradient = any(v in self.grads for v in op.outputs)
            if has_gradient and (mask := self.kernel_memory.saved_mask(op, tensors)):  # torch converts it to an additive mask
                saved[mask, f"added by {op.name}", float(DTYPE_BYTES[tensors[op.inputs[0]].dtype])] = None
            size = working_bytes(op, tensors, self.grads, self.persistent_values, done.extra_bytes) if has_gradient else 0.0
            if op.function is not None and has_gradient:
                size += op.function.working_bytes
            if read and has_gradient:  # its operands' gradients in both dtypes
                operands = [v for v in read if v in self.grads and v not in self.persistent_values]
                both_bytes = sum(t[v].size_bytes for v in operands for t in (tensors, self.graph.tensors))
                # By then the product itself is done, and its saved copies are freed.
                size = max(
                    size, both_bytes - sum(tensors[v].size_bytes for v in read if v in done.saved and v not in self.persistent_values)
                )
            if self.is_cast and has_gradient and record_of(op).view.concatenates:  # forward has widened copies of its operands
                size += sum(2.0 * tensors[v].size_bytes for v in op.inputs if tensors[v].dtype == "bfloat16") * (
                    tensors[op.outputs[0]].dtype == "float32"
                )
            workspace = self.kernel_memory.workspace(op, tensors, read, done) if has_gradient else BackwardWorkspace()
            stored = tuple(sorted(storage for storage in saved if storage))
            working, by_torch = size + workspace.working_bytes, size + workspace.torch_bytes
            by_operator[op.name] = SavedTensors(
                stored, working, by_torch, workspace.unsharded_bytes, workspace.sharded_bytes, workspace.weight_bytes
            )
        return by_operator

    def _saved_storage(self, op: Operator, value: str, read: Mapping[str, Tensor], is_row_copy: bool) -> tuple[str, str, float] | None:
        """Return (value, copy, relative size) that an operator saves of a value; None for a parameter itself. Casts and row copies are made
        per operator, but casts of a weight once."""
        if is_row_copy:
            width = read[value].size_bytes / self.graph.tensors[value].size_bytes if value in read else 1.0
            return value, f"rows for {op.name}", width
        if value in read:
            suffix = "" if value in self.persistent_values else f" for {op.name}"
            return value, f"{read[value].dtype}{suffix}", read[value].size_bytes / self.graph.tensors[value].size_bytes
        return None if self.storage_root.get(value, value) in self.persistent_values else (value, "", 1.0)


@dataclass(frozen=True, slots=True)
class PeakByZeroStage:
    """Bytes during one operator's backward (`block_runs`) by ZeRO stage: with full gradients and weights, with gradients
    reduce-scattered (stage 2), with weights all-gathered as well (stage 3). `first`: as `full`, in the first backward of a step before
    which there are no gradients, less those not yet computed."""

    full: float = 0.0
    scattered: float = 0.0
    gathered: float = 0.0
    first: float = 0.0

    def at_stage(self, zero: int, scatters_last: bool = False) -> float:
        """Return the bytes for a ZeRO stage. `scatters_last`: whole gradients are counted elsewhere, as without the stage."""
        if scatters_last and zero >= 2:
            return self.full + (self.gathered - self.scattered if zero == 3 else 0.0)
        return self.gathered if zero == 3 else self.scattered if zero == 2 else self.full


@dataclass(frozen=True, slots=True)
class StageState:
    """One stage on one rank: numbers of sharded parameters, and bytes of one microbatch.

    `num_remote_experts` are parameters of experts on other data replicas: ZeRO shards those too. `num_unreduced` have the same gradient on
    every replica, which is not reduced: ZeRO does not shard those.

    `entering_bytes` are received from other stages, gradients of `leaving_bytes` come back from them; `saved_bytes` are saved on the device
    for backward, `score_bytes` of them attention scores. `transient` is the transient memory at the peak of backward, less saved tensors
    freed by then. With recomputed or offloaded layers `rematerialized` is what was recomputed or loaded, less what is freed, at that peak,
    and `transient` the rest. `offloaded_bytes` of a microbatch are offloaded. `has_late_gradients`: gradients exist from a step's first
    backward on only. `bucket_bytes`: size of a bucket of gradients. `buffer_bytes`: the model's own buffers.
    `num_largest`: elements of the largest trainable parameter.
    """

    num_parameters: float
    num_trainable: float
    entering_bytes: float
    num_remote_experts: float = 0.0
    saved_bytes: float = 0.0
    score_bytes: float = 0.0
    transient: PeakByZeroStage = PeakByZeroStage()
    rematerialized: PeakByZeroStage = PeakByZeroStage()
    offloaded_bytes: float = 0.0
    num_unreduced: float = 0.0
    leaving_bytes: float = 0.0
    has_late_gradients: bool = False
    bucket_bytes: float = BUCKET_BYTES
    buffer_bytes: float = 0.0
    num_largest: float = 0.0


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of one stage if its rank has no other: `alone`. Its terms, for a rank with several: `saved_bytes` of each microbatch in
    flight, `rematerialized_bytes` and `transient_bytes` of the one in backward (`StageState`), `entering_bytes` received for each forward,
    `leaving_bytes` received for each backward and `deferred_bytes` of each microbatch whose weight gradients are deferred. `first_bytes`:
    as `rematerialized_bytes` and `transient_bytes` together, less `late_gradient_bytes` not yet computed, which exist from a step's first
    backward on; in `alone.gradients` they are counted only if they exist at its peak. `largest_gradient_bytes`: of one parameter.
    `buffer_bytes`: the model's own."""

    alone: MemoryBreakdown
    saved_bytes: float = 0.0
    rematerialized_bytes: float = 0.0
    transient_bytes: float = 0.0
    entering_bytes: float = 0.0
    leaving_bytes: float = 0.0
    deferred_bytes: float = 0.0
    first_bytes: float = 0.0
    late_gradient_bytes: float = 0.0
    largest_gradient_bytes: float = 0.0
    buffer_bytes: float = 0.0


def server_weight_copies(layout: Layout) -> float:
    """Return the copies of weights on a parameter server's rank besides its replica, in sizes of the model: its shard and, with stale
    updates, the weights arriving for the next step and the versions of its shard that other ranks may still pull.

    >>> server_weight_copies(Layout(data=4, servers=2)), server_weight_copies(Layout(data=4, servers=2, staleness=1)), server_weight_copies(Layout(data=4))
    (0.5, 2.5, 0.0)
    """  # noqa: E501
    if not layout.servers:
        return 0.0
    return 1 / layout.servers + (1 + (layout.staleness + 1) / layout.servers if layout.staleness else 0.0)


def memory_of(
    state: StageState,
    layout: Layout,
    stage: int,
    widths: Widths,
    *,
    scratch_bytes: float = 0.0,
    optimizer_states: int = 2,
    deferred_bytes: float = 0.0,
    num_host_replicas: int = 1,
) -> StageMemory:
    """Return the memory of one rank of a stage (`stage` counts chunks too).

    `num_host_replicas`: replicas per host if compressed gradients are reduced inside hosts first.
    `deferred_bytes`: recomputed or loaded for the input part of a microbatch's backward and retained for its weight gradients.
    """
    schedule = schedule_of(layout)
    rank, holders = schedule.ranks_of[stage][0], len(schedule.ranks_of[stage])
    num_rank_stages = len(schedule.stages_of[rank])
    # Stages that several pipeline ranks have are not sharded (`run/state/parameters`), but their optimizer state is, over those ranks.
    data, zero = layout.weight_ranks // layout.zero_groups, layout.zero if holders == 1 else min(layout.zero, 1)
    zero_stage = zero if data > 1 else 0
    activations = state.saved_bytes - (state.score_bytes if layout.recompute == "selective" else 0.0)
    there = state.rematerialized.at_stage(zero_stage, layout.scatters_last)
    activation = activations * schedule.in_flight(stage) + there
    if deferred_bytes and num_rank_stages == 1:
        only_saved = StageMemory(MemoryBreakdown(), activations, there, deferred_bytes=deferred_bytes, first_bytes=there)
        activation = float(bytes_by_moment([only_saved], schedule.live_microbatches(rank)).saved.max())
    unsummed = state.num_unreduced
    trained = (state.num_trainable - unsummed + state.num_remote_experts) / data + unsummed
    parameters = widths.weight * (trained if zero == 3 else state.num_trainable)
    parameters += widths.frozen * (state.num_parameters - state.num_trainable)  # whole on every rank
    whole = state.num_trainable * (layout.scatters_last and zero_stage >= 2)  # until the last microbatch
    gradients = widths.gradient * ((trained if zero >= 2 else state.num_trainable) + whole) * (layout.staleness + 1)  # of each in flight
    parameters += widths.weight * server_weight_copies(layout) * state.num_trainable
    compression = Compression.parse(layout.compress)
    if compression.has_error_feedback:  # error feedback of a rank's own gradients, and of its shard of the reduced ones
        gradients += widths.gradient * state.num_trainable * (1 / num_host_replicas + 1 / data * (compression.kind == "int8" and not zero))
    optimizer = (widths.copies + widths.moment * optimizer_states) * (trained / holders if zero else state.num_trainable)
    if layout.servers:  # a bucket arriving from every other rank
        gradients += min(state.bucket_bytes, widths.gradient * state.num_trainable) * (layout.data - 1) / layout.servers
        optimizer /= layout.servers
    optimizer *= not layout.offloads_optimizer
    beside = state.transient.at_stage(zero_stage, layout.scatters_last)
    late, first = (gradients, state.transient.first + state.rematerialized.first) if state.has_late_gradients else (0.0, there + beside)
    terms = StageMemory(
        MemoryBreakdown(), activations, there, beside, deferred_bytes=deferred_bytes, first_bytes=first, late_gradient_bytes=late,
        largest_gradient_bytes=widths.gradient * state.num_largest,
    )  # fmt: skip
    if late and num_rank_stages == 1:
        activation, beside, gradients = bytes_by_moment([terms], schedule.live_microbatches(rank)).at_peak
    if widths.copies > widths.gradient and not layout.offloads_optimizer:  # updates read gradients as wide as main weights
        beside = max(beside, widths.copies * (trained / holders if zero else state.num_trainable) - activation)
    beside += PACKING.get(compression.kind, 0.0) * min(state.bucket_bytes, widths.gradient * state.num_trainable)
    entering, leaving = (size * (layout.pipeline > 1) for size in (state.entering_bytes, state.leaving_bytes))
    # Receives are posted ahead: a microbatch's gradient arrives during the backward of the one before.
    buffers = beside + 2 * entering + leaving + state.buffer_bytes
    margin = scratch_bytes / num_rank_stages + MARGIN * (parameters + gradients + optimizer + activation + buffers)
    alone = MemoryBreakdown(parameters, gradients, optimizer, activation, buffers, margin)
    return replace(terms, alone=alone, entering_bytes=entering, leaving_bytes=leaving, buffer_bytes=state.buffer_bytes)


@dataclass(frozen=True, slots=True)
class BytesByMoment:
    """Bytes of a rank by moment of its schedule: saved for backward, transient, and gradients that do not exist at every moment."""

    saved: NDArray[np.float64]
    transient: NDArray[np.float64]
    gradients: NDArray[np.float64]

    @property
    def total(self) -> NDArray[np.float64]:
        return self.saved + self.transient + self.gradients

    @property
    def at_peak(self) -> tuple[float, float, float]:
        """The three at the fullest moment. Transient bytes below zero are of gradients that are not computed yet."""
        peak = int(self.total.argmax())
        saved, transient, gradients = (float(part[peak]) for part in (self.saved, self.transient, self.gradients))
        return saved, max(0.0, transient), gradients + min(0.0, transient)


def bytes_by_moment(stages: Sequence[StageMemory], moments: LiveMicrobatches) -> BytesByMoment:
    """Return the bytes of a rank's stages by moment, the last after all backwards: gradients, and a bucket of them a second time."""
    columns = [
        (m.saved_bytes, m.rematerialized_bytes, m.deferred_bytes, m.transient_bytes, m.entering_bytes, m.leaving_bytes,
            m.first_bytes - m.rematerialized_bytes, m.late_gradient_bytes)
        for m in stages
    ]  # fmt: skip
    kept, there, noted, beside, entering, leaving, first, late = np.ascontiguousarray(np.array(columns, dtype=np.float64).T)
    saved = moments.in_flight @ kept + moments.backward @ there + moments.awaiting_weight_gradient @ noted
    transient = moments.backward @ beside + moments.inputs_in_transfer @ entering + moments.gradients_in_transfer @ leaving
    if not late.any():
        return BytesByMoment(saved, transient, np.zeros_like(saved))
    transient += (moments.weight_gradients == FIRST_GRADIENTS) @ (first - beside)
    gradients, total = (moments.weight_gradients > NO_GRADIENTS) @ late, float(late.sum())
    largest = max(m.largest_gradient_bytes for m in stages)
    copied = min(total, max(unshared_bucket_bytes(total), largest))  # a bucket has whole parameters
    ends = ((saved, 0.0), (transient, copied), (gradients, total))
    saved, transient, gradients = (np.append(part, end) for part, end in ends)
    return BytesByMoment(saved, transient, gradients)


def working_bytes(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str], persistent_values: Set[str], extra_bytes: float) -> float:
    """Return the workspace of an operator that has a gradient. `persistent_values`: parameters, whose gradients are counted elsewhere.
    `extra_bytes`: saved tensors that are no value of the graph."""
    record, out = record_of(op), tensors[op.outputs[0]]
    gradient_bytes = sum(tensors[v].size_bytes for v in op.outputs if v in grads)
    differentiable = [v for v in dict.fromkeys(op.inputs) if v in grads]
    inner = [v for v in differentiable if v not in persistent_values]
    in_place = record.backward.gradient in (GradientMemory.ALIAS, GradientMemory.REDUCED)
    if in_place or (record.view.kind == ViewKind.CAST and tensors[op.inputs[0]].dtype == out.dtype):
        # Gradients of broadcast operands are reduced into a separate tensor.
        return gradient_bytes + sum(
            tensors[v].size_bytes for v in inner if record.backward.gradient == GradientMemory.REDUCED and tensors[v].size < out.size
        )
    if record.backward.gradient == GradientMemory.BROADCAST:
        size = gradient_bytes + sum(max(tensors[v].size_bytes, out.size_bytes) for v in differentiable)
        return size + 2.0 * out.size_bytes * (record.linear == Linearity.NUMERATOR and len(op.inputs) > 1 and op.inputs[1] in grads)
    size = gradient_bytes + sum(tensors[v].size_bytes for v in inner)
    if not op.inputs:
        return size
    x = tensors[op.inputs[0]]
    if record.backward.saves_log_softmax:  # the gradient of its saved tensors
        return size + extra_bytes
    if kind_of(op) == "attention":  # recomputed scores, and their gradient
        scores = x.size_bytes / x.shape[-1] * tensors[op.inputs[1]].shape[-2]
        if has_score_dropout(op):  # gradients before and after softmax, in float32 or wider; none of queries and keys yet
            values = tensors[op.inputs[2]].size_bytes
            return values + 2.0 * max(1.0, 4.0 / DTYPE_BYTES[x.dtype]) * scores
        return size + min(extra_bytes, 2.0 * scores)
    if kind_of(op) == "recurrent":
        return size + RECURRENT_WORKSPACE * out.size_bytes
    if record.backward.gradient == GradientMemory.PADDED_SPECTRUM:  # backward works on complex numbers of full length
        dim, length = fft_dim_and_length(op, tensors)
        return size + 16.0 * prod(out.shape) / out.shape[dim] * length
    if record.backward.gradient == GradientMemory.SPECTRUM and x.is_float:
        return size + out.size_bytes
    if x.dtype.startswith("complex") and record.backward.conjugates_saved:  # the conjugate of a saved tensor
        size += x.size_bytes
    if record.backward.gradient == GradientMemory.SCATTER_ADD and x.dtype == "bfloat16":  # bfloat16 accumulates in float32
        size += 2 * x.size_bytes
    return size + record.backward.temporaries * x.size_bytes
