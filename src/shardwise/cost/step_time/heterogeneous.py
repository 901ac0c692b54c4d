"""Prices on a heterogeneous cluster, whose parts have devices of different kinds: a `Pricer` that prices each stage on its part.

A pipeline whose stages each lie on one part is priced part by part: a stage's seconds, memory and gradient reductions are its own part's,
and sends between parts go over the link between them. A stage on several parts (data or tensor ranks of different kinds) is priced as if
every rank were the slowest, since all wait for it; but replicas that each lie on one part may have unequal shares of a batch
(`balance_shares`), and then each part is priced with its own replicas' samples. Not modelled: more memory in one part than in another for
such replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

from shardwise.cluster.cluster import Cluster, ClusterLevel
from shardwise.cost.devices.devices import Array
from shardwise.cost.memory.memory import StageMemory
from shardwise.cost.network.network import send_s
from shardwise.cost.step import Pricer, StageCost
from shardwise.errors import Infeasible
from shardwise.model.graph import Graph
from shardwise.model.sharding.sharding import Shards
from shardwise.plan.ir.axis import PIPELINE
from shardwise.plan.ir.placement import apportion_units
from shardwise.plan.layout import Layout
from shardwise.plan.microbatches import layout_microbatch_sizes
from shardwise.plan.plan import BUCKET_BYTES
from shardwise.plan.unequal_ranks import format_shares
from shardwise.schedules import schedule_of


@dataclass
class HeterogeneousPricer(Pricer):
    """A `Pricer` of a cluster with parts."""

    _pricers_by_width: dict[int, tuple[Pricer, ...]] = field(default_factory=dict, init=False)  # for this batch and stack only

    @cached_property
    def part_pricers(self) -> tuple[Pricer, ...]:
        """Return one pricer for each part; they share what follows from the graph and its sharding alone."""
        pricers: list[Pricer] = []
        for part in self.cluster.parts:
            first_device = sum(earlier.cluster.num_devices for earlier in pricers)
            pricer = Pricer(
                self.graph, part, self.batch_size, self.optimizer_states, self.shards, self.stack, BUCKET_BYTES, first_rank=first_device
            )
            pricer.__dict__.update({"inventory": self.inventory, "cuts": self.cuts})
            pricer._shardings, pricer._canonical, pricer._parts, pricer._kinds = self._shardings, self._canonical, self._parts, self._kinds
            pricer._sections, pricer._splits = self._sections, self._splits
            pricers.append(pricer)
        return tuple(pricers)

    def pricer_at(self, layout: Layout, stage: int) -> Pricer:
        """Return the pricer of the part on which a stage lies; this one, of the weakest devices, where it lies on several."""
        if not self.has_aligned_stages(layout):
            return self
        first = layout.stage_rank_range(schedule_of(layout).ranks_of[stage][0])[0]
        for pricer in self.part_pricers:
            if first < pricer.cluster.num_devices:
                return pricer
            first -= pricer.cluster.num_devices
        return self

    def has_aligned_stages(self, layout: Layout) -> bool:
        """Return whether every stage lies on one part; with bidirectional pipelines each lies on two ranks."""
        if schedule_of(layout).has_replicas or layout.neighbours == PIPELINE:
            return False
        uses_all = layout.num_ranks == self.cluster.num_devices
        width = layout.stage_ranks
        return uses_all and all(end in layout.begins if layout.begins else end % width == 0 for end in self._part_ends)

    @cached_property
    def _part_ends(self) -> tuple[int, ...]:
        """Number of devices up to and including each part."""
        return tuple(accumulate(part.num_devices for part in self.cluster.parts))

    def replica_pricers(self, layout: Layout) -> tuple[Pricer, ...]:
        """Return a pricer of each part for its own replicas, where these have unequal shares and lie on one part each; () where not."""
        width, uses_all = layout.replica_ranks, layout.num_ranks == self.cluster.num_devices
        if not layout.shares or layout.num_stages > 1 or not uses_all or any(p.num_devices % width for p in self.cluster.parts):
            return ()
        if width not in self._pricers_by_width:
            ends = list(accumulate((part.num_devices // width for part in self.cluster.parts), initial=0))
            pricers = [pricer.with_changes() for pricer in self.part_pricers]
            for pricer, replicas in zip(pricers, pairwise(ends), strict=True):
                pricer.replicas = replicas
            self._pricers_by_width[width] = tuple(pricers)
        return self._pricers_by_width[width]

    def operator_seconds(self, layout: Layout) -> tuple[Array, Array, Array, Array]:
        """Seconds of every operator as for one kind of device; of replicas with unequal shares those of the slowest part."""
        self.sharding(layout)
        by_part = [pricer.operator_seconds(layout) for pricer in self.replica_pricers(layout)]
        return max(by_part, key=lambda times: sum(float(t.sum()) for t in times)) if by_part else super().operator_seconds(layout)

    def stages(
        self, layout: Layout, sites: Sequence[str] = (), *, only: Sequence[int] | None = None, place: int | None = None
    ) -> tuple[StageCost, ...]:
        self.sharding(layout)
        if not self.has_aligned_stages(layout):
            return super().stages(layout, sites, only=only, place=place)
        wanted = only or range(len(sites) + 1)
        owners = [self.pricer_at(layout, i if place is None else place) for i in wanted]
        return tuple(pricer.stages(layout, sites, only=(i,), place=place)[0] for i, pricer in zip(wanted, owners, strict=True))

    def stage_memories(self, layout: Layout, sites: Sequence[str], only: Sequence[int]) -> tuple[StageMemory, ...]:
        return tuple(cost.memory for cost in self.stages(layout, sites, only=only))

    def boundary_send_s(self, layout: Layout, stage: int, target: int, size_bytes: float) -> float:
        """Seconds to send one microbatch's `size_bytes` from a stage to another."""
        sender, receiver = self.pricer_at(layout, stage), self.pricer_at(layout, target)
        if sender is receiver:
            ranks_of = schedule_of(layout).ranks_of
            return sender.transfer_s(layout, size_bytes, ranks_of[stage][0], ranks_of[target][0])
        width = min(end - first for first, end in (layout.stage_rank_range(stage), layout.stage_rank_range(target)))
        return send_s(self._inter_part_cluster, size_bytes / width, max(width, self._inter_part_cluster.node_size), width)

    @cached_property
    def _inter_part_cluster(self) -> Cluster:
        """Return the cluster of nodes joined by the link between the parts."""
        assert self.cluster.between is not None
        node, outer = self.cluster.levels
        return replace(self.cluster, levels=(node, ClusterLevel(outer.name, outer.size, self.cluster.between)))

    def peak_flops(self, layout: Layout) -> float:
        if layout.num_ranks != self.cluster.num_devices:
            return super().peak_flops(layout)
        return sum(part.device.peak(layout.precision) * part.num_devices for part in self.cluster.parts)

    def describe_parts(self, layout: Layout) -> str:
        """Describe which stages lie on which part."""
        if pricers := self.replica_pricers(layout):
            return ", ".join(f"{p.samples(layout)} samples of a microbatch on each replica of {p.cluster.name}" for p in pricers)
        if not self.has_aligned_stages(layout):
            return f"every stage lies on {' and '.join(part.name for part in self.cluster.parts)}, and all ranks wait for the slowest"
        words, first, end = [], 0, 0
        for part in self.cluster.parts:
            end += part.num_devices
            count = sum(layout.stage_rank_range(stage)[1] <= end for stage in range(layout.pipeline)) - first
            ranks = f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"
            words.append(f"pipeline {ranks} on {part.name}")
            first += count
        return ", ".join(words)


