"""Sharding propagation: from factor rules to the sharded label of every operator over each mesh axis, and the redistributions.

Parameters (and buffers) are sharded as given for an axis, or the best sharding is searched. `Sharding` has, for every operator, the sharded
label, for every value the placement in which it is computed and those in which it is read (placements: `sharding.py`). A consumer sharded
on a label that an input lacks computes only its part of that input's gradient: it reads D.

Axes are solved one after another: `axis_problem.py` has the strategies of operators along one and their costs, `axis_values.py` the
placements of values and their redistribution, `axis_search.py` finds the cheapest. Here is what every axis leaves to the next, and the
result.

Which labels axes other than `data` may shard follows from `dims/labels.py`: those of weights; positions and samples only on request.

One dimension of a tensor is sharded by at most one axis, except for `depth`, the last of a grid of tensor ranks, and for samples: there the
shards of a dimension may be sharded again, for values that have such shards wherever they are read, so that none is gathered along one axis
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from weft.errors import LayoutError
from weft.model.dims.labels import expert_weights
from weft.model.dims.sequences import passes_round
from weft.model.gradients import backward_reached
from weft.model.graph import Graph, copied_into, writes_buffer
from weft.model.sharding.axis_problem import AxisProblem, Choice
from weft.model.sharding.axis_search import solve
from weft.model.sharding.axis_values import Given, Others
from weft.model.sharding.deferral import defer
from weft.model.sharding.grid import heads_in_pieces, kept_for, nested, twice_cut
from weft.model.sharding.owners import Taken, assign_owners
from weft.model.sharding.sharding import Move, Owners, Prices, Sharding, Shards, move_collectives
from weft.plan.axis import BOTH, RING, Axis, attention_kind, axis_of, nothing_to_cut
from weft.plan.choice import AUTO
from weft.plan.placement import D, Placement, R, hands_summands, is_halo, is_owned, is_piece, is_shard


def given_dims(graph: Graph, axis: str, n: int, shards: Mapping[str, Shards] | None) -> dict[str, int] | None:
    """Return [value] -> dimension of it that is sharded over `axis`, where that is given (over data none is); None where it is searched.

    Raises:
        LayoutError: a shard names a parameter that the graph does not have, or a dimension of fewer entries than ranks.
    """
    dims = (shards or {}).get(axis)
    row = axis_of(axis)
    if dims is None:
        experts = expert_weights(graph) if row.cuts_experts else ()
        searched = row.cuts_weights or row.owns
        return None if searched else {value: 0 for value in experts if graph.tensors[value].shape[0] >= n}
    names = {v.name: v for v in (*graph.parameters, *graph.buffers)}
    copied = copied_into(graph)
    fixed = {}
    for name, dim in dims:
        if name not in names:
            raise LayoutError(f"the plan cuts {name} over {axis}, but the model has no such parameter or buffer")
        if row.owns:
            fixed[names[name].value] = dim
            if dim >= n:
                raise LayoutError(f"the plan gives {name} to rank {dim} of {axis}={n}; ranks count from 0 to {n - 1}")
            continue
        if names[name].value in copied:
            raise LayoutError(f"the plan cuts {name} over {axis}, but the model writes all of it in place; leave that cut out")
        shape = names[name].tensor.shape
        if dim >= len(shape) or shape[dim] < n:
            raise LayoutError(f"the plan cuts dimension {dim} of {name} {list(shape)} over {axis}={n}, which leaves ranks without a piece")
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
    attention: str = AUTO,
) -> Sharding:
    """Complete the sharding over the axes of `sizes` (those of size 1 are left out), `data` first.

    `shards[axis]` gives the sharded dimensions of parameters and buffers; a missing axis is searched (`data` shards none).
    `labels[axis][site]`: the sharded label of an operator, "" for none, with `+` where it leaves partial sums; the rest is searched.
    `sequence`: values between products may be sharded along positions as well (sequence parallelism, Korthikanti et al. 2022). `attention`:
    how ranks of a context axis attend to each other's positions. `samples`: tensor ranks may shard samples as well, operator by operator,
    the shards of `data` again (Krizhevsky 2014).

    Raises:
        LayoutError: a shard names a parameter that the graph does not have, or a dimension of fewer entries than ranks; a label on which an
            operator cannot be sharded.
    """
    decided = _Found.of(graph)
    order = sorted((a for a in sizes if sizes[a] > 1), key=lambda a: _turn(axis_of(a)))
    planned = {axis: given_dims(graph, axis, sizes[axis], shards) for axis in order}
    for axis in order:
        price = prices.get(axis, Prices()) if isinstance(prices, Mapping) else prices or Prices()
        row, cuts = axis_of(axis), planned[axis]
        fixed_shards = Given({} if row.owns else cuts, (labels or {}).get(axis, {}), attention_kind(attention))
        other_axes = _others(decided, sizes, order, axis, planned, samples)
        problem = AxisProblem(graph, axis, sizes[axis], price, fixed_shards, other_axes, sequence=sequence, samples=samples)
        _check_axis(problem)
        chosen, variable_placements = _solved_first(problem) if axis == order[0] and not labels and not row.cuts_weights else solve(problem)
        branches = assign_owners(problem, chosen, cuts) if row.owns else Taken(chosen)
        decided.add(problem, branches, variable_placements)
    return decided.sharding(sizes, attention)


def _solved_first(problem: AxisProblem) -> tuple[dict[str, Choice], dict[str, Placement]]:
    """Return the solution of an axis before all others, to which it leaves nothing: independent of them, so cached per graph."""
    fixed = None if problem.fixed is None else tuple(problem.fixed.items())
    key = (problem.axis, problem.n, problem.prices, fixed, problem.attention, problem.sequence, problem.samples)
    solved: dict[object, tuple[dict[str, Choice], dict[str, Placement]]] = problem.graph.solved_first
    if key not in solved:
        solved[key] = solve(problem)
    return solved[key]


def _turn(row: Axis) -> tuple[bool, bool, bool]:
    """Return the sort key of an axis: those that shard samples first, those of weights last, after the axes whose shards they shard
    again."""
    return not row.cuts_samples, row.cuts_weights, row.again


def _others(
    decided: _Found, sizes: Mapping[str, int], order: list[str], axis: str, planned: Mapping[str, Mapping[str, int] | None], samples: bool
) -> Others:
    """Return what `axis` takes over from those before it in `order`, and leaves to those after it."""
    row, earlier = axis_of(axis), order[: order.index(axis)]
    outer_axes = tuple(a for a in order if axis_of(a).cuts_samples) if samples and row.cuts_weights else ()
    if row.again:
        outer_axes = (*outer_axes, *(a for a in earlier if axis_of(a).cuts & row.cuts and not axis_of(a).again))
    nested_shards, kernels, sliced = (
        nested(decided, sizes, outer_axes, row) if earlier and outer_axes else ({}, frozenset[tuple[str, str]](), frozenset[str]())
    )
    for value, dims in heads_in_pieces(decided, sizes).items() if row.cuts_weights else ():
        nested_shards.setdefault(value, {}).update(dims)
    later = order[len(earlier) + 1 :] if row.cuts_weights else []
    reserved, pinned = kept_for(later, planned, planned[axis] or {})
    taken = {v: decided.taken.get(v, set()) | reserved.get(v, set()) for v in (*decided.taken, *reserved)}
    replicas = prod(sizes[a] for a in earlier if not axis_of(a).cuts_weights)
    reshards = any(axis_of(a).again for a in order if axis_of(a).cuts_weights)
    return Others(taken, nested_shards, kernels, sliced, pinned, bool(later), prod(sizes[a] for a in earlier), replicas, reshards)


def _check_axis(problem: AxisProblem) -> None:
    """Refuse a planned dimension that another axis shards already, and an axis of positions or channels that the model does not have."""
    fixed = problem.fixed if problem.row.cuts_weights and problem.fixed else {}
    for v in (*problem.graph.parameters, *problem.graph.buffers):
        if v.value in fixed and not problem.cuttable(v.value, fixed[v.value]):
            raise twice_cut(v, fixed[v.value], problem.axis, problem.n)
    row, n = problem.row, problem.n
    if row.cuts_channels:
        cuts = any(problem.cuttable(*place) for place in problem.channels)
    elif row.cuts_sequences:
        cuts = any(problem.cuttable(*place) for place in problem.sequences)
    else:
        cuts = not row.cuts_positions or any(row.cuts & kinds and problem.cuttable(*place) for place, kinds in problem.positions.items())
    if not cuts:
        raise LayoutError(f"{nothing_to_cut(row, n)}; leave it out, or use fewer ranks")
    if row.cuts_sequences and problem.attention in (RING, BOTH) and not passes_round(problem.rules):
        raise LayoutError(
            f"{row.name}={n} attention={problem.attention} passes keys round where attention is one operator "
            "(scaled_dot_product_attention), and this model has none; use attention=gather, or a fused implementation"
        )


@dataclass
class _Found:
    """Decisions of the axes solved so far, as in `Sharding`. `taken_dims`: by value the dimensions that they shard."""

    graph: Graph
    ops: dict[str, dict[str, str]]
    forms: dict[str, dict[str, Placement]]
    needs: dict[str, list[dict[str, Placement | None]]]
    gradients: dict[str, list[str]] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    cut: dict[str, Shards] = field(default_factory=dict)
    taken: dict[str, set[int]] = field(default_factory=dict)
    regions: tuple[Owners, ...] = ()

    @classmethod
    def of(cls, graph: Graph) -> _Found:
        needs: dict[str, list[dict[str, Placement | None]]] = {op.name: [{} for _ in op.inputs] for op in graph.operators}
        return cls(graph, {op.name: {} for op in graph.operators}, {value: {} for value in graph.tensors}, needs)

    def add(self, problem: AxisProblem, taken: Taken, placed: Mapping[str, Placement]) -> None:
        """Record one axis' solution: placements, deferred gradients, redistributions."""
        graph, axis, chosen = self.graph, problem.axis, taken.choices
        self.regions += taken.regions
        for v in graph.variables:
            start = problem.start(v.value)
            self.forms[v.value][axis] = taken.placed.get(v.value) or (placed.get(v.value, R) if start is None else start[0])
        for op in graph.operators:
            choice = chosen[op.name]
            self.ops[op.name][axis] = choice.label
            for value, form in zip(op.outputs, choice.makes, strict=True):
                self.forms[value][axis] = form
            for row, needed in zip(self.needs[op.name], choice.needs, strict=True):
                row[axis] = needed
        defer(graph, axis, problem.grads, self.ops, self.forms, self.needs)
        self._sum_once(problem)
        self._move(problem, {value: form for region in taken.regions for value, form in region.leaves.items()})
        stored = [(v.name, self.forms[v.value][axis]) for v in (*graph.parameters, *graph.buffers)]
        owners = [(name, form.rank) for name, form in stored if is_owned(form)]
        self.cut[axis] = tuple(owners or [(name, form.dim) for name, form in stored if is_shard(form)])
        for value, by_axis in self.forms.items():
            if is_piece(form := by_axis[axis]):
                self.taken.setdefault(value, set()).add(form.dim)
        for op in graph.operators:
            for value, by in zip(op.inputs, self.needs[op.name], strict=True):
                if is_piece(needed := by[axis]):
                    self.taken.setdefault(value, set()).add(needed.dim)

    def _sum_once(self, problem: AxisProblem) -> None:
        """Mark variables all of whose readers return partial gradients: these are reduced once a step."""
        axis = problem.axis
        uses: dict[str, list[Placement | None]] = {}
        for op in self.graph.operators:
            for value, row in zip(op.inputs, self.needs[op.name], strict=True):
                uses.setdefault(value, []).append(row[axis])
        _share_reads(self.graph, problem, uses, self.needs)
        for v in (*self.graph.parameters, *self.graph.inputs):
            wanted = {form for form in uses.get(v.value, ()) if form is not None}
            is_partial = wanted == {D} or (problem.row.follows and wanted and all(map(hands_summands, wanted)))
            if self.forms[v.value][axis] is R and is_partial and v.value in problem.grads:
                self.forms[v.value][axis] = D
                self.gradients.setdefault(v.value, []).append(axis)
        for v in self.graph.inputs if problem.row.cuts_positions else ():
            read = {form for form in uses.get(v.value, ()) if form is not None}
            # All read the same single shard: that is a rank's input.
            if len(read) == 1 and (is_shard(only := read.pop()) or is_halo(only)):
                self.forms[v.value][axis] = only

    def _move(self, problem: AxisProblem, leaves: Mapping[str, Placement]) -> None:
        """Add redistributions along the axis: each placement in which a value is needed, from the cheapest available one. `leaves`: sample
        shards of values that leave a region."""
        axis = problem.axis
        available = {value: [self.forms[value][axis]] for value in self.graph.tensors if axis in self.forms[value]}
        producers = self.graph.producer() if leaves else {}
        for value, form in leaves.items():
            forward, backward = move_collectives(available[value][0], form)
            move = Move(value, producers[value].name, axis, available[value][0], form, forward, backward if value in problem.grads else "")
            self.moves.append(move)
            available[value].append(form)
        for op in self.graph.operators:
            for value, row in zip(op.inputs, self.needs[op.name], strict=True):
                needed = row[axis]
                if needed is None or needed in available[value]:
                    continue
                source = cheapest(problem, value, available[value], needed)
                forward, backward = move_collectives(source, needed)
                self.moves.append(Move(value, op.name, axis, source, needed, forward, backward if value in problem.grads else ""))
                available[value].append(needed)

    def sharding(self, sizes: Mapping[str, int], attention: str) -> Sharding:
        graph = self.graph
        state = {v.value: v for v in (*graph.parameters, *graph.buffers)}
        return Sharding(
            {a: n for a, n in sizes.items() if n > 1},
            self.ops,
            self.forms,
            {name: tuple(rows) for name, rows in self.needs.items()},
            {value: tuple(axes) for value, axes in self.gradients.items()},
            tuple(self.moves),
            tuple(op.site for op in graph.operators if graph.rules[op.name] is None and not writes_buffer(op, state)),
            self.cut,
            self.regions,
            attention,
        )


