"""The intra-operator problem along one mesh axis, as tables. In: a graph along an axis, who is placed alike. Out: `Tables`.

Operators that are placed alike (`model/repeats`) are one `Kind` with the choices that they have in common. Every value is a `Flow`: the
forms in which it may begin, and its readers in order; values whose flows are equal are one flow with a count.

Prices are finer than those of propagation: an operator's backward has its own work, a redistribution also copies what it sends,
and gradients that training never asks for (of the batch) cost nothing.

What is whole on every rank, made by a replicated operator or stored, and read as D alone, is never summed where it is read: the
gradient's summands travel on through the operator (`propagate` does so by itself), or wait for the sum of gradients.
Two more states say so:

    DEFERRED   whole, and every reader reads it as D, at no price
    SUMMED     whole, and some reader needs the whole gradient: the others pay for their D
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from shardwise.cost.memory.memory import Inventory
from shardwise.model.graph import Graph, Operator, written_buffers
from shardwise.model.sharding.axis_problem import AxisProblem, OperatorStrategy
from shardwise.plan.ir.placement import D, Interned, Placement, R, Shard

Word = tuple[Placement, ...]  # the forms in which one operator reads one value, each once; () where any will do
INFINITE = float("inf")


@dataclass(frozen=True, slots=True, eq=False)
class Undecided(Interned):
    """What is whole, until its readers say where its gradient is summed."""

    deferred: bool


# States of this problem beside the placements, which no reader ever asks for.
DEFERRED = cast("Placement", Undecided(True))
SUMMED = cast("Placement", Undecided(False))


class Axis(AxisProblem):
    """The axis of `propagate`, with operators priced by what their forward and their backward do."""

    @cached_property
    def inventory(self) -> Inventory:
        return Inventory.of(self.graph)

    def compute_s(self, op: Operator) -> float:
        work, fixed = self.inventory.works[op.name], self.weight_bytes(op)
        return self.roofline_s(op, work.flops, work.bytes, fixed) + self.roofline_s(op, work.backward_flops, work.backward_bytes, 2 * fixed)


@dataclass(frozen=True, slots=True)
class Kind:
    """Operators that are placed alike: their names, and the choices that are left after pruning."""

    operators: tuple[str, ...]
    choices: tuple[OperatorStrategy, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value begins: made by a kind (the form by choice), or stored in one of `forms` at `store_s` seconds a step each."""

    kind: int = -1
    made: tuple[Placement, ...] = ()
    forms: tuple[Placement, ...] = ()
    store_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Use:
    """One reader of a value: a kind, at which of its inputs, and the word by choice."""

    kind: int
    places: tuple[int, ...]
    words: tuple[Word, ...]


@dataclass(frozen=True, slots=True)
class Flow:
    """Values that begin alike, are read alike and cost the same to move. `example` is one of them."""

    values: tuple[str, ...]
    source: Source
    uses: tuple[Use, ...]

    @property
    def example(self) -> str:
        return self.values[0]


@dataclass(frozen=True)
class Tables:
    """The problem along `axis`."""

    axis: Axis
    moves: Moves
    kinds: tuple[Kind, ...]
    kind_of: Mapping[str, int]
    flows: tuple[Flow, ...]

    @cached_property
    def parameters(self) -> frozenset[str]:
        return frozenset(v.value for v in self.axis.graph.parameters)


