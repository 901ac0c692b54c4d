"""From factor rules to a complete sharding: which label of every operator is cut over each mesh axis, and what moves.

In: a graph, the axes with their sizes, and where parameters (and buffers) are cut; or nothing for an axis, and the best cut is
searched. Out: `Sharding`: for every operator the label that is cut, for every value the form it is made in and the forms it
is needed in.

A value's forms are `model/sharding.py`'s. A consumer that is cut on a label which an input lacks computes only its share of that
input's gradient: it needs D. Getting D from R costs nothing forward and an all-reduce backward (Megatron's f); P to R is
its dual (g). A parameter that is needed as D everywhere needs no operator at all: its gradient is summed once a step.

The search is a frontier dynamic programme: operators in order, states are the forms of the values still needed, the
`beam` cheapest distinct states are kept. It is exact while the frontier has at most `beam` distinct states.

Which labels another axis than `data` may cut says `model/labels.py`: those of weights; positions and samples only where that is asked for.

One dimension of a tensor is cut by at most one axis, but for `depth`, the last of a grid of tensor ranks, and for samples: there the
pieces of a dimension may be cut once more, of values that lie in such pieces wherever they are read, so that none is put together without
the other.

Not modelled: overlap, memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

from weft.errors import LayoutError
from weft.model.deferral import defer
from weft.model.gradients import backward_reached, needs_gradient
from weft.model.graph import Graph, Operator, Ref, statistics
from weft.model.grid import kept_for, nested, twice_cut
from weft.model.labels import meanings, positions
from weft.model.sharding import Move, Prices, Sharding, Shards, collective_s, move_collectives, transfer_s
from weft.model.work import batched, differentiable, operator_bytes, operator_flops
from weft.ops import Labels, Rule, record_of, windows_of, writes
from weft.ops.linear import passes, passing
from weft.ops.rule import HALO
from weft.plan.axis import axis_of, axis_words
from weft.plan.placement import D, Halo, P, Placement, R, Shard, dual, halo, is_cut, is_shard, pieces
from weft.plan.transition import allowed, transition

GATHERED = 1 + 1 / 16  # what putting pieces together weighs where another axis of a grid is still to cut: more than what else is as cheap


@dataclass(frozen=True, slots=True)
class _Choice:
    label: str
    needs: tuple[Placement | None, ...]
    makes: tuple[Placement, ...]
    cost_s: float

    @property
    def word(self) -> str:
        """What a plan calls it: the label, with `+` where summands are left."""
        return self.label + "+" * (P in self.makes)


class _Decided(NamedTuple):
    """The decisions that led to a state of the search, the last one first."""

    before: _Decided | None
    op: str
    choice: _Choice
    stored: dict[str, Placement]  # parameters and buffers that were met here, as they lie


class _Axis:
    """The problem along one axis, with the other axes' decisions given."""

    def __init__(
        self,
        graph: Graph,
        axis: str,
        n: int,
        taken: Mapping[str, set[int]],
        fixed: Mapping[str, int] | None,
        prices: Prices,
        divide: int,
        sequence: bool = False,
        labels: Mapping[str, str] | None = None,
        inside: Mapping[str, Mapping[int, int]] | None = None,
        kernels: frozenset[tuple[str, str]] = frozenset(),
        more: bool = False,
        pinned: Mapping[str, Placement] | None = None,
        samples: bool = False,
        replicas: int = 1,
    ):
        self.graph, self.axis, self.n, self.prices = graph, axis, n, prices
        self.taken = taken  # value -> dims that other axes cut
        self.inside = inside or {}  # value -> {dim: into how many pieces another axis cuts it}, where this axis may cut the pieces
        self.more = more  # whether other tensor axes come after this one
        self.pinned = pinned or {}  # variable -> the form that it is read in, whatever else would be cheaper
        self.kernels = kernels  # (operator, label) that another axis cuts, which takes a kernel of one group
        self.fixed = fixed
        self.divide = divide  # ranks along the other axes, to scale bytes and FLOPs of what follows the samples
        self.divide_fixed = divide // replicas  # and of what does not, which every one of the `replicas` among them has
        self.grads = needs_gradient(graph)
        self.placed = {v.value: v for v in (*graph.parameters, *graph.buffers)}
        self.copied_into = copied_into(graph)
        # Statistics are written by the operator that reads them: what is moved is a copy, in which the write would be lost.
        self.still = written_buffers(graph) - self.copied_into
        self.weights = {v.value for v in graph.parameters if len(v.tensor.shape) > 1}
        self.rules = graph.rules
        self.heavy = {op.name for op in graph.operators if operator_flops(op, graph.tensors) > 0}
        self.sequence, self.samples = sequence, samples
        self.spreads = sequence or samples  # whether summands may be scattered to what lies between the products
        self.labels = labels or {}  # site -> the choice that is given, in its word
        self._moves: dict[tuple[str, Placement, Placement], float] = {}
        self.row = axis_of(axis)
        self.meanings = meanings(graph, self.rules) if self.row.cuts_weights else None
        if self.row.follows:
            # Every operator that can follow does, whatever its latency: that is what the axis is for.
            self.prices = replace(prices, latency_s=0.0)

    def cuttable(self, value: str, dim: int) -> bool:
        size, ways = self.graph.tensors[value].shape[dim], self.inside.get(value, {}).get(dim, 0)
        if not ways and dim in self.taken.get(value, ()):
            return False
        size //= ways or 1
        return size >= self.n and (size % self.n == 0 or self.row.uneven)

    @cached_property
    def positions(self) -> Mapping[tuple[str, int], frozenset[str]]:
        """Which dimensions are positions of an image, and which."""
        return positions(self.graph, self.rules)

    def admits(self, op: Operator, rule: Rule, label: str) -> bool:
        """Whether the axis is for dimensions of this kind."""
        if self.row.cuts_positions:
            places = ((value, row.index(label)) for value, row in self._labelled(op, rule) if label in row)
            return any(self.row.cuts & self.positions.get(place, frozenset()) for place in places)
        if rule.kernels.get(label) == HALO:
            return False
        return self.meanings is None or self.meanings[op.name].admits(label, self.sequence, self.samples)

    @staticmethod
    def _labelled(op: Operator, rule: Rule) -> Iterator[tuple[str, Labels]]:
        for value, row in (*zip(op.inputs, rule.inputs, strict=True), *zip(op.outputs, rule.outputs, strict=True)):
            if row is not None:
                yield value, row

    def _divides(self, op: Operator, rule: Rule, label: str) -> bool:
        """Whether pieces of a label are pieces of each dimension that has it: of lengths that differ only where they divide all."""
        lengths = {self.graph.tensors[value].shape[row.index(label)] for value, row in self._labelled(op, rule) if label in row}
        return rule.kernels.get(label) == HALO or len(lengths) == 1 or not any(length % self.n for length in lengths)

    def compute_s(self, op: Operator) -> float:
        """Seconds of a whole operator, forward and (counted twice as much) backward; what no product is may be cut by a later axis."""
        if self.more and op.name not in self.heavy:
            return 0.0
        flops, size = operator_flops(op, self.graph.tensors), operator_bytes(op, self.graph.tensors)
        return 3 * self.longer_s(op, flops, size, self.fixed_bytes(op))

    def longer_s(self, op: Operator, flops: float, size: float, fixed: float) -> float:
        """Seconds of computing so many FLOPs or of moving so many bytes, `fixed` of them however many samples there are."""
        value, fixed = op.outputs[0], min(size, fixed)
        moved = self.share(size - fixed, value) + fixed / self.divide_fixed
        return max(self.share(flops, value) / self.prices.flops_per_s, moved / self.prices.memory_bytes_per_s)

    def fixed_bytes(self, op: Operator) -> int:
        """Bytes of the weights that an operator reads, where its other operands follow the samples."""
        if op.outputs[0] not in self.follows:
            return 0
        return sum(self.graph.tensors[v].size_bytes for v in dict.fromkeys(op.inputs) if v not in self.follows)

    @cached_property
    def follows(self) -> set[str]:
        """Values whose size follows the samples."""
        return batched(self.graph)

    def share(self, amount: float, value: str) -> float:
        """Of an amount that goes with a value at the graph's batch: one rank's along the other axes, for the samples that are weighed.

        Whole numbers are scaled as such, so that the same samples a rank weigh the same, however many the graph has.
        """
        if value not in self.follows:
            return amount / self.divide_fixed
        whole = int(amount) if amount == int(amount) else amount
        return whole * (self.prices.samples or self.graph.batch_size) / (self.graph.batch_size * self.divide)

    def choices(self, op: Operator) -> list[_Choice]:
        rule = self.rules[op.name]
        seconds = self.compute_s(op)
        whole: list[Placement | None] = [R] * len(op.inputs)
        if rule is not None:
            whole = [None if labels is None else R for labels in rule.inputs]
        found = [_Choice("", tuple(whole), (R,) * len(op.outputs), seconds)]
        said = self.labels.get(op.site)
        if rule is None or writes_buffer(op, self.placed):
            return self._said(op, said, found)
        for label in rule.labels:
            if said is None and not self.admits(op, rule, label):
                continue
            for summed in (True, False) if self.spreads or said is not None else (True,):
                choice = self._cut(op, rule, label, seconds / self.n, summed)
                if choice is not None and choice not in found:
                    found.append(choice)
        if any(value in self.pinned for value in op.inputs):
            needed = [self.pinned.get(value) for value in op.inputs]
            found = [c for c in found if all(p is None or need in (None, p) for p, need in zip(needed, c.needs, strict=True))] or found
        if self.row.cuts_samples and all(self.graph.tensors[v].can_learn for v in op.outputs):
            found += [_Choice("", needs, (P,) * len(op.outputs), seconds) for needs in passing(op, self.grads)]
        return self._said(op, said, found)

    def _said(self, op: Operator, said: str | None, choices: list[_Choice]) -> list[_Choice]:
        if said is None:
            return choices
        given = [choice for choice in choices if choice.word == said]
        if not given:
            possible = ", ".join(choice.word or "none" for choice in choices)
            raise LayoutError(f"the plan cuts {said!r} of {op.site} over {self.axis}={self.n}, but what can be cut is {possible}")
        return given

    def worth(self, op: Operator, choice: _Choice, held: Mapping[str, tuple[Placement, ...]]) -> bool:
        """Whether a cut follows from something: an input that is cut there already, or (not over data) work that a cut saves.

        Cuts of cheap operators out of the blue are legal, and crowd out the states that matter.
        """
        if P in choice.needs:  # what is a summand, and beside it at most what every rank has whole
            return passes(choice.needs, [held.get(value) or self.start(value) or (R,) for value in op.inputs])
        if not choice.label or op.site in self.labels:
            return True
        for value, need in zip(op.inputs, choice.needs, strict=True):
            if is_cut(need):
                have = held.get(value) or self.start(value) or ()
                if need in have or Shard(need.dim) in have or (self.spreads and P in have):
                    return True
                if self.row.cuts_weights and value in self.weights and not have:
                    return True
        return self.row.cuts_weights and op.name in self.heavy

    def _cut(self, op: Operator, rule: Rule, label: str, seconds: float, summed: bool) -> _Choice | None:
        """Cut `label`. `summed`: a product whose bias is added once sums its summands first; else each rank adds its share of the bias."""
        kernel, record = rule.kernels.get(label), record_of(op)
        if (op.name, label) in self.kernels or not self._divides(op, rule, label):
            return None
        makes: list[Placement] = []
        for value, labels in zip(op.outputs, rule.outputs, strict=True):
            if label in labels:
                dim = labels.index(label)
                if not self.cuttable(value, dim):
                    return None
                makes.append(Shard(dim))
            elif kernel == "vocabulary":
                makes.append(P if record.looks_up else R)
            elif kernel in ("extreme", "apart"):
                makes.append(R)
            elif kernel in ("average", "statistics", "summands") or record.contracts:
                makes.append(P)
            else:
                return None
        contracted = any(form is P for form in makes) and kernel is None
        bias = op.args[record.bias] if contracted and record.bias is not None and len(op.args) > record.bias else None
        if isinstance(bias, Ref) and summed:
            makes = [R] * len(makes)  # the kernel reduces before it adds the bias
            seconds += collective_s("all_reduce", self._bytes(op.outputs[0]), self.n, self.prices)
        needs: list[Placement | None] = []
        for value, row in zip(op.inputs, rule.inputs, strict=True):
            if row is None:
                needs.append(None)
            elif label in row:
                dim = row.index(label)
                read = self._read(op, value, dim, label) if kernel == HALO else Shard(dim)
                if read is None or not self.cuttable(value, dim):
                    return None
                needs.append(read)
            elif isinstance(bias, Ref) and summed and value == bias.value:
                needs.append(R)
            else:
                needs.append(D if value in self.grads else R)
        if record.statistics:
            # Running statistics are written where they are stored, so they cannot be moved first.
            for value, need in zip(op.inputs, needs, strict=True):
                stored = self.fixed.get(value) if self.fixed is not None and value in self.placed else None
                if (
                    value in self.placed
                    and value not in self.grads
                    and self.fixed is not None
                    and need != (R if stored is None else Shard(stored))
                ):
                    return None
        if kernel == "extreme":
            seconds += collective_s("all_reduce", self._bytes(op.outputs[0]), self.n, self.prices)
        if kernel == "statistics":
            seconds += 2 * collective_s("all_reduce", 16.0 * self.graph.tensors[op.inputs[0]].shape[1], self.n, self.prices)
        return _Choice(label, tuple(needs), tuple(makes), seconds)

    def _read(self, op: Operator, value: str, dim: int, label: str) -> Placement | None:
        """What ranks read of a dimension along which windows slide, to make their pieces of the result; None where one reads nothing."""
        rule = self.rules[op.name]
        assert rule is not None
        made = next((value, row.index(label)) for value, row in zip(op.outputs, rule.outputs, strict=True) if label in row)
        length, window = self.graph.tensors[value].shape[dim], windows_of(op, self.graph.tensors)[label]
        ranges = pieces(self.graph.tensors[made[0]].shape[made[1]], self.n)
        read = halo(dim, length, [window.needs(start, stop, length) for start, stop in ranges])
        empty = isinstance(read, Halo) and any(start == stop for start, stop in read.windows)
        return None if empty else read

    def _bytes(self, value: str) -> float:
        size = self.graph.tensors[value].size_bytes
        return float(size) if value in self.placed else self.share(size, value)

    def move_s(self, value: str, source: Placement, target: Placement) -> float:
        """Seconds of a redistribution, forward and (where training asks for the value's gradient) backward; each question once."""
        key = (value, source, target)
        if key not in self._moves:
            self._moves[key] = self._move_s(value, source, target)
        return self._moves[key]

    def _move_s(self, value: str, source: Placement, target: Placement) -> float:
        if source == target:
            return 0.0
        if self._barred(value, source, target):
            return float("inf")
        size = self._bytes(value)
        cost = transfer_s(source, target, size, self.n, self.prices)
        if value in self.asked:
            cost += transfer_s(dual(target), dual(source), size, self.n, self.prices)
        # What lies in pieces here and whole there leaves the dimension to no later axis; sums, which move as many bytes, do.
        return cost * GATHERED if self.more and is_shard(source) and not is_shard(target) else cost

    def _barred(self, value: str, source: Placement, target: Placement) -> bool:
        lost = not allowed(source, target) or value in self.still
        return lost or (is_cut(target) and not self.cuttable(value, target.dim))

    @cached_property
    def asked(self) -> set[str]:
        """Values whose gradient training asks for: not those of the batch."""
        return differentiable(self.graph)

    def exact_s(self, value: str, source: Placement, target: Placement) -> float:
        """`move_s` with the copies around collectives as well.

        What decides between forms to move from, which collectives alone leave equal: S to + and R to + move as many bytes.
        """
        if source == target or self._barred(value, source, target):
            return 0.0 if source == target else float("inf")
        size = self._bytes(value)
        inner = any(is_cut(form) and form.dim for form in (source, target))
        ways = [(source, target), (dual(target), dual(source))] if value in self.asked else [(source, target)]
        return sum(
            transfer_s(a, b, size, self.n, self.prices) + self._copied_s(transition(a, b).collective, size, inner) for a, b in ways
        )

    def _copied_s(self, name: str, size: float, inner: bool) -> float:
        """Seconds of reading and writing memory around a collective: pieces of inner dimensions do not lie together."""
        n = self.n
        parts = {"all_reduce": 2.0, "all_gather": 2.0 * inner, "reduce_scatter": 2.0 * inner, "slice": 2.0 / n * inner}
        parts |= {"pad": 1.0 + 2.0 / n, "all_to_all": 4.0 / n, "halo_exchange": 2.0 / n, "halo_add": 2.0 / n}
        return parts.get(name, 0.0) * size / self.prices.memory_bytes_per_s

    def place(self, value: str, need: Placement) -> tuple[Placement, float] | None:
        """A parameter or buffer met for the first time, free to lie as it is needed: (stored form, seconds a step)."""
        size = self.graph.tensors[value].size_bytes
        touched = size * 8 / self.prices.memory_bytes_per_s  # gradient and optimizer states, read and written
        if is_shard(need):
            return (need, touched / self.n) if self.cuttable(value, need.dim) else None
        # Gradients are summed many in one bucket: their bytes count, a latency of their own does not.
        summed = need is D and value in self.grads
        return R, touched + (collective_s("all_reduce", size, self.n, replace(self.prices, latency_s=0.0)) if summed else 0.0)

    def start(self, value: str) -> tuple[Placement, ...] | None:
        """Forms in which a variable is there at the beginning; None for a parameter that may still lie anywhere."""
        if value in self.copied_into:  # what is written is the whole buffer
            return (R,)
        if value in self.placed:
            if self.fixed is None or value in self.still:  # statistics lie as the operator has them that writes them
                return None
            dim = self.fixed.get(value)
            return (R,) if dim is None else (Shard(dim),)
        for v in self.graph.inputs:
            if v.value == value:
                if self.row.cuts_positions:
                    shape = range(len(v.tensor.shape))
                    dims = (d for d in shape if self.row.cuts & self.positions.get((value, d), frozenset()) and self.cuttable(value, d))
                    return (R, *(Shard(d) for d in dims))  # a rank reads its piece from what it is given
                return (Shard(0),) if v.batched and self.row.cuts_samples else (R,)
        return (R,)

    def solve(self, beam: int) -> tuple[dict[str, _Choice], dict[str, Placement]]:
        """The cheapest choices found, and where parameters and buffers lie."""
        last: dict[str, int] = {}
        for i, op in enumerate(self.graph.operators):
            for value in op.inputs:
                last[value] = i
        State = tuple[float, dict[str, tuple[Placement, ...]], _Decided | None]
        states: list[State] = [(0.0, {}, None)]
        for i, op in enumerate(self.graph.operators):
            gone = {value for value in op.inputs if last[value] == i}
            choices = [
                (choice, {v: (form,) for v, form in zip(op.outputs, choice.makes, strict=True) if last.get(v, -1) > i})
                for choice in self.choices(op)
            ]
            best: dict[frozenset[tuple[str, tuple[Placement, ...]]], State] = {}
            for cost, held, path in states:
                for choice, made in choices:
                    if not self.worth(op, choice, held):
                        continue
                    tried = self._apply(op, choice, cost, held)
                    if tried is None:
                        continue
                    total, after, stored = tried
                    for value in gone:
                        after.pop(value, None)
                    after.update(made)
                    key = frozenset(after.items())
                    if key not in best or total < best[key][0]:
                        best[key] = (total, after, _Decided(path, op.name, choice, stored))
            states = sorted(best.values(), key=lambda s: s[0])[:beam]
        chosen: dict[str, _Choice] = {}
        placed: dict[str, Placement] = {}
        node = states[0][2]
        while node is not None:
            chosen[node.op] = node.choice
            placed.update(node.stored)
            node = node.before
        return chosen, placed

    def _apply(
        self, op: Operator, choice: _Choice, cost: float, held: dict[str, tuple[Placement, ...]]
    ) -> tuple[float, dict[str, tuple[Placement, ...]], dict[str, Placement]] | None:
        after = dict(held)
        stored: dict[str, Placement] = {}
        cost += choice.cost_s
        for value, need in zip(op.inputs, choice.needs, strict=True):
            have = after.get(value)
            if have is None:
                have = self.start(value)
                if have is None:
                    found = self.place(value, need or R)
                    if found is None:
                        return None
                    stored[value], extra = found
                    cost += extra
                    have = (found[0],) if need in (None, found[0]) else (found[0], need)
                elif value in self.placed and need is D and have == (R,):
                    have = (R, D)  # its gradient is summed with all the others, whatever this use needs
                after[value] = have
            if need is None or need in have:
                continue
            price = min(self.move_s(value, source, need) for source in have)
            if price == float("inf"):
                return None
            cost += price
            after[value] = (*have, need)
        return cost, after, stored


