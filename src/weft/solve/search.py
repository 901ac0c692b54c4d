"""The fastest plan. In: a graph, a cluster, a batch, constraints or a layout by hand. Out: a `Plan` with reasons and runners-up.

Branch and bound. Every frame of the space gets a proven lower bound; the most promising is priced with all its schedules and all that
trades memory for time, and timed by the clock on the program that would run, until no bound is below the best. What costs time and
saves only memory is not tried where the same fits without. Then the leading layouts' tensor ranks are arranged in grids. A layout by hand
goes the same way, alone. Not searched: shards other than those that propagation finds best, stages other than the most balanced (that
fit), and grids of layouts that do not lead with their tensor ranks in a line.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import permutations
from math import exp, log

from weft.cluster.cluster import Cluster
from weft.cluster.mixed import reordered
from weft.cost.gradients import best_bucket_bytes
from weft.cost.parts import block, expert_weights
from weft.cost.stage import work_share
from weft.cost.step import Pricer, together
from weft.errors import Infeasible, LayoutError, UsageError
from weft.model.collector import uncollected
from weft.model.graph import Graph
from weft.model.samples import check_samples, samples_elsewhere
from weft.model.sharding import Shards
from weft.model.stages import links
from weft.plan.check import check
from weft.plan.layout import Layout
from weft.plan.microbatches import microbatch_sizes
from weft.plan.plan import Candidate, Plan
from weft.plan.residency import KINDS
from weft.schedules import build
from weft.solve.bounds import check_state, least_s, least_saving_s, least_state_bytes, most_memory
from weft.solve.grids import in_grids
from weft.solve.mixed import MixedPricer, check_fits, memory_of, pricer_of
from weft.solve.reasons import differences, reasons, spread
from weft.solve.refine import refined, wanted
from weft.solve.remedies import nothing_fits
from weft.solve.residency import DROP, KEEP, SWAP, housed, told
from weft.solve.space import Constraint, Space, limits_of
from weft.solve.stages import useful
from weft.solve.sums import sums_of, why
from weft.solve.timing import PLAIN, Priced, balanced, clocked, fitted, least_pipeline_s, price, timeline, trips_s

__all__ = ["OBJECTIVES", "Priced", "balanced", "check_layout", "clocked", "price", "search", "timeline"]

OBJECTIVES = ("time", "cost", "energy", "memory")
MOST_REFUSED = 4
MOST_GUESSED, MOST_TRIED_FIRST = 16, 2  # frames that look promising, and those of them that are priced before all others
MOST_HOUSED = 24  # ways to fit by repeating or moving all layers, of which fewer are tried
MOST_ORDERS = 6  # of the parts of a mixed cluster
CALM = 0.02  # of the step: what processors' own figures differ by from probe to probe
SAME = 0.004  # relative difference of times that is none
NEARLY = 1.2  # of the memory: what the first of the most balanced stages may need where other stages could still fit
MOST_CHECKED = 8_000  # actions of the program that is proven
INFINITE = float("inf")
Thrift = tuple[int, str, str]  # ZeRO stage, recomputation, offload
COMPARED = ("data", "tensor", "pipeline", "microbatches", "precision", "sequence_parallel", "expert")  # keys of frames


def search(
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
        return _search(graph, cluster, batch_size, model, constraints, layout, objective, shards, stages, optimizer_states)


def _search(
    graph: Graph,
    cluster: Cluster,
    batch_size: int,
    model: str,
    constraints: str,
    layout: Layout | None,
    objective: str,
    shards: Mapping[str, Shards] | None,
    stages: Sequence[str],
    optimizer_states: int,
) -> Plan:
    began = time.perf_counter()
    if batch_size < 1:
        raise UsageError(f"a batch of {batch_size} samples; use 1 or more")
    if objective not in OBJECTIVES:
        raise UsageError(f"unknown objective {objective}; use one of {', '.join(OBJECTIVES)}")
    elsewhere = samples_elsewhere(graph)
    limits = limits_of(constraints, elsewhere)
    if layout is not None:
        check_samples(graph, layout)
        found = _by_hand(pricer_of(graph, cluster, batch_size, optimizer_states, shards), layout, stages)
    else:
        # Of a mixed cluster the parts may stand in any order along the pipeline.
        orders = [reordered(cluster, order) for order in permutations(range(len(cluster.parts)))] if cluster.parts else [cluster]
        tried = [_find(pricer_of(graph, c, batch_size, optimizer_states, shards), limits, objective) for c in orders[:MOST_ORDERS]]
        fitting = [one for one in tried if one.best is not None]
        if not fitting:
            raise nothing_fits(tried[0].pricer, tried[0].space, constraints, tried[0].leanest, tried[0].refused)
        found = min(fitting, key=lambda one: one.score())
        found.compare()
    pricer, cluster, best = found.pricer, found.pricer.cluster, found.best
    assert best is not None
    if layout is None and objective == "time" and cluster.is_cpu:
        best = calmest(found.clocked, best)
    if layout is None and wanted(pricer, best):
        chosen = best
        pricer, best = refined(pricer, best)
        if best is not chosen:
            found.clocked.append(best)
            found.bound_s = 0.0  # what was proven was of the placements that propagation finds
    _prove(pricer, best)
    found.clocked.sort(key=lambda p: (p is not best, *_score(p, cluster, objective)))
    priced = {p.layout: p for p in reversed(found.clocked)}  # of two placements of one layout the better
    candidates = [Candidate(p.layout, p.prediction) for p in reversed(priced.values())]
    refused = sorted(
        found.refused, key=lambda c: (differences(c.layout, best.layout), c.prediction.step_time_s if c.prediction else float("inf"))
    )
    inner = [best.layout.of_stage(s) for s in range(best.layout.pipeline)]
    sharding = pricer.sharding(max(inner, key=lambda one: one.tensor))  # stages with fewer tensor ranks cut the same
    cut = () if sharding is None else tuple((axis, names) for axis, names in sharding.shards.items() if axis != "data" and names)
    mixed = isinstance(pricer, MixedPricer)
    bucket_bytes = 0 if mixed else best_bucket_bytes(pricer, best.layout, best.sites)
    sums = sums_of(cluster, best.layout)
    return Plan(
        best.layout,
        model,
        cluster.name,
        batch_size,
        best.sites,
        cut,
        best.prediction,
        (
            *reasons(best.layout, best.prediction, candidates, refused, cluster, by_hand=layout is not None, bound_s=found.bound_s),
            *((("all_reduce", words),) if not mixed and (words := why(cluster, best.layout, sums, bucket_bytes)) else ()),
            *((("layers", words),) if (words := told(pricer, best.layout, best.sites)) else ()),
            *((("samples", elsewhere),) if elsewhere else ()),
            *((("parts", pricer.where(best.layout)),) if isinstance(pricer, MixedPricer) else ()),
        ),
        (*spread(candidates), *refused[:MOST_REFUSED]),
        () if sharding is None else sharding.replicated,
        bucket_bytes=bucket_bytes,
        bound_gap=best.prediction.step_time_s / found.bound_s - 1 if found.bound_s else None,
        planning_time_s=time.perf_counter() - began,
        sums=sums,
    )


def _find(pricer: Pricer, limits: Sequence[Constraint], objective: str) -> _Search:
    """The search of all layouts that the constraints admit."""
    graph = pricer.graph
    layers = sum(run.count for run in graph.fold.runs) if graph.fold is not None else len(useful(pricer.cuts, 1)) + 1
    fewer = objective in ("cost", "energy") and not pricer.cluster.parts
    space = Space(pricer.cluster, pricer.batch_size, limits, len(pricer.cuts) + 1, layers, _experts(pricer.graph), fewer=fewer)
    space.check()
    found = _Search(pricer, space, objective)
    found.run()
    found.house()
    found.arrange()
    return found


@dataclass
class _Search:
    """One search: what is still open, what was found. `clocked` and `refused` are in no order."""

    pricer: Pricer
    space: Space
    objective: str
    best: Priced | None = None
    leanest: Priced | None = None
    clocked: list[Priced] = field(default_factory=list)
    refused: list[Candidate] = field(default_factory=list)
    bound_s: float = 0.0
    _open: list[tuple[tuple[float, ...], int, Layout, bool]] = field(default_factory=list)
    _all: list[tuple[tuple[float, ...], int, Layout, bool]] = field(default_factory=list)
    _number: int = 0
    _best_value: tuple[float, ...] = ()
    _known: dict[tuple[Layout, bool], dict[Thrift, float]] = field(default_factory=dict)
    _may_fit: dict[Layout, dict[Thrift, Layout]] = field(default_factory=dict)

    def run(self) -> None:
        """Price frames in the order of their bounds until none can be better than the best."""
        cluster = self.pricer.cluster
        least: dict[tuple[Layout, bool], float] = {}
        for frame in self.space.frames():
            for interleaved in {one.schedule not in PLAIN for one in self.space.schedules(frame)}:
                try:
                    check_layout(frame, cluster, self.pricer.batch_size)
                    bound = least_s(self.pricer, frame, interleaved)
                except (Infeasible, LayoutError) as error:
                    self._refuse(frame, None, str(error))
                    continue
                least[frame, interleaved] = bound
                self._number += 1
                heapq.heappush(self._open, (self._bound(frame, bound), self._number, frame, interleaved))
        self._all = list(self._open)
        done = {key: self._expand(*key) for key in self._promising()}
        least.update(done)
        while self._open:
            bound_score, number, frame, interleaved = self._open[0]
            if self.best is not None and bound_score > self._best_value:
                break
            heapq.heappop(self._open)
            if (frame, interleaved) in done:
                continue
            savings = self._savings(frame, interleaved)
            least[frame, interleaved] = min(savings.values(), default=INFINITE)  # nothing makes it fit
            known = min((self._bound(frame, seconds) for seconds in savings.values()), default=None)
            if known is not None and known > bound_score:
                heapq.heappush(self._open, (known, number, frame, interleaved))  # what makes it fit costs time
            elif known is not None:
                least[frame, interleaved] = self._expand(frame, interleaved)
        lowest = min(least.values(), default=INFINITE)
        self.bound_s = lowest if lowest < INFINITE else 0.0

    def house(self) -> None:
        """Where all layers are repeated or moved for want of memory, try the fewest that it takes: of what could not be told to be worse.

        The bound then is that of what neither repeats nor moves layers, where that would be the least.
        """
        if self.best is None or self.objective == "memory":
            return
        ways = {DROP: ("recompute", ("full",)), SWAP: ("offload", ("activations", "all"))}
        open_to = {
            way: [kind for kind in kinds if self.space.admits(key, kind) and not self.space.asked(key, kind)]
            for way, (key, kinds) in ways.items()
        }
        bases: dict[tuple[Layout, bool, int, str], float] = {}
        for (frame, interleaved), savings in self._known.items():
            for (zero, recompute, offload), seconds in savings.items():
                if recompute in open_to[DROP] or offload in open_to[SWAP]:
                    base = (frame, interleaved, zero, "optimizer" if offload in ("optimizer", "all") else "none")
                    bases[base] = min(seconds, bases.get(base, INFINITE))
        for frame, interleaved, zero, offload in heapq.nsmallest(MOST_HOUSED, bases, key=lambda one: bases[one]):
            moves = "all" if offload == "optimizer" else "activations"
            allowed = [KEEP, *([SWAP] if moves in open_to[SWAP] else []), *([DROP] if open_to[DROP] else [])]
            least = least_saving_s(self.pricer, replace(frame, zero=zero, offload=offload), interleaved)
            if self._hopeless(frame, least):
                continue
            for schedule in self.space.schedules(frame):
                if (schedule.schedule not in PLAIN) is interleaved:
                    timed = housed(self.pricer, replace(schedule, zero=zero, offload=offload), allowed)
                    if timed is not None:
                        self.bound_s = min(self.bound_s, least)
                        if self._leads(timed):
                            self._lead(timed)
                        self.clocked.append(timed)

    def arrange(self) -> None:
        """Try the leading layouts' tensor ranks in grids, unless a constraint arranges them; the bound counts those that fit."""
        if self.best is None or self.space.grid is not None or self.objective == "memory":
            return
        for layout, least in in_grids(self.pricer, list(self.clocked), self._hopeless):
            taken = None if self._hopeless(layout, least) else self._try(layout)
            if taken is not None:
                self.bound_s = min(self.bound_s, max(least, taken))

    def _promising(self) -> list[tuple[Layout, bool]]:
        """Frames that are likely to be among the best: a good plan that is known early saves pricing many others.

        A guess: what makes them fit counts, and half of the time in which a pipeline of whole backwards fills and drains.
        """

        def guess(item: tuple[tuple[float, ...], int, Layout, bool]) -> float:
            return item[0][0] * (1 + 0.5 * (item[2].pipeline - 1) / item[2].microbatches)

        # The best of every mesh, since those of one mesh need about as much memory.
        likely: dict[tuple[int, int, int], tuple[tuple[float, ...], int, Layout, bool]] = {}
        for item in sorted(self._open, key=guess):
            likely.setdefault((item[2].data, item[2].tensor, item[2].pipeline), item)
        found = []
        for item in list(likely.values())[:MOST_GUESSED]:
            savings = self._savings(item[2], item[3])
            if savings:
                waits = 1 + 0.5 * (item[2].pipeline - 1) / item[2].microbatches
                found.append((waits * min(savings.values()), item[1], item[2], item[3]))
        return [(frame, interleaved) for _, _, frame, interleaved in heapq.nsmallest(MOST_TRIED_FIRST, found)]

    def compare(self) -> None:
        """Price what differs from the best in one key, where the search had no need to: the plan says what it would cost."""
        assert self.best is not None
        mine = self.best.layout
        frames = [item for item in self._all if not item[3]]
        for key in COMPARED:
            have = {getattr(p.layout, key) for p in self.clocked}
            for value in sorted({getattr(item[2], key) for item in frames} - have, key=str):
                near = sorted((item for item in frames if getattr(item[2], key) == value), key=lambda i: (i[0], i[1]))
                for _, _, frame, _ in near[:2]:
                    if self._plainest(frame):
                        break
        done = {p.layout for p in self.clocked}
        for one in self.space.variants(replace(mine, schedule="1f1b", chunks=1, zero=0, recompute="none", offload="none")):
            if one not in done and differences(one, mine) == 1:
                self._try(one, whatever=True)

    def _plainest(self, frame: Layout) -> bool:
        """Price the frame with the first thrift that makes it fit; whether one does."""
        schedule = next(self.space.schedules(frame), None)
        if schedule is None:
            return False
        thrifts = sorted(self._thrifts(frame), key=lambda t: (t[2] != "none", t[1] == "full", t[1] != "none", abs(t[0] - 1)))
        return any(
            self._try(replace(schedule, zero=zero, recompute=recompute, offload=offload), whatever=True) is not None
            for zero, recompute, offload in thrifts[:3]
        )

    def _bound(self, frame: Layout, seconds: float) -> tuple[float, ...]:
        if self.objective == "memory":
            zero = max((z for z in range(4) if self.space.admits("zero", z)), default=0) if frame.data > 1 else 0
            offload = "all" if any(self.space.admits("offload", o) for o in ("optimizer", "all")) else "none"
            return (least_state_bytes(self.pricer, replace(frame, zero=zero, offload=offload, compress="none", staleness=0)),)
        return (_value(frame, seconds, self.pricer.cluster, self.objective),)

    def _savings(self, frame: Layout, interleaved: bool) -> dict[Thrift, float]:
        """Every (zero, recompute, offload) under which the frame may fit, with seconds that no such step beats."""
        key = (frame, interleaved)
        if key not in self._known:
            every = self._thrifts(frame).items()
            self._known[key] = {thrift: least_saving_s(self.pricer, one, interleaved) for thrift, one in every}
        return self._known[key]

    def _expand(self, frame: Layout, interleaved: bool) -> float:
        """Price the variants of a frame, those that cost more only where what costs less does not fit.

        Returns:
            Seconds below which no variant comes that may fit; infinite where none does.
        """
        savings = self._savings(frame, interleaved)
        lowest = INFINITE
        for schedule in self.space.schedules(frame):
            if (schedule.schedule not in PLAIN) is not interleaved:
                continue
            fitting: list[Layout] = []
            # Of the balanced stages of this schedule, with what full recomputation repeats or without.
            known: dict[bool, float] = {}
            for thrift, seconds in savings.items():
                zero, recompute, offload = thrift
                least = seconds
                if not self._hopeless(frame, least):
                    again = recompute == "full"
                    if again not in known:
                        known[again] = self._least_of(schedule, again)
                    least = max(least, known[again])
                if not self._hopeless(frame, least):
                    one = replace(schedule, zero=zero, recompute=recompute, offload=offload)
                    if self.objective != "memory" and any(_spares(other, one) for other in fitting):
                        continue
                    found = self._try(one)
                    if found is None:
                        continue
                    fitting.append(one)
                    least = max(least, found)
                lowest = min(lowest, least)
        return lowest

    def _least_of(self, schedule: Layout, again: bool) -> float:
        """Seconds at the least with the balanced stages of one schedule, with full recomputation (`again`) or without."""
        try:
            return least_pipeline_s(schedule, trips_s(self.pricer, schedule, again))
        except Infeasible:
            return 0.0

    def _thrifts(self, frame: Layout) -> dict[Thrift, Layout]:
        """(zero, recompute, offload) under which the frame may fit, with the layout: under which the first stage of 1F1B nearly does.

        GPipe holds as many microbatches or more, and chunks hold (p - 1)/v more.
        """
        if frame not in self._may_fit:
            pricer, found = self.pricer, {}
            have = most_memory(pricer, frame)
            try:
                sites = balanced(pricer, frame) if frame.pipeline > 1 else ()  # the same for all
                for one in self.space.thrifts(frame):
                    if least_state_bytes(pricer, one) <= have and pricer.held(one, sites, range(1))[0].total <= NEARLY * have:
                        found[one.zero, one.recompute, one.offload] = one
            except (Infeasible, LayoutError):  # the model has too few places for so many stages
                pass
            self._may_fit[frame] = found
        return self._may_fit[frame]

    def _try(self, layout: Layout, whatever: bool = False) -> float | None:
        """Price a layout, and time it by the clock where it may be the best (or `whatever`).

        Returns:
            Seconds below which it does not come; None where it does not fit. What cannot be the best may be told not to fit, or not.
        """
        pricer, cluster = self.pricer, self.pricer.cluster
        have = memory_of(pricer, layout, 0)
        try:
            check_layout(layout, cluster, pricer.batch_size)
            check_state(pricer, layout)
            sites = balanced(pricer, layout) if layout.num_stages > 1 else ()
            mine = layout.stages_of(0)
            need = together(pricer.held(layout, sites, mine), layout).total
            barred = need > have and (layout.pipeline == 1 or layout.schedule != "1f1b")
            if not (barred or whatever or self.best is None):
                own = sum(c.forward_s + c.backward_s for c in pricer.stages(layout, sites, only=mine))
                floor = work_share(layout, 0) * layout.microbatches * own
                if self._hopeless(layout, floor):
                    return floor
            if self.objective == "memory" and self.best is not None and need > self.best.prediction.memory.total and not whatever:
                return 0.0
            if barred:
                raise Infeasible(f"{layout}: the first rank needs {need / 2**30:.2f} GiB, and has {have / 2**30:.2f} GiB")
            priced = price(pricer, layout, sites)
        except (Infeasible, LayoutError) as error:
            self._refuse(layout, None, str(error))
            return None
        if self.leanest is None or priced.prediction.memory.total < self.leanest.prediction.memory.total:
            self.leanest = priced
        try:
            check_priced(pricer, priced)
        except Infeasible as error:
            found = self._fitted(priced) if layout.schedule == "1f1b" and layout.pipeline > 1 else None
            if found is None:
                self._refuse(layout, priced, str(error))
                return None
            priced = found
        if not whatever:
            trips = [(c.forward_s, c.forward_s + c.backward_s) for c in priced.costs]
            lowest = pricer.predict(layout, priced.costs, (), least_pipeline_s(layout, trips)).step_time_s
            if self._hopeless(layout, lowest):
                return lowest
        timed = clocked(pricer, priced, whole=False)
        if self._leads(timed):
            timed = clocked(pricer, priced)  # what is chosen is timed in whole
            if self._leads(timed):
                self._lead(timed)
        self.clocked.append(timed)
        return timed.prediction.step_time_s

    def _leads(self, priced: Priced) -> bool:
        cluster = self.pricer.cluster
        return self.best is None or _score(priced, cluster, self.objective) < _score(self.best, cluster, self.objective)

    def _fitted(self, priced: Priced) -> Priced | None:
        """The same with stages that fit, where the most balanced ones do not."""
        pricer, layout = self.pricer, priced.layout
        if sum(c.memory.total for c in priced.costs) > sum(memory_of(pricer, layout, k) for k in range(layout.pipeline)):
            return None
        try:
            found = fitted(pricer, layout)
            check_priced(pricer, found)
        except Infeasible:
            return None
        return found

    def _hopeless(self, layout: Layout, seconds: float) -> bool:
        """Whether a step of at least so many seconds cannot be the best."""
        if self.best is None:
            return False
        return self._bound(layout, seconds) > self._best_value

    def score(self) -> tuple[float, ...]:
        """Of the best; less is better."""
        assert self.best is not None
        return _score(self.best, self.pricer.cluster, self.objective)

    def _lead(self, priced: Priced) -> None:
        self.best = priced
        self._best_value = self.score()[:1]

    def _refuse(self, layout: Layout, priced: Priced | None, why: str) -> None:
        self.refused.append(Candidate(layout, None if priced is None else priced.prediction, why))


