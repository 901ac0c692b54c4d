"""Parallel branches of a graph: sets of operators that nothing joins between where they fork and where they meet.

In: a graph. Out: `Region`s, each of two branches or more. A region lies between an operator (or the batch) and the first that all ways from
there to the loss go through, its immediate post-dominator; or between an operator and the last that all ways to it come through, its
immediate dominator. What lies between falls apart into branches once operators without a product that several branches lead to (sums,
concatenations), or from which several come (splits), are left out. Regions nest: towers of Inception modules are one region, and so is each
module. `balanced` gives branches to ranks by their work.

Not modelled: branches that share an operator with products; a region whose branches are taken apart further for more ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft.model.graph import Graph, writes_buffer
from weft.model.joined import Joined
from weft.model.work import closure, operator_flops

MOST_EXACT = 1 << 14  # ways to give branches to ranks that are all tried


@dataclass(frozen=True, slots=True)
class Region:
    """Numbers of the operators of every branch, in order."""

    branches: tuple[tuple[int, ...], ...]

    @property
    def operators(self) -> frozenset[int]:
        return frozenset(i for branch in self.branches for i in branch)

    def without(self, number: int, graph: Graph) -> Region | None:
        """The same without an operator at a border of it; None where it is at none."""
        op, inside = graph.operators[number], self.operators
        outputs = {v for i in inside for v in graph.operators[i].outputs}
        read = {v for i in inside for v in graph.operators[i].inputs}
        if read.intersection(op.outputs) and outputs.intersection(op.inputs):
            return None
        return Region(tuple(tuple(i for i in branch if i != number) for branch in self.branches))


class _Flow:
    """Which operator reads from which, of those that the samples go through; a source before all of them and a sink behind."""

    def __init__(self, graph: Graph) -> None:
        operators, place = graph.operators, graph.place
        follows = closure(graph, {v.value for v in graph.inputs})
        self.nodes = [i for i, op in enumerate(operators) if op.name not in graph.free and any(v in follows for v in op.inputs)]
        inside = set(self.nodes)
        self.source, self.sink = -1, len(operators)
        self.before: dict[int, list[int]] = {
            i: sorted({at for v in operators[i].inputs if (at := place.get(v)) in inside}) for i in self.nodes  
        }
        self.after: dict[int, list[int]] = {i: [] for i in (self.source, *self.nodes)}
        for i in self.nodes:
            self.before[i] = self.before[i] or [self.source]
            for at in self.before[i]:
                self.after[at].append(i)
        for i in self.nodes:
            self.after[i] = self.after[i] or [self.sink]
        self.heavy = {i for i in self.nodes if operator_flops(operators[i], graph.tensors) > 0}

    def between(self) -> Iterator[list[int]]:
        """What lies between every operator from which several come and where all ways from it meet, and between every one to which several
        lead and where all ways to it fork; without these."""
        yield from self._between((*reversed(self.nodes), self.source), self.sink, self.after)
        yield from self._between(self.nodes, self.source, self.before)

    def _between(self, order: Sequence[int], root: int, beside: Mapping[int, list[int]]) -> Iterator[list[int]]:
        """As `between`, of one direction: `beside` are the neighbours that come before in `order`, `root` is before all."""
        depth, nearest = {root: 0}, {root: root}
        for i in order:
            first, *others = beside[i]
            for other in others:
                while first != other:
                    if depth[first] < depth[other]:
                        other = nearest[other]
                    else:
                        first = nearest[first]
            nearest[i], depth[i] = first, depth[first] + 1
            if others:
                between, todo = set[int](), list(beside[i])
                while todo:
                    at = todo.pop()
                    if at != first and at not in between:
                        between.add(at)
                        todo += beside[at]
                yield sorted(between - {self.source, self.sink})

    def branches(self, between: Sequence[int]) -> list[set[int]]:
        """The sets into which operators fall apart without those that join or split them."""
        inside = set(between)
        tail, head = set[int](), set[int]()
        for i in reversed(between):
            if i not in self.heavy and all(j in tail or j not in inside for j in self.after[i]):
                tail.add(i)
        for i in between:
            if i not in self.heavy and i not in tail and all(j in head or j not in inside for j in self.before[i]):
                head.add(i)
        left = inside - tail - head
        of = self._connected(left)
        for order, beside in ((sorted(tail), self.before), (sorted(head, reverse=True), self.after)):
            for i in order:  # what one branch alone leads to, or what leads to it alone, is part of it
                near = {of.get(j) for j in beside[i] if j in inside}
                if len(near) == 1 and None not in near:
                    of[i] = next(iter(near))  # type: ignore[assignment]
        branches: dict[int, set[int]] = {}
        for i, branch in of.items():
            branches.setdefault(branch, set()).add(i)
        return sorted((b for b in branches.values() if b & self.heavy), key=min)

    def _connected(self, left: set[int]) -> dict[int, int]:
        """[operator] -> one of those that it is connected with, the same for all of them."""
        joined = Joined[int]()
        for i in left:
            joined.add([i, *(j for j in self.after[i] if j in left)])
        return {i: joined.root(i) for i in left}


def regions(graph: Graph) -> tuple[Region, ...]:
    """Every region of the graph, the larger ones first."""
    flow = _Flow(graph)
    if not flow.nodes:
        return ()
    unique: dict[Region, None] = {}
    for between in flow.between():
        branches = flow.branches(between)
        if len(branches) > 1:
            unique[Region(tuple(tuple(sorted(b)) for b in branches))] = None
    sound = [region for region in unique if not _writes(graph, region)]
    return tuple(sorted(sound, key=lambda region: -len(region.operators)))


def _writes(graph: Graph, region: Region) -> bool:
    """Whether a buffer is written in place between its first operator and its last, from what the model computes: order matters then."""
    held = {v.value: v for v in (*graph.parameters, *graph.buffers)}
    numbers = region.operators
    between = graph.operators[min(numbers) : max(numbers) + 1]
    written = {op.inputs[0] for op in between if writes_buffer(op, held)}
    return any(written.intersection(op.inputs) and not writes_buffer(op, held) for op in between) or any(
        writes_buffer(graph.operators[i], held) for i in numbers
    )


def balanced(work: Sequence[float], ranks: int) -> tuple[int, ...]:
    """The rank of every branch, so that the rank with most work has least: exact where there are few ways, else the longest first.

    >>> balanced([4, 3, 3, 2], 2), balanced([5, 1, 1], 2)
    ((0, 1, 1, 0), (0, 1, 1))
    """
    loads, longest = [0.0] * ranks, [0] * len(work)
    order = sorted(range(len(work)), key=lambda i: (-work[i], i))
    for i in order:
        longest[i] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[longest[i]] += work[i]
    if len(work) <= ranks or ranks ** len(work) > MOST_EXACT:
        return tuple(longest)
    best, least = tuple(longest), max(loads)

    def give(at: int, owners: list[int], loads: list[float]) -> None:
        nonlocal best, least
        if at == len(order):
            best, least = tuple(owners), max(loads)
            return
        i = order[at]
        for rank in range(min(ranks, len({owners[j] for j in order[:at]}) + 1)):  # ranks are alike until they have something
            if loads[rank] + work[i] < least * (1 - 1e-12):
                owners[i] = rank
                give(at + 1, owners, [x + work[i] * (r == rank) for r, x in enumerate(loads)])

    give(0, [0] * len(work), [0.0] * ranks)
    return best
