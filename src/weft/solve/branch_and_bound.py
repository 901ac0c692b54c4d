"""Branch and bound over the bases of a space. In: a pricer, a space, an objective. Out: the best plan and all that was timed.

Every base gets a proven lower bound; the most promising is priced with all its schedules and all that trades memory for time, and timed
by the clock on the program that would run, until no bound is below the best. What costs time and saves only memory is not tried where
the same fits without. Then the leading layouts' tensor ranks are arranged in grids.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from weft.cost.step import Pricer, together
from weft.errors import Infeasible, LayoutError
from weft.plan.axis import PIPELINE
from weft.plan.layout import Layout
from weft.plan.plan import Candidate
from weft.plan.residency import KINDS, kind_of
from weft.schedules import schedule_of
from weft.solve.bounds import check_room, check_state, least_s, least_saving_s, least_state_bytes, most_memory, most_room, waiting
from weft.solve.checks import check_layers, check_layout, check_priced
from weft.solve.grids import beyond, in_grids, left_out, more_and_fewer
from weft.solve.housing import housed, least_more_s
from weft.solve.lending import may_lend
from weft.solve.mixed import memory_of, share_out
from weft.solve.reasons import differences
from weft.solve.residency import DROP, KEEP, SWAP
from weft.solve.score import score, worth
from weft.solve.shorter import shortened
from weft.solve.space import Constraint, Space, fewer_counts
from weft.solve.submeshes import submeshes
from weft.solve.timing import Priced, balanced, clocked, fitted, least_pipeline_s, price, trips_s, waits_to_fill
from weft.solve.turned import turned

MOST_GUESSED, MOST_TRIED_FIRST = 16, 2  # bases that look promising, and those of them that are priced before all others
MOST_SHORTENED = 2  # layouts with segments of which fewer layers are repeated
MOST_HOUSED = 24  # ways to fit by repeating or moving all layers, of which fewer are tried
# Numbers of ranks below all of them that are tried, where arithmetic alone takes at most that part of the best step.
MOST_FEWER, WORTH = 6, 0.95
NEARLY = 1.2  # of the memory: what the first of the most balanced stages may need where other stages could still fit
INFINITE = float("inf")
MemoryOptions = tuple[int, str, str, int]  # ZeRO stage, recomputation, offload, segment
# Keys of bases.
COMPARED = (
    "data", "branch", "neighbours", "tensor", "context", "spatial", "pipeline", "microbatches", "precision", "sequence_parallel",
    "sample_parallel", "expert",
)  # fmt: skip


@dataclass
class Branches:
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
    _least_s: dict[tuple[Layout, bool], dict[MemoryOptions, float]] = field(default_factory=dict)
    _may_fit: dict[Layout, dict[MemoryOptions, Layout]] = field(default_factory=dict)

    def run(self) -> None:
        """Price bases in the order of their bounds until none can be better than the best; then those of smaller jobs that may be, and
        those with grids of tensor ranks on several nodes."""
        self._price(self.space)
        if self.objective == "time":
            self._price_fewer()
            for space in beyond(self.pricer, self.space, INFINITE if self.best is None else self.best.prediction.step_time_s):
                self._price(space)

    def _price_fewer(self) -> None:
        """Price smaller jobs that may be faster than the best."""
        if self.best is None or any(c.key == "ranks" for c in self.space.constraints):
            return
        tried, device = 0, self.pricer.cluster.device
        rate = device.matmul_efficiency * max(flops for _, flops in device.peak_flops)
        for count in fewer_counts(self.pricer.cluster):
            least_s = self.best.prediction.model_flops / (count * rate)
            if least_s < WORTH * self.best.prediction.step_time_s and tried < MOST_FEWER:
                tried += 1
                self._price(replace(self.space, constraints=(*self.space.constraints, Constraint("ranks", "=", count))))

    def _price(self, space: Space) -> None:
        """Price the bases of a space in the order of their bounds until none can be better than the best."""
        cluster = self.pricer.cluster
        least: dict[tuple[Layout, bool], float] = {}
        self._open = []
        zeros = [z for z in range(4) if space.admits("zero", z)]
        offloads = [kind_of("offload", o) for o in space.words("offload")]
        for base in self._bases(space):
            for interleaved in {not waits_to_fill(one) for one in self.space.schedules(base)}:
                try:
                    check_layout(base, cluster, self.pricer.batch_size)
                    check_room(self.pricer, base, zeros, offloads)
                    bound = least_s(self.pricer, base, interleaved)
                except (Infeasible, LayoutError) as error:
                    self._refuse(base, None, str(error))
                    continue
                least[base, interleaved] = bound
                self._number += 1
                heapq.heappush(self._open, (self._bound(base, bound), self._number, base, interleaved))
        self._all += self._open
        done = {key: self._expand(*key) for key in self._promising()}
        least.update(done)
        while self._open:
            bound_score, number, base, interleaved = self._open[0]
            if self.best is not None and bound_score > self._best_value:
                break
            heapq.heappop(self._open)
            if (base, interleaved) in done:
                continue
            savings = self._savings(base, interleaved)
            least[base, interleaved] = min(savings.values(), default=INFINITE)  # nothing makes it fit
            best_bound = min((self._bound(base, seconds) for seconds in savings.values()), default=None)
            if best_bound is not None and best_bound > bound_score:
                heapq.heappush(self._open, (best_bound, number, base, interleaved))  # what makes it fit costs time
            elif best_bound is not None:
                least[base, interleaved] = self._expand(base, interleaved)
        lowest = min((*least.values(), self.bound_s or INFINITE))
        self.bound_s = lowest if lowest < INFINITE else 0.0

    def _bases(self, space: Space) -> Iterator[Layout]:
        """Those of a space, on a mixed cluster also with shares by the speed of its parts; and with stages of unlike numbers of ranks."""
        for base in space.bases():
            yield from (one for one in (base, share_out(self.pricer, base)) if one is not None)
        yield from submeshes(space)

    def house(self) -> None:
        """Where all layers are repeated or moved for want of memory, try the fewest that it takes: of what could not be told to be worse.

        The bound then is the least of what neither repeats nor moves layers, of those that are not tried as well.
        """
        if self.best is None or self.objective == "memory":
            return
        ways = {DROP: ("recompute", ("full",)), SWAP: ("offload", ("activations", "all"))}
        open_to = {
            way: [kind for kind in kinds if self.space.admits(key, kind) and not self.space.asked(key, kind)]
            for way, (key, kinds) in ways.items()
        }
        bases: dict[tuple[Layout, bool, int, str], None] = {}
        for (base, interleaved), savings in self._least_s.items():
            for zero, recompute, offload, _ in savings:
                if recompute in open_to[DROP] or offload in open_to[SWAP]:
                    bases[base, interleaved, zero, "optimizer" if offload in ("optimizer", "all") else "none"] = None
        # Of each first what is known already, then what its first rank takes at the least, then its price.
        queue: list[tuple[float, int, Layout, list[str], bool]] = []
        for base, interleaved, zero, offload in bases:
            moves = "all" if offload == "optimizer" else "activations"
            allowed = [KEEP, *([SWAP] if moves in open_to[SWAP] else []), *([DROP] if open_to[DROP] else [])]
            least = least_saving_s(self.pricer, replace(base, zero=zero, offload=offload), interleaved)
            for schedule in self.space.schedules(base) if not self._hopeless(base, least) else ():
                if waits_to_fill(schedule) is not interleaved:
                    heapq.heappush(queue, (least, len(queue), replace(schedule, zero=zero, offload=offload), allowed, False))
        left, passed = MOST_HOUSED, INFINITE
        while queue and left:
            least, number, one, allowed, is_exact = heapq.heappop(queue)
            if self._hopeless(one, least):
                continue
            if not is_exact:
                heapq.heappush(queue, (max(least, self._least_housed(one, allowed)), number, one, allowed, True))
                continue
            left, passed = left - 1, min(passed, least)
            priced = housed(self.pricer, one, allowed)
            if priced is not None:
                self._time(priced)
        self.bound_s = min(self.bound_s, passed, queue[0][0] if queue else INFINITE)
        if open_to[DROP]:
            self._shorten()

    def _shorten(self) -> None:
        """Where all layers are repeated several at a time, try the fewest that it takes. No choice of layers takes less than
        `_least_housed`, whether they are repeated together or not, so the bound stands."""
        leading = sorted((p for p in self.clocked if p.layout.segment > 1 and not p.layout.inner), key=lambda p: p.prediction.step_time_s)
        for base in list(dict.fromkeys(_alone(p.layout) for p in leading))[:MOST_SHORTENED]:
            least = least_saving_s(self.pricer, replace(base, recompute="none"), not waits_to_fill(base))
            for segment in self.space.segments("full", base.offload) if not self._hopeless(base, least) else ():
                priced = shortened(self.pricer, replace(base, segment=segment)) if segment > 1 else None
                if priced is not None:
                    self._time(priced)

    def _least_housed(self, layout: Layout, allowed: Sequence[str]) -> float:
        """Seconds of a step at the least in which the first rank of a layout that does not fit moves and repeats what makes it fit."""
        pricer, schedule = self.pricer, schedule_of(layout)
        shares = schedule.shares[0]
        mine = sorted(shares)
        if may_lend(pricer.cluster, layout):
            return 0.0
        try:
            sites = balanced(pricer, layout) if layout.num_stages > 1 else ()
            trips = trips_s(pricer, layout, again=False)
        except Infeasible:
            return INFINITE
        more = least_more_s(pricer, layout, sites, 0, allowed)
        costs = zip(mine, pricer.stages(layout, sites, only=mine), strict=True)
        once = sum(shares[s] * (c.forward_s + c.backward_s) for s, c in costs)
        bare = more + sum(shares[s] * trips[s][1] for s in mine)  # gathered weights hide behind what is repeated
        least = max(least_pipeline_s(layout, trips), layout.microbatches * max(once, bare))
        if schedule.splits_backward or schedule.has_replicas:
            return least
        return max(least, sum(trip_s for _, trip_s in trips[:-1]) + layout.microbatches * trips[-1][1] + more * (layout.pipeline > 1))

    def arrange(self) -> None:
        """Try leading pipelines' stages as neighbours, and leading layouts' tensor ranks in grids, the best grid of each mesh with more
        and fewer microbatches; the bound counts those that fit."""
        if self.best is None or self.objective == "memory":
            return
        if self.space.admits("neighbours", PIPELINE):
            for layout in turned(self.pricer.cluster, list(self.clocked), self._hopeless):
                self.bound_s = min(self.bound_s, self._try(layout) or self.bound_s)
        if self.space.grid is not None:
            return
        for base in left_out(self.pricer, list(self.clocked), [item[2] for item in sorted(self._all) if not item[3]], self._hopeless):
            self._plainest(base)
        cheapest: dict[tuple[object, ...], tuple[float, Layout]] = {}
        for layout, least in in_grids(self.pricer, list(self.clocked), self._hopeless):
            seconds = self._in_grid(layout, least)
            mesh = (layout.data, layout.branch, layout.tensor, layout.pipeline, layout.context, layout.spatial)
            if mesh not in cheapest or seconds < cheapest[mesh][0]:
                cheapest[mesh] = seconds, layout
        for first, layout in cheapest.values():
            for counts in more_and_fewer(self.space, layout):
                last = first
                for microbatches in counts:
                    with suppress(Infeasible, LayoutError):
                        other = replace(layout, microbatches=microbatches)
                        seconds = self._in_grid(other, least_saving_s(self.pricer, other, not waits_to_fill(other)))
                        if seconds < last:
                            last = seconds
                            continue
                    break

    def _in_grid(self, layout: Layout, least: float) -> float:
        """Seconds of a layout in a grid, or `least` where that cannot be the best; infinite where it does not fit."""
        if self._hopeless(layout, least):
            return least
        taken = self._try(layout)
        if taken is None:
            return INFINITE
        self.bound_s = min(self.bound_s, max(least, taken))
        return max(least, taken)

    def _promising(self) -> list[tuple[Layout, bool]]:
        """Bases that are likely to be among the best: a good plan that is known early saves pricing many others.

        A guess: what makes them fit counts, and half of the time in which a pipeline of whole backwards fills and drains.
        """

        def guess(item: tuple[tuple[float, ...], int, Layout, bool]) -> float:
            return item[0][0] * (1 + 0.5 * (item[2].pipeline - 1) / item[2].microbatches)

        # The best of every mesh, since those of one mesh need about as much memory.
        likely: dict[tuple[object, ...], tuple[tuple[float, ...], int, Layout, bool]] = {}
        for item in sorted(self._open, key=guess):
            base = item[2]
            likely.setdefault((base.data, base.branch, base.tensor, base.pipeline, base.context, base.spatial, base.inner), item)
        promising = []
        for item in list(likely.values())[:MOST_GUESSED]:
            savings = self._savings(item[2], item[3])
            if savings:
                waits = 1 + 0.5 * (item[2].pipeline - 1) / item[2].microbatches
                promising.append((waits * min(savings.values()), item[1], item[2], item[3]))
        return [(base, interleaved) for _, _, base, interleaved in heapq.nsmallest(MOST_TRIED_FIRST, promising)]

    def compare(self) -> None:
        """Price what differs from the best in one key, where the search had no need to: the plan says what it would cost."""
        assert self.best is not None
        mine = self.best.layout
        bases = [item for item in self._all if not item[3] and not item[2].inner]
        for key in COMPARED:
            have = {getattr(p.layout, key) for p in self.clocked}
            for value in sorted({getattr(item[2], key) for item in bases} - have, key=str):
                near = sorted((item for item in bases if getattr(item[2], key) == value), key=lambda i: (i[0], i[1]))
                for _, _, base, _ in near[:2]:
                    if self._plainest(base):
                        break
        done = {p.layout for p in self.clocked}
        for one in self.space.variants(
            replace(mine, schedule="1f1b", chunks=1, zero=0, recompute="none", segment=1, offload="none", lend=self.space.lend)
        ):
            if one not in done and differences(one, mine) == 1:
                self._try(one, whatever=True)

    def _plainest(self, base: Layout) -> bool:
        """Price the base with the first way of saving memory that makes it fit; whether one does."""
        schedule = next(self.space.schedules(base), None)
        if schedule is None:
            return False
        ways = sorted(self._memory_options(base), key=lambda t: (t[2] != "none", t[1] == "full", t[1] != "none", t[3], abs(t[0] - 1)))
        return any(self._try(_saving(schedule, options), whatever=True) is not None for options in ways[:3])

    def _bound(self, base: Layout, seconds: float) -> tuple[float, ...]:
        if self.objective == "memory":
            zero = max((z for z in range(4) if self.space.admits("zero", z)), default=0) if base.replicas > 1 else 0
            offload = "all" if any(kind_of("offload", o) in ("optimizer", "all") for o in self.space.words("offload")) else "none"
            return (least_state_bytes(self.pricer, replace(base, zero=zero, offload=offload, compress="none", staleness=0, servers=0)),)
        return (worth(base, seconds, self.pricer.cluster, self.objective),)

    def _savings(self, base: Layout, interleaved: bool) -> dict[MemoryOptions, float]:
        """Every way of saving memory under which the base may fit, with seconds that no such step beats: of any segment the same."""
        key = (base, interleaved)
        if key not in self._least_s:
            seconds: dict[Layout, float] = {}
            for one in map(_alone, self._memory_options(base).values()):
                if one not in seconds:
                    seconds[one] = least_saving_s(self.pricer, one, interleaved)
            self._least_s[key] = {options: seconds[_alone(one)] for options, one in self._memory_options(base).items()}
        return self._least_s[key]

    def _expand(self, base: Layout, interleaved: bool) -> float:
        """Price the variants of a base, those that cost more only where what costs less does not fit.

        Returns: seconds below which no variant comes that may fit; infinite where none does.
        """
        savings = self._savings(base, interleaved)
        lowest = INFINITE
        for schedule in self.space.schedules(base):
            if waits_to_fill(schedule) is interleaved:
                continue
            fitting: list[Layout] = []
            # Of the balanced stages of this schedule, with what full recomputation repeats or without.
            bounds: dict[bool, float] = {}
            for options, seconds in savings.items():
                least = seconds
                if not self._hopeless(base, least):
                    again = options[1] == "full"
                    if again not in bounds:
                        bounds[again] = self._least_of(schedule, again)
                    least = max(least, bounds[again])
                if not self._hopeless(base, least):
                    one = _saving(schedule, options)
                    if self.objective != "memory" and any(_spares(other, one) for other in fitting):
                        continue
                    seconds_taken = self._try(one)
                    if seconds_taken is None:
                        continue
                    fitting.append(one)
                    least = max(least, seconds_taken)
                lowest = min(lowest, least)
        return lowest

    def _least_of(self, schedule: Layout, again: bool) -> float:
        """Seconds at the least with the balanced stages of one schedule, with full recomputation (`again`) or without."""
        try:
            lends = waiting(self.pricer, schedule, even=True) if may_lend(self.pricer.cluster, schedule) else 0.0
            return least_pipeline_s(schedule, trips_s(self.pricer, schedule, again), lends)
        except Infeasible:
            return 0.0

    def _memory_options(self, base: Layout) -> dict[MemoryOptions, Layout]:
        """The ways of saving memory under which the base may fit, with the layout: under which the first stage of 1F1B nearly does, or the
        first rank of a schedule of one stage a rank that is asked for, which may hold fewer.
        GPipe holds as many microbatches or more, and chunks hold (p - 1)/v more. Without a pipeline layers are repeated together only
        where it does not fit if they are repeated one at a time, since that takes as long.
        """
        if base not in self._may_fit:
            pricer, layouts = self.pricer, {}
            have, room = most_memory(pricer, base), most_room(pricer, base)
            try:
                sites = balanced(pricer, base) if base.pipeline > 1 else ()  # the same for all
                enough: set[Layout] = set()
                asked = [s for s in self.space.schedules(base) if s.chunks == 1 and self.space.asked("schedule", s.schedule)]
                for one in self.space.memory_options(base):
                    if least_state_bytes(pricer, one) > room or (one.segment > 1 and _alone(one) in enough):
                        continue
                    need = self._held(replace(one, schedule=asked[0].schedule) if asked else one, sites)
                    if need <= have and base.pipeline == 1 and self.objective != "memory":
                        enough.add(_alone(one))
                    if need <= NEARLY * have:
                        layouts[one.zero, one.recompute, one.offload, one.segment] = one
            except (Infeasible, LayoutError):  # the model has too few places for so many stages
                pass
            self._may_fit[base] = layouts
        return self._may_fit[base]

    def _held(self, layout: Layout, sites: Sequence[str]) -> float:
        """Bytes that the first rank of a pipeline holds."""
        schedule = schedule_of(layout)
        return together(self.pricer.held(layout, sites, schedule.stages_of[0]), schedule, 0).total

    def _try(self, layout: Layout, whatever: bool = False) -> float | None:
        """Price a layout, and time it by the clock where it may be the best (or `whatever`).

        Returns: seconds below which it does not come; None where it does not fit. What cannot be the best may be told not to fit, or not.
        """
        pricer, cluster = self.pricer, self.pricer.cluster
        have = memory_of(pricer, layout, 0)
        try:
            check_layout(layout, cluster, pricer.batch_size)
            check_state(pricer, layout)
            sites = balanced(pricer, layout) if layout.num_stages > 1 else ()
            schedule = schedule_of(layout)
            mine, need = schedule.stages_of[0], self._held(layout, sites)
            barred = need > have and (layout.pipeline == 1 or layout.schedule != "1f1b")
            lends = waiting(pricer, layout, even=True) if may_lend(cluster, layout) else 0.0
            if not (barred or whatever or lends or self.best is None):
                costs = zip(mine, pricer.stages(layout, sites, only=mine), strict=True)
                floor = layout.microbatches * sum(schedule.shares[0][s] * (c.forward_s + c.backward_s) for s, c in costs)
                if self._hopeless(layout, floor):
                    return floor
            if self.objective == "memory" and self.best is not None and need > self.best.prediction.memory.total and not whatever:
                return 0.0
            if barred:
                raise Infeasible(f"{layout}: the first rank needs {need / 2**30:.2f} GiB, and has {have / 2**30:.2f} GiB")
            priced = price(pricer, layout, sites)
            if layout.residency.picks:  # as a constraint asks for
                check_layers(pricer, priced)
        except (Infeasible, LayoutError) as error:
            self._refuse(layout, None, str(error))
            return None
        if self.leanest is None or priced.prediction.memory.total < self.leanest.prediction.memory.total:
            self.leanest = priced
        try:
            check_priced(pricer, priced)
        except Infeasible as error:
            refitted = self._fitted(priced) if layout.schedule == "1f1b" and layout.pipeline > 1 else None
            if refitted is None:
                self._refuse(layout, priced, str(error))
                return None
            priced = refitted
        return self._time(priced, whatever)

    def _time(self, priced: Priced, whatever: bool = False) -> float:
        """Time a priced layout by the clock where it may be the best (or `whatever`); seconds below which it does not come."""
        pricer, layout = self.pricer, priced.layout
        if not whatever:
            lends = waiting(pricer, layout, even=True) if may_lend(pricer.cluster, layout) else 0.0
            trips = [(c.forward_s, c.forward_s + c.backward_s) for c in priced.costs]
            lowest = pricer.predict(layout, priced.costs, (), least_pipeline_s(layout, trips, lends)).step_time_s
            if self._hopeless(layout, lowest):
                return lowest
        timed = clocked(pricer, priced, in_full=False)
        if self._leads(timed):
            timed = clocked(pricer, priced)  # what is chosen is timed in whole
            if self._leads(timed):
                self._lead(timed)
        self.clocked.append(timed)
        return timed.prediction.step_time_s

    def _leads(self, priced: Priced) -> bool:
        cluster = self.pricer.cluster
        return self.best is None or score(priced, cluster, self.objective) < score(self.best, cluster, self.objective)

    def _fitted(self, priced: Priced) -> Priced | None:
        """The same with stages that fit, where the most balanced ones do not."""
        pricer, layout = self.pricer, priced.layout
        if sum(c.memory.alone.total for c in priced.costs) > sum(memory_of(pricer, layout, k) for k in range(layout.pipeline)):
            return None
        try:
            refitted = fitted(pricer, layout)
            check_priced(pricer, refitted)
        except Infeasible:
            return None
        return refitted

    def _hopeless(self, layout: Layout, seconds: float) -> bool:
        """Whether a step of at least so many seconds cannot be the best."""
        if self.best is None:
            return False
        return self._bound(layout, seconds) > self._best_value

    def score(self) -> tuple[float, ...]:
        """Of the best; less is better."""
        assert self.best is not None
        return score(self.best, self.pricer.cluster, self.objective)

    def _lead(self, priced: Priced) -> None:
        self.best = priced
        self._best_value = self.score()[:1]

    def _refuse(self, layout: Layout, priced: Priced | None, why: str) -> None:
        self.refused.append(Candidate(layout, None if priced is None else priced.prediction, why))


def _saving(layout: Layout, options: MemoryOptions) -> Layout:
    zero, recompute, offload, segment = options
    return replace(layout, zero=zero, recompute=recompute, offload=offload, segment=segment)


def _alone(layout: Layout) -> Layout:
    """The same with layers that are repeated one at a time."""
    return replace(layout, segment=1) if layout.segment > 1 else layout


def _spares(other: Layout, layout: Layout) -> bool:
    """Whether `layout` only saves memory where `other` does not, and costs at least its time: it recomputes more, or offloads activations.

    ZeRO stages and an optimizer on the host may each be the faster, so they never stand for one another.
    """
    moved = {"none": ("none", "activations"), "optimizer": ("optimizer", "all")}.get(other.offload, (other.offload,))
    more = KINDS.index(other.residency.recompute.kind) <= KINDS.index(layout.residency.recompute.kind)
    return more and layout.offload in moved and other.zero == layout.zero
