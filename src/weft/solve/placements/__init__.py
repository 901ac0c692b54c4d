"""Which label of every operator is cut over a mesh axis, by integer programming. In: a graph, axes, prices, a memory budget. Out: a
`Placement` with its proven bound.

One axis after the other, as `model/propagate` does; `data` is completed by propagation, since it cuts samples and nothing else. Along
an axis the optimum is proven for the prices of the search, with repeated layers placed alike. Not modelled: overlap, and choices of
two axes that would only pay together.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from weft.errors import Infeasible, UsageError
from weft.model.graph import Graph
from weft.model.propagate import _Axis as Axis
from weft.model.propagate import given_dims, propagate
from weft.model.repeats import representatives
from weft.model.sharding import Form, Prices, Sharding, Shards
from weft.solve.placements.budget import Budget, Bytes, held, pieces
from weft.solve.placements.highs import Solution, available, check_available, least_bytes, solve
from weft.solve.placements.linear import Programme, programme
from weft.solve.placements.price import Cost, price
from weft.solve.placements.tables import Tables, tables

__all__ = ["Budget", "Bytes", "Cost", "Placement", "Solved", "available", "exceptions", "solve_placements"]

Labels = Mapping[str, str]  # [operator's site] -> the label that is cut, with `+` where summands are left; "" where it is replicated


@dataclass(frozen=True, slots=True)
class Solved:
    """How one axis was solved. `bound_s`: no placement that treats repeated layers alike costs less."""

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
class Placement:
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
) -> Placement:
    """Place every operator over the axes of `sizes`.

    Args:
        prices: of all axes, or by axis. shards: cuts that are given, by axis; the rest is searched.
        sequence: positions may be cut around the products (sequence parallelism). batch_cut: axes that may cut samples as well.
        fold: repeated layers are placed alike. limit_s: time for the solver, an axis. gap: it may stop at, relative.

    Raises:
        Infeasible: nothing fits the budget (with the least that is possible), or nothing was found in time.
        UsageError: an unknown axis, or the solver is not installed (`available()` says so beforehand).
        LayoutError: shards that the graph does not have.

    >>> from weft.model.graph import Operator, Ref, Tensor, Variable
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
    check_available()
    budget = budget or Budget()
    alike = representatives(graph) if fold else {}
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
        problem = Axis(
            graph,
            axis,
            sizes[axis],
            taken_by(graph, so_far),
            given_dims(graph, axis, sizes[axis], found),
            price_of,
            prod(before.values()),
            sequence,
        )
        if axis in batch_cut:
            problem.meanings = None
        ways = {} if so_far is None else pieces(graph, so_far.forms, before)
        divided = {} if so_far is None else _divided(so_far, before)
        table = tables(problem, alike)
        built = programme(table, budget, ways, divided)
        later = prod(sizes[a] for a in order[i + 1 :])
        answer = _solve(built, budget, later, limit_s, gap, axis, sizes[axis])
        chosen, stored = _read(table, built, answer)
        cost = price(table, chosen, stored)
        memory = held(table, budget, ways, divided, chosen, stored)
        named = {v.value: v.name for v in (*graph.parameters, *graph.buffers)}
        found[axis] = tuple((name, int(stored[value][1:])) for value, name in named.items() if stored.get(value, "R")[0] == "S")
        labels[axis] = {op.site: table.kinds[k].choices[chosen[k]].word for op in graph.operators for k in (table.kind_of[op.name],)}
        solved.append(
            Solved(
                axis,
                sizes[axis],
                cost,
                answer.bound,
                answer.proven,
                len(graph.operators),
                len(table.kinds),
                len(built.costs),
                len(built.rows),
                time.perf_counter() - began,
            )
        )
    sharding = propagate(graph, sizes, found, prices=prices, sequence=sequence, labels=labels)
    return Placement({axis: found[axis] for axis in order}, labels, sharding, memory, tuple(solved))


def exceptions(graph: Graph, sizes: Mapping[str, int], placement: Placement, *, sequence: bool = False) -> dict[str, Labels]:
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
    return a.ops[name][axis] == b.ops[name][axis] and [row[axis] for row in a.needs[name]] == [row[axis] for row in b.needs[name]]


def taken_by(graph: Graph, sharding: Sharding | None) -> dict[str, set[int]]:
    """[value] -> dimensions that the sharding's axes cut, where it is made or read."""
    found: dict[str, set[int]] = {}
    if sharding is None:
        return found
    for value, forms in sharding.forms.items():
        for form in forms.values():
            if form[0] == "S":
                found.setdefault(value, set()).add(int(form[1:]))
    for op in graph.operators:
        for value, needs in zip(op.inputs, sharding.needs[op.name], strict=True):
            for need in needs.values():
                if need is not None and need[0] == "S":
                    found.setdefault(value, set()).add(int(need[1:]))
    return found


def _check(sizes: Mapping[str, int], batch_cut: Collection[str]) -> None:
    for axis, size in sizes.items():
        if size < 1:
            raise UsageError(f"mesh axis {axis}={size}; every axis needs at least 1 rank")
    for axis in batch_cut:
        if axis not in sizes:
            raise UsageError(f"batch_cut names the axis {axis}, which is none of {', '.join(sizes)}")


def _divided(sharding: Sharding, sizes: Mapping[str, int]) -> dict[str, int]:
    return {name: prod(n for axis, n in sizes.items() if cut.get(axis)) for name, cut in sharding.ops.items()}


def _solve(built: Programme, budget: Budget, later: int, limit_s: float, gap: float, axis: str, size: int) -> Solution:
    most = budget.size_bytes * later  # axes that come later may divide all of it
    answer = solve(built, most, limit_s, gap)
    if answer is None:
        least = least_bytes(built, limit_s)
        raise Infeasible(
            f"no placement over {axis}={size} holds its parameters, gradients, optimizer states and activations in {most / 2**30:.3f} GiB "
            f"a rank; the least is {least / 2**30:.3f} GiB: use more ranks, a smaller microbatch, recomputation or ZeRO"
        )
    return answer


def _read(table: Tables, built: Programme, answer: Solution) -> tuple[list[int], dict[str, Form]]:
    """The choice of every kind, and the form of every parameter and buffer that is read."""
    chosen = [max(range(len(columns)), key=lambda q: answer.values[columns[q]]) for columns in built.choices]
    stored = {}
    for flow in table.flows:
        if flow.example in built.stores:
            form, _ = max(built.stores[flow.example], key=lambda pair: answer.values[pair[1]])
            stored.update(dict.fromkeys(flow.values, form))
    return chosen, stored
