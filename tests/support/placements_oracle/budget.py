"""Bytes on one rank of parameters, gradients, optimizer states and kept activations, by how everything is cut. In: a problem along an
axis, what a rank may hold. Out: for every term its bytes whole and cut, which the integer programme adds up and so does `held`.

Activations are what `model/work` says backward keeps, in the form in which its operator reads it: a piece that is gathered for a
product is kept whole. Views of one storage are kept once for all readers that have it cut, and once for all that have it whole.

Not modelled: workspaces, communication buffers, the allocator's fragmentation (the caller leaves a margin).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import UsageError
from shardwise.model.graph import Graph
from shardwise.model.sharding.axis_problem import OperatorStrategy
from shardwise.model.work import MATMUL_KINDS
from shardwise.plan.ir.placement import Placement, R, is_shard
from tests.support.placements_oracle.tables import Tables


@dataclass(frozen=True, slots=True)
class Budget:
    """What one rank may hold, and how wide its parts are.

    Args:
        size_bytes: of everything below together; infinite where nothing limits it.
        weight, gradient, optimizer: bytes a parameter; with ZeRO the caller divides them (optimizer=8/8 over 8 data ranks).
        scale: activations held, against one pass over the graph: (microbatches in flight) x (samples of one) / (the graph's samples).
        precision: under bfloat16 and float16 products keep half as wide copies of what they read, weights as well.
    """

    size_bytes: float = float("inf")
    weight: float = 4.0
    gradient: float = 4.0
    optimizer: float = 8.0
    scale: float = 1.0
    precision: str = "float32"

    def __post_init__(self) -> None:
        if not self.size_bytes > 0:
            raise UsageError(f"a memory budget of {self.size_bytes} bytes; it must be above 0")
        for name in ("weight", "gradient", "optimizer", "scale"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UsageError(f"{name}={getattr(self, name)} of a memory budget; it must be 0 or more")


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes on one rank, by what they hold."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True, slots=True)
class Keeper:
    """An operator's kind that keeps something, and by choice whether it has it cut."""

    kind: int
    cut: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Term:
    """`size_bytes`, times `count`, kept whole for the keepers that have it whole, and 1/n of it for those that have it cut."""

    size_bytes: float
    count: int
    keepers: tuple[Keeper, ...]


def state_of(tables: Tables, budget: Budget, value: str, ways: Mapping[str, int]) -> Bytes:
    """Bytes of one whole parameter or buffer with what belongs to it; `ways`: pieces into which other axes cut values."""
    variable = tables.axis.state[value]
    by = ways.get(value, 1)
    if value not in tables.parameters:
        return Bytes(variable.tensor.size_bytes / by)
    size = variable.tensor.size / by
    if not variable.trainable:
        return Bytes(size * budget.weight)
    return Bytes(size * budget.weight, size * budget.gradient, size * budget.optimizer)


def terms(tables: Tables, budget: Budget, ways: Mapping[str, int], divided: Mapping[str, int]) -> tuple[Term, ...]:
    """What is kept for backward. `ways`: pieces of each value, `divided`: ranks that share each operator, along other axes."""
    inventory = tables.axis.inventory
    half = budget.precision in ("bfloat16", "float16")
    wide = 2.0 if budget.precision == "float64" else 1.0
    kept: dict[tuple[str, bool], dict[Keeper, None]] = {}
    found: dict[tuple[float, tuple[Keeper, ...]], int] = {}
    for op in tables.axis.graph.operators:
        work = inventory.works[op.name]
        at = tables.kind_of[op.name]
        choices = tables.kinds[at].choices
        narrow = half and work.kind in (*MATMUL_KINDS, "activation")
        for value in work.saved:
            root = inventory.storage_root.get(value, value)
            if root in inventory.persistent_values and not (narrow and root in inventory.grads):
                continue
            keeper = Keeper(at, tuple(is_shard(_form(op.inputs, op.outputs, choice, value)) for choice in choices))
            kept.setdefault((root, narrow), {})[keeper] = None
        if work.extra_bytes:
            scale = budget.scale if op.outputs[0] in inventory.batched else 1.0
            key = (work.extra_bytes * wide * scale / divided.get(op.name, 1), (Keeper(at, tuple(bool(c.label) for c in choices)),))
            found[key] = found.get(key, 0) + 1
    for (root, narrow), keepers in kept.items():
        tensor = tables.axis.graph.tensors[root]
        size = tensor.size_bytes * (budget.scale if root in inventory.batched else 1.0) / ways.get(root, 1)
        if tensor.is_float:
            size *= wide * (0.5 if narrow else 1.0)
        entry = (size, tuple(keepers))
        found[entry] = found.get(entry, 0) + 1
    return tuple(Term(size, count, keepers) for (size, keepers), count in found.items() if size > 0)


def _form(inputs: Sequence[str], outputs: Sequence[str], choice: OperatorStrategy, value: str) -> Placement:
    if value in inputs:
        return choice.input_placements[inputs.index(value)] or R
    return choice.output_placements[outputs.index(value)]


def held(
    tables: Tables,
    budget: Budget,
    ways: Mapping[str, int],
    divided: Mapping[str, int],
    chosen: Sequence[int],
    stored: Mapping[str, Placement],
) -> Bytes:
    """Bytes of one solution: the choice of every kind, and where parameters and buffers lie (whole where `stored` lacks them)."""
    n = tables.axis.n
    parts = [0.0, 0.0, 0.0]
    for value in tables.axis.state:
        state = state_of(tables, budget, value, ways)
        by = n if is_shard(stored.get(value, R)) else 1
        for i, size in enumerate((state.parameters, state.gradients, state.optimizer)):
            parts[i] += size / by
    activations = 0.0
    for term in terms(tables, budget, ways, divided):
        forms = {keeper.cut[chosen[keeper.kind]] for keeper in term.keepers}
        activations += term.count * term.size_bytes * ((False in forms) + (True in forms) / n)
    return Bytes(parts[0], parts[1], parts[2], activations)


def pieces(graph: Graph, forms: Mapping[str, Mapping[str, Placement]], sizes: Mapping[str, int]) -> dict[str, int]:
    """[value] -> pieces into which the axes of `sizes` cut it, where more than one."""
    found: dict[str, int] = {}
    for value in graph.tensors:
        for axis, form in forms.get(value, {}).items():
            if axis in sizes and is_shard(form):
                found[value] = found.get(value, 1) * sizes[axis]
    return found