def writes_buffer(op: Operator, placed: Mapping[str, object]) -> bool:
    """Whether the operator updates a buffer in place (`num_batches_tracked.add_(1)`); batch norm has a kernel of its own."""
    return writes(op) and op.inputs[0] in placed


def copied_into(graph: Graph) -> set[str]:
    """Values of the buffers (and parameters) that an operator updates in place: they lie whole on every rank, as they are written."""
    placed = {v.value: v for v in (*graph.parameters, *graph.buffers)}
    return {op.inputs[0] for op in graph.operators if writes_buffer(op, placed)}


def written_buffers(graph: Graph) -> set[str]:
    """Values of the buffers that are updated while the model runs, running statistics of norms in training included."""
    held = {v.value for v in graph.buffers}
    return copied_into(graph) | {value for op in graph.operators for value in statistics(op) if value in held}


def given_dims(graph: Graph, axis: str, n: int, shards: Mapping[str, Shards] | None) -> dict[str, int] | None:
    """[value] -> dimension of it that is cut over `axis`, where that is given (over data nothing is); None where it is searched.

    Raises:
        LayoutError: a shard names a parameter that the graph does not have, or a dimension that does not divide.
    """
    given = (shards or {}).get(axis)
    if given is None:
        return None if axis_of(axis).cuts_weights else {}
    names = {v.name: v for v in (*graph.parameters, *graph.buffers)}
    whole = copied_into(graph)
    fixed = {}
    for name, dim in given:
        if name not in names:
            raise LayoutError(f"the plan cuts {name} over {axis}, but the model has no such parameter or buffer")
        if names[name].value in whole:
            raise LayoutError(f"the plan cuts {name} over {axis}, but the model writes all of it in place; leave that cut out")
        shape = names[name].tensor.shape
        if dim >= len(shape) or shape[dim] % n:
            raise LayoutError(f"the plan cuts dimension {dim} of {name} {list(shape)} over {axis}={n}, which does not divide it")
        fixed[names[name].value] = dim
    return fixed


