"""Branch parallelism: which rank of an axis owns which parallel branches of a graph. Inside a region each operator runs on one rank, for
all samples that the ranks of the axis share; everywhere else these samples are sharded.

Starts from the strategies that shard samples. A region is taken as a unit or not at all: values that enter and leave it are sharded by
samples, or are replicated and need no gradient on more than one rank.

Of overlapping regions those are taken that minimize the work of the busiest ranks. A plan names the owners of parameters, and then those
regions are taken whose parameters it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardwise.errors import LayoutError
from shardwise.model.graph import Graph
from shardwise.model.sharding.axis_problem import AxisProblem, OperatorStrategy
from shardwise.model.sharding.sharding import BranchOwners
from shardwise.model.stages.branches import BranchRegion, balance_branches, find_regions
from shardwise.plan.ir.placement import Placement, R, Shard, SingleOwner, is_shard


@dataclass(frozen=True)
class OwnedBranches:
    """`strategies`: by operator, with owners. `placements`: of parameters and buffers that a single rank reads. `regions`: as in
    `Sharding`."""

    strategies: Mapping[str, OperatorStrategy]
    placements: Mapping[str, Placement] = field(default_factory=dict)
    regions: tuple[BranchOwners, ...] = ()


def assign_owners(problem: AxisProblem, chosen: Mapping[str, OperatorStrategy], planned: Mapping[str, int] | None) -> OwnedBranches:
    """Assign branches to ranks of the axis. `planned`: by parameter or buffer the rank that a plan gives it to; None where that is
    searched.

    Raises:
        LayoutError: the graph has no usable region; a plan's owners of one branch differ.
    """
    graph, n = problem.graph, problem.n
    candidates = [_RegionCandidate.of(problem, chosen, region) for region in find_regions(graph)]
    valid = [c for c in candidates if not c.reason]
    if not valid:
        reasons = "; ".join(dict.fromkeys(c.reason for c in candidates[:3]))
        raise LayoutError(
            f"{problem.axis}={n} gives parallel branches to ranks, and "
            + (f"no branches of this model can be taken: {reasons}" if reasons else "this model has no parallel branches with products")
            + "; leave it out, or use data for these ranks"
        )
    ranks = [c.planned_ranks(planned) if planned is not None else balance_branches(c.branch_s, n) for c in valid]
    regions_chosen = _choose_regions(valid, ranks, n, planned is not None)
    choices, placements = dict(chosen), dict[str, Placement]()
    regions: list[tuple[BranchOwners, int]] = []
    for c, of in regions_chosen:
        owners = {graph.operators[i].name: rank for branch, rank in zip(c.region.branches, of, strict=True) for i in branch}
        loads = [sum(s for s, rank in zip(c.branch_s, of, strict=True) if rank == k) for k in range(n)]
        regions.append((BranchOwners(problem.axis, owners, c.exit_shards), loads.index(max(loads))))
        for name, rank in owners.items():
            choice = chosen[name]
            choices[name] = replace(
                choice,
                label="",
                input_placements=(SingleOwner(rank),) * len(choice.input_placements),
                output_placements=(SingleOwner(rank),) * len(choice.output_placements),
            )
    for value, readers in _ranks_reading(graph, [region for region, _ in regions]).items():
        (reader, *other_readers) = readers
        if reader is not None and not other_readers and graph.tensors[value].shape:
            placements[value] = SingleOwner(reader)
    complete = (replace(region, off_rank=_off_busiest_rank(graph, region, busiest, placements)) for region, busiest in regions)
    return OwnedBranches(choices, placements, tuple(complete))


def _off_busiest_rank(graph: Graph, region: BranchOwners, busiest: int, placements: Mapping[str, Placement]) -> frozenset[str]:
    """Return operators of other ranks than the busiest one of a region, and the values that only these have."""
    other_ops = [op for op in graph.operators if region.rank_of.get(op.name, busiest) != busiest]
    values = {value for op in other_ops for value in op.outputs}
    return frozenset({op.name for op in other_ops} | values | {value for op in other_ops for value in op.inputs if value in placements})


def _ranks_reading(graph: Graph, regions: list[BranchOwners]) -> dict[str, set[int | None]]:
    """Return, by parameter and buffer, the ranks that read it; None stands for all."""
    owners = {name: rank for region in regions for name, rank in region.rank_of.items()}
    readers: dict[str, set[int | None]] = {}
    for op in graph.operators:
        for value in op.inputs:
            if graph.is_state.get(value):
                readers.setdefault(value, set()).add(owners.get(op.name))
    return readers


@dataclass(frozen=True)
class _RegionCandidate:
    """A candidate region; `reason`: why it cannot be taken. `branch_s`: seconds of every branch. `exit_shards`: sample shards of values
    that leave it."""

    problem: AxisProblem
    region: BranchRegion
    branch_s: tuple[float, ...]
    exit_shards: Mapping[str, Shard]
    reason: str = ""

    @classmethod
    def of(cls, problem: AxisProblem, chosen: Mapping[str, OperatorStrategy], region: BranchRegion) -> _RegionCandidate:
        operators = problem.graph.operators
        region = region.join_branches(problem.statistics_buffers, problem.graph)
        leaves, why, at = _region_borders(problem, chosen, region)
        while why and operators[at].name not in problem.products and (smaller := region.without(at, problem.graph)) is not None:
            region = smaller  # operators other than products may as well run on all ranks
            leaves, why, at = _region_borders(problem, chosen, region)
        if len(region.branches) == 1:
            why = f"{operators[region.branches[0][0]].site} and the others write the same running statistics, in order"
        work = tuple(sum(problem.compute_s(operators[i]) for i in branch) for branch in region.branches)
        return cls(problem, region, work, leaves, why)

    def planned_ranks(self, rank_of: Mapping[str, int]) -> tuple[int, ...]:
        """Return the rank of every branch in a plan, the least loaded for one without parameters; empty where the plan names none."""
        operators, loads = self.problem.graph.operators, [0.0] * self.problem.n
        named = [{rank_of[v] for i in branch for v in operators[i].inputs if v in rank_of} for branch in self.region.branches]
        if not any(named) or any(len(ranks_named) > 1 for ranks_named in named):  # the plan means regions inside of it
            return ()
        chosen = [0] * len(named)
        for i in sorted(range(len(named)), key=lambda i: (not named[i], -self.branch_s[i], i)):
            chosen[i] = named[i].pop() if named[i] else min(range(len(loads)), key=lambda rank: loads[rank])
            loads[chosen[i]] += self.branch_s[i]
        return tuple(chosen)


def _choose_regions(
    candidates: list[_RegionCandidate], ranks: list[tuple[int, ...]], n: int, is_planned: bool
) -> list[tuple[_RegionCandidate, tuple[int, ...]]]:
    """Return, of nested regions, those that take most work off the busiest ranks; in graph order."""
    value: dict[int, float] = {}
    inner: dict[int, list[int]] = {}
    for k in reversed(range(len(candidates))):  # inner ones first
        operators_here = candidates[k].region.operators
        nested = [j for j in inner if candidates[j].region.operators <= operators_here]
        outermost = [j for j in nested if not any(candidates[j].region.operators < candidates[i].region.operators for i in nested)]
        loads = [0.0] * n
        for seconds, rank in zip(candidates[k].branch_s, ranks[k], strict=False):
            loads[rank] += seconds
        gain, inner_gain = sum(loads) - max(loads), sum(value[j] for j in outermost)
        takes = bool(ranks[k]) and gain > 0 and (gain >= inner_gain or is_planned)
        inner[k], value[k] = ([] if takes else outermost), gain if takes else inner_gain
    chosen: list[int] = []
    covered: frozenset[int] = frozenset()

    def take(k: int) -> None:
        nonlocal covered
        if covered & candidates[k].region.operators:
            return
        if inner[k] or not (value[k] and ranks[k]):
            for j in inner[k]:
                take(j)
            return
        covered |= candidates[k].region.operators
        chosen.append(k)

    for k in range(len(candidates)):
        take(k)
    return [(candidates[k], ranks[k]) for k in sorted(chosen, key=lambda k: min(candidates[k].region.operators))]


def _region_borders(
    problem: AxisProblem, chosen: Mapping[str, OperatorStrategy], region: BranchRegion
) -> tuple[dict[str, Shard], str, int]:
    """Return (sample shards of values that leave a region, reason why it cannot be taken or empty, operator of the reason)."""
    graph, inside, rows = problem.graph, region.operators, {value for value, _ in problem.expert_rows}
    forms = {v: form for op in graph.operators for v, form in zip(op.outputs, chosen[op.name].output_placements, strict=True)}
    inner_values = {v for i in inside for v in graph.operators[i].outputs}
    read = {v for i, op in enumerate(graph.operators) if i not in inside for v in op.inputs} | {graph.loss, *graph.outputs}
    leaves: dict[str, Shard] = {}
    for value in sorted(inner_values & read, key=graph.producer_index.__getitem__):
        form = forms[value]
        if value in rows:
            return {}, f"{value} leaves them, and its rows are in the order of experts", graph.producer_index[value]
        if not is_shard(form) or graph.tensors[value].dtype.startswith("complex"):
            return {}, f"{value} leaves them, and is not sharded by samples", graph.producer_index[value]
        leaves[value] = form
    for i in sorted(inside):
        op = graph.operators[i]
        for value in op.inputs:
            if value in inner_values:
                continue
            if value in rows:
                return {}, f"{op.site} reads {value}, whose rows are in the order of experts", i
            if problem.statistics_buffers & {value}:
                if any(value in other.inputs for j, other in enumerate(graph.operators) if j not in inside):
                    return {}, f"{op.site} writes statistics that others read", i
                continue
            if value in problem.written_in_place:
                return {}, f"{op.site} reads a buffer that is written while the model runs", i
            if graph.is_state.get(value):
                continue
            form = forms.get(value) or (problem.initial_placements(value) or (R,))[0]
            if graph.tensors[value].dtype.startswith("complex") or not (
                is_shard(form) or (form is R and value not in problem.differentiable)
            ):
                return {}, f"{op.site} reads {value}, which is not sharded by samples", i
    return leaves, "", 0
