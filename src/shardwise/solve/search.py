"""Search for the fastest plan of a graph on a cluster, under constraints or for a layout by hand, with reasons and runners-up.

Branch and bound (`shardwise.solve.branch_and_bound`), once for every order of the parts of a heterogeneous cluster; the best plan's
program is
proven. A layout by hand goes the same way, alone. Not searched: shards other than those that propagation finds best, stages other than the
most balanced (that fit), and grids of layouts that neither lead with their tensor ranks in a line nor promise to on several nodes; of those
that do, more and fewer microbatches are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.heterogeneous import reorder_parts
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.balance import select_cuts
from shardwise.cost.step_time.heterogeneous import HeterogeneousPricer, build_pricer
from shardwise.cost.step_time.predicted_timeline import step_timeline
from shardwise.cost.step_time.timing import PricedLayout, has_fill_drain_bubble, price, simulate_time, simulate_timeline
from shardwise.errors import Infeasible, UsageError
from shardwise.model.batch.additive import analyze_additivity, describe_microbatch_couplings
from shardwise.model.batch.samples import check_samples, misplaced_samples_reason
from shardwise.model.batch.summable_loss import with_counted_means
from shardwise.model.gc_pause import gc_paused
from shardwise.model.graph import Graph
from shardwise.model.sharding.fold import fold_layers
from shardwise.model.sharding.sharding import Shards
from shardwise.model.stages.stages import stage_links
from shardwise.plan.ir.axis import DATA
from shardwise.plan.ir.check import check
from shardwise.plan.layout import Layout
from shardwise.plan.plan import BUCKET_BYTES, LayoutCandidate, Plan
from shardwise.schedules import program_of
from shardwise.solve.activation_memory.choose import describe_layer_choices
from shardwise.solve.axis_candidates import (
    attention_candidates,
    branch_rank_counts,
    context_candidates,
    has_mixed_traffic,
    min_heads,
    spatial_candidates,
)
from shardwise.solve.bounds import layout_lower_bound_s
from shardwise.solve.branch_and_bound import BranchAndBound
from shardwise.solve.checks import check_layers, check_layout, check_priced, num_blocks, num_experts
from shardwise.solve.constraints import Constraint, constraints_for_samples, parse_constraints
from shardwise.solve.infeasible import infeasible_error
from shardwise.solve.moves.all_reduce_choice import choose_gradient_all_reduce, explain_all_reduce
from shardwise.solve.reasons import distinct_candidates, explain_choices, num_differences, select_shown
from shardwise.solve.score import check_objective, score_plan, simplest_plan
from shardwise.solve.space import SearchSpace
from shardwise.units import format_seconds

__all__ = [
    "PricedLayout",
    "check_layers",
    "check_layout",
    "price",
    "search",
    "simulate_time",
    "simulate_timeline",
    "step_timeline",
]

MAX_REFUSED = 4
MAX_PART_ORDERS = 6  # of the parts of a heterogeneous cluster
MAX_CHECKED_ACTIONS = 8_000  # actions of a program that is proven, about


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
    is_plain_loop: bool = False,
) -> Plan:
    """Choose a plan for `batch_size` samples a step, or price `layout` as it is (with `shards` and `stages` where they are given).

    Args:
        is_plain_loop: priced for the user's own loop (`cost/memory/plain_loop`), not for an engine.
        constraints: text as `parse_constraints` reads it. objective: time, cost (device hours), energy (the same, in power), memory.

    Raises:
        Infeasible: no layout meets the constraints, or none fits the memory; with the numbers and what would.
        UsageError: an unknown objective, constraint or batch.
    """
    with gc_paused():
        start_s = time.perf_counter()
        if batch_size < 1:
            raise UsageError(f"a batch of {batch_size} samples; use 1 or more")
        check_objective(objective)

        def pricer_on(machines: Cluster) -> Pricer:
            pricer = build_pricer(graph, machines, batch_size, optimizer_states, shards)
            pricer.is_plain_loop = is_plain_loop
            return pricer

        samples_note = misplaced_samples_reason(graph)
        limits = constraints_for_samples(constraints, samples_note)
        if layout is not None:
            check_samples(graph, layout)
            _check_admitted(layout, constraints)
            searched = _price_manual_layout(pricer_on(cluster), layout, stages)
        else:
            searched = _search_part_orders(pricer_on, cluster, constraints, limits, objective)
        best = _select_best(searched, objective, by_hand=layout is not None)
        plan = _plan(searched, best, model, samples_note, by_hand=layout is not None)
        return replace(plan, planning_time_s=time.perf_counter() - start_s)


def _search_part_orders(
    pricer_on: Callable[[Cluster], Pricer], cluster: Cluster, constraints: str, limits: Sequence[Constraint], objective: str
) -> BranchAndBound:
    """Return the best search; the parts of a heterogeneous cluster may follow each other in any order along the pipeline."""
    orders = [reorder_parts(cluster, order) for order in permutations(range(len(cluster.parts)))] if cluster.parts else [cluster]
    searches = [_search_layouts(pricer_on(c), limits, objective) for c in orders[:MAX_PART_ORDERS]]
    fitting = [found for found in searches if found.best is not None]
    if not fitting:
        raise infeasible_error(
            searches[0].pricer, searches[0].space, constraints, searches[0].lowest_memory, searches[0].refused_candidates
        )
    best = min(fitting, key=lambda found: found.best_score())
    best.compare()
    return best


def _select_best(searched: BranchAndBound, objective: str, by_hand: bool) -> PricedLayout:
    """Select and prove the best plan, and sort the other priced layouts after it."""
    cluster, best = searched.pricer.cluster, searched.best
    assert best is not None
    if not by_hand:
        best = simplest_plan(searched.timed_layouts, best, cluster, objective)
    _check_program(searched.pricer, best)
    searched.timed_layouts.sort(key=lambda p: (p is not best, *score_plan(p, cluster, objective)))
    return best


def _plan(searched: BranchAndBound, best: PricedLayout, model: str, elsewhere: str | None, by_hand: bool) -> Plan:
    pricer, cluster = searched.pricer, searched.pricer.cluster
    priced = {p.layout: p for p in reversed(searched.timed_layouts)}  # each layout once
    candidates = distinct_candidates([LayoutCandidate(p.layout, p.prediction) for p in reversed(priced.values())])
    refused = sorted(
        searched.refused_candidates,
        key=lambda c: (num_differences(c.layout, best.layout), c.prediction.step_time_s if c.prediction else float("inf")),
    )
    stage_layouts = [best.layout.of_stage(s) for s in range(best.layout.pipeline)]
    sharding = pricer.sharding(max(stage_layouts, key=lambda one: one.tensor))  # stages with fewer tensor ranks shard the same
    shards = () if sharding is None else tuple((axis, names) for axis, names in sharding.shards.items() if axis != DATA and names)
    is_heterogeneous = isinstance(pricer, HeterogeneousPricer)
    bucket_bytes = round(pricer.bucket_size(best.layout, best.sites))
    all_reduce = choose_gradient_all_reduce(cluster, best.layout)
    all_reduce_reason = "" if is_heterogeneous else explain_all_reduce(cluster, best.layout, all_reduce, bucket_bytes)
    chosen = explain_choices(best.layout, best.prediction, candidates, refused, cluster, by_hand=by_hand, bound_s=searched.bound_s)
    return Plan(
        best.layout,
        model,
        cluster.source_text,
        pricer.batch_size,
        best.sites,
        shards,
        best.prediction,
        (*chosen, *((("all_reduce", all_reduce_reason),) if all_reduce_reason else ()), *_plan_notes(pricer, best, elsewhere)),
        (*select_shown(candidates), *refused[:MAX_REFUSED]),
        () if sharding is None else sharding.replicated_sites,
        bucket_bytes=bucket_bytes if bucket_bytes != BUCKET_BYTES else 0,
        bound_gap=best.prediction.step_time_s / searched.bound_s - 1 if searched.bound_s else None,
        sums=all_reduce,
    )


def _plan_notes(pricer: Pricer, best: PricedLayout, elsewhere: str | None) -> Iterator[tuple[str, str]]:
    """Yield further reasons that the plan lists for what was chosen."""
    if words := _efficiency_sources(pricer, best.layout):
        yield "figures", words
    if best.layout.lend == "on":
        yield "lend", _explain_lending(pricer, best)
    if words := describe_layer_choices(pricer, best.layout, best.sites):
        yield "layers", words
    if elsewhere:
        yield "samples", elsewhere
    if words := _microbatch_difference(pricer.graph, best.layout):
        yield "whole batch", words
    if isinstance(pricer, HeterogeneousPricer):
        yield "parts", pricer.describe_parts(best.layout)


def _efficiency_sources(pricer: Pricer, layout: Layout) -> str:
    """Describe the efficiency figures that GPUs are priced with, of every part of a heterogeneous cluster."""
    pricers = pricer.part_pricers if isinstance(pricer, HeterogeneousPricer) else (pricer,)
    return "; ".join(dict.fromkeys(part.devices.describe_efficiency(layout.precision) for part in pricers))


def _search_layouts(pricer: Pricer, limits: Sequence[Constraint], objective: str) -> BranchAndBound:
    """Search all layouts that the constraints admit."""
    graph = pricer.graph
    folded = fold_layers(graph)
    layers = sum(run.count for run in folded.runs) if folded is not None else len(select_cuts(pricer.cuts, 1)) + 1
    smaller_jobs = objective in ("cost", "energy") and not pricer.cluster.parts
    space = SearchSpace(
        pricer.cluster,
        pricer.batch_size,
        limits,
        num_layers=len(pricer.cuts) + 1,
        num_chunks=layers,
        num_experts=num_experts(pricer.graph),
        includes_smaller_jobs=smaller_jobs,
        has_mixed_traffic=has_mixed_traffic(pricer.graph, pricer.batch_size),
        num_blocks=num_blocks(pricer.graph),
        spatial_words=spatial_candidates(graph, pricer.cluster),
        context_sizes=context_candidates(graph, pricer.cluster),
        attention_words=attention_candidates(graph),
        num_heads=min_heads(graph),
        branch_sizes=branch_rank_counts(graph, pricer.cluster),
    )
    space.check()
    branches = BranchAndBound(pricer, space, objective)
    branches.run()
    branches.chunk_losses()
    branches.refine_activation_memory()
    branches.arrange_ranks()
    return branches


def _check_admitted(layout: Layout, constraints: str) -> None:
    """Raise `Infeasible` where the constraints do not admit a layout by hand."""
    for constraint in parse_constraints(constraints):
        if not constraint.admits(layout.num_ranks if constraint.key == "ranks" else getattr(layout, constraint.key)):
            raise Infeasible(f"the layout {layout} is not what the constraint {constraint} admits; leave one of them out")


def _price_manual_layout(pricer: Pricer, layout: Layout, stages: Sequence[str]) -> BranchAndBound:
    """Price and check one layout by hand, as a search of nothing else.

    Raises:
        Infeasible, LayoutError: it is impossible, or does not fit.
    """
    check_layout(layout, pricer.cluster, pricer.batch_size)
    # By hand and on GPUs, stages have equally many layers, as in the frameworks that the efficiency sets were measured with.
    priced = price(pricer, layout, stages or pricer.even_stage_sites(layout))
    check_layers(pricer, priced)
    check_priced(pricer, priced)
    best = simulate_time(pricer, priced)
    space = SearchSpace(pricer.cluster, pricer.batch_size)
    bound_s = 0.0 if layout.inner else layout_lower_bound_s(pricer, layout, not has_fill_drain_bubble(layout))
    return BranchAndBound(pricer, space, "time", best=best, lowest_memory=best, timed_layouts=[best], bound_s=bound_s)


def _microbatch_difference(graph: Graph, layout: Layout) -> str:
    """Describe where microbatches train something else than the whole batch."""
    return (
        describe_microbatch_couplings(analyze_additivity(with_counted_means(graph)).coupled)
        if layout.microbatches > 1 and graph.batch_size > 1
        else ""
    )


def _explain_lending(pricer: Pricer, best: PricedLayout) -> str:
    """Describe what lending cores saves."""
    unlent_s = simulate_time(pricer, price(pricer, replace(best.layout, lend="off"), best.sites)).prediction.step_time_s
    return f"cores of ranks that wait in the pipeline compute for the others: with lend=off a step takes {format_seconds(unlent_s)}"


def _check_program(pricer: Pricer, best: PricedLayout) -> None:
    """Prove the program of the plan, for a schedule by name; a very long one with fewer microbatches, the same modulo the ranks.

    Schedules are periodic with period p in the microbatches, so the rest is more of the same. The run proves its whole program.
    """
    layout = best.layout
    if layout.pipeline == 1 or layout.actions:  # a custom schedule was proven before it was priced
        return
    m = layout.microbatches
    surplus = m - max(2 * layout.pipeline, MAX_CHECKED_ACTIONS // (6 * layout.num_stages))
    m -= layout.pipeline * max(0, -(-surplus // layout.pipeline))
    check(program_of(replace(layout, microbatches=m), stage_links(pricer.stages_at(best.sites))))