def propagate(
    graph: Graph,
    sizes: Mapping[str, int],
    shards: Mapping[str, Shards] | None = None,
    *,
    prices: Prices | Mapping[str, Prices] | None = None,
    sequence: bool = False,
    samples: bool = False,
    labels: Mapping[str, Mapping[str, str]] | None = None,
    beam: int = 24,
) -> Sharding:
    """Complete the sharding over the axes of `sizes` (those of size 1 are left out), `data` first.

    `shards[axis]` says where parameters and buffers are cut; an axis that is missing there is searched (`data` keeps all whole).
    `labels[axis][site]`: the label of an operator that is cut, "" for none, with `+` where it leaves summands; the rest is searched.
    `sequence`: what lies between products may be cut along positions as well (sequence parallelism, Korthikanti et al. 2022).
    `samples`: tensor ranks may cut samples as well, operator by operator, the pieces of `data` once more (Krizhevsky 2014).

    Raises:
        LayoutError: a shard names a parameter that the graph does not have, or a dimension that does not divide; a label that an operator
            cannot be cut on.
    """
    names = {v.name: v for v in (*graph.parameters, *graph.buffers)}
    ops: dict[str, dict[str, str]] = {op.name: {} for op in graph.operators}
    forms: dict[str, dict[str, Placement]] = {value: {} for value in graph.tensors}
    needs: dict[str, list[dict[str, Placement | None]]] = {op.name: [{} for _ in op.inputs] for op in graph.operators}
    gradients: dict[str, list[str]] = {}
    taken: dict[str, set[int]] = {}
    cut: dict[str, Shards] = {}
    moves: list[Move] = []
    done = 1
    order = sorted((a for a in sizes if sizes[a] > 1), key=lambda a: (not axis_of(a).cuts_samples, axis_of(a).cuts_weights))
    given = {axis: given_dims(graph, axis, sizes[axis], shards) for axis in order}
    for axis in order:
        n, fixed = sizes[axis], given[axis]
        price = prices.get(axis, Prices()) if isinstance(prices, Mapping) else prices or Prices()
        row, weights = axis_of(axis), [a for a in order if axis_of(a).cuts_weights]
        again = tuple(a for a in order if axis_of(a).cuts_samples) if samples and row.cuts_weights else ()
        if row.again:
            again = (*again, *(a for a in weights if not axis_of(a).again))
        inside, kernels = nested(graph, ops, forms, needs, sizes, again) if done > 1 and again else ({}, frozenset())
        later = order[order.index(axis) + 1 :] if row.cuts_weights else []
        reserved, pinned = kept_for(later, given, fixed or {})
        blocked = {v: taken.get(v, set()) | reserved.get(v, set()) for v in (*taken, *reserved)}
        problem = _Axis(
            graph, axis, n, blocked, fixed, price, done, sequence, (labels or {}).get(axis), inside, kernels, bool(later), pinned, samples,
            prod(sizes[a] for a in order[: order.index(axis)] if not axis_of(a).cuts_weights),
        )  # fmt: skip
        for v in names.values() if row.cuts_weights else ():
            if v.value in (fixed or {}) and not problem.cuttable(v.value, (fixed or {})[v.value]):
                raise twice_cut(v, (fixed or {})[v.value], axis, n)
        if row.cuts_positions and not any(row.cuts & kinds for kinds in problem.positions.values()):
            raise LayoutError(f"{axis}={n} shares images, and no window of this model slides along {axis_words(row)}; leave it out")
        chosen, placed = problem.solve(beam)
        _record(graph, problem, chosen, placed, ops, forms, needs, gradients, moves)
        cut[axis] = tuple((v.name, form.dim) for v in names.values() if is_shard(form := forms[v.value][axis]))
        for value, by_axis in forms.items():
            if is_shard(form := by_axis[axis]):
                taken.setdefault(value, set()).add(form.dim)
        for op in graph.operators:
            for value, by in zip(op.inputs, needs[op.name], strict=True):
                if is_shard(need := by[axis]):
                    taken.setdefault(value, set()).add(need.dim)
        done *= n
    buffers = {v.value: v for v in (*graph.parameters, *graph.buffers)}
    return Sharding(
        {a: n for a, n in sizes.items() if n > 1},
        ops,
        forms,
        {name: tuple(rows) for name, rows in needs.items()},
        {value: tuple(axes) for value, axes in gradients.items()},
        tuple(moves),
        tuple(op.site for op in graph.operators if graph.rules[op.name] is None and not writes_buffer(op, buffers)),
        cut,
    )


