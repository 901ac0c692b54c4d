"""Branch and bound over the bases of a search space: the best plan under an objective, and everything that was priced and simulated.

Every base gets a proven lower bound; the most promising is priced with all its schedules and all that trades memory for time, and simulated
on the program that would run, until no bound is below the best. What costs time and saves only memory is not tried where the same fits
without. Then the leading layouts' tensor ranks are arranged in grids.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from shardwise.cost.step import Pricer
from shardwise.cost.step_time.heterogeneous import balance_shares, stage_device_memory
from shardwise.cost.step_time.lending import may_lend
from shardwise.cost.step_time.timing import (
    PricedLayout,
    balanced_sites,
    fit_stages,
    has_fill_drain_bubble,
    pipeline_lower_bound_s,
    price,
    simulate_time,
    stage_trips_lower_bound_s,
)
from shardwise.errors import Infeasible, LayoutError
from shardwise.plan.ir.axis import PIPELINE
from shardwise.plan.layout import Layout
from shardwise.plan.plan import LayoutCandidate
from shardwise.plan.residency import CHEAP, strip_layers
from shardwise.schedules import schedule_of
from shardwise.solve.activation_memory.choose import added_time_lower_bound_s, price_with_activation_memory, with_fewest_recomputed_layers
from shardwise.solve.activation_memory.residency import KEEP, OFFLOAD, RECOMPUTE
from shardwise.solve.bounds import (
    base_lower_bound_s,
    check_base_state_fits,
    check_state_fits,
    layout_lower_bound_s,
    state_bytes_lower_bound,
    wait_factor,
)
from shardwise.solve.checks import check_layers, check_layout, check_priced
from shardwise.solve.constraints import Constraint
from shardwise.solve.memory_options import MemoryOptionTable, first_rank_bytes, is_dominated_by, with_memory_options, with_segment_of_one
from shardwise.solve.moves.chunked_losses import MAX_CHUNKED_BASES, bases_to_chunk, other_choices, other_chunk_counts
from shardwise.solve.moves.grids import (
    arrange_in_grids,
    multi_node_grid_spaces,
    other_microbatch_counts,
    unpriced_meshes,
    with_adjacent_stages,
    with_shards_in_nodes,
)
from shardwise.solve.moves.submeshes import submesh_bases
from shardwise.solve.reasons import num_differences
from shardwise.solve.score import objective_value, score_plan
from shardwise.solve.space import SearchSpace, smaller_rank_counts

MAX_PROMISING_BASES, MAX_FIRST_BASES = 16, 2  # bases that look promising, and those of them that are priced first
MAX_CHEAP_LAYOUTS = 2  # layouts with recompute=cheap of which fewer layers are recomputed
MAX_SEGMENT_LAYOUTS = 2  # layouts with segments of which fewer layers are recomputed
MAX_MEMORY_TRIALS = 24  # layouts that fit by recomputing or offloading all layers, for which fewer are tried
# Smaller numbers of ranks that are tried, where FLOPs alone take at most that fraction of the best step.
MAX_RANK_COUNTS, MAX_IDEAL_FRACTION = 6, 0.95
INFINITE = float("inf")
# Keys of bases.
COMPARED_KEYS = (
    "data", "branch", "neighbours", "tensor", "context", "spatial", "pipeline", "microbatches", "precision", "sequence_parallel",
    "sample_parallel", "expert",
)  # fmt: skip


@dataclass
class BranchAndBound:
    """One search: the frontier of open bases, and what was found. `timed_layouts` and `refused_candidates` are in no order."""

    pricer: Pricer
    space: SearchSpace
    objective: str
    best: PricedLayout | None = None
    lowest_memory: PricedLayout | None = None
    timed_layouts: list[PricedLayout] = field(default_factory=list)
    refused_candidates: list[LayoutCandidate] = field(default_factory=list)
    bound_s: float = 0.0
    _frontier: list[tuple[tuple[float, ...], int, Layout, bool]] = field(default_factory=list)
    _all_bases: list[tuple[tuple[float, ...], int, Layout, bool]] = field(default_factory=list)
    _num_queued: int = 0
    _best_value: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self._memory_options = MemoryOptionTable(self.pricer, self.space, tries_all=self.objective == "memory")

    def run(self) -> None:
        """Price bases in the order of their bounds until none can beat the best; then smaller jobs and multi-node grids that may."""
        self._search_space(self.space)
        if self.objective == "time":
            self._price_smaller_jobs()
            for space in multi_node_grid_spaces(
                self.pricer, self.space, INFINITE if self.best is None else self.best.prediction.step_time_s
            ):
                self._search_space(space)

    def _price_smaller_jobs(self) -> None:
        """Price smaller jobs that may be faster than the best."""
        if self.best is None or any(c.key == "ranks" for c in self.space.constraints):
            return
        num_tried, device = 0, self.pricer.cluster.device
        rate = device.matmul_efficiency * max(flops for _, flops in device.peak_flops)
        for count in smaller_rank_counts(self.pricer.cluster):
            ideal_s = self.best.prediction.model_flops / (count * rate)
            if ideal_s < MAX_IDEAL_FRACTION * self.best.prediction.step_time_s and num_tried < MAX_RANK_COUNTS:
                num_tried += 1
                self._search_space(replace(self.space, constraints=(*self.space.constraints, Constraint("ranks", "=", count))))

    def _search_space(self, space: SearchSpace) -> None:
        """Price the bases of a space in the order of their bounds until none can beat the best."""
        cluster = self.pricer.cluster
        bounds: dict[tuple[Layout, bool], float] = {}
        self._frontier = []
        zeros = [z for z in range(4) if space.admits("zero", z)]
        offloads = [strip_layers("offload", o) for o in space.admitted_words("offload")]
        for base in self._iterate_bases(space):
            for interleaved in {not has_fill_drain_bubble(scheduled) for scheduled in self.space.schedules(base)}:
                try:
                    check_layout(base, cluster, self.pricer.batch_size)
                    check_base_state_fits(self.pricer, base, zeros, offloads)
                    bound = base_lower_bound_s(self.pricer, base, interleaved)
                except (Infeasible, LayoutError) as error:
                    self._refuse(base, None, str(error))
                    continue
                bounds[base, interleaved] = bound
                self._num_queued += 1
                heapq.heappush(self._frontier, (self._objective_bound(base, bound), self._num_queued, base, interleaved))
        self._all_bases += self._frontier
        expanded = {key: self._expand(*key) for key in self._promising_bases()}
        bounds.update(expanded)
        while self._frontier:
            bound_score, number, base, interleaved = self._frontier[0]
            if self.best is not None and bound_score > self._best_value:
                break
            heapq.heappop(self._frontier)
            if (base, interleaved) in expanded:
                continue
            savings = self._memory_options.lower_bounds_s(base, interleaved)
            bounds[base, interleaved] = min(savings.values(), default=INFINITE)  # infinite: nothing makes it fit
            best_bound = min((self._objective_bound(base, seconds) for seconds in savings.values()), default=None)
            if best_bound is not None and best_bound > bound_score:
                heapq.heappush(self._frontier, (best_bound, number, base, interleaved))  # memory options that make it fit cost time
            elif best_bound is not None:
                bounds[base, interleaved] = self._expand(base, interleaved)
        lowest = min((*bounds.values(), self.bound_s or INFINITE))
        self.bound_s = lowest if lowest < INFINITE else 0.0

    def _iterate_bases(self, space: SearchSpace) -> Iterator[Layout]:
        """Yield the bases of a space, on a heterogeneous cluster also with shares by the speed of its parts; and those with submeshes."""
        for base in space.bases():
            yield from (shared for shared in (base, balance_shares(self.pricer, base)) if shared is not None)
        yield from submesh_bases(space)

    def chunk_losses(self) -> None:
        """Search bases that memory binds again with their losses in chunks; of those left out the bound is that without."""
        bases = sorted(item for item in self._all_bases if self.best is None or item[0] <= self._best_value)
        chunked = bases_to_chunk(self.pricer, self.space, bases, list(self.timed_layouts), self._cannot_win)
        for number, (bound_s, base, interleaved) in enumerate(chunked):
            self.bound_s = min(self.bound_s or INFINITE, self._expand(base, interleaved) if number < MAX_CHUNKED_BASES else bound_s)
        for other in other_chunk_counts(self.space, self.best):
            self._price_layout(other)

    def refine_activation_memory(self) -> None:
        """Offload or recompute the fewest layers that it takes where all would be, for layouts whose bounds do not rule them out.

        The bound then is that of what neither recomputes nor offloads layers, also of those that are not tried.
        """
        if self.best is None or self.objective == "memory":
            return
        keys_of_choice = {RECOMPUTE: ("recompute", ("full",)), OFFLOAD: ("offload", ("activations", "all"))}
        admitted = {
            choice: [kind for kind in kinds if self.space.admits(key, kind) and not self.space.is_requested(key, kind)]
            for choice, (key, kinds) in keys_of_choice.items()
        }
        bases: dict[tuple[Layout, bool, int, str], None] = {}
        for (base, interleaved), savings in self._memory_options.bounds_s.items():
            for zero, recompute, offload, _ in savings:
                if recompute in admitted[RECOMPUTE] or offload in admitted[OFFLOAD]:
                    bases[base, interleaved, zero, "optimizer" if offload in ("optimizer", "all") else "none"] = None
        # Each is queued with its known bound, then with the bound of its first rank, then it is priced.
        queue: list[tuple[float, int, Layout, list[str], bool]] = []
        for base, interleaved, zero, offload in bases:
            offload_kind = "all" if offload == "optimizer" else "activations"
            allowed = [KEEP, *([OFFLOAD] if offload_kind in admitted[OFFLOAD] else []), *([RECOMPUTE] if admitted[RECOMPUTE] else [])]
            bound_s = layout_lower_bound_s(self.pricer, replace(base, zero=zero, offload=offload), interleaved)
            for schedule in self.space.schedules(base) if not self._cannot_win(base, bound_s) else ():
                if has_fill_drain_bubble(schedule) is not interleaved:
                    heapq.heappush(queue, (bound_s, len(queue), replace(schedule, zero=zero, offload=offload), allowed, False))
        trials_left, lowest_passed = MAX_MEMORY_TRIALS, INFINITE
        while queue and trials_left:
            bound_s, number, candidate, allowed, is_exact = heapq.heappop(queue)
            if self._cannot_win(candidate, bound_s):
                continue
            if not is_exact:
                heapq.heappush(queue, (max(bound_s, self._activation_memory_bound_s(candidate, allowed)), number, candidate, allowed, True))
                continue
            trials_left, lowest_passed = trials_left - 1, min(lowest_passed, bound_s)
            priced = price_with_activation_memory(self.pricer, candidate, allowed)
            if priced is not None:
                self._simulate(priced)
        self.bound_s = min(self.bound_s, lowest_passed, queue[0][0] if queue else INFINITE)
        if admitted[RECOMPUTE]:
            self._refine_segments()
        if self.space.admits("recompute", CHEAP) and not self.space.is_requested("recompute", CHEAP):
            self._refine_cheap_layers()

    def _refine_cheap_layers(self) -> None:
        """Recompute cheap operators of the fewest layers that it takes where those of all are recomputed."""
        by_time = sorted((p for p in self.timed_layouts if p.layout.recompute == CHEAP), key=lambda p: p.prediction.step_time_s)
        for one in by_time[:MAX_CHEAP_LAYOUTS]:
            priced = None if one.layout.inner else with_fewest_recomputed_layers(self.pricer, one.layout)
            if priced is not None:
                self._simulate(priced)

    def _refine_segments(self) -> None:
        """Recompute the fewest layers that it takes where all are recomputed in segments. No choice of layers takes less than
        `_activation_memory_bound_s`, whether in segments or not, so the bound stands."""
        by_time = sorted(
            (p for p in self.timed_layouts if p.layout.segment > 1 and not p.layout.inner), key=lambda p: p.prediction.step_time_s
        )
        for base in list(dict.fromkeys(with_segment_of_one(p.layout) for p in by_time))[:MAX_SEGMENT_LAYOUTS]:
            bound_s = layout_lower_bound_s(self.pricer, replace(base, recompute="none"), not has_fill_drain_bubble(base))
            for segment in self.space.segments("full", base.offload) if not self._cannot_win(base, bound_s) else ():
                priced = with_fewest_recomputed_layers(self.pricer, replace(base, segment=segment)) if segment > 1 else None
                if priced is not None:
                    self._simulate(priced)

    def _activation_memory_bound_s(self, layout: Layout, allowed: Sequence[str]) -> float:
        """Return a lower bound of a step in which the first rank offloads and recomputes what makes the layout fit."""
        pricer, schedule = self.pricer, schedule_of(layout)
        shares = schedule.shares[0]
        stages = sorted(shares)
        if may_lend(pricer.cluster, layout):
            return 0.0
        try:
            sites = balanced_sites(pricer, layout)
            trips = stage_trips_lower_bound_s(pricer, layout, with_recompute=False)
        except Infeasible:
            return INFINITE
        added_s = added_time_lower_bound_s(pricer, layout, sites, 0, allowed)
        costs = zip(stages, pricer.stages(layout, sites, only=stages), strict=True)
        busy_s = sum(shares[s] * (c.forward_s + c.backward_s) for s, c in costs)
        hidden_s = added_s + sum(shares[s] * trips[s][1] for s in stages)  # gathered weights overlap what is recomputed
        bound_s = max(pipeline_lower_bound_s(layout, trips), layout.microbatches * max(busy_s, hidden_s))
        if schedule.splits_backward or schedule.has_replicas:
            return bound_s
        return max(bound_s, sum(trip_s for _, trip_s in trips[:-1]) + layout.microbatches * trips[-1][1] + added_s * (layout.pipeline > 1))

    def arrange_ranks(self) -> None:
        """Try leading pipelines with stages as neighbours, and leading layouts' tensor ranks in grids, the best grid of each mesh with more
        and fewer microbatches; the bound counts those that fit."""
        if self.best is None or self.objective == "memory":
            return
        if self.space.admits("neighbours", PIPELINE):
            for layout in with_adjacent_stages(self.pricer.cluster, list(self.timed_layouts), self._cannot_win):
                self.bound_s = min(self.bound_s, self._price_layout(layout) or self.bound_s)
        for layout in with_shards_in_nodes(self.pricer.cluster, list(self.timed_layouts)):
            if self.space.admits("shard", layout.shard):
                self.bound_s = min(self.bound_s, self._price_layout(layout) or self.bound_s)
        if self.space.grid is not None:
            return
        for base in unpriced_meshes(
            self.pricer, list(self.timed_layouts), [item[2] for item in sorted(self._all_bases) if not item[3]], self._cannot_win
        ):
            self._price_simplest(base)
        cheapest: dict[tuple[object, ...], tuple[float, Layout]] = {}
        for layout, bound_s in arrange_in_grids(self.pricer, self.space, list(self.timed_layouts), self._cannot_win):
            seconds = self._price_grid_s(layout, bound_s)
            mesh = (layout.data, layout.branch, layout.tensor, layout.pipeline, layout.context, layout.spatial)
            if mesh not in cheapest or seconds < cheapest[mesh][0]:
                cheapest[mesh] = seconds, layout
        for first, layout in cheapest.values():
            for counts in other_microbatch_counts(self.space, layout):
                best_s = first
                for microbatches in counts:
                    with suppress(Infeasible, LayoutError):
                        variant = replace(layout, microbatches=microbatches)
                        seconds = self._price_grid_s(
                            variant, layout_lower_bound_s(self.pricer, variant, not has_fill_drain_bubble(variant))
                        )
                        if seconds < best_s:
                            best_s = seconds
                            continue
                    break

    def _price_grid_s(self, layout: Layout, bound_s: float) -> float:
        """Seconds of a layout in a grid, or `bound_s` where that cannot be the best; infinite where it does not fit."""
        if self._cannot_win(layout, bound_s):
            return bound_s
        step_s = self._price_layout(layout)
        if step_s is None:
            return INFINITE
        self.bound_s = min(self.bound_s, max(bound_s, step_s))
        return max(bound_s, step_s)

    def _promising_bases(self) -> list[tuple[Layout, bool]]:
        """Return bases that are likely to be among the best: a good plan that is known early saves pricing many others.

        A guess: the bound with memory options, and half of the time in which a pipeline of whole backwards fills and drains.
        """

        def guess(item: tuple[tuple[float, ...], int, Layout, bool]) -> float:
            return item[0][0] * (1 + 0.5 * (item[2].pipeline - 1) / item[2].microbatches)

        # The best of every mesh, since those of one mesh need about as much memory.
        likely: dict[tuple[object, ...], tuple[tuple[float, ...], int, Layout, bool]] = {}
        for item in sorted(self._frontier, key=guess):
            base = item[2]
            likely.setdefault((base.data, base.branch, base.tensor, base.pipeline, base.context, base.spatial, base.inner), item)
        promising = []
        for item in list(likely.values())[:MAX_PROMISING_BASES]:
            savings = self._memory_options.lower_bounds_s(item[2], item[3])
            if savings:
                fill_factor = 1 + 0.5 * (item[2].pipeline - 1) / item[2].microbatches
                promising.append((fill_factor * min(savings.values()), item[1], item[2], item[3]))
        return [(base, interleaved) for _, _, base, interleaved in heapq.nsmallest(MAX_FIRST_BASES, promising)]

    def compare(self) -> None:
        """Price what differs from the best in one key, where the search had no need to: the plan reports what it would cost."""
        assert self.best is not None
        best_layout = self.best.layout
        bases = [item for item in self._all_bases if not item[3] and not item[2].inner]
        for key in COMPARED_KEYS:
            priced_values = {getattr(p.layout, key) for p in self.timed_layouts}
            for value in sorted({getattr(item[2], key) for item in bases} - priced_values, key=str):
                nearest = sorted((item for item in bases if getattr(item[2], key) == value), key=lambda i: (i[0], i[1]))
                for _, _, base, _ in nearest[:2]:
                    if self._price_simplest(base):
                        break
        for other in other_choices(best_layout, self.space):
            self._price_layout(other, must_simulate=True)
        priced_layouts = {p.layout for p in self.timed_layouts}
        for variant in self.space.variants(
            replace(best_layout, schedule="1f1b", chunks=1, zero=0, recompute="none", segment=1, offload="none", lend=self.space.lend)
        ):
            if variant not in priced_layouts and num_differences(variant, best_layout) == 1:
                self._price_layout(variant, must_simulate=True)

    def _price_simplest(self, base: Layout) -> bool:
        """Price the base with the first memory option that makes it fit; return whether one does."""
        schedule = next(self.space.schedules(base), None)
        if schedule is None:
            return False
        fitting = self._memory_options.fitting_layouts(base)
        options = sorted(fitting, key=lambda t: (t[2] != "none", t[1] == "full", t[1] != "none", t[3], abs(t[0] - 1)))
        return any(self._price_layout(with_memory_options(schedule, saving), must_simulate=True) is not None for saving in options[:3])

    def _objective_bound(self, base: Layout, seconds: float) -> tuple[float, ...]:
        if self.objective == "memory":
            zero = max((z for z in range(4) if self.space.admits("zero", z)), default=0) if base.replicas > 1 else 0
            offloads = {strip_layers("offload", o) for o in self.space.admitted_words("offload")}
            offload = "none" if offloads.isdisjoint(("optimizer", "all")) else "all"
            smallest = replace(base, zero=zero, offload=offload, compress="none", staleness=0, servers=0)
            return (state_bytes_lower_bound(self.pricer, smallest),)
        return (objective_value(base, seconds, self.pricer.cluster, self.objective),)

    def _expand(self, base: Layout, is_interleaved: bool) -> float:
        """Price the variants of a base, those that cost more only where what costs less does not fit.

        Returns: lower bound in seconds of the variants that may fit; infinite where none does.
        """
        savings = self._memory_options.lower_bounds_s(base, is_interleaved)
        lowest = INFINITE
        for schedule in self.space.schedules(base):
            if has_fill_drain_bubble(schedule) is is_interleaved:
                continue
            fitting: list[Layout] = []
            # With the balanced stages of this schedule, with full recomputation or without.
            bounds: dict[bool, float] = {}
            for options, seconds in savings.items():
                bound_s = seconds
                if not self._cannot_win(base, bound_s):
                    with_recompute = options[1] == "full"
                    if with_recompute not in bounds:
                        bounds[with_recompute] = self._schedule_bound_s(schedule, with_recompute)
                    bound_s = max(bound_s, bounds[with_recompute])
                if not self._cannot_win(base, bound_s):
                    candidate = with_memory_options(schedule, options)
                    if self.objective != "memory" and any(is_dominated_by(candidate, other) for other in fitting):
                        continue
                    step_s = self._price_layout(candidate)
                    if step_s is None:
                        continue
                    fitting.append(candidate)
                    bound_s = max(bound_s, step_s)
                lowest = min(lowest, bound_s)
        return lowest

    def _lending_factor(self, layout: Layout) -> float:
        """Return the least fraction of the work that is left where waiting ranks may lend their cores; 0 where they may not."""
        return wait_factor(self.pricer, layout, ignores_fill=True) if may_lend(self.pricer.cluster, layout) else 0.0

    def _schedule_bound_s(self, schedule: Layout, with_recompute: bool) -> float:
        """Return a lower bound with the balanced stages of one schedule, with full recomputation or without."""
        try:
            trips = stage_trips_lower_bound_s(self.pricer, schedule, with_recompute)
            return pipeline_lower_bound_s(schedule, trips, self._lending_factor(schedule))
        except Infeasible:
            return 0.0

    def _price_layout(self, layout: Layout, must_simulate: bool = False) -> float | None:
        """Price a layout, and simulate it where it may be the best (or `must_simulate`).

        Returns: lower bound of its seconds; None where it does not fit, which may not be checked for what cannot be the best.
        """
        pricer, cluster = self.pricer, self.pricer.cluster
        available = stage_device_memory(pricer, layout, 0)
        try:
            check_layout(layout, cluster, pricer.batch_size)
            check_state_fits(pricer, layout)
            sites = balanced_sites(pricer, layout)
            schedule = schedule_of(layout)
            stages, needed = schedule.stages_of[0], first_rank_bytes(pricer, layout, sites)
            is_too_large = needed > available and (layout.pipeline == 1 or layout.schedule != "1f1b")
            lending_factor = self._lending_factor(layout)
            if not (is_too_large or must_simulate or lending_factor or self.best is None):
                costs = zip(stages, pricer.stages(layout, sites, only=stages), strict=True)
                floor = layout.microbatches * sum(schedule.shares[0][s] * (c.forward_s + c.backward_s) for s, c in costs)
                if self._cannot_win(layout, floor):
                    return floor
            if self.objective == "memory" and self.best is not None and needed > self.best.prediction.memory.total and not must_simulate:
                return 0.0
            if is_too_large:
                raise Infeasible(f"{layout}: the first rank needs {needed / 2**30:.2f} GiB, and has {available / 2**30:.2f} GiB")
            priced = price(pricer, layout, sites)
            if layout.residency.is_partial:  # as a constraint asks for
                check_layers(pricer, priced)
        except (Infeasible, LayoutError) as error:
            self._refuse(layout, None, str(error))
            return None
        if self.lowest_memory is None or priced.prediction.memory.total < self.lowest_memory.prediction.memory.total:
            self.lowest_memory = priced
        try:
            check_priced(pricer, priced)
        except Infeasible as error:
            refitted = self._refit_stages(priced) if layout.schedule == "1f1b" and layout.pipeline > 1 else None
            if refitted is None:
                self._refuse(layout, priced, str(error))
                return None
            priced = refitted
        return self._simulate(priced, must_simulate)

    def _simulate(self, priced: PricedLayout, must_simulate: bool = False) -> float:
        """Simulate a priced layout where it may be the best (or `must_simulate`); return a lower bound of its seconds."""
        pricer, layout = self.pricer, priced.layout
        if not must_simulate:
            lending_factor = self._lending_factor(layout)
            trips = [(c.forward_s, c.forward_s + c.backward_s) for c in priced.costs]
            lowest = pricer.predict(layout, priced.costs, (), pipeline_lower_bound_s(layout, trips, lending_factor)).step_time_s
            if self._cannot_win(layout, lowest):
                return lowest
        simulated = simulate_time(pricer, priced, is_full=False)
        if self._is_better(simulated):
            simulated = simulate_time(pricer, priced)  # what is chosen is simulated in full
            if self._is_better(simulated):
                self._set_best(simulated)
        self.timed_layouts.append(simulated)
        return simulated.prediction.step_time_s

    def _is_better(self, priced: PricedLayout) -> bool:
        cluster = self.pricer.cluster
        return self.best is None or score_plan(priced, cluster, self.objective) < score_plan(self.best, cluster, self.objective)

    def _refit_stages(self, priced: PricedLayout) -> PricedLayout | None:
        """Return the layout with stages that fit, where the most balanced ones do not."""
        pricer, layout = self.pricer, priced.layout
        if sum(c.memory.alone.total for c in priced.costs) > sum(stage_device_memory(pricer, layout, k) for k in range(layout.pipeline)):
            return None
        try:
            refitted = fit_stages(pricer, layout)
            check_priced(pricer, refitted)
        except Infeasible:
            return None
        return refitted

    def _cannot_win(self, layout: Layout, seconds: float) -> bool:
        """Return whether a step of at least so many seconds cannot be the best."""
        if self.best is None:
            return False
        return self._objective_bound(layout, seconds) > self._best_value

    def best_score(self) -> tuple[float, ...]:
        """Return the score of the best; less is better."""
        assert self.best is not None
        return score_plan(self.best, self.pricer.cluster, self.objective)

    def _set_best(self, priced: PricedLayout) -> None:
        self.best = priced
        self._best_value = self.best_score()[:1]

    def _refuse(self, layout: Layout, priced: PricedLayout | None, reason: str) -> None:
        self.refused_candidates.append(LayoutCandidate(layout, None if priced is None else priced.prediction, reason))
