"""The cheapest placement by trying all of them: every choice of every operator, every place of every parameter. For small graphs.

Written against the definition, and apart from the code that it judges: what a value costs to move is written out here from the bytes
that a ring sends, and what backward keeps from the operators' own lists. Choices of an operator come from the factor rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.model.propagate import _Axis, _Choice
from weft.model.work import differentiable, storages, work

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
    stored: dict[str, str]
    seconds: float
    size_bytes: float


class Everything:
    """All placements of a graph along an axis of `n` ranks; `axis` is where choices and prices come from."""

    def __init__(self, axis: _Axis, weight: float = 4, gradient: float = 4, optimizer: float = 8):
        self.axis, self.graph = axis, axis.graph
        self.choices = [axis.choices(op) for op in self.graph.operators]
        self.least_after = [0.0]
        for row in reversed(self.choices):
            self.least_after.append(self.least_after[-1] + min(c.cost_s for c in row))
        self.least_after.reverse()
        self.asked = differentiable(self.graph)
        self.root = storages(self.graph)
        self.works = work(self.graph)
        self.widths = (weight, gradient, optimizer)
        self.fixed = {v.value for v in (*self.graph.inputs, *self.graph.constants)}

    def move(self, value: str, a: str, b: str) -> float:
        """Seconds of one redistribution."""
        if a == b:
            return 0.0
        if (a, b) == ("+", "R"):
            return float("inf")
        prices, n = self.axis.prices, self.axis.n
        size = self.graph.tensors[value].size_bytes
        if (a, b) == ("R", "+") and value in self.axis.placed:
            return 2 * size * (n - 1) / n / prices.link_bytes_per_s if value in self.axis.grads else 0.0
        forward, backward = RING[a[0], b[0]]
        total = 0.0
        for part in (forward, backward if value in self.asked else None):
            if part is not None:
                total += (1 / n if part < 0 else part) * size * (n - 1) / n / prices.link_bytes_per_s + prices.latency_s / (
                    1 if part == 2 else 2
                )
        return total

    def lies(self, value: str) -> list[str]:
        """Forms in which a parameter may be stored."""
        shape, n = self.graph.tensors[value].shape, self.axis.n
        return ["R", *(f"S{d}" for d, size in enumerate(shape) if size % n == 0 and d not in self.axis.taken.get(value, ()))]

    def touch(self, value: str, form: str) -> float:
        """Seconds of reading and writing gradient and states."""
        return self.graph.tensors[value].size_bytes * 8 / self.axis.prices.memory_bytes_per_s / (self.axis.n if form[0] == "S" else 1)

    def cheapest(self, bound: float = float("inf")) -> float:
        """Seconds of the cheapest placement. Only what already costs more than a known one is left out."""
        self.best = bound
        self._descend(0, 0.0, {}, {})
        return self.best

    def _descend(self, i: int, cost: float, held: dict[str, tuple[str, ...]], stored: dict[str, str]) -> None:
        if cost + self.least_after[i] >= self.best:
            return
        if i == len(self.choices):
            self.best = cost
            return
        for choice in self.choices[i]:
            for extra, after, lies in self._apply(i, choice, held, stored):
                self._descend(i + 1, cost + extra, after, lies)

    def all(self) -> Iterator[Tried]:
        """Every placement there is."""
        yield from self._all(0, 0.0, {}, {}, [])

    def _all(self, i: int, cost: float, held: dict[str, tuple[str, ...]], stored: dict[str, str], chosen: list[_Choice]) -> Iterator[Tried]:
        if i == len(self.choices):
            words = {op.site: choice.word for op, choice in zip(self.graph.operators, chosen, strict=True)}
            yield Tried(words, stored, cost, self.size_bytes(chosen, stored))
            return
        for choice in self.choices[i]:
            for extra, after, lies in self._apply(i, choice, held, stored):
                yield from self._all(i + 1, cost + extra, after, lies, [*chosen, choice])

    def _apply(
        self, i: int, choice: _Choice, held: dict[str, tuple[str, ...]], stored: dict[str, str]
    ) -> Iterator[tuple[float, dict[str, tuple[str, ...]], dict[str, str]]]:
        """What follows from one choice, for every way in which parameters that are met here for the first time may lie."""
        op = self.graph.operators[i]
        new = [v for v in dict.fromkeys(op.inputs) if v in self.axis.placed and v not in stored]
        ways: list[dict[str, str]] = [{}]
        for value in new:
            ways = [{**way, value: form} for way in ways for form in self.lies(value)]
        for way in ways:
            lies = {**stored, **way}
            now = dict(held)
            cost = choice.cost_s + sum(self.touch(value, form) for value, form in way.items())
            for value, need in zip(op.inputs, choice.needs, strict=True):
                if value not in now:
                    now[value] = (lies[value],) if value in lies else ("R",)
                if need is not None and need not in now[value]:
                    cost += min(self.move(value, source, need) for source in now[value])
                    now[value] = (*now[value], need)
            if cost < float("inf"):
                now.update({value: (form,) for value, form in zip(op.outputs, choice.makes, strict=True)})
                yield cost, now, lies

    def cost_of(self, words: dict[str, str], stored: dict[str, str]) -> float:
        """Seconds of one placement."""
        cost, held, lies = 0.0, {}, dict(stored)
        for i, op in enumerate(self.graph.operators):
            choice = next(c for c in self.choices[i] if c.word == words[op.site])
            for value in dict.fromkeys(op.inputs):
                if value in self.axis.placed and value not in held:
                    cost += self.touch(value, lies.setdefault(value, "R"))
            extra, held, _ = next(self._apply(i, choice, held, lies))
            cost += extra
        return cost

    def size_bytes(self, chosen: list[_Choice], stored: dict[str, str]) -> float:
        """Bytes on one rank of parameters with their states, and of what backward keeps, once for those that have it alike."""
        n = self.axis.n
        total = 0.0
        for v in self.graph.parameters:
            widths = sum(self.widths) if v.trainable else self.widths[0]
            total += widths * v.tensor.size / (n if stored.get(v.value, "R") != "R" else 1)
        kept: set[tuple[str, bool]] = set()
        for op, choice in zip(self.graph.operators, chosen, strict=True):
            done = self.works[op.name]
            total += done.extra_bytes / (n if choice.label else 1)
            for value in done.keeps:
                root = self.root.get(value, value)
                if root in self.axis.placed or root in self.fixed:
                    continue
                form = dict(zip(op.outputs, choice.makes, strict=True)).get(value)
                for read, need in reversed(list(zip(op.inputs, choice.needs, strict=True))):
                    form = need or "R" if read == value else form
                kept.add((root, form is not None and form[0] == "S"))
        return total + sum(self.graph.tensors[root].size_bytes / (n if cut else 1) for root, cut in kept)