def _by_hand(pricer: Pricer, layout: Layout, stages: Sequence[str]) -> _Search:
    """The search of one layout.

    Raises:
        Infeasible, LayoutError: it cannot be, or does not fit.
    """
    check_layout(layout, pricer.cluster, pricer.batch_size)
    # By hand and on GPUs, stages have equally many layers, as the frameworks have them that the efficiency sets were measured with.
    priced = price(pricer, layout, stages or pricer.even(layout))
    blocks = [dict.fromkeys(block(op.site) for op in stage.operators) for stage in pricer.split(priced.sites)]
    layout.residency.check([list(filter(None, one)) or [""] for one in blocks])
    check_priced(pricer, priced)
    best = clocked(pricer, priced)
    space = Space(pricer.cluster, pricer.batch_size)
    bound_s = 0.0 if layout.inner else least_saving_s(pricer, layout, layout.schedule not in PLAIN)
    return _Search(pricer, space, "time", best, best, [best], bound_s=bound_s)


def check_priced(pricer: Pricer, priced: Priced) -> None:
    """Raise `Infeasible` with the numbers where a rank does not fit the devices that it lies on."""
    layout = priced.layout
    if not pricer.cluster.parts:
        pricer.check_memory(layout, priced.prediction)
        return
    check_fits(
        pricer, layout, [together([priced.costs[s].memory for s in layout.stages_of(r)], layout).total for r in range(layout.pipeline)]
    )