class Moves:
    """Seconds to move a value between forms, forward and backward; infinite where it is not possible. Keeps what it has priced."""

    def __init__(self, axis: Axis):
        self.axis = axis
        self.still = written_buffers(axis.graph)  # written where they lie, so never moved
        self._known: dict[tuple[object, ...], float] = {}
        self._like: dict[str, tuple[object, ...]] = {}

    def like(self, value: str) -> tuple[object, ...]:
        """What the price of moving a value depends on."""
        if value not in self._like:
            tensor = self.axis.graph.tensors[value]
            cuttable = tuple(dim for dim in range(len(tensor.shape)) if self.axis.can_shard(value, dim))
            placed = value in self.axis.state
            self._like[value] = (tensor.size_bytes, value in self.axis.differentiable, value in self.still, placed, cuttable)
        return self._like[value]

    def seconds(self, value: str, source: Placement, target: Placement) -> float:
        if source == target:
            return 0.0
        key = (*self.like(value), source, target)
        if key not in self._known:
            self._known[key] = self._price(value, source, target)
        return self._known[key]

    def read(self, value: str, held: frozenset[Placement], word: Word) -> tuple[float, frozenset[Placement]]:
        """(seconds, forms held afterwards) of reading a value in the forms of `word`, each moved from where that is cheapest."""
        total = 0.0
        for need in word:
            if DEFERRED in held and need is not D:
                return INFINITE, held
            if SUMMED in held and need is not D:
                held = held - {SUMMED} | {R}
            if need not in held:
                total += 0.0 if DEFERRED in held else min(self.seconds(value, R if source == SUMMED else source, need) for source in held)
                held = held | {need}
        return total, held

    def stored(self, value: str, form: Placement) -> float:
        """Seconds a step of a parameter or buffer that lies in `form`, the sum of its gradient for DEFERRED; infinite where it cannot."""
        found = self.axis.stored_placement(value, D if form is DEFERRED else R if form is SUMMED else form)
        return INFINITE if found is None else found[1]

    def _price(self, value: str, source: Placement, target: Placement) -> float:
        return INFINITE if value in self.still else self.axis.redistribute_with_copies_s(value, source, target)


def tables(axis: Axis, representative: Mapping[str, str]) -> Tables:
    """The problem along `axis`, operators placed like their representatives wherever they have the same choices."""
    moves = Moves(axis)
    kinds, kind_of = _kinds(axis, moves, representative)
    kinds = _deferring(axis, kinds, _uses(axis.graph, kinds, kind_of))
    uses = _uses(axis.graph, kinds, kind_of)
    groups: dict[tuple[object, ...], list[str]] = {}
    parts: dict[tuple[object, ...], tuple[Source, tuple[Use, ...]]] = {}
    made = {value: (op, i) for op in axis.graph.operators for i, value in enumerate(op.outputs)}
    for value, readers in uses.items():
        if value in made:
            op, i = made[value]
            at = kind_of[op.name]
            source = Source(at, tuple(choice.output_placements[i] for choice in kinds[at].choices))
        else:
            source = _start(axis, moves, value)
        key = (moves.like(value), source, readers)
        groups.setdefault(key, []).append(value)
        parts[key] = (source, readers)
    flows = tuple(Flow(tuple(values), *parts[key]) for key, values in groups.items())
    return Tables(axis, moves, kinds, kind_of, flows)


def _kinds(axis: Axis, moves: Moves, representative: Mapping[str, str]) -> tuple[tuple[Kind, ...], dict[str, int]]:
    groups: dict[tuple[object, ...], list[str]] = {}
    choices: dict[tuple[object, ...], list[OperatorStrategy]] = {}
    for op in axis.graph.operators:
        key = (representative.get(op.name, op.name), *_decides(axis, moves, op))
        if key not in choices:
            choices[key] = prune(axis.strategies(op))
        groups.setdefault(key, []).append(op.name)
    kinds = tuple(Kind(tuple(names), tuple(choices[key])) for key, names in groups.items())
    return kinds, {name: i for i, kind in enumerate(kinds) for name in kind.operators}


def _decides(axis: Axis, moves: Moves, op: Operator) -> tuple[object, ...]:
    """What, besides what repetition compares, decides on an operator's choices and their prices."""
    meaning = None if axis.weight_label_meanings is None else axis.weight_label_meanings[op.name]
    values = tuple((moves.like(value), value in axis.grads) for value in (*op.inputs, *op.outputs))
    fixed = () if axis.planned_dims is None else tuple(axis.planned_dims.get(value) for value in op.inputs)
    return meaning, values, fixed