def _record(
    graph: Graph,
    problem: _Axis,
    chosen: Mapping[str, _Choice],
    placed: Mapping[str, Placement],
    ops: dict[str, dict[str, str]],
    forms: dict[str, dict[str, Placement]],
    needs: dict[str, list[dict[str, Placement | None]]],
    gradients: dict[str, list[str]],
    moves: list[Move],
) -> None:
    """Write one axis' solution down: forms, needs, deferred gradients, moves."""
    axis = problem.axis
    for v in graph.variables:
        start = problem.start(v.value)
        forms[v.value][axis] = placed.get(v.value, R) if start is None else start[0]
    for op in graph.operators:
        choice = chosen[op.name]
        ops[op.name][axis] = choice.label
        for value, form in zip(op.outputs, choice.makes, strict=True):
            forms[value][axis] = form
        for row, need in zip(needs[op.name], choice.needs, strict=True):
            row[axis] = need
    defer(graph, axis, problem.grads, ops, forms, needs)
    uses: dict[str, list[Placement | None]] = {}
    for op in graph.operators:
        for value, row in zip(op.inputs, needs[op.name], strict=True):
            uses.setdefault(value, []).append(row[axis])
    _share_reads(graph, problem, uses, needs)
    for v in (*graph.parameters, *graph.inputs):
        wanted = {form for form in uses.get(v.value, ()) if form is not None}
        summands = wanted == {D} or (problem.row.follows and wanted and all(form is D or is_cut(form) for form in wanted))
        if forms[v.value][axis] is R and summands and v.value in problem.grads:
            forms[v.value][axis] = D
            gradients.setdefault(v.value, []).append(axis)
    for v in graph.inputs if problem.row.cuts_positions else ():
        read = {form for form in uses.get(v.value, ()) if form is not None}
        if len(read) == 1 and is_cut(only := read.pop()):  # all read the same part: that is what a rank is given
            forms[v.value][axis] = only
    have = {value: [forms[value][axis]] for value in graph.tensors if value in forms and axis in forms[value]}
    for op in graph.operators:
        for value, row in zip(op.inputs, needs[op.name], strict=True):
            need = row[axis]
            if need is None or need in have[value]:
                continue
            source = cheapest(problem, value, have[value], need)
            forward, backward = move_collectives(source, need)
            moves.append(Move(value, op.name, axis, source, need, forward, backward if value in problem.grads else ""))
            have[value].append(need)


def _share_reads(
    graph: Graph, problem: _Axis, uses: dict[str, list[Placement | None]], needs: Mapping[str, list[dict[str, Placement | None]]]
) -> None:
    """Where some read a parameter as D and others, which hand back no gradient, whole: let them all read it as D.

    So an average of weights, which reads the trained ones, does not keep their gradients from being summed once a step.
    """
    axis = problem.axis
    both = {v.value for v in graph.parameters if v.value in problem.grads and {R, D} <= set(uses.get(v.value, ()))}
    if not both:
        return
    reached = backward_reached(graph, problem.grads)
    for op in graph.operators:
        if both.intersection(op.inputs) and not any(v in reached and v in problem.grads for v in op.outputs):
            for value, row in zip(op.inputs, needs[op.name], strict=True):
                if value in both and row[axis] is R:
                    row[axis] = D
    for value in both:
        uses[value] = [row[axis] for op in graph.operators for v, row in zip(op.inputs, needs[op.name], strict=True) if v == value]


def cheapest(problem: _Axis, value: str, have: Iterable[Placement], need: Placement) -> Placement:
    """The form from which `need` is cheapest to get."""
    return min(have, key=lambda source: problem.exact_s(value, source, need))