def _share_reads(
    graph: Graph, problem: AxisProblem, uses: dict[str, list[Placement | None]], needs: Mapping[str, list[dict[str, Placement | None]]]
) -> None:
    """Let all read a parameter as D where some do, and others, which return no gradient, read it replicated.

    So an average of weights, which reads the trained ones, does not prevent reducing their gradients once a step.
    """
    axis = problem.axis
    read_both_ways = {v.value for v in graph.parameters if v.value in problem.grads and {R, D} <= set(uses.get(v.value, ()))}
    if not read_both_ways:
        return
    reached = backward_reached(graph, problem.grads)
    for op in graph.operators:
        if read_both_ways.intersection(op.inputs) and not any(v in reached and v in problem.grads for v in op.outputs):
            for value, row in zip(op.inputs, needs[op.name], strict=True):
                if value in read_both_ways and row[axis] is R:
                    row[axis] = D
    for value in read_both_ways:
        uses[value] = [row[axis] for op in graph.operators for v, row in zip(op.inputs, needs[op.name], strict=True) if v == value]


def cheapest(problem: AxisProblem, value: str, have: Iterable[Placement], need: Placement) -> Placement:
    """Return the placement from which `need` is cheapest to get."""
    return min(have, key=lambda source: problem.exact_s(value, source, need))
