"""Parallel branches of a graph: sets of operators that are independent between a fork and a join.

A region lies between an operator (or the batch) and its immediate post-dominator with respect to the loss; or between an operator and its
immediate dominator. It falls apart into branches once operators without a product that several branches lead to (sums, concatenations), or
from which several come (splits), are removed. Regions nest: towers of Inception modules are one region, and so is each module.
`balance_branches` assigns branches to ranks by their work.

Not modeled: branches that share an operator with products; a region whose branches are split further for more ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from shardwise.model.dataflow import cached_on_graph, propagate_forward, reachable_elements
from shardwise.model.graph import Graph, writes_buffer
from shardwise.model.stages.stages import batch_only_operators
from shardwise.model.union_find import UnionFind
from shardwise.model.work import operator_flops
from shardwise.ops import record_of

MAX_EXACT_ASSIGNMENTS = 1 << 14  # assignments of branches to ranks that are all tried


@dataclass(frozen=True, slots=True)
class BranchRegion:
    """Indices of the operators of every branch, in order."""

    branches: tuple[tuple[int, ...], ...]

    @property
    def operators(self) -> frozenset[int]:
        return frozenset(i for branch in self.branches for i in branch)

    def join_branches(self, values: AbstractSet[str], graph: Graph) -> BranchRegion:
        """Return the region with those branches as one that read the same of `values`: statistics, which one rank must write in order."""
        branches: list[tuple[set[str], list[int]]] = []
        for branch in self.branches:
            read = {v for i in branch for v in graph.operators[i].inputs if v in values}
            same = [entry for entry in branches if entry[0] & read]
            branches = [entry for entry in branches if not entry[0] & read]
            branches.append((read.union(*(r for r, _ in same)), [*(i for _, numbers in same for i in numbers), *branch]))
        return BranchRegion(tuple(sorted(tuple(sorted(numbers)) for _, numbers in branches)))

    def without(self, number: int, graph: Graph) -> BranchRegion | None:
        """Return the region without an operator at its border; None where it is inside."""
        op, inner_operators = graph.operators[number], self.operators
        outputs = {v for i in inner_operators for v in graph.operators[i].outputs}
        read = {v for i in inner_operators for v in graph.operators[i].inputs}
        if read.intersection(op.outputs) and outputs.intersection(op.inputs):
            return None
        return BranchRegion(tuple(tuple(i for i in branch if i != number) for branch in self.branches))


class _DataFlow:
    """Data flow between the operators that depend on samples; with a source before all of them and a sink after."""

    def __init__(self, graph: Graph) -> None:
        operators, place = graph.operators, graph.producer_index
        follows, free = propagate_forward(operators, {v.value for v in graph.inputs}), batch_only_operators(graph)
        self.nodes = [i for i, op in enumerate(operators) if op.name not in free and not follows.isdisjoint(op.inputs)]
        inside = set(self.nodes)
        self.source, self.sink = -1, len(operators)
        self.predecessors: dict[int, list[int]] = {
            i: sorted({at for v in operators[i].inputs if (at := place.get(v)) in inside}) for i in self.nodes
        }
        self.successors: dict[int, list[int]] = {i: [] for i in (self.source, *self.nodes)}
        for i in self.nodes:
            self.predecessors[i] = self.predecessors[i] or [self.source]
            for at in self.predecessors[i]:
                self.successors[at].append(i)
        for i in self.nodes:
            self.successors[i] = self.successors[i] or [self.sink]
        self.products = {i for i in self.nodes if operator_flops(operators[i], graph.tensors) > 0}
        # Rows of experts have an order of their own, so that what dispatches and combines them belongs to their branch.
        self.inner = self.products | {i for i in self.nodes if record_of(operators[i]).expert_stage}

    def fork_join_spans(self) -> Iterator[list[int]]:
        """Yield the operators between every fork and its immediate post-dominator, and between every join and its immediate dominator; both
        excluded."""
        yield from self._fork_join_spans((*reversed(self.nodes), self.source), self.sink, self.successors)
        yield from self._fork_join_spans(self.nodes, self.source, self.predecessors)

    def _fork_join_spans(self, order: Sequence[int], root: int, neighbors: Mapping[int, list[int]]) -> Iterator[list[int]]:
        """Yield the same in one direction: `beside` are the neighbors earlier in `order`, `root` is before all."""
        depth, nearest = {root: 0}, {root: root}
        for i in order:
            first, *other_neighbors = neighbors[i]
            for other in other_neighbors:
                while first != other:
                    if depth[first] < depth[other]:
                        other = nearest[other]
                    else:
                        first = nearest[first]
            nearest[i], depth[i] = first, depth[first] + 1
            if other_neighbors:

                def beyond(at: int, end: int = first) -> Sequence[int]:
                    return neighbors[at] if at != end else ()

                between = reachable_elements(neighbors[i], beyond)
                yield sorted(between - {first, self.source, self.sink})

    def branches(self, between: Sequence[int]) -> list[set[int]]:
        """Return the connected sets of operators once those that join or split them are removed."""
        span = set(between)
        tail, head = set[int](), set[int]()
        for i in reversed(between):
            if i not in self.inner and all(j in tail or j not in span for j in self.successors[i]):
                tail.add(i)
        for i in between:
            if i not in self.inner and i not in tail and all(j in head or j not in span for j in self.predecessors[i]):
                head.add(i)
        remaining = span - tail - head
        branch_of = self._connected(remaining)
        for order, neighbors in ((sorted(tail), self.predecessors), (sorted(head, reverse=True), self.successors)):
            for i in order:  # operators adjacent to a single branch belong to it
                near = {branch_of.get(j) for j in neighbors[i] if j in span}
                if len(near) == 1 and None not in near:
                    branch_of[i] = next(iter(near))  # type: ignore[assignment]
        branches: dict[int, set[int]] = {}
        for i, branch in branch_of.items():
            branches.setdefault(branch, set()).add(i)
        return sorted((b for b in branches.values() if b & self.products), key=min)

    def _connected(self, remaining: set[int]) -> dict[int, int]:
        """Return, by operator, a representative of its connected component."""
        joined = UnionFind[int]()
        for i in remaining:
            joined.union([i, *(j for j in self.successors[i] if j in remaining)])
        return {i: joined.root(i) for i in remaining}


@cached_on_graph
def find_regions(graph: Graph) -> tuple[BranchRegion, ...]:
    """Return every region of the graph, larger ones first."""
    flow = _DataFlow(graph)
    if not flow.nodes:
        return ()
    unique: dict[BranchRegion, None] = {}
    for between in flow.fork_join_spans():
        branches = flow.branches(between)
        if len(branches) > 1:
            unique[BranchRegion(tuple(tuple(sorted(b)) for b in branches))] = None
    valid = [region for region in unique if not _writes_buffer_between(graph, region)]
    return tuple(sorted(valid, key=lambda region: -len(region.operators)))


def _writes_buffer_between(graph: Graph, region: BranchRegion) -> bool:
    """Return whether a buffer that is read is written in place between its first operator and its last; then order matters."""
    state, numbers = graph.state, region.operators
    between = graph.operators[min(numbers) : max(numbers) + 1]
    written = {op.inputs[0] for op in between if writes_buffer(op, state)}
    return any(written.intersection(op.inputs) and not writes_buffer(op, state) for op in between) or any(
        writes_buffer(graph.operators[i], state) for i in numbers
    )


def balance_branches(work: Sequence[float], ranks: int) -> tuple[int, ...]:
    """Return the rank of every branch that minimizes the largest work: exact for few assignments, else longest first.

    >>> balance_branches([4, 3, 3, 2], 2), balance_branches([5, 1, 1], 2)
    ((0, 1, 1, 0), (0, 1, 1))
    """
    loads, longest = [0.0] * ranks, [0] * len(work)
    order = sorted(range(len(work)), key=lambda i: (-work[i], i))
    for i in order:
        longest[i] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[longest[i]] += work[i]
    if len(work) <= ranks or ranks ** len(work) > MAX_EXACT_ASSIGNMENTS:
        return tuple(longest)
    best, least = tuple(longest), max(loads)

    def give(at: int, owners: list[int], loads: list[float]) -> None:
        nonlocal best, least
        if at == len(order):
            best, least = tuple(owners), max(loads)
            return
        i = order[at]
        for rank in range(min(ranks, len({owners[j] for j in order[:at]}) + 1)):  # idle ranks are interchangeable
            if loads[rank] + work[i] < least * (1 - 1e-12):
                owners[i] = rank
                give(at + 1, owners, [x + work[i] * (r == rank) for r, x in enumerate(loads)])

    give(0, [0] * len(work), [0.0] * ranks)
    return best
