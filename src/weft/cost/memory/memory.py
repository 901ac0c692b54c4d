"""Bytes on one rank. In: what its stage keeps and holds, a layout. Out: `Memory` by what it holds.

On processors weights are float32 (bfloat16 is autocast over them), gradients float32, AdamW keeps two float32 moments: 16 bytes a
parameter. On GPUs 16-bit precisions are Megatron-LM's: 16-bit weights, gradients of the stack's width, a float32 copy of the weights
beside the moments. Activations are what autograd keeps for backward, each storage once, times the microbatches in flight; with full
recomputation only what enters each layer and what stands in none, and one layer's of one microbatch. Not modelled: the allocator's
fragmentation (a margin instead) and workspaces of kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from weft.cost.devices.devices import Widths
from weft.cost.devices.kept import Beside, KernelMemory
from weft.cost.memory.working import working_bytes
from weft.model.graph import DTYPE_BYTES, Graph, Operator, Tensor
from weft.model.storage.autocast import autocast, cast
from weft.model.work import Work, batched, differentiable, storages, work
from weft.ops import record_of
from weft.plan.compression import Compression
from weft.plan.layout import Layout
from weft.plan.plan import BUCKET_BYTES, Memory, bucket_alone
from weft.schedules import schedule_of

MARGIN = 0.06  # of everything else: fragmentation and workspaces
# Memory that packing and unpacking a bucket takes besides, in sizes of a bucket: measured.
PACKING = {"bfloat16": 2.0, "int8": 2.0, "topk": 4.0}


def state_bytes(num_parameters: float, zero: int, num_ranks: int, weight: float = 4, gradient: float = 4, optimizer: float = 8) -> float:
    """Bytes of weights, gradients and optimizer state on each of `num_ranks` data replicas.

    Rajbhandari et al. 2020, section 5, for any widths. Their mixed precision is weight=2, gradient=2, optimizer=12:
    4Φ + 12Φ/N at stage 1, 2Φ + 14Φ/N at stage 2, 16Φ/N at stage 3.
    """
    parts = ((optimizer, 1), (gradient, 2), (weight, 3))
    return sum(num_parameters * width / (num_ranks if zero >= stage else 1) for width, stage in parts)


@dataclass(frozen=True, slots=True)
class Kept:
    """What one operator keeps for backward: storages with their bytes, and the bytes of tensors that its own backward works on (and those
    of a convolution that torch makes itself, not oneDNN, counted as float32: `torch_bytes`), and besides where it is not cut over ranks
    (`alone_bytes`) and where it is (`spread_bytes`)."""

    # Value, and which copy of it, of how many times its bytes, if in another dtype than it has.
    storages: tuple[tuple[str, str, float], ...]
    working_bytes: float
    torch_bytes: float
    alone_bytes: float
    spread_bytes: float
    weight_bytes: float  # the gradients of its weights before they are added up, whatever the batch


@dataclass(frozen=True)
class Inventory:
    """What follows from the graph alone, computed once."""

    graph: Graph
    works: Mapping[str, Work]
    grads: frozenset[str]
    batched: frozenset[str]
    root: Mapping[str, str]
    held: frozenset[str]  # parameters, buffers, inputs and constants: never counted as activations
    kernels: KernelMemory
    is_cast: bool = False  # by autocast; `graph` then has the dtypes that it makes

    @classmethod
    def of(cls, graph: Graph, memory: type[KernelMemory] = KernelMemory, is_cast: bool = False) -> Inventory:
        """`memory`: what kernels keep besides. `is_cast`: under autocast."""
        held = frozenset(v.value for v in (*graph.parameters, *graph.buffers, *graph.constants, *graph.inputs))
        graph = autocast(graph) if is_cast else graph
        works, grads = work(graph, cast if is_cast else None), frozenset(differentiable(graph))
        kernels = memory(graph, grads, held)
        for op in graph.operators:
            tensors = {**graph.tensors, **cast(op, graph.tensors)} if is_cast else graph.tensors
            works[op.name] = kernels.work(op, tensors, works[op.name])
        return cls(graph, works, grads, frozenset(batched(graph)), storages(graph, kernels.copied), held, kernels, is_cast)

    def cast_of(self, op: Operator) -> dict[str, float]:
        """Bytes that are read and written to have an operand in another dtype, by value."""
        tensors = self.graph.tensors
        read = cast(op, tensors) if self.is_cast else {}
        return {v: float(tensors[v].size_bytes + t.size_bytes) for v, t in read.items()}

    @cached_property
    def kept(self) -> dict[str, Kept]:
        """By operator; parameters only where a copy of them is kept in another dtype."""
        by_operator = {}
        for op in self.graph.operators:
            read = cast(op, self.graph.tensors) if self.is_cast else {}
            tensors = {**self.graph.tensors, **read} if read else self.graph.tensors
            done = self.works[op.name]
            rows = self.kernels.rows(op)
            mine = dict.fromkeys(self._storage(op, v, read, v in rows) for v in done.keeps)
            live = any(v in self.grads for v in op.outputs)
            if live and (mask := self.kernels.mask(op, tensors)):  # torch makes of it what is added to the scores
                mine[mask, f"added by {op.name}", float(DTYPE_BYTES[tensors[op.inputs[0]].dtype])] = None
            size = working_bytes(op, tensors, self.grads, self.held, done.extra_bytes) if live else 0.0
            if op.function is not None and live:
                size += op.function.working_bytes
            if read and live:  # its operands' gradients in both dtypes
                mine_read = [v for v in read if v in self.grads and v not in self.held]
                both = sum(t[v].size_bytes for v in mine_read for t in (tensors, self.graph.tensors))
                # By then the product itself is done, and the copies that it kept are gone.
                size = max(size, both - sum(tensors[v].size_bytes for v in read if v in done.keeps and v not in self.held))
            if self.is_cast and live and record_of(op).joins:  # forward has operands that are widened beside their originals
                size += sum(2.0 * tensors[v].size_bytes for v in op.inputs if tensors[v].dtype == "bfloat16") * (
                    tensors[op.outputs[0]].dtype == "float32"
                )
            more = self.kernels.beside(op, tensors, read, done) if live else Beside()
            stored = tuple(sorted(one for one in mine if one))
            by_operator[op.name] = Kept(stored, size + more.working, size + more.by_torch, more.alone, more.spread, more.weights)
        return by_operator

    def _storage(self, op: Operator, value: str, read: Mapping[str, Tensor], as_rows: bool) -> tuple[str, str, float] | None:
        """What an operator keeps of a value. A copy in another dtype, or in rows, is made for each operator, but of a weight once."""
        if as_rows:
            width = read[value].size_bytes / self.graph.tensors[value].size_bytes if value in read else 1.0
            return value, f"rows for {op.name}", width
        if value in read:
            whose = "" if value in self.held else f" for {op.name}"
            return value, f"{read[value].dtype}{whose}", read[value].size_bytes / self.graph.tensors[value].size_bytes
        return None if self.root.get(value, value) in self.held else (value, "", 1.0)


@dataclass(frozen=True, slots=True)
class Moments:
    """Bytes that are there while one operator's backward runs (`runs`): where gradients and weights are whole, where gradients
    are scattered (stage 2 of ZeRO), where weights are gathered as well (stage 3)."""

    full: float = 0.0
    scattered: float = 0.0
    gathered: float = 0.0

    def of(self, zero: int) -> float:
        """Of a stage of ZeRO."""
        return self.gathered if zero == 3 else self.scattered if zero == 2 else self.full


@dataclass(frozen=True, slots=True)
class StageState:
    """One stage on one rank: parameters after cutting, layers, and bytes of one microbatch.

    `num_elsewhere` are parameters of experts that other data replicas have: ZeRO divides those too. `num_unsummed` are trained by every
    replica with the same gradient, which is not summed: ZeRO leaves those whole.

    `entering_bytes` come from other stages, gradients of `leaving_bytes` come back from those; `kept_bytes` are kept on the device for
    backward, `scores_bytes` of them by attention's scores. `beside` is what there is for a moment of backward beside what is kept, less
    what of that is gone by then. Where layers are repeated or moved `there` is what was made again or came back, less what is gone, at
    that moment, and `beside` the rest. `moved_bytes` of a microbatch go to the host. `from_backward`: gradients
    are there from backward on only, and `beside` less those that are still to come.
    """

    num_parameters: float
    num_trainable: float
    entering_bytes: float
    num_elsewhere: float = 0.0
    kept_bytes: float = 0.0
    scores_bytes: float = 0.0
    beside: Moments = Moments()
    there: Moments = Moments()
    moved_bytes: float = 0.0
    num_unsummed: float = 0.0
    leaving_bytes: float = 0.0
    from_backward: bool = False


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What one stage holds where its rank has no other: `alone`. Its parts, for a rank that has several: `kept_bytes` of each microbatch
    that waits for its backward, `there_bytes` and `beside_bytes` of the one that is in it (`StageState`), `entering_bytes` that come for
    each forward, `leaving_bytes` that come for each backward and `noted_bytes` of each whose weights part is put off."""

    alone: Memory
    kept_bytes: float = 0.0
    there_bytes: float = 0.0
    beside_bytes: float = 0.0
    entering_bytes: float = 0.0
    leaving_bytes: float = 0.0
    noted_bytes: float = 0.0