def prune(choices: list[OperatorStrategy]) -> list[OperatorStrategy]:
    """Those that no other dominates: one that makes the same, needs the same or less, and is cheaper (or first)."""

    def dominates(a: OperatorStrategy, b: OperatorStrategy) -> bool:
        return (
            a.output_placements == b.output_placements
            and a.cost_s <= b.cost_s
            and all(x is None or x == y for x, y in zip(a.input_placements, b.input_placements, strict=True))
        )

    kept: list[OperatorStrategy] = []
    for choice in choices:
        if not any(dominates(other, choice) for other in kept):
            kept = [other for other in kept if not dominates(choice, other)]
            kept.append(choice)
    return kept


def _deferring(axis: Axis, kinds: tuple[Kind, ...], uses: Mapping[str, tuple[Use, ...]]) -> tuple[Kind, ...]:
    """The kinds, with replicated operators that may pass summands of gradients on both as they do and as they do not.

    Where the operators of a kind are read differently, or have several outputs, what they make whole is R: whether they pass
    summands on does not follow from one value's readers.
    """
    final = {axis.graph.loss, *axis.graph.outputs}
    operators = {op.name: op for op in axis.graph.operators}
    found = []
    for kind in kinds:
        ops = [operators[name] for name in kind.operators]
        made = [value for value in ops[0].outputs if value in axis.grads]
        if not any(value in uses for value in made) or any(value in final for op in ops for value in op.outputs):
            found.append(kind)
            continue
        alike = len(made) == 1 and len({tuple(uses.get(value, ()) for value in op.outputs) for op in ops}) == 1
        choices: list[OperatorStrategy] = []
        for choice in kind.choices:
            if choice.label:
                choices.append(choice)
                continue
            floats = [value in axis.grads for value in ops[0].outputs]
            whole = tuple(SUMMED if alike and is_float else form for form, is_float in zip(choice.output_placements, floats, strict=True))
            deferred = tuple(DEFERRED if is_float else form for form, is_float in zip(choice.output_placements, floats, strict=True))
            rows = zip(ops[0].inputs, choice.input_placements, strict=True)
            needs = tuple(D if need is R and value in axis.grads else need for value, need in rows)
            choices += [replace(choice, output_placements=whole), replace(choice, output_placements=deferred, input_placements=needs)]
        found.append(replace(kind, choices=tuple(choices)))
    return tuple(found)


def _uses(graph: Graph, kinds: tuple[Kind, ...], kind_of: Mapping[str, int]) -> dict[str, tuple[Use, ...]]:
    """Every value's readers in order. One that repeats an earlier reader finds the form there already, and is left out."""
    known: dict[tuple[int, tuple[int, ...]], Use] = {}
    found: dict[str, dict[Use, None]] = {}
    for op in graph.operators:
        at = kind_of[op.name]
        rows: dict[str, list[int]] = {}
        for i, value in enumerate(op.inputs):
            rows.setdefault(value, []).append(i)
        for value, places in rows.items():
            key = (at, tuple(places))
            if key not in known:
                words = []
                for choice in kinds[at].choices:
                    needs = [choice.input_placements[i] for i in places]
                    words.append(tuple(dict.fromkeys(need for need in needs if need is not None)))
                known[key] = Use(at, tuple(places), tuple(words))
            found.setdefault(value, {})[known[key]] = None
    return {value: tuple(readers) for value, readers in found.items()}


def _start(axis: Axis, moves: Moves, value: str) -> Source:
    given = axis.initial_placements(value)
    if value not in axis.state:
        return Source(forms=given or (R,), store_s=(0.0,))
    dims = range(len(axis.graph.tensors[value].shape))
    cut = tuple(Shard(dim) for dim in dims if axis.can_shard(value, dim)) if given is None else ()
    forms = ((SUMMED, DEFERRED) if value in axis.grads else (R,)) + cut if given in (None, (R,)) else given
    assert forms is not None
    return Source(forms=forms, store_s=tuple(moves.stored(value, form) for form in forms))
