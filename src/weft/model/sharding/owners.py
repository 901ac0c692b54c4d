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

from weft.errors import LayoutError
from weft.model.graph import Graph
from weft.model.sharding.axis_problem import AxisProblem, Choice
from weft.model.sharding.sharding import Owners
from weft.model.stages.branches import Region, balanced
from weft.plan.placement import Owned, Placement, R, Shard, is_shard


@dataclass(frozen=True)
class Taken:
    """`strategies`: by operator, with owners. `placements`: of parameters and buffers that a single rank reads. `regions`: as in
    `Sharding`."""

    choices: Mapping[str, Choice]
    placed: Mapping[str, Placement] = field(default_factory=dict)
    regions: tuple[Owners, ...] = ()


def assign_owners(problem: AxisProblem, chosen: Mapping[str, Choice], planned: Mapping[str, int] | None) -> Taken:
    """Assign branches to ranks of the axis. `planned`: by parameter or buffer the rank that a plan gives it to; None where that is
    searched.

    Raises:
        LayoutError: the graph has no usable region; a plan's owners of one branch differ.
    """
    graph, n = problem.graph, problem.n
    candidates = [_Candidate.of(problem, chosen, region) for region in graph.regions]
    valid = [c for c in candidates if not c.why]
    if not valid:
        reasons = "; ".join(dict.fromkeys(c.why for c in candidates[:3]))
        raise LayoutError(
            f"{problem.axis}={n} gives parallel branches to ranks, and "
            + (f"no branches of this model can be taken: {reasons}" if reasons else "this model has no parallel branches with products")
            + "; leave it out, or use data for these ranks"
        )
    ranks = [c.given(planned) if planned is not None else balanced(c.work, n) for c in valid]
    regions_chosen = _choose_regions(valid, ranks, n, planned is not None)
    choices, placements = dict(chosen), dict[str, Placement]()
    regions: list[tuple[Owners, int]] = []
    for c, of in regions_chosen:
        owners = {graph.operators[i].name: rank for branch, rank in zip(c.region.branches, of, strict=True) for i in branch}
        loads = [sum(s for s, rank in zip(c.work, of, strict=True) if rank == k) for k in range(n)]
        regions.append((Owners(problem.axis, owners, c.leaves), loads.index(max(loads))))
        for name, rank in owners.items():
            choice = chosen[name]
            choices[name] = replace(choice, label="", needs=(Owned(rank),) * len(choice.needs), makes=(Owned(rank),) * len(choice.makes))
    for value, readers in _readers(graph, [region for region, _ in regions]).items():
        (reader, *other_readers) = readers
        if reader is not None and not other_readers and graph.tensors[value].shape:
            placements[value] = Owned(reader)
    complete = (replace(region, elsewhere=_elsewhere(graph, region, busiest, placements)) for region, busiest in regions)
    return Taken(choices, placements, tuple(complete))


def _elsewhere(graph: Graph, region: Owners, busiest: int, placed: Mapping[str, Placement]) -> frozenset[str]:
    """Return operators of other ranks than the busiest one of a region, and the values that only these have."""
    other_ops = [op for op in graph.operators if region.ranks.get(op.name, busiest) != busiest]
    values = {value for op in other_ops for value in op.outputs}
    return frozenset({op.name for op in other_ops} | values | {value for op in other_ops for value in op.inputs if value in placed})


def _readers(graph: Graph, regions: list[Owners]) -> dict[str, set[int | None]]:
    """Return, by parameter and buffer, the ranks that read it; None stands for all."""
    owners = {name: rank for region in regions for name, rank in region.ranks.items()}
    readers: dict[str, set[int | None]] = {}
    for op in graph.operators:
        for value in op.inputs:
            if graph.held.get(value):
                readers.setdefault(value, set()).add(owners.get(op.name))
    return readers


