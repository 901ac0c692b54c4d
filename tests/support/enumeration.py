"""The cheapest placement by trying all of them: every choice of every operator, every place of every parameter. For small graphs.

Written against the definition, and apart from the code that it judges: what a value costs to move is written out here from the bytes
that a ring sends, and what backward keeps from the operators' own lists. Choices of an operator come from the factor rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from shardwise.model.gradients import differentiable_values
from shardwise.model.sharding.axis_problem import AxisProblem, OperatorStrategy
from shardwise.model.work import operator_work, storage_roots
from shardwise.plan.ir.placement import D, Placement, R, Shard, is_shard

# Bytes that a rank sends, in parts of the tensor's (n - 1)/n, forward and backward; None where no bytes move. An all-reduce
# (2) has a latency, the others half of one.
RING: dict[tuple[str, str], tuple[float | None, float | None]] = {
    ("R", "+"): (None, 2), ("R", "S"): (None, 1), ("+", "S"): (None, None), ("P", "R"): (2, None), ("P", "+"): (2, 2), ("P", "S"): (1, 1),
    ("S", "R"): (1, None), ("S", "+"): (1, 1), ("S", "S"): (-1, -1),
}  # fmt: skip


@dataclass
class Tried:
    """One complete placement: words by site, forms of parameters, seconds, bytes."""

    words: dict[str, str]
    stored: dict[str, Placement]
    seconds: float
    size_bytes: float


class Everything:
    """All placements of a graph along an axis of `n` ranks; `axis` is where choices and prices come from."""

    def __init__(self, axis: AxisProblem, weight: float = 4, gradient: float = 4, optimizer: float = 8):
        self.axis, self.graph = axis, axis.graph
        self.choices = [axis.strategies(op) for op in self.graph.operators]
        self.least_after = [0.0]
        for row in reversed(self.choices):
            self.least_after.append(self.least_after[-1] + min(c.cost_s for c in row))
        self.least_after.reverse()
        self.asked = differentiable_values(self.graph)
        self.root = storage_roots(self.graph)
        self.works = operator_work(self.graph)
        self.widths = (weight, gradient, optimizer)
        self.fixed = {v.value for v in (*self.graph.inputs, *self.graph.constants)}

    def move(self, value: str, a: Placement | str, b: Placement | str) -> float:
        """Seconds of one redistribution."""
        a, b = str(a), str(b)
        if a == b:
            return 0.0
        if (a, b) == ("+", "R"):
            return float("inf")
        prices, n = self.axis.prices, self.axis.n
        size = self.graph.tensors[value].size_bytes
        forward, backward = RING[a[0], b[0]]
        total = 0.0
        asked = value in self.asked
        # Copies: an all-reduce's argument, pieces that do not lie together, a gradient in a tensor of zeros, an exchange's pieces twice.
        inner = int(a[1:] or 0) > 0 or int(b[1:] or 0) > 0
        both = [part for part in (forward, backward if asked else None) if part is not None]
        written = sum(2.0 if part == 2 else 2.0 * inner if part == 1 else 4 / n for part in both)
        if (a[0], b[0]) == ("+", "S"):
            written = 2 / n * inner + (1 + 2 / n) * asked
        elif (a[0], b[0]) == ("R", "S"):
            written += 2 / n * inner
        elif (a[0], b[0]) == ("S", "R"):
            written += 2 / n * inner * asked
        total += written * size / prices.memory_bytes_per_s
        for part in both:
            sent = (1 / n if part < 0 else part) * size * (n - 1) / n
            total += sent / prices.link_bytes_per_s + prices.latency_s / (1 if part == 2 else 2)
        return total

    def lies(self, value: str) -> list[str]:
        """Forms in which a parameter may be stored."""
        shape, n = self.graph.tensors[value].shape, self.axis.n
        return [R, *(Shard(d) for d, size in enumerate(shape) if size % n == 0 and d not in self.axis.taken_dims.get(value, ()))]

    def touch(self, value: str, form: str) -> float:
        """Seconds of reading and writing gradient and states."""
        return self.graph.tensors[value].size_bytes * 8 / self.axis.prices.memory_bytes_per_s / (self.axis.n if is_shard(form) else 1)

    @property
    def count(self) -> int:
        """How many placements there are, those that cannot be among them."""
        read = {value for op in self.graph.operators for value in op.inputs if value in self.axis.state}
        return prod(len(row) for row in self.choices) * prod(len(self.lies(value)) for value in read)

    def cheapest(self, bound: float = float("inf")) -> float:
        """Seconds of the cheapest placement below `bound`. Only what must cost more than a known one is left out."""
        self.best = bound
        for _ in self._descend(0, 0.0, [], {}, {}):
            pass
        return self.best

    def all(self) -> Iterator[Tried]:
        """Every placement there is."""
        return self._descend(0, 0.0, [], {}, None)

    def cost_of(self, words: dict[str, str], stored: dict[str, str]) -> float:
        """Seconds of one placement."""
        rows = zip(self.graph.operators, self.choices, strict=True)
        chosen = [next(c for c in row if c.plan_name == words[op.site]) for op, row in rows]
        read = {value for op in self.graph.operators for value in op.inputs if value in self.axis.state}
        lies = {value: stored.get(value, R) for value in read}
        work_s = sum(c.cost_s for c in chosen) + sum(self.touch(value, form) for value, form in lies.items())
        return work_s + self.moves(chosen, lies)

    def _descend(
        self,
        i: int,
        cost: float,
        chosen: list[OperatorStrategy],
        stored: dict[str, Placement],
        held: dict[str, tuple[Placement, ...]] | None,
    ) -> Iterator[Tried]:
        """All that follow from these choices. `held`: forms of every value, where what must cost too much is left out; else None."""
        if i == len(self.choices):
            work_s = sum(c.cost_s for c in chosen) + sum(self.touch(value, form) for value, form in stored.items())
            seconds = work_s + self.moves(chosen, stored)
            if held is not None:
                self.best = min(self.best, seconds)
            elif seconds < float("inf"):
                words = {op.site: choice.plan_name for op, choice in zip(self.graph.operators, chosen, strict=True)}
                yield Tried(words, stored, seconds, self.size_bytes(chosen, stored))
            return
        new = [v for v in dict.fromkeys(self.graph.operators[i].inputs) if v in self.axis.state and v not in stored]
        ways: list[dict[str, Placement]] = [{}]
        for value in new:
            ways = [{**way, value: form} for way in ways for form in self.lies(value)]
        for choice in self.choices[i]:
            for way in ways:
                least, after = cost, held
                if held is not None:
                    least += choice.cost_s + sum(self.touch(value, form) for value, form in way.items())
                    extra, after = self._at_least(i, choice, {**held, **{value: (form,) for value, form in way.items()}})
                    least += extra
                    if least + self.least_after[i + 1] >= self.best:
                        continue
                yield from self._descend(i + 1, least, [*chosen, choice], {**stored, **way}, after)

    def _at_least(
        self, i: int, choice: OperatorStrategy, held: dict[str, tuple[Placement, ...]]
    ) -> tuple[float, dict[str, tuple[Placement, ...]]]:
        """(least seconds of the moves before an operator, forms held): what is whole may yet turn out to hold summands of gradients."""
        op = self.graph.operators[i]
        total = 0.0
        for value, need in zip(op.inputs, choice.input_placements, strict=True):
            now = held.get(value, (R,))
            if need is not None and need not in now and not (need is D and R in now):
                sources = {*now, D} if R in now and need is not R else set(now)
                total += min(self.move(value, source, need) for source in sources)
            if need is not None:
                held[value] = now if need in now else (*now, need)
        held.update({value: (form,) for value, form in zip(op.outputs, choice.output_placements, strict=True)})
        return total, held

    def moves(self, chosen: list[OperatorStrategy], stored: dict[str, Placement]) -> float:
        """Seconds of all redistributions and sums of gradients, summands of gradients passed on as far as they may be."""
        operators = self.graph.operators
        needs, whole, reads = self._deferred(chosen)
        total = 0.0
        held: dict[str, list[str]] = {}
        for value, form in stored.items():
            held[value] = [form]
            if form is R and reads[value] == {D}:
                n, prices = self.axis.n, self.axis.prices
                total += 2 * self.graph.tensors[value].size_bytes * (n - 1) / n / prices.link_bytes_per_s
                held[value] = [D]
        for op, choice, row in zip(operators, chosen, needs, strict=True):
            for value, need in zip(op.inputs, row, strict=True):
                now = held.setdefault(value, [R])
                if need is not None and need not in now:
                    total += min(self.move(value, source, need) for source in now)
                    now.append(need)
            for value, form in zip(op.outputs, choice.output_placements, strict=True):
                held[value] = [D if value in whole else form]
        return total

    def _deferred(self, chosen: list[OperatorStrategy]) -> tuple[list[list[str | None]], set[str], dict[str, set[str]]]:
        """What operators need, which values are whole with summands for gradients, and in which forms every value is read.

        From the last operator to the first: a replicated one whose result is read as D alone reads D itself.
        """
        needs: list[list[str | None]] = [list(choice.input_placements) for choice in chosen]
        whole: set[str] = set()
        reads: dict[str, set[str]] = {value: set() for value in self.graph.tensors}
        for i in reversed(range(len(chosen))):
            op = self.graph.operators[i]
            made = [value for value in op.outputs if value in self.axis.grads and value != self.graph.loss]
            if chosen[i].label == "" and made and all(reads[value] == {D} for value in made):
                whole.update(made)
                needs[i] = [D if need is R and v in self.axis.grads else need for v, need in zip(op.inputs, needs[i], strict=True)]
            for value, need in zip(op.inputs, needs[i], strict=True):
                if need is not None:
                    reads[value].add(need)
        return needs, whole, reads

    def size_bytes(self, chosen: list[OperatorStrategy], stored: dict[str, Placement]) -> float:
        """Bytes on one rank of parameters with their states, and of what backward keeps, once for those that have it alike."""
        n = self.axis.n
        total = 0.0
        for v in self.graph.parameters:
            widths = sum(self.widths) if v.trainable else self.widths[0]
            total += widths * v.tensor.size / (n if stored.get(v.value, R) is not R else 1)
        kept: set[tuple[str, bool]] = set()
        for op, choice in zip(self.graph.operators, chosen, strict=True):
            done = self.works[op.name]
            total += done.extra_bytes / (n if choice.label else 1)
            for value in done.saved:
                root = self.root.get(value, value)
                if root in self.axis.state or root in self.fixed:
                    continue
                form = dict(zip(op.outputs, choice.output_placements, strict=True)).get(value)
                for read, need in reversed(list(zip(op.inputs, choice.input_placements, strict=True))):
                    form = need or R if read == value else form
                kept.add((root, form is not None and is_shard(form)))
        return total + sum(self.graph.tensors[root].size_bytes / (n if cut else 1) for root, cut in kept)
