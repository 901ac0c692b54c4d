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

from collections.abc import Hashable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from math import prod

from shardwise.errors import LayoutError
from shardwise.model.dims.labels import expert_weights
from shardwise.model.dims.sequence_dims import can_use_ring_attention
from shardwise.model.gradients import values_on_backward_path
from shardwise.model.graph import Graph, Operator, buffers_written_in_place, writes_buffer
from shardwise.model.sharding.axis_nesting import already_sharded_error, heads_sharded_by_sequence, nested_dims, reserve_for_later_axes
from shardwise.model.sharding.axis_problem import AxisProblem, OperatorStrategy
from shardwise.model.sharding.axis_search import solve_axis
from shardwise.model.sharding.axis_values import FixedShards, OtherAxes
from shardwise.model.sharding.branch_owners import OwnedBranches, assign_owners
from shardwise.model.sharding.sharding import BranchOwners, Prices, Redistribution, Sharding, Shards, redistribution_collectives
from shardwise.ops.experts import EXPERT
from shardwise.plan.ir.axis import RING, ULYSSES_RING, Axis, attention_kind, axis_of, explain_unshardable
from shardwise.plan.ir.choice import AUTO
from shardwise.plan.ir.placement import D, P, Placement, R, has_partial_gradient, has_single_owner, is_disjoint_shard, is_halo, is_shard


def planned_dims(graph: Graph, axis: str, n: int, shards: Mapping[str, Shards] | None) -> dict[str, int] | None:
    """Return [value] -> dimension of it that is sharded over `axis`, where that is given (over data none is); None where it is searched.

    Raises:
        LayoutError: a shard names a parameter that the graph does not have, or a dimension of fewer entries than ranks.
    """
    dims = (shards or {}).get(axis)
    row = axis_of(axis)
    if dims is None:
        experts = expert_weights(graph) if row.shards_experts else ()
        searched = row.shards_weights or row.owns_operators
        return None if searched else {value: 0 for value in experts if graph.tensors[value].shape[0] >= n}
    names = {v.name: v for v in (*graph.parameters, *graph.buffers)}
    copied = buffers_written_in_place(graph)
    fixed = {}
    for name, dim in dims:
        if name not in names:
            raise LayoutError(f"the plan cuts {name} over {axis}, but the model has no such parameter or buffer")
        if row.owns_operators:
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
    decided = _ShardingBuilder.empty(graph)
    order = sorted((a for a in sizes if sizes[a] > 1), key=lambda a: _axis_order(axis_of(a)))
    planned = {axis: planned_dims(graph, axis, sizes[axis], shards) for axis in order}
    for axis in order:
        price = prices.get(axis, Prices()) if isinstance(prices, Mapping) else prices or Prices()
        row, cuts = axis_of(axis), planned[axis]
        fixed_shards = FixedShards({} if row.owns_operators else cuts, (labels or {}).get(axis, {}), attention_kind(attention))
        other_axes = _other_axes(decided, sizes, order, axis, planned, samples, sequence)
        problem = AxisProblem(graph, axis, sizes[axis], price, fixed_shards, other_axes, sequence=sequence, samples=samples)
        _check_axis(problem, sizes)
        chosen, variable_placements = (
            _solve_first_axis(problem) if axis == order[0] and not labels and not row.shards_weights else solve_axis(problem)
        )
        branches = assign_owners(problem, chosen, cuts) if row.owns_operators else OwnedBranches(chosen)
        decided.add(problem, branches, variable_placements)
    return decided.build(sizes, attention)


def _solve_first_axis(problem: AxisProblem) -> tuple[dict[str, OperatorStrategy], dict[str, Placement]]:
    """Return the solution of an axis before all others, to which it leaves nothing: independent of them, so cached per graph."""
    fixed = None if problem.planned_dims is None else tuple(problem.planned_dims.items())
    key = ("first axis", problem.axis, problem.n, problem.prices, fixed, problem.attention, problem.sequence, problem.samples)
    solved: dict[Hashable, tuple[dict[str, OperatorStrategy], dict[str, Placement]]] = problem.graph.analyses
    if key not in solved:
        solved[key] = solve_axis(problem)
    return solved[key]


