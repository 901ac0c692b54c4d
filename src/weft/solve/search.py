"""Search for the fastest plan of a graph on a cluster, under constraints or for a layout by hand, with reasons and runners-up.

Branch and bound (`weft.solve.branch_and_bound`), once for every order of the parts of a heterogeneous cluster; the best plan's program is
proven. A layout by hand goes the same way, alone. Not searched: shards other than those that propagation finds best, stages other than the
most balanced (that fit), and grids of layouts that neither lead with their tensor ranks in a line nor promise to on several nodes; of those
that do, more and fewer microbatches are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from weft.cluster.cluster import Cluster
from weft.cluster.mixed import reordered
from weft.cost.stages.gradients import best_bucket_bytes
from weft.cost.step import Pricer
from weft.errors import Infeasible, UsageError
from weft.model.batch.additive import additive, microbatch_words
from weft.model.batch.normalise import counted
from weft.model.batch.samples import check_samples, samples_elsewhere
from weft.model.collector import uncollected
from weft.model.graph import Graph
from weft.model.sharding.sharding import Shards
from weft.model.stages.stages import links
from weft.plan.axis import DATA
from weft.plan.check import check
from weft.plan.layout import Layout
from weft.plan.plan import Candidate, Plan
from weft.schedules import program_of
from weft.solve.all_reduce_choice import sums_of, why
from weft.solve.bounds import least_saving_s
from weft.solve.branch_and_bound import Branches
from weft.solve.checks import check_layers, check_layout, check_priced, num_blocks, num_experts
from weft.solve.forks import counts
from weft.solve.housing import told
from weft.solve.images import attention_ways, contexts, fewest_heads, ways
from weft.solve.mixed import MixedPricer, pricer_of
from weft.solve.mixed_traffic import has_mixed_traffic
from weft.solve.reasons import differences, reasons, spread
from weft.solve.remedies import nothing_fits
from weft.solve.score import OBJECTIVES, calmest, score
from weft.solve.space import Constraint, Space, limits_of, parse_constraints
from weft.solve.stage_starts import useful
from weft.solve.timing import Priced, clocked, price, step_timeline, timeline, waits_to_fill
from weft.units import format_seconds

__all__ = ["OBJECTIVES", "Priced", "check_layers", "check_layout", "clocked", "price", "search", "step_timeline", "timeline"]

MOST_REFUSED = 4
MOST_ORDERS = 6  # of the parts of a heterogeneous cluster
MOST_CHECKED = 8_000  # actions of a program that is proven, about


def search(  # noqa: PLR0913
    graph: Graph,
    cluster: Cluster,
    batch_size: int,
    model: str,
    constraints: str = "",
    layout: Layout | None = None,
    objective: str = "time",
    *,
    shards: Mapping[str, Shards] | None = None,
    stages: Sequence[str] = (),
    optimizer_states: int = 2,
) -> Plan:
    """Choose a plan for `batch_size` samples a step, or price `layout` as it is (with `shards` and `stages` where they are given).

    Args:
        constraints: text as `parse_constraints` reads it. objective: time, cost (device hours), energy (the same, in power), memory.

    Raises:
        Infeasible: no layout meets the constraints, or none fits the memory; with the numbers and what would.
        UsageError: an unknown objective, constraint or batch.
    """
    with uncollected():
        start_s = time.perf_counter()
        if batch_size < 1:
            raise UsageError(f"a batch of {batch_size} samples; use 1 or more")
        if objective not in OBJECTIVES:
            raise UsageError(f"unknown objective {objective}; use one of {', '.join(OBJECTIVES)}")

        def pricer_on(machines: Cluster) -> Pricer:
            return pricer_of(graph, machines, batch_size, optimizer_states, shards)

        samples_note = samples_elsewhere(graph)
        limits = limits_of(constraints, samples_note)
        if layout is not None:
            check_samples(graph, layout)
            _check_admitted(layout, constraints)
            searched = _by_hand(pricer_on(cluster), layout, stages)
        else:
            searched = _of_any_order(pricer_on, cluster, constraints, limits, objective)
        best = _best(searched, objective, by_hand=layout is not None)
        plan = _plan(searched, best, model, samples_note, by_hand=layout is not None)
        return replace(plan, planning_time_s=time.perf_counter() - start_s)


def _of_any_order(
    pricer_on: Callable[[Cluster], Pricer], cluster: Cluster, constraints: str, limits: Sequence[Constraint], objective: str
) -> Branches:
    """Return the best search; the parts of a heterogeneous cluster may follow each other in any order along the pipeline."""
    orders = [reordered(cluster, order) for order in permutations(range(len(cluster.parts)))] if cluster.parts else [cluster]
    searches = [_find(pricer_on(c), limits, objective) for c in orders[:MOST_ORDERS]]
    fitting = [found for found in searches if found.best is not None]
    if not fitting:
        raise nothing_fits(searches[0].pricer, searches[0].space, constraints, searches[0].leanest, searches[0].refused)
    best = min(fitting, key=lambda found: found.score())
    best.compare()
    return best


def _best(searched: Branches, objective: str, by_hand: bool) -> Priced:
    """Select and prove the best plan, and sort the other priced layouts after it."""
    cluster, best = searched.pricer.cluster, searched.best
    assert best is not None
    if not by_hand and objective == "time" and cluster.kind.shares_hosts:
        best = calmest(searched.clocked, best)
    _prove(searched.pricer, best)
    searched.clocked.sort(key=lambda p: (p is not best, *score(p, cluster, objective)))
    return best


def _plan(searched: Branches, best: Priced, model: str, elsewhere: str | None, by_hand: bool) -> Plan:
    pricer, cluster = searched.pricer, searched.pricer.cluster
    priced = {p.layout: p for p in reversed(searched.clocked)}  # each layout once
    candidates = [Candidate(p.layout, p.prediction) for p in reversed(priced.values())]
    refused = sorted(
        searched.refused, key=lambda c: (differences(c.layout, best.layout), c.prediction.step_time_s if c.prediction else float("inf"))
    )
    stage_layouts = [best.layout.of_stage(s) for s in range(best.layout.pipeline)]
    sharding = pricer.sharding(max(stage_layouts, key=lambda one: one.tensor))  # stages with fewer tensor ranks shard the same
    shards = () if sharding is None else tuple((axis, names) for axis, names in sharding.shards.items() if axis != DATA and names)
    is_heterogeneous = isinstance(pricer, MixedPricer)
    bucket_bytes = 0 if is_heterogeneous or best.layout.inner else best_bucket_bytes(pricer, best.layout, best.sites)
    all_reduce = sums_of(cluster, best.layout)
    all_reduce_reason = "" if is_heterogeneous else why(cluster, best.layout, all_reduce, bucket_bytes)
    chosen = reasons(best.layout, best.prediction, candidates, refused, cluster, by_hand=by_hand, bound_s=searched.bound_s)
    return Plan(
        best.layout,
        model,
        cluster.found_by,
        pricer.batch_size,
        best.sites,
        shards,
        best.prediction,
        (*chosen, *((("all_reduce", all_reduce_reason),) if all_reduce_reason else ()), *_notes(pricer, best, elsewhere)),
        (*spread(candidates), *refused[:MOST_REFUSED]),
        () if sharding is None else sharding.replicated,
        bucket_bytes=bucket_bytes,
        bound_gap=best.prediction.step_time_s / searched.bound_s - 1 if searched.bound_s else None,
        sums=all_reduce,
    )


def _notes(pricer: Pricer, best: Priced, elsewhere: str | None) -> Iterator[tuple[str, str]]:
    """Yield further reasons that the plan lists for what was chosen."""
    if words := _figures(pricer, best.layout):
        yield "figures", words
    if best.layout.lend == "on":
        yield "lend", _lent(pricer, best)
    if words := told(pricer, best.layout, best.sites):
        yield "layers", words
    if elsewhere:
        yield "samples", elsewhere
    if words := _apart(pricer.graph, best.layout):
        yield "whole batch", words
    if isinstance(pricer, MixedPricer):
        yield "parts", pricer.where(best.layout)


def _figures(pricer: Pricer, layout: Layout) -> str:
    """Describe the efficiency figures that GPUs are priced with, of every part of a heterogeneous cluster."""
    pricers = pricer.pricers if isinstance(pricer, MixedPricer) else (pricer,)
    return "; ".join(dict.fromkeys(part.devices.words(layout.precision) for part in pricers))


def _find(pricer: Pricer, limits: Sequence[Constraint], objective: str) -> Branches:
    """Search all layouts that the constraints admit."""
    graph = pricer.graph
    layers = sum(run.count for run in graph.fold.runs) if graph.fold is not None else len(useful(pricer.cuts, 1)) + 1
    smaller_jobs = objective in ("cost", "energy") and not pricer.cluster.parts
    space = Space(
        pricer.cluster,
        pricer.batch_size,
        limits,
        num_layers=len(pricer.cuts) + 1,
        num_chunks=layers,
        experts=num_experts(pricer.graph),
        fewer=smaller_jobs,
        mixed_traffic=has_mixed_traffic(pricer.graph, pricer.batch_size),
        num_blocks=num_blocks(pricer.graph),
        images=ways(graph, pricer.cluster),
        contexts=contexts(graph, pricer.cluster),
        attention=attention_ways(graph),
        heads=fewest_heads(graph),
        branches=counts(graph, pricer.cluster),
    )
    space.check()
    branches = Branches(pricer, space, objective)
    branches.run()
    branches.house()
    branches.arrange()
    return branches


def _check_admitted(layout: Layout, constraints: str) -> None:
    """Raise `Infeasible` where the constraints do not admit a layout by hand."""
    for constraint in parse_constraints(constraints):
        if not constraint.admits(layout.num_ranks if constraint.key == "ranks" else getattr(layout, constraint.key)):
            raise Infeasible(f"the layout {layout} is not what the constraint {constraint} admits; leave one of them out")


def _by_hand(pricer: Pricer, layout: Layout, stages: Sequence[str]) -> Branches:
    """Price and check one layout by hand, as a search of nothing else.

    Raises:
        Infeasible, LayoutError: it is impossible, or does not fit.
    """
    check_layout(layout, pricer.cluster, pricer.batch_size)
    # By hand and on GPUs, stages have equally many layers, as in the frameworks that the efficiency sets were measured with.
    priced = price(pricer, layout, stages or pricer.even(layout))
    check_layers(pricer, priced)
    check_priced(pricer, priced)
    best = clocked(pricer, priced)
    space = Space(pricer.cluster, pricer.batch_size)
    bound_s = 0.0 if layout.inner else least_saving_s(pricer, layout, not waits_to_fill(layout))
    return Branches(pricer, space, "time", best=best, leanest=best, clocked=[best], bound_s=bound_s)


def _apart(graph: Graph, layout: Layout) -> str:
    """Describe where microbatches train something else than the whole batch."""
    return microbatch_words(additive(counted(graph)).coupled) if layout.microbatches > 1 and graph.batch_size > 1 else ""


def _lent(pricer: Pricer, best: Priced) -> str:
    """Describe what lending cores saves."""
    unlent_s = clocked(pricer, price(pricer, replace(best.layout, lend="off"), best.sites)).prediction.step_time_s
    return f"cores of ranks that wait in the pipeline compute for the others: with lend=off a step takes {format_seconds(unlent_s)}"


def _prove(pricer: Pricer, best: Priced) -> None:
    """Prove the program of the plan, for a schedule by name; a very long one with fewer microbatches, the same modulo the ranks.

    Schedules are periodic with period p in the microbatches, so the rest is more of the same. The run proves its whole program.
    """
    layout = best.layout
    if layout.pipeline == 1 or layout.actions:  # a custom schedule was proven before it was priced
        return
    m = layout.microbatches
    surplus = m - max(2 * layout.pipeline, MOST_CHECKED // (6 * layout.num_stages))
    m -= layout.pipeline * max(0, -(-surplus // layout.pipeline))
    check(program_of(replace(layout, microbatches=m), links(pricer.split(best.sites))))