def balance_shares(pricer: Pricer, layout: Layout) -> Layout | None:
    """Return the layout with batch shares such that replicas on every part take equally long; None where they are equal or cannot differ.

    A replica's time is linear in its samples, with slope and intercept from the prices of two sizes.
    """
    if not isinstance(pricer, HeterogeneousPricer) or layout.data == 1 or layout.num_stages > 1 or layout.expert > 1:
        return None
    width, size = layout.replica_ranks, layout_microbatch_sizes(pricer.batch_size, layout)[0]
    uses_all = layout.num_ranks == pricer.cluster.num_devices and not any(p.num_devices % width for p in pricer.cluster.parts)
    if not uses_all or layout.sample_parallel == "on" or layout.staleness or layout.servers or size < 2 * layout.data:
        return None
    pricer.sharding(layout)
    samples, counts = size // layout.data, [part.num_devices // width for part in pricer.cluster.parts]
    lines = []
    for part_pricer in pricer.part_pricers:
        small_s, large_s = (
            sum(float(t.sum()) for t in part_pricer.with_changes(batch_size=n * layout.data * layout.microbatches).operator_seconds(layout))
            for n in (samples, 2 * samples)
        )
        lines.append((max(1e-12, (large_s - small_s) / samples), max(0.0, 2 * small_s - large_s)))
    low, high = 0.0, max(slope * size + fixed for slope, fixed in lines)
    for _ in range(60):  # bisect the time in which all samples are finished
        middle = (low + high) / 2
        finished = sum(n * max(0.0, middle - fixed) / slope for n, (slope, fixed) in zip(counts, lines, strict=True))
        low, high = (middle, high) if finished < size else (low, middle)
    shares = [max(1, round(_SHARE_RESOLUTION * (high - fixed) / slope)) for slope, fixed in lines]
    rows = apportion_units(size, [share for share, n in zip(shares, counts, strict=True) for _ in range(n)])
    balanced = replace(layout, shares=format_shares(rows))
    return balanced if balanced.shares else None


_SHARE_RESOLUTION = 10_000  # resolution of shares, in parts of a sample


def build_pricer(
    graph: Graph, cluster: Cluster, batch_size: int, optimizer_states: int = 2, shards: Mapping[str, Shards] | None = None
) -> Pricer:
    """Build the pricer for a cluster, heterogeneous or not."""
    if cluster.parts:  # whose parts choose no bucket size in common
        return HeterogeneousPricer(graph, cluster, batch_size, optimizer_states, shards, bucket_bytes=BUCKET_BYTES)
    return Pricer(graph, cluster, batch_size, optimizer_states, shards)


def stage_pricer(pricer: Pricer, layout: Layout, stage: int) -> Pricer:
    """Return the pricer of the devices that a stage lies on."""
    return pricer.pricer_at(layout, stage) if isinstance(pricer, HeterogeneousPricer) else pricer


def stage_device_memory(pricer: Pricer, layout: Layout, stage: int) -> float:
    """Bytes of each device that a stage lies on."""
    pricer_here = stage_pricer(pricer, layout, stage)
    return pricer_here.cluster.memory_of(layout.num_ranks)


def check_ranks_fit(pricer: Pricer, layout: Layout, memory: Sequence[float]) -> None:
    """Raise `Infeasible` where a pipeline rank needs more than its devices have. `memory`: bytes by pipeline rank."""
    for rank, needed in enumerate(memory):
        have = stage_device_memory(pricer, layout, rank)
        if needed > have:
            part = stage_pricer(pricer, layout, rank).cluster.name
            raise Infeasible(
                f"{layout}: pipeline rank {rank}, on {part}, needs {needed / 2**30:.2f} GiB a device, which has {have / 2**30:.2f} GiB; "
                "use more microbatches, recompute=full, a higher zero, or more devices"
            )
