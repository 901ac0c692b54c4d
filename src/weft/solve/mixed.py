"""Prices on a mixed cluster. In: what a pricer takes. Out: a `Pricer` whose stages are priced on the part that they lie on.

A pipeline whose stages each lie on one part is priced part by part: seconds, memory and gradient sums of a stage are its own part's, and
what crosses between parts goes over the link between them. Where a stage would lie on several parts (data or tensor ranks of different
kinds) every rank is taken as the least of them, since all wait for the slowest; but replicas that each lie on one part may have unequal
shares of a batch (`share_out`), and then each part is priced with the samples that its replicas have. Not modelled: more memory in one part
than in another for such replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

from weft.cluster.cluster import Cluster, Level
from weft.cost.devices.devices import Array
from weft.cost.memory.memory import StageMemory
from weft.cost.network.network import send_s
from weft.cost.step import Pricer, StageCost
from weft.errors import Infeasible
from weft.model.graph import Graph
from weft.model.sharding.sharding import Shards
from weft.plan.axis import PIPELINE
from weft.plan.layout import Layout
from weft.plan.microbatches import sizes_of_plan
from weft.plan.placement import apportioned
from weft.plan.shares import format_shares
from weft.schedules import schedule_of


@dataclass
class MixedPricer(Pricer):
    """A `Pricer` of a cluster with parts."""

    _apart: dict[int, tuple[Pricer, ...]] = field(default_factory=dict, init=False)  # of this batch and stack alone

    @cached_property
    def pricers(self) -> tuple[Pricer, ...]:
        """One for each part; what follows from the graph and its sharding they share."""
        pricers: list[Pricer] = []
        for part in self.cluster.parts:
            before = sum(earlier.cluster.num_devices for earlier in pricers)
            one = Pricer(self.graph, part, self.batch_size, self.optimizer_states, self.shards, self.stack, before=before)
            one.__dict__.update({"inventory": self.inventory, "cuts": self.cuts})
            one._shardings, one._canonical, one._parts, one._kinds = self._shardings, self._canonical, self._parts, self._kinds
            one._sections, one._splits = self._sections, self._splits
            pricers.append(one)
        return tuple(pricers)

    def owner(self, layout: Layout, stage: int) -> Pricer:
        """The pricer of the part on which a stage lies; this one, of the least of all parts, where it lies on several."""
        if not self.aligned(layout):
            return self
        first = layout.span(schedule_of(layout).ranks_of[stage][0])[0]
        for one in self.pricers:
            if first < one.cluster.num_devices:
                return one
            first -= one.cluster.num_devices
        return self

    def aligned(self, layout: Layout) -> bool:
        """Whether every stage lies on one part; with replicas that go both ways each lies on two ranks."""
        if schedule_of(layout).has_replicas or layout.neighbours == PIPELINE:
            return False
        uses_all = layout.num_ranks == self.cluster.num_devices
        width = layout.stage_ranks
        return uses_all and all(end in layout.begins if layout.begins else end % width == 0 for end in self._ends)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """How many devices there are up to each part's last."""
        return tuple(accumulate(part.num_devices for part in self.cluster.parts))

    def by_part(self, layout: Layout) -> tuple[Pricer, ...]:
        """A pricer of each part for its own replicas, where these have unequal shares and lie on one part each; () where they do not."""
        width, uses_all = layout.replica_ranks, layout.num_ranks == self.cluster.num_devices
        if not layout.shares or layout.num_stages > 1 or not uses_all or any(p.num_devices % width for p in self.cluster.parts):
            return ()
        if width not in self._apart:
            ends = list(accumulate((part.num_devices // width for part in self.cluster.parts), initial=0))
            pricers = [one.varied() for one in self.pricers]
            for one, replicas in zip(pricers, pairwise(ends), strict=True):
                one.replicas = replicas
            self._apart[width] = tuple(pricers)
        return self._apart[width]

    def operator_seconds(self, layout: Layout) -> tuple[Array, Array, Array, Array]:
        """As on one kind of device; of replicas with unequal shares those of the part that takes longest."""
        self.sharding(layout)
        each = [one.operator_seconds(layout) for one in self.by_part(layout)]
        return max(each, key=lambda times: sum(float(t.sum()) for t in times)) if each else super().operator_seconds(layout)

    def stages(
        self, layout: Layout, sites: Sequence[str] = (), *, only: Sequence[int] | None = None, place: int | None = None
    ) -> tuple[StageCost, ...]:
        self.sharding(layout)
        if not self.aligned(layout):
            return super().stages(layout, sites, only=only, place=place)
        wanted = only or range(len(sites) + 1)
        owners = [self.owner(layout, i if place is None else place) for i in wanted]
        return tuple(one.stages(layout, sites, only=(i,), place=place)[0] for i, one in zip(wanted, owners, strict=True))

    def held(self, layout: Layout, sites: Sequence[str], only: Sequence[int]) -> tuple[StageMemory, ...]:
        return tuple(cost.memory for cost in self.stages(layout, sites, only=only))

    def border_s(self, layout: Layout, stage: int, to: int, size_bytes: float) -> float:
        """Seconds to hand one microbatch's `size_bytes` from a stage to another."""
        here, there = self.owner(layout, stage), self.owner(layout, to)
        if here is there:
            places = schedule_of(layout).ranks_of
            return here.transfer_s(layout, size_bytes, places[stage][0], places[to][0])
        width = min(end - first for first, end in (layout.span(stage), layout.span(to)))
        return send_s(self._between, size_bytes / width, max(width, self._between.node_size), width)

    @cached_property
    def _between(self) -> Cluster:
        """Nodes joined by what joins the parts."""
        assert self.cluster.between is not None
        node, outer = self.cluster.levels
        return replace(self.cluster, levels=(node, Level(outer.name, outer.size, self.cluster.between)))

    def peak_flops(self, layout: Layout) -> float:
        if layout.num_ranks != self.cluster.num_devices:
            return super().peak_flops(layout)
        return sum(part.device.peak(layout.precision) * part.num_devices for part in self.cluster.parts)

    def where(self, layout: Layout) -> str:
        """Which stages lie on which part, in words."""
        if each := self.by_part(layout):
            return ", ".join(f"{one.samples(layout)} samples of a microbatch on each replica of {one.cluster.name}" for one in each)
        if not self.aligned(layout):
            return f"every stage lies on {' and '.join(part.name for part in self.cluster.parts)}, and all ranks wait for the slowest"
        said, first, end = [], 0, 0
        for part in self.cluster.parts:
            end += part.num_devices
            count = sum(layout.span(place)[1] <= end for place in range(layout.pipeline)) - first
            ranks = f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"
            said.append(f"pipeline {ranks} on {part.name}")
            first += count
        return ", ".join(said)


def share_out(pricer: Pricer, layout: Layout) -> Layout | None:
    """The layout with such shares that replicas on every part take equally long; None where they are equal, or cannot differ.

    What a replica takes is a part that grows with its samples and one that does not, both from the prices of two sizes.
    """
    if not isinstance(pricer, MixedPricer) or layout.data == 1 or layout.num_stages > 1 or layout.expert > 1:
        return None
    width, size = layout.replica_ranks, sizes_of_plan(pricer.batch_size, layout)[0]
    uses_all = layout.num_ranks == pricer.cluster.num_devices and not any(p.num_devices % width for p in pricer.cluster.parts)
    if not uses_all or layout.sample_parallel == "on" or layout.staleness or layout.servers or size < 2 * layout.data:
        return None
    pricer.sharding(layout)
    each, counts = size // layout.data, [part.num_devices // width for part in pricer.cluster.parts]
    sloped = []
    for one in pricer.pricers:
        less, more = (
            sum(float(t.sum()) for t in one.varied(batch_size=n * layout.data * layout.microbatches).operator_seconds(layout))
            for n in (each, 2 * each)
        )
        sloped.append((max(1e-12, (more - less) / each), max(0.0, 2 * less - more)))
    low, high = 0.0, max(slope * size + fixed for slope, fixed in sloped)
    for _ in range(60):  # the time in which all samples are done
        middle = (low + high) / 2
        done = sum(n * max(0.0, middle - fixed) / slope for n, (slope, fixed) in zip(counts, sloped, strict=True))
        low, high = (middle, high) if done < size else (low, middle)
    shares = [max(1, round(_FINE * (high - fixed) / slope)) for slope, fixed in sloped]
    rows = apportioned(size, [share for share, n in zip(shares, counts, strict=True) for _ in range(n)])
    shared = replace(layout, shares=format_shares(rows))
    return shared if shared.shares else None


_FINE = 10_000  # to which part of a sample shares are weighed


def pricer_of(
    graph: Graph, cluster: Cluster, batch_size: int, optimizer_states: int = 2, shards: Mapping[str, Shards] | None = None
) -> Pricer:
    """The pricer for a cluster, mixed or not."""
    kind = MixedPricer if cluster.parts else Pricer
    return kind(graph, cluster, batch_size, optimizer_states, shards)


def owner(pricer: Pricer, layout: Layout, stage: int) -> Pricer:
    """The pricer of the devices that a stage lies on."""
    return pricer.owner(layout, stage) if isinstance(pricer, MixedPricer) else pricer


def memory_of(pricer: Pricer, layout: Layout, stage: int) -> float:
    """Bytes of each device that a stage lies on."""
    one = owner(pricer, layout, stage)
    return one.cluster.memory_of(layout.num_ranks)


def check_fits(pricer: Pricer, layout: Layout, memory: Sequence[float]) -> None:
    """Raise `Infeasible` where a pipeline rank needs more than the devices that it lies on have. `memory`: bytes by pipeline rank."""
    for rank, need in enumerate(memory):
        have = memory_of(pricer, layout, rank)
        if need > have:
            where = owner(pricer, layout, rank).cluster.name
            raise Infeasible(
                f"{layout}: pipeline rank {rank}, on {where}, needs {need / 2**30:.2f} GiB a device, which has {have / 2**30:.2f} GiB; "
                "use more microbatches, recompute=full, a higher zero, or more devices"
            )