def _axis_order(row: Axis) -> tuple[bool, bool, bool]:
    """Return the sort key of an axis: those that shard samples first, those of weights last, after the axes whose shards they shard
    again."""
    return not row.shards_samples, row.shards_weights, row.may_reshard


def _other_axes(
    decided: _ShardingBuilder,
    sizes: Mapping[str, int],
    order: list[str],
    axis: str,
    planned: Mapping[str, Mapping[str, int] | None],
    samples: bool,
    sequence: bool,
) -> OtherAxes:
    """Return what `axis` takes over from those before it in `order`, and leaves to those after it."""
    row, earlier = axis_of(axis), order[: order.index(axis)]
    outer_axes = tuple(a for a in order if axis_of(a).shards_samples) if samples and row.shards_weights else ()
    if sequence and row.shards_weights and not row.may_reshard:  # tensor ranks divide the positions of a context rank
        outer_axes = (*outer_axes, *(a for a in earlier if axis_of(a).shards_sequences))
    if row.may_reshard:
        outer_axes = (*outer_axes, *(a for a in earlier if axis_of(a).shards & row.shards and not axis_of(a).may_reshard))
    nested_shards, kernels, sliced = (
        nested_dims(decided, sizes, outer_axes, row) if earlier and outer_axes else ({}, frozenset[tuple[str, str]](), frozenset[str]())
    )
    for value, dims in heads_sharded_by_sequence(decided, sizes).items() if row.shards_weights else ():
        nested_shards.setdefault(value, {}).update(dims)
    later = order[len(earlier) + 1 :] if row.shards_weights else []
    reserved, pinned = reserve_for_later_axes(later, planned, planned[axis] or {})
    taken = {v: decided.taken_dims.get(v, set()) | reserved.get(v, set()) for v in (*decided.taken_dims, *reserved)}
    replicas = prod(sizes[a] for a in earlier if not axis_of(a).shards_weights)
    reshards = any(axis_of(a).may_reshard for a in order if axis_of(a).shards_weights)
    sending = [a for a in earlier if axis_of(a).shards_experts]
    sent = frozenset(name for name, labels in decided.labels.items() if any(labels.get(a) == EXPERT for a in sending))
    return OtherAxes(taken, nested_shards, kernels, sliced, pinned, bool(later), prod(sizes[a] for a in earlier), replicas, reshards, sent)


def _check_axis(problem: AxisProblem, sizes: Mapping[str, int]) -> None:
    """Refuse a planned dimension that another axis shards already, and an axis of positions or channels that the model does not have."""
    fixed = problem.planned_dims if problem.axis_record.shards_weights and problem.planned_dims else {}
    for v in (*problem.graph.parameters, *problem.graph.buffers):
        if v.value in fixed and not problem.can_shard(v.value, fixed[v.value]):
            raise already_sharded_error(v, fixed[v.value], problem.axis, problem.n)
    row, n = problem.axis_record, problem.n
    if row.shards_channels:
        cuts = any(problem.can_shard(*place) for place in problem.image_channels)
    elif row.shards_sequences:
        cuts = any(problem.can_shard(*place) for place in problem.sequence_dims)
    else:
        cuts = not row.shards_positions or any(
            row.shards & kinds and problem.can_shard(*place) for place, kinds in problem.image_positions.items()
        )
    if not cuts:
        raise LayoutError(f"{explain_unshardable(row, n, sizes)}; leave it out, or use fewer ranks")
    if row.shards_sequences and problem.attention in (RING, ULYSSES_RING) and not can_use_ring_attention(problem.rules):
        raise LayoutError(
            f"{row.name}={n} attention={problem.attention} passes keys round where attention is one operator "
            "(scaled_dot_product_attention), and this model has none; use attention=gather, or a fused implementation"
        )


