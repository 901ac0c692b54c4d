"""An oracle of propagation: which label of every operator is cut over a mesh axis, by integer programming. In: a graph, axes, prices, a
memory budget. Out: an `Assignment` with its proven bound.

One axis after the other, as propagation does; `data` is completed by propagation, since it cuts samples and nothing else. Along
an axis the optimum is proven for the prices of the search, with repeated layers placed alike. Not modelled: overlap, and choices of
two axes that would only pay together.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod

from shardwise.errors import Infeasible, UsageError
from shardwise.model.graph import Graph
from shardwise.model.sharding.axis_problem import OperatorStrategy
from shardwise.model.sharding.axis_values import FixedShards, OtherAxes
from shardwise.model.sharding.propagate import planned_dims, propagate
from shardwise.model.sharding.sharding import Prices, Sharding, Shards
from shardwise.plan.ir.placement import Placement, R, is_shard
from tests.support.placements_oracle.budget import Budget, Bytes, held, pieces
from tests.support.placements_oracle.highs import Solution, least_bytes, solve
from tests.support.placements_oracle.linear import Programme, programme
from tests.support.placements_oracle.price import Cost, price
from tests.support.placements_oracle.repeats import representatives
from tests.support.placements_oracle.tables import DEFERRED, Axis, Tables, tables

__all__ = ["Assignment", "Budget", "Bytes", "Cost", "Solved", "exceptions", "solve_placements"]

INFINITE = float("inf")
COARSE = 5e-3  # relative gap at which repeated layers that are placed each for itself are good enough: many are equally good
Labels = Mapping[str, str]  # [operator's site] -> the label that is cut, with `+` where summands are left; "" where it is replicated


@dataclass(frozen=True, slots=True)
class Solved:
    """How one axis was solved. `bound_s`: no placement costs less that treats repeated layers alike (any, where they were placed apart)."""

    axis: str
    size: int
    cost: Cost
    bound_s: float
    proven: bool
    num_operators: int
    num_kinds: int
    num_columns: int
    num_rows: int
    seconds: float

    @property
    def gap(self) -> float:
        """Part of the cost that a better placement might save, at most."""
        return max(0.0, 1.0 - self.bound_s / self.cost.total) if self.cost.total > 0 else 0.0


@dataclass(frozen=True)
class Assignment:
    """The decision along every axis but `data`: `shards` and `labels` by axis, for `propagate` and a plan; what it costs and holds.

    `cost_s` is the cost along the last axis, which divides the compute, and what the axes before it move. `memory`: on one rank.
    """

    shards: Mapping[str, Shards]
    labels: Mapping[str, Labels]
    sharding: Sharding
    memory: Bytes
    solved: tuple[Solved, ...]

    @property
    def cost_s(self) -> float:
        if not self.solved:
            return 0.0
        return self.solved[-1].cost.total + sum(one.cost.moves_s for one in self.solved[:-1])

    @property
    def gap(self) -> float:
        """The largest gap of an axis."""
        return max((one.gap for one in self.solved), default=0.0)


def solve_placements(
    graph: Graph,
    sizes: Mapping[str, int],
    *,
    prices: Prices | Mapping[str, Prices] | None = None,
    budget: Budget | None = None,
    shards: Mapping[str, Shards] | None = None,
    sequence: bool = False,
    batch_cut: Collection[str] = (),
    fold: bool = True,
    limit_s: float = 10.0,
    gap: float = 1e-6,
) -> Assignment:
    """Place every operator over the axes of `sizes`.

    Args:
        prices: of all axes, or by axis. shards: cuts that are given, by axis; the rest is searched.
        sequence: positions may be cut around the products (sequence parallelism). batch_cut: axes that may cut samples as well.
        fold: repeated layers are placed alike, unless the budget is better used by placing them apart.
        limit_s: time for the solver, an axis. gap: it may stop at, relative (0.5 % where layers are placed apart).

    Raises:
        Infeasible: nothing fits the budget (with the least that is possible), or nothing was found in time.
        UsageError: an unknown axis.
        LayoutError: shards that the graph does not have.

    >>> from shardwise.model.graph import Operator, Ref, Tensor, Variable
    >>> shape = {"x": (64, 4096), "w": (4096, 4096), "y": (64, 4096), "loss": ()}
    >>> tensors = {name: Tensor(dims, "float32") for name, dims in shape.items()}
    >>> linear = Operator("y", "aten.linear.default", (Ref("x"), Ref("w")), (), ("y",), "a/linear")
    >>> loss = Operator("loss", "aten.sum.default", (Ref("y"),), (), ("loss",), "sum")
    >>> w = Variable("w", "a.weight", tensors["w"], trainable=True)
    >>> x = Variable("x", "x", tensors["x"], batched=True)
    >>> graph = Graph((w,), (), (x,), (), (linear, loss), tensors, "loss", 64)
    >>> solve_placements(graph, {"tensor": 2}).shards
    {'tensor': (('a.weight', 0),)}
    """
    _check(sizes, batch_cut)
    budget = budget or Budget()
    order = [axis for axis in sizes if axis != "data" and sizes[axis] > 1]
    found: dict[str, Shards] = dict(shards or {})
    labels: dict[str, Labels] = {}
    solved = []
    memory = Bytes()
    for i, axis in enumerate(order):
        began = time.perf_counter()
        before = {a: sizes[a] for a in ("data", *order[:i]) if sizes.get(a, 1) > 1}
        so_far = propagate(graph, before, found, prices=prices, sequence=sequence, labels=labels) if before else None
        price_of = prices.get(axis, Prices()) if isinstance(prices, Mapping) else prices or Prices()
        fixed = planned_dims(graph, axis, sizes[axis], found)
        others = OtherAxes(taken_by(graph, so_far), num_ranks=prod(before.values()), num_replicas=before.get("data", 1))
        problem = Axis(graph, axis, sizes[axis], price_of, FixedShards(fixed), others, sequence=sequence)
        if axis in batch_cut:
            problem.weight_label_meanings = None
        ways = {} if so_far is None else pieces(graph, so_far.placements, before)
        divided = {} if so_far is None else _divided(so_far, before)
        later = prod(sizes[a] for a in order[i + 1 :])  # axes that come later may divide all of it
        limits = replace(budget, size_bytes=budget.size_bytes * later)
        one, answer = _along(problem, limits, ways, divided, fold, limit_s, gap)
        cost = price(one.tables, one.chosen, one.stored)
        memory = held(one.tables, budget, ways, divided, one.chosen, one.stored)
        named = {v.value: v.name for v in (*graph.parameters, *graph.buffers)}
        found[axis] = tuple((name, form.dim) for v, name in named.items() if is_shard(form := one.stored.get(v, R)))
        labels[axis] = {op.site: one.choice(op.name).plan_name for op in graph.operators}
        counts = (len(graph.operators), len(one.tables.kinds), len(one.programme.costs), len(one.programme.rows))
        solved.append(Solved(axis, sizes[axis], cost, answer.bound, answer.proven, *counts, time.perf_counter() - began))
    sharding = propagate(graph, sizes, found, prices=prices, sequence=sequence, labels=labels)
    return Assignment({axis: found[axis] for axis in order}, labels, sharding, memory, tuple(solved))


@dataclass(frozen=True)
class _One:
    """A solution along one axis: the choice of every kind, and the form of every parameter and buffer that is read."""

    tables: Tables
    programme: Programme
    chosen: tuple[int, ...]
    stored: Mapping[str, Placement]

    def choice(self, operator: str) -> OperatorStrategy:
        kind = self.tables.kind_of[operator]
        return self.tables.kinds[kind].choices[self.chosen[kind]]


def _along(
    problem: Axis, budget: Budget, ways: Mapping[str, int], divided: Mapping[str, int], fold: bool, limit_s: float, gap: float
) -> tuple[_One, Solution]:
    """Solve one axis: repeated layers alike first, and where the budget costs time, each for itself from there."""
    began = time.perf_counter()
    alike = representatives(problem.graph) if fold else {}
    table = tables(problem, alike)
    built = programme(table, budget, ways, divided)
    free = solve(built, INFINITE, limit_s, gap)
    if free is None:
        raise Infeasible(f"the cuts that are given over {problem.axis}={problem.n} cannot all be; leave some of them out")
    one = _read(table, built, free)
    if budget.size_bytes == INFINITE or held(table, budget, ways, divided, one.chosen, one.stored).total <= budget.size_bytes:
        return one, free
    answer = solve(built, budget.size_bytes, limit_s, gap)
    repeats = len(table.kinds) < len(problem.graph.operators)
    if answer is not None:
        one = _read(table, built, answer)
        if not repeats:
            return one, answer
    if repeats:
        table = tables(problem, {})
        built = programme(table, budget, ways, divided)
    left = max(limit_s - (time.perf_counter() - began), 0.1 * limit_s)
    start = {} if answer is None else _start(table, built, one)
    apart = None
    try:
        apart = solve(built, budget.size_bytes, left, max(gap, COARSE), start) if repeats else None
    except Infeasible:
        if answer is None:
            raise
    if apart is None and answer is None:
        least = least_bytes(built, limit_s)
        known = f"the least is {least / 2**30:.3f} GiB" if least < INFINITE else "what is the least was not found in time"
        raise Infeasible(
            f"no placement over {problem.axis}={problem.n} holds its parameters, gradients, optimizer states and activations in "
            f"{budget.size_bytes / 2**30:.3f} GiB a rank; {known}: use more ranks, a smaller microbatch, recomputation or ZeRO"
        )
    if answer is None or (apart is not None and apart.cost < answer.cost):
        assert apart is not None
        return _read(table, built, apart), apart
    return one, answer if apart is None else replace(answer, bound=apart.bound)


def _start(table: Tables, built: Programme, one: _One) -> dict[int, float]:
    """Columns of 0 and 1 of a solution with repeated layers alike, in the programme in which each stands for itself."""
    found: dict[int, float] = {}
    for kind, columns in zip(table.kinds, built.choices, strict=True):
        chosen = one.choice(kind.operators[0])
        for column, choice in zip(columns, kind.choices, strict=True):
            found[column] = float(
                choice.plan_name == chosen.plan_name and (DEFERRED in choice.output_placements) == (DEFERRED in chosen.output_placements)
            )
    return found


def exceptions(graph: Graph, sizes: Mapping[str, int], placement: Assignment, *, sequence: bool = False) -> dict[str, Labels]:
    """The labels that a plan must say, by axis: those which propagation from the shards alone, at its own prices, would choose otherwise.

    Empty where the shards say everything. With what comes back, `propagate(graph, sizes, shards, labels=...)` is the placement's.
    """
    found: dict[str, dict[str, str]] = {}
    for _ in range(4):
        alone = propagate(graph, sizes, placement.shards, sequence=sequence, labels=found)
        missing = 0
        for axis, labels in placement.labels.items():
            for op in graph.operators:
                if not _same(alone, placement.sharding, op.name, axis) and op.site not in found.get(axis, {}):
                    found.setdefault(axis, {})[op.site] = labels[op.site]
                    missing += 1
        if not missing:
            return dict(found)
    return dict(placement.labels)


def _same(a: Sharding, b: Sharding, name: str, axis: str) -> bool:
    return a.labels[name][axis] == b.labels[name][axis] and [row[axis] for row in a.input_placements[name]] == [
        row[axis] for row in b.input_placements[name]
    ]


def taken_by(graph: Graph, sharding: Sharding | None) -> dict[str, set[int]]:
    """[value] -> dimensions that the sharding's axes cut, where it is made or read."""
    found: dict[str, set[int]] = {}
    if sharding is None:
        return found
    for value, forms in sharding.placements.items():
        for form in forms.values():
            if is_shard(form):
                found.setdefault(value, set()).add(form.dim)
    for op in graph.operators:
        for value, needs in zip(op.inputs, sharding.input_placements[op.name], strict=True):
            for need in needs.values():
                if is_shard(need):
                    found.setdefault(value, set()).add(need.dim)
    return found


def _check(sizes: Mapping[str, int], batch_cut: Collection[str]) -> None:
    for axis, size in sizes.items():
        if size < 1:
            raise UsageError(f"mesh axis {axis}={size}; every axis needs at least 1 rank")
    for axis in batch_cut:
        if axis not in sizes:
            raise UsageError(f"batch_cut names the axis {axis}, which is none of {', '.join(sizes)}")


def _divided(sharding: Sharding, sizes: Mapping[str, int]) -> dict[str, int]:
    return {name: prod(n for axis, n in sizes.items() if cut.get(axis)) for name, cut in sharding.labels.items()}


def _read(table: Tables, built: Programme, answer: Solution) -> _One:
    chosen = tuple(max(range(len(columns)), key=lambda q: answer.values[columns[q]]) for columns in built.choices)
    stored: dict[str, Placement] = {}
    for flow in table.flows:
        if flow.example in built.stores:
            form, _ = max(built.stores[flow.example], key=lambda pair: answer.values[pair[1]])
            stored.update(dict.fromkeys(flow.values, form))
    return _One(table, built, chosen, stored)
