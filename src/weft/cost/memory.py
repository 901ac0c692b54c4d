"""Bytes on one rank. In: a graph's inventory, the operators of its stage, layout and sharding. Out: `Memory` by what it holds.

Weights are float32 (bfloat16 is autocast over them), gradients float32, AdamW keeps two float32 moments: 16 bytes a parameter.
Activations are what autograd keeps for backward, each storage once, times the microbatches in flight; with full recomputation only
what enters a stage, and one microbatch's. Not modelled: the allocator's fragmentation (a margin instead) and workspaces of kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from weft.model.graph import Graph, Operator
from weft.model.sharding import Sharding
from weft.model.work import MATMUL_KINDS, Work, batched, differentiable, storages, work
from weft.plan.layout import Layout
from weft.plan.plan import Memory

MARGIN = 0.06  # of everything else: fragmentation and workspaces


def state_bytes(num_parameters: float, zero: int, num_ranks: int, weight: float = 4, gradient: float = 4, optimizer: float = 8) -> float:
    """Bytes of weights, gradients and optimizer state on each of `num_ranks` data replicas.

    Rajbhandari et al. 2020, section 5, for any widths. Their mixed precision is weight=2, gradient=2, optimizer=12:
    4Φ + 12Φ/N at stage 1, 2Φ + 14Φ/N at stage 2, 16Φ/N at stage 3.
    """
    parts = ((optimizer, 1), (gradient, 2), (weight, 3))
    return sum(num_parameters * width / (num_ranks if zero >= stage else 1) for width, stage in parts)


def in_flight(schedule: str, num_stages: int, stage: int, microbatches: int) -> int:
    """Microbatches whose activations a stage holds at once: all (gpipe), p - stage (1f1b), one where there is no pipeline."""
    if num_stages == 1 or schedule == "sequential":
        return 1
    return microbatches if schedule == "gpipe" else min(microbatches, num_stages - stage)


@dataclass(frozen=True, slots=True)
class Kept:
    """What one operator keeps for backward: storages with their bytes, and the bytes that its own backward works on."""

    storages: tuple[tuple[str, float], ...]
    working_bytes: float
    narrow: bool  # keeps bfloat16 copies under autocast


@dataclass(frozen=True)
class Inventory:
    """What follows from the graph alone, computed once."""

    graph: Graph
    works: Mapping[str, Work]
    grads: frozenset[str]
    batched: frozenset[str]
    root: Mapping[str, str]
    held: frozenset[str] = field(default=frozenset())  # parameters, buffers, inputs and constants: never counted as activations

    @classmethod
    def of(cls, graph: Graph) -> Inventory:
        held = frozenset(v.value for v in (*graph.parameters, *graph.buffers, *graph.constants, *graph.inputs))
        return cls(graph, work(graph), frozenset(differentiable(graph)), frozenset(batched(graph)), storages(graph), held)

    @cached_property
    def kept(self) -> dict[str, Kept]:
        """By operator; parameters only where a bfloat16 copy of them is kept."""
        found = {}
        tensors = self.graph.tensors
        for op in self.graph.operators:
            done = self.works[op.name]
            narrow = done.kind in (*MATMUL_KINDS, "activation")
            roots = {self.root.get(v, v) for v in done.keeps}
            mine = [(r, float(tensors[r].size_bytes)) for r in roots if r not in self.held or (narrow and r in self.grads)]
            live = any(v in self.grads for v in op.outputs)
            values = {*op.outputs, *op.inputs} - self.held if live else set()
            size = sum(tensors[v].size_bytes for v in values) + done.extra_bytes * live
            found[op.name] = Kept(tuple(sorted(mine)), float(size), narrow)
        return found


def cut_ways(sharding: Sharding | None, op: str, axes: Mapping[str, int]) -> int:
    """Ranks among which an operator's work is divided; an axis over which it is replicated does not count."""
    if sharding is None:
        return 1
    ways = 1
    for axis, size in axes.items():
        if size > 1 and sharding.ops[op].get(axis):
            ways *= size
    return ways


def value_ways(sharding: Sharding | None, value: str, axes: Mapping[str, int]) -> int:
    """Pieces that a value is cut into along `axes`."""
    if sharding is None or value not in sharding.forms:
        return 1
    ways = 1
    for axis, size in axes.items():
        if size > 1 and sharding.forms[value].get(axis, "R")[0] == "S":
            ways *= size
    return ways


def activation_bytes(
    inventory: Inventory, operators: Iterable[Operator], scale: float, precision: str, sharding: Sharding | None, axes: Mapping[str, int]
) -> tuple[float, float]:
    """(bytes that backward keeps of one microbatch, largest working set of one operator's backward).

    Products keep bfloat16 copies of float32 operands under autocast, weights too (once a step, but counted a microbatch).
    """
    half = precision == "bfloat16"
    wide = 2.0 if precision == "float64" else 1.0
    kept: dict[tuple[str, bool], float] = {}
    extra = peak = 0.0
    for op in operators:
        mine = inventory.kept[op.name]
        narrow = half and mine.narrow
        done = inventory.works[op.name]
        divide = cut_ways(sharding, op.name, axes)
        for root, size in mine.storages:
            if (root, narrow) in kept or (root in inventory.held and not narrow):
                continue
            floating = inventory.graph.tensors[root].is_float
            by = (scale if root in inventory.batched else 1.0) / value_ways(sharding, root, axes)
            kept[root, narrow] = size * by * (wide if floating else 1.0) * (0.5 if narrow and floating else 1.0)
        extra += done.extra_bytes * wide * scale / divide
        peak = max(peak, wide * mine.working_bytes * scale / divide)
    return sum(kept.values()) + extra, peak


@dataclass(frozen=True, slots=True)
class StageState:
    """Parameters of one stage on one rank: their number after cutting, and the bytes that enter the stage of one microbatch."""

    num_parameters: float
    num_trainable: float
    entering_bytes: float


def memory_of(
    state: StageState,
    activations: tuple[float, float],
    layout: Layout,
    stage: int,
    scratch_bytes: float = 0.0,
    optimizer_states: int = 2,
) -> Memory:
    """The bytes of one rank of a stage. `activations`: of one microbatch, as `activation_bytes` gives them."""
    width = 8.0 if layout.precision == "float64" else 4.0
    kept, peak = activations
    flying = in_flight(layout.schedule, layout.pipeline, stage, layout.microbatches)
    if layout.recompute == "full":
        activation = state.entering_bytes * flying + kept
    else:
        activation = kept * flying
    parameters = width * state.num_parameters
    gradients = width * state.num_trainable
    optimizer = width * optimizer_states * state.num_trainable / (layout.data if layout.zero else 1)
    buffers = peak + 2 * state.entering_bytes * (layout.pipeline > 1)
    margin = scratch_bytes + MARGIN * (parameters + gradients + optimizer + activation + buffers)
    return Memory(parameters, gradients, optimizer, activation, buffers, margin)