@dataclass
class _ShardingBuilder:
    """Decisions of the axes solved so far, as in `Sharding`. `taken_dims`: by value the dimensions that they shard."""

    graph: Graph
    labels: dict[str, dict[str, str]]
    placements: dict[str, dict[str, Placement]]
    input_placements: dict[str, list[dict[str, Placement | None]]]
    gradient_axes: dict[str, list[str]] = field(default_factory=dict)
    redistributions: list[Redistribution] = field(default_factory=list)
    shards: dict[str, Shards] = field(default_factory=dict)
    taken_dims: dict[str, set[int]] = field(default_factory=dict)
    regions: tuple[BranchOwners, ...] = ()

    @classmethod
    def empty(cls, graph: Graph) -> _ShardingBuilder:
        needs: dict[str, list[dict[str, Placement | None]]] = {op.name: [{} for _ in op.inputs] for op in graph.operators}
        return cls(graph, {op.name: {} for op in graph.operators}, {value: {} for value in graph.tensors}, needs)

    def add(self, problem: AxisProblem, branches: OwnedBranches, placements: Mapping[str, Placement]) -> None:
        """Record one axis' solution: placements, deferred gradients, redistributions."""
        graph, axis, chosen = self.graph, problem.axis, branches.strategies
        self.regions += branches.regions
        for v in graph.variables:
            start = problem.initial_placements(v.value)
            self.placements[v.value][axis] = branches.placements.get(v.value) or (placements.get(v.value, R) if start is None else start[0])
        for op in graph.operators:
            choice = chosen[op.name]
            self.labels[op.name][axis] = choice.label
            for value, form in zip(op.outputs, choice.output_placements, strict=True):
                self.placements[value][axis] = form
            for row, needed in zip(self.input_placements[op.name], choice.input_placements, strict=True):
                row[axis] = needed
        defer_gradient_reductions(graph, axis, problem.grads, self.labels, self.placements, self.input_placements)
        self._mark_reduced_once(problem)
        self._add_redistributions(problem, {value: form for region in branches.regions for value, form in region.exit_shards.items()})
        stored = [(v.name, self.placements[v.value][axis]) for v in (*graph.parameters, *graph.buffers)]
        owners = [(name, form.rank) for name, form in stored if has_single_owner(form)]
        self.shards[axis] = tuple(owners or [(name, form.dim) for name, form in stored if is_shard(form)])
        for value, by_axis in self.placements.items():
            if is_disjoint_shard(form := by_axis[axis]):
                self.taken_dims.setdefault(value, set()).add(form.dim)
        for _, value, row in self._reads():
            if is_disjoint_shard(needed := row[axis]):
                self.taken_dims.setdefault(value, set()).add(needed.dim)

    def _reads(self) -> Iterator[tuple[Operator, str, dict[str, Placement | None]]]:
        """Yield (operator, value, placements) of everything that operators read."""
        for op in self.graph.operators:
            yield from ((op, value, row) for value, row in zip(op.inputs, self.input_placements[op.name], strict=True))

    def _mark_reduced_once(self, problem: AxisProblem) -> None:
        """Mark variables all of whose readers return partial gradients: these are reduced once a step."""
        axis = problem.axis
        uses: dict[str, list[Placement | None]] = {}
        for _, value, row in self._reads():
            uses.setdefault(value, []).append(row[axis])
        self._align_reads(problem, uses)
        for v in (*self.graph.parameters, *self.graph.inputs):
            wanted = {form for form in uses.get(v.value, ()) if form is not None}
            is_partial = wanted == {D} or (problem.axis_record.always_shards and wanted and all(map(has_partial_gradient, wanted)))
            if self.placements[v.value][axis] is R and is_partial and v.value in problem.grads:
                self.placements[v.value][axis] = D
                self.gradient_axes.setdefault(v.value, []).append(axis)
        for v in self.graph.inputs if problem.axis_record.shards_positions else ():
            read = {form for form in uses.get(v.value, ()) if form is not None}
            # All read the same single shard: that is a rank's input.
            if len(read) == 1 and (is_shard(only := read.pop()) or is_halo(only)):
                self.placements[v.value][axis] = only

    def _add_redistributions(self, problem: AxisProblem, exit_shards: Mapping[str, Placement]) -> None:
        """Add redistributions along the axis: each placement in which a value is needed, from the cheapest available one. `leaves`: sample
        shards of values that leave a region."""
        axis = problem.axis
        available = {value: [self.placements[value][axis]] for value in self.graph.tensors if axis in self.placements[value]}

        def redistribute(value: str, op: Operator, source: Placement, target: Placement) -> None:
            forward, backward = redistribution_collectives(source, target)
            backward = backward if value in problem.grads else ""
            self.redistributions.append(Redistribution(value, op.name, axis, source, target, forward, backward))
            available[value].append(target)

        for value, form in exit_shards.items():
            redistribute(value, self.graph.producers[value], available[value][0], form)
        for op, value, row in self._reads():
            if (needed := row[axis]) is not None and needed not in available[value]:
                redistribute(value, op, cheapest_source(problem, value, available[value], needed), needed)

    def _align_reads(self, problem: AxisProblem, uses: dict[str, list[Placement | None]]) -> None:
        """Let all read a parameter as D where some do, and others, which return no gradient, read it replicated.

        So an average of weights, which reads the trained ones, does not prevent reducing their gradients once a step.
        """
        graph, axis, grads = self.graph, problem.axis, problem.grads
        read_both_ways = {v.value for v in graph.parameters if v.value in grads and {R, D} <= set(uses.get(v.value, ()))}
        if not read_both_ways:
            return
        reached = values_on_backward_path(graph, grads)
        for op, value, row in self._reads():
            if value in read_both_ways and row[axis] is R and not any(v in reached and v in grads for v in op.outputs):
                row[axis] = D
        for value in read_both_ways:
            uses[value] = [row[axis] for _, v, row in self._reads() if v == value]

    def build(self, sizes: Mapping[str, int], attention: str) -> Sharding:
        graph = self.graph
        return Sharding(
            {a: n for a, n in sizes.items() if n > 1},
            self.labels,
            self.placements,
            {name: tuple(rows) for name, rows in self.input_placements.items()},
            {value: tuple(axes) for value, axes in self.gradient_axes.items()},
            tuple(self.redistributions),
            tuple(op.site for op in graph.operators if graph.rules[op.name] is None and not writes_buffer(op, graph.state)),
            self.shards,
            self.regions,
            attention=attention,
        )


