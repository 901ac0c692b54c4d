"""Prices on a mixed cluster. In: what a pricer takes. Out: a `Pricer` whose stages are priced on the part that they lie on.

A pipeline whose stages each lie on one part is priced part by part: seconds, memory and gradient sums of a stage are its own part's, and
what crosses between parts goes over the link between them. Where a stage would lie on several parts (data or tensor ranks of different
kinds) every rank is taken as the least of them, since all wait for the slowest. Not modelled: replicas with unequal shares of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from weft.cluster.cluster import Cluster, Level
from weft.cost.memory import StageMemory
from weft.cost.network import send_s
from weft.cost.step import Pricer, StageCost
from weft.errors import Infeasible
from weft.model.graph import Graph
from weft.model.sharding import Shards
from weft.plan.layout import Layout
from weft.schedules import schedule_of


@dataclass
class MixedPricer(Pricer):
    """A `Pricer` of a cluster with parts."""

    @cached_property
    def pricers(self) -> tuple[Pricer, ...]:
        """One for each part; what follows from the graph and its sharding they share."""
        found = []
        for part in self.cluster.parts:
            one = Pricer(self.graph, part, self.batch_size, self.optimizer_states, self.shards, self.stack)
            one.__dict__.update({"inventory": self.inventory, "cuts": self.cuts})
            one._shardings, one._same, one._parts, one._kinds = self._shardings, self._same, self._parts, self._kinds
            one._sections, one._splits = self._sections, self._splits
            found.append(one)
        return tuple(found)

    def owner(self, layout: Layout, stage: int) -> Pricer:
        """The pricer of the part on which a stage lies; this one, of the least of all parts, where it lies on several."""
        if not self.aligned(layout):
            return self
        first = schedule_of(layout).ranks_of[stage][0] * layout.stage_ranks
        for one in self.pricers:
            if first < one.cluster.num_devices:
                return one
            first -= one.cluster.num_devices
        return self

    def aligned(self, layout: Layout) -> bool:
        """Whether every stage lies on one part; with replicas that go both ways each lies on two ranks."""
        if schedule_of(layout).has_replicas:
            return False
        width = layout.stage_ranks
        whole = layout.num_ranks == self.cluster.num_devices
        return whole and all(part.num_devices % width == 0 for part in self.cluster.parts)

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
            return here.transfer_s(layout, size_bytes) if here is not self else super().transfer_s(layout, size_bytes)
        width = layout.stage_ranks
        return send_s(self._between, size_bytes / width, width, width)

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
        if not self.aligned(layout):
            return f"every stage lies on {' and '.join(part.name for part in self.cluster.parts)}, and all ranks wait for the slowest"
        said, first = [], 0
        for part in self.cluster.parts:
            count = part.num_devices // (layout.stage_ranks)
            ranks = f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"
            said.append(f"pipeline {ranks} on {part.name}")
            first += count
        return ", ".join(said)


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
