"""Which rank of an axis runs which branches of a graph, where the axis owns: in regions of parallel branches each operator is one rank's,
on all samples that the ranks of the axis share; everywhere else these are cut.

In: the problem along the axis with the choices that cut samples, and what a plan says of it. Out: the choices with owners, the regions that
were taken, and where their parameters lie. A region is taken as a whole or not at all: what enters and leaves it lies in pieces of the
samples, or is whole on every rank and asks for no gradient of more than one.

Of regions that overlap those are taken that leave the busiest ranks the least of the work. A plan's cuts name the owners of parameters, and
then those regions are taken whose parameters they name.
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
    """`choices`: by operator, with owners. `placed`: where parameters and buffers lie that one rank alone reads. `regions`: as `Sharding`
    has them."""

    choices: Mapping[str, Choice]
    placed: Mapping[str, Placement] = field(default_factory=dict)
    regions: tuple[Owners, ...] = ()


def assign_owners(problem: AxisProblem, chosen: Mapping[str, Choice], planned: Mapping[str, int] | None) -> Taken:
    """Let ranks of the axis own branches. `planned`: by parameter or buffer the rank that a plan gives it to; None where that is searched.

    Raises:
        LayoutError: the graph has no region that can be taken; a plan's owners of one branch differ.
    """
    graph, n = problem.graph, problem.n
    candidates = [_Candidate.of(problem, chosen, region) for region in graph.regions]
    sound = [c for c in candidates if not c.why]
    if not sound:
        reasons = "; ".join(dict.fromkeys(c.why for c in candidates[:3]))
        raise LayoutError(
            f"{problem.axis}={n} gives parallel branches to ranks, and "
            + (f"no branches of this model can be taken: {reasons}" if reasons else "this model has no parallel branches with products")
            + "; leave it out, or use data for these ranks"
        )
    ranks = [c.given(planned) if planned is not None else balanced(c.work, n) for c in sound]
    regions_chosen = _choose_regions(sound, ranks, n, planned is not None)
    choices, placed = dict(chosen), dict[str, Placement]()
    regions: list[tuple[Owners, int]] = []
    for c, of in regions_chosen:
        owners = {graph.operators[i].name: rank for branch, rank in zip(c.region.branches, of, strict=True) for i in branch}
        loads = [sum(s for s, rank in zip(c.work, of, strict=True) if rank == k) for k in range(n)]
        regions.append((Owners(problem.axis, owners, c.leaves), loads.index(max(loads))))
        for name, rank in owners.items():
            choice = chosen[name]
            choices[name] = replace(choice, label="", needs=(Owned(rank),) * len(choice.needs), makes=(Owned(rank),) * len(choice.makes))
    for value, readers in _readers(graph, [region for region, _ in regions]).items():
        (reader, *others) = readers
        if reader is not None and not others and graph.tensors[value].shape:
            placed[value] = Owned(reader)
    complete = (replace(region, elsewhere=_elsewhere(graph, region, busiest, placed)) for region, busiest in regions)
    return Taken(choices, placed, tuple(complete))


def _elsewhere(graph: Graph, region: Owners, busiest: int, placed: Mapping[str, Placement]) -> frozenset[str]:
    """Operators of other ranks than the busiest one of a region, and what these alone have."""
    others = [op for op in graph.operators if region.ranks.get(op.name, busiest) != busiest]
    values = {value for op in others for value in op.outputs}
    return frozenset({op.name for op in others} | values | {value for op in others for value in op.inputs if value in placed})


def _readers(graph: Graph, regions: list[Owners]) -> dict[str, set[int | None]]:
    """By parameter and buffer the ranks that read it; None where all do."""
    owners = {name: rank for region in regions for name, rank in region.ranks.items()}
    readers: dict[str, set[int | None]] = {}
    for op in graph.operators:
        for value in op.inputs:
            if graph.held.get(value):
                readers.setdefault(value, set()).add(owners.get(op.name))
    return readers


@dataclass(frozen=True)
class _Candidate:
    """A region that may be taken; `why` not, in words. `work`: seconds of every branch. `leaves`: in which pieces what leaves it lies."""

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
            region = smaller  # what is no product is as well done by all ranks
            leaves, why, at = _borders(problem, chosen, region)
        work = tuple(sum(problem.compute_s(operators[i]) for i in branch) for branch in region.branches)
        return cls(problem, region, work, leaves, why)

    def given(self, ranks: Mapping[str, int]) -> tuple[int, ...]:
        """The rank of every branch as a plan has it, of one without parameters of its own the idlest; empty where it names none."""
        operators, loads = self.problem.graph.operators, [0.0] * self.problem.n
        named = [{ranks[v] for i in branch for v in operators[i].inputs if v in ranks} for branch in self.region.branches]
        if not any(named) or any(len(those) > 1 for those in named):  # an outer region of those that the plan means
            return ()
        chosen = [0] * len(named)
        for i in sorted(range(len(named)), key=lambda i: (not named[i], -self.work[i], i)):
            chosen[i] = named[i].pop() if named[i] else min(range(len(loads)), key=lambda rank: loads[rank])
            loads[chosen[i]] += self.work[i]
        return tuple(chosen)


def _choose_regions(
    candidates: list[_Candidate], ranks: list[tuple[int, ...]], n: int, is_planned: bool
) -> list[tuple[_Candidate, tuple[int, ...]]]:
    """Of regions that lie in one another those that take most work off the busiest ranks; the outer ones come first."""
    value: dict[int, float] = {}
    inner: dict[int, list[int]] = {}
    for k in reversed(range(len(candidates))):  # inner ones first
        mine = candidates[k].region.operators
        beside = [j for j in inner if candidates[j].region.operators <= mine]
        within = [j for j in beside if not any(candidates[j].region.operators < candidates[i].region.operators for i in beside)]
        loads = [0.0] * n
        for seconds, rank in zip(candidates[k].work, ranks[k], strict=False):
            loads[rank] += seconds
        gain, theirs = sum(loads) - max(loads), sum(value[j] for j in within)
        takes = bool(ranks[k]) and gain > 0 and (gain >= theirs or is_planned)
        inner[k], value[k] = ([] if takes else within), gain if takes else theirs
    chosen: list[int] = []
    seen: frozenset[int] = frozenset()

    def take(k: int) -> None:
        nonlocal seen
        if seen & candidates[k].region.operators:
            return
        if inner[k] or not (value[k] and ranks[k]):
            for j in inner[k]:
                take(j)
            return
        seen |= candidates[k].region.operators
        chosen.append(k)

    for k in range(len(candidates)):
        take(k)
    return [(candidates[k], ranks[k]) for k in sorted(chosen, key=lambda k: min(candidates[k].region.operators))]


def _borders(problem: AxisProblem, chosen: Mapping[str, Choice], region: Region) -> tuple[dict[str, Shard], str, int]:
    """In which pieces what leaves a region lies; and why it cannot be taken, and at which operator: empty where it can."""
    graph, inside = problem.graph, region.operators
    forms = {v: form for op in graph.operators for v, form in zip(op.outputs, chosen[op.name].makes, strict=True)}
    mine = {v for i in inside for v in graph.operators[i].outputs}
    read = {v for i, op in enumerate(graph.operators) if i not in inside for v in op.inputs} | {graph.loss, *graph.outputs}
    leaves: dict[str, Shard] = {}
    for value in sorted(mine & read, key=graph.place.__getitem__):
        form = forms[value]
        if not is_shard(form) or graph.tensors[value].dtype.startswith("complex"):
            return {}, f"{value} leaves them, and does not lie in pieces of the samples", graph.place[value]
        leaves[value] = form
    for i in sorted(inside):
        op = graph.operators[i]
        for value in op.inputs:
            if value in mine:
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
                return {}, f"{op.site} reads {value}, which does not lie in pieces of the samples", i
    return leaves, "", 0