def cheapest_source(problem: AxisProblem, value: str, sources: Iterable[Placement], target: Placement) -> Placement:
    """Return the placement from which `need` is cheapest to get."""
    return min(sources, key=lambda source: problem.redistribute_with_copies_s(value, source, target))


def defer_gradient_reductions(
    graph: Graph,
    axis: str,
    grads: Set[str],
    labels: dict[str, dict[str, str]],
    placements: dict[str, dict[str, Placement]],
    input_placements: dict[str, list[dict[str, Placement | None]]],
) -> None:
    """Let partial gradients pass backward through replicated operators, so that they are reduced once, at the parameter.

    A replicated operator whose outputs are needed only as D passes partial sums on: its own inputs become D. Over `data` a shard and a
    partial sum count as well: a slice of D returns a partial sum without a collective, where a slice of R would need one.
    """

    def passes(needed: set[Placement | None]) -> bool:
        return all(form is D or (axis_of(axis).always_shards and (has_partial_gradient(form) or form is P)) for form in needed)

    uses: dict[str, set[Placement | None]] = {}
    final = {graph.loss, *graph.outputs}
    for op in reversed(graph.operators):
        outputs = [value for value in op.outputs if value in grads]
        linear = op.function is None or op.function.has_linear_backward
        passes_partial_sums = linear and all(passes(uses.get(v, set())) and v not in final and placements[v][axis] is R for v in outputs)
        if labels[op.name][axis] == "" and passes_partial_sums and any(v in uses for v in outputs):
            for value in outputs:
                placements[value][axis] = D
            for value, row in zip(op.inputs, input_placements[op.name], strict=True):
                if row[axis] is R and value in grads:
                    row[axis] = D
        for value, row in zip(op.inputs, input_placements[op.name], strict=True):
            if row[axis] is not None:
                uses.setdefault(value, set()).add(row[axis])