def served_copies(layout: Layout) -> float:
    """Weights that the rank of a server holds beside the model's own, in the model's size: its part and, where updates come late, what
    arrives for the next step and the versions of its part that others may still have to take.

    >>> served_copies(Layout(data=4, servers=2)), served_copies(Layout(data=4, servers=2, staleness=1)), served_copies(Layout(data=4))
    (0.5, 2.5, 0.0)
    """
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
    noted_bytes: float = 0.0,
    summed_inside: int = 1,
) -> StageMemory:
    """The bytes of one rank of a stage (`stage` counts chunks too).

    `summed_inside`: replicas of one host, where several hosts have them.
    `noted_bytes`: what was made again or came back for the input part of a microbatch's backward and stays for its weights part.
    """
    schedule = schedule_of(layout)
    rank, holders = schedule.ranks_of[stage][0], len(schedule.ranks_of[stage])
    several = len(schedule.stages_of[rank])
    # What other pipeline ranks have too stays whole (`run/state/parameters`); the optimizer's state is shared with those.
    data, zero = layout.weight_ranks, layout.zero if holders == 1 else min(layout.zero, 1)
    pieces = zero if data > 1 else 0
    activations = state.kept_bytes - (state.scores_bytes if layout.recompute == "selective" else 0.0)
    there = state.there.of(pieces)
    activation = activations * schedule.in_flight(stage) + there
    if noted_bytes and several == 1:
        now = schedule.held(rank)
        activation = float((now.in_flight[:, 0] * activations + now.backward[:, 0] * there + now.noted[:, 0] * noted_bytes).max())
    unsummed = state.num_unsummed
    shared, trained = ((n - unsummed + state.num_elsewhere) / data + unsummed for n in (state.num_parameters, state.num_trainable))
    parameters = widths.weight * (shared if zero == 3 else state.num_parameters)
    gradients = widths.gradient * (trained if zero >= 2 else state.num_trainable)
    gradients *= layout.staleness + 1  # each step under way has its own
    parameters += widths.weight * served_copies(layout) * state.num_trainable
    how = Compression.parse(layout.compress)
    if how.keeps:  # what is not sent: of a rank's own gradients, and of its piece of the sums
        gradients += widths.gradient * state.num_trainable * (1 / summed_inside + 1 / data * (how.kind == "int8" and not zero))
    optimizer = (widths.copies + widths.moment * optimizer_states) * (trained / holders if zero else state.num_trainable)
    if layout.servers:  # what arrives there of a bucket, from all others
        gradients += min(BUCKET_BYTES, widths.gradient * state.num_trainable) * (layout.data - 1) / layout.servers
        optimizer /= layout.servers
    if layout.moves_optimizer:
        optimizer = 0.0
    beside = state.beside.of(pieces)
    if state.from_backward:  # behind backward there is nothing else, and a bucket of gradients a second time
        beside = max(beside, bucket_alone(gradients) - activation)
        gradients, beside = gradients + min(0.0, beside), max(0.0, beside)
    beside += PACKING.get(how.kind, 0.0) * min(BUCKET_BYTES, widths.gradient * state.num_trainable)
    entering, leaving = (size * (layout.pipeline > 1) for size in (state.entering_bytes, state.leaving_bytes))
    # Receives are posted ahead: a microbatch's gradient is on its way while backward is at the one before.
    buffers = beside + 2 * entering + leaving
    margin = scratch_bytes / several + MARGIN * (parameters + gradients + optimizer + activation + buffers)
    alone = Memory(parameters, gradients, optimizer, activation, buffers, margin)
    return StageMemory(alone, activations, there, beside, entering, leaving, noted_bytes)