@dataclass(frozen=True)
class _Candidate:
    """A candidate region; `reason`: why it cannot be taken. `branch_s`: seconds of every branch. `exit_shards`: sample shards of values
    that leave it."""

    problem: AxisProblem
    region: Region
    work: tuple[float, ...]
    leaves: Mapping[str, Shard]
    why: str = ""

    @classmethod
    def of(cls, problem: AxisProblem, chosen: Mapping[str, Choice], region: Region) -> _Candidate:
        operators = problem.graph.operators
        leaves, why, at = _borders(problem, chosen, region)
        while why and operators[at].name not in problem.heavy and (smaller := region.without(at, problem.graph)) is not None:
            region = smaller  # operators other than products may as well run on all ranks
            leaves, why, at = _borders(problem, chosen, region)
        work = tuple(sum(problem.compute_s(operators[i]) for i in branch) for branch in region.branches)
        return cls(problem, region, work, leaves, why)

    def given(self, ranks: Mapping[str, int]) -> tuple[int, ...]:
        """Return the rank of every branch in a plan, the least loaded for one without parameters; empty where the plan names none."""
        operators, loads = self.problem.graph.operators, [0.0] * self.problem.n
        named = [{ranks[v] for i in branch for v in operators[i].inputs if v in ranks} for branch in self.region.branches]
        if not any(named) or any(len(ranks_named) > 1 for ranks_named in named):  # the plan means regions inside of it
            return ()
        chosen = [0] * len(named)
        for i in sorted(range(len(named)), key=lambda i: (not named[i], -self.work[i], i)):
            chosen[i] = named[i].pop() if named[i] else min(range(len(loads)), key=lambda rank: loads[rank])
            loads[chosen[i]] += self.work[i]
        return tuple(chosen)


def _choose_regions(
    candidates: list[_Candidate], ranks: list[tuple[int, ...]], n: int, is_planned: bool
) -> list[tuple[_Candidate, tuple[int, ...]]]:
    """Return, of nested regions, those that take most work off the busiest ranks; in graph order."""
    value: dict[int, float] = {}
    inner: dict[int, list[int]] = {}
    for k in reversed(range(len(candidates))):  # inner ones first
        operators_here = candidates[k].region.operators
        nested = [j for j in inner if candidates[j].region.operators <= operators_here]
        outermost = [j for j in nested if not any(candidates[j].region.operators < candidates[i].region.operators for i in nested)]
        loads = [0.0] * n
        for seconds, rank in zip(candidates[k].work, ranks[k], strict=False):
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


def _borders(problem: AxisProblem, chosen: Mapping[str, Choice], region: Region) -> tuple[dict[str, Shard], str, int]:
    """Return (sample shards of values that leave a region, reason why it cannot be taken or empty, operator of the reason)."""
    graph, inside = problem.graph, region.operators
    forms = {v: form for op in graph.operators for v, form in zip(op.outputs, chosen[op.name].makes, strict=True)}
    inner_values = {v for i in inside for v in graph.operators[i].outputs}
    read = {v for i, op in enumerate(graph.operators) if i not in inside for v in op.inputs} | {graph.loss, *graph.outputs}
    leaves: dict[str, Shard] = {}
    for value in sorted(inner_values & read, key=graph.place.__getitem__):
        form = forms[value]
        if not is_shard(form) or graph.tensors[value].dtype.startswith("complex"):
            return {}, f"{value} leaves them, and is not sharded by samples", graph.place[value]
        leaves[value] = form
    for i in sorted(inside):
        op = graph.operators[i]
        for value in op.inputs:
            if value in inner_values:
                continue
            if problem.still & {value}:
                if any(value in other.inputs for j, other in enumerate(graph.operators) if j not in inside):
                    return {}, f"{op.site} writes statistics that others read", i
                continue
            if value in problem.copied_into:
                return {}, f"{op.site} reads a buffer that is written while the model runs", i
            if graph.held.get(value):
                continue
            form = forms.get(value) or (problem.start(value) or (R,))[0]
            if graph.tensors[value].dtype.startswith("complex") or not (is_shard(form) or (form is R and value not in problem.asked)):
                return {}, f"{op.site} reads {value}, which is not sharded by samples", i
    return leaves, "", 0