def _prove(pricer: Pricer, best: Priced) -> None:
    """Prove the program that the plan would run; a very long one with fewer microbatches, as many over a multiple of the ranks.

    Schedules repeat themselves every p microbatches, so what is left out is more of the same. The run proves its own as it goes.
    """
    layout = best.layout
    if layout.pipeline == 1:
        return
    m = layout.microbatches
    surplus = m - max(2 * layout.pipeline, MOST_CHECKED // (6 * layout.num_stages))
    m -= layout.pipeline * max(0, -(-surplus // layout.pipeline))
    check(build(layout.schedule, layout.num_stages, m, links(pricer.split(best.sites)), chunks=layout.chunks))


def _experts(graph: Graph) -> int:
    """Experts of the widest layer, 1 where there are none."""
    sizes = {v.value: v.tensor.shape[0] for v in graph.parameters if v.tensor.shape}
    return max((sizes[value] for value in expert_weights(graph)), default=1)


def check_layout(layout: Layout, cluster: Cluster, batch_size: int) -> None:
    """Raise `Infeasible` where the layout cannot be on this cluster or with this batch, with the numbers and the remedy."""
    if layout.num_ranks > cluster.num_devices and not cluster.is_cpu:
        raise Infeasible(f"{layout} needs {layout.num_ranks} devices, {cluster.name} has {cluster.num_devices}; make an axis smaller")
    sizes = microbatch_sizes(batch_size, layout.shares, layout.microbatches)
    if layout.inner and sizes[0] != sizes[-1]:
        ways = layout.shares * layout.microbatches
        raise Infeasible(
            f"{layout}: a batch of {batch_size} samples is no multiple of {layout.shares} shares x microbatches={layout.microbatches}, and "
            f"unequal microbatches with inner are not built yet; use a multiple of {ways}"
        )
    cluster.device.peak(layout.precision)


def _spares(other: Layout, layout: Layout) -> bool:
    """Whether `layout` only saves memory where `other` does not, and costs at least its time: it recomputes more, or offloads activations.

    ZeRO stages and an optimizer on the host may each be the faster, so they never stand for one another.
    """
    moved = {"none": ("none", "activations"), "optimizer": ("optimizer", "all")}.get(other.offload, (other.offload,))
    more = KINDS.index(other.residency.recompute.kind) <= KINDS.index(layout.residency.recompute.kind)
    return more and layout.offload in moved and other.zero == layout.zero


def _rounded(seconds: float) -> float:
    """To the nearest of a grid of steps of 0.4 %: no prediction is as exact, and decimal digits would be as coarse as 1 % at 1.00."""
    return exp(round(log(seconds) / SAME) * SAME) if 0 < seconds < INFINITE else seconds


def _value(layout: Layout, seconds: float, cluster: Cluster, objective: str) -> float:
    """The objective of a step of so many seconds, on a grid within whose cells the simpler layout and the leaner one wins."""
    seconds = _rounded(seconds)
    if objective == "time":
        return seconds
    return seconds * layout.num_ranks * (cluster.threads_of(layout.num_ranks, layout.threads) or 1)


def _score(priced: Priced, cluster: Cluster, objective: str) -> tuple[float, ...]:
    layout, prediction = priced.layout, priced.prediction
    seconds = _rounded(prediction.step_time_s)
    if objective == "memory":
        return (prediction.memory.total, seconds)
    unlike = sum(getattr(layout, f.name) != f.default for f in fields(Layout))
    value = _value(layout, prediction.step_time_s, cluster, objective)
    return (value, seconds, layout.num_ranks, layout.microbatches, unlike, prediction.memory.total)


def calmest(clocked: Sequence[Priced], best: Priced) -> Priced:
    """Of the plans about as fast as the best, the one whose ranks wait for one another least often.

    On processors whatever else runs stops a rank now and then, and all that wait for it; that is not priced. Tensor ranks meet in
    every layer, stages with every microbatch, replicas once a step.
    """

    def meets(one: Priced) -> tuple[object, ...]:
        layout = one.layout
        return layout.tensor > 1, layout.pipeline > 1, layout.offload != "none", layout.recompute != "none", layout.zero, _seconds(one)

    return min((one for one in (best, *clocked) if _seconds(one) <= _seconds(best) * (1 + CALM)), key=meets)


def _seconds(priced: Priced) -> float:
    return priced.prediction.step_time_s
