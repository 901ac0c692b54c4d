"""Step-time and memory model of one training step. In: a graph's inventory, a cluster, a batch, a layout, its stages. Out: `Prediction`.

A step is forward and backward of every microbatch through the stages, gradient reduction, and the optimizer. The pipeline is in closed
form here, (sum of the stages) + (m - 1) x (the slowest rank's), which is exact for equal stages; the search replaces it by a simulation of
the real schedule. On CPUs operators cost what `Speed` measured, and nothing overlaps within a host; on GPUs the efficiency set of the
cluster decides, which may overlap gradient reduction with the last backward. Not modelled: the data loader, and a first step that compiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.calibration.efficiency import EfficiencySet
from shardwise.cost.devices.compute import Seconds
from shardwise.cost.memory.memory import StageMemory, StageState, memory_of
from shardwise.cost.memory.plain_loop import add_plain_loop, layout_as_held, plain_loop_copied_bytes
from shardwise.cost.network.axes import rank_distance, stage_rank_distance
from shardwise.cost.network.network import send_s, split_by_host
from shardwise.cost.operators.operators import OperatorPricer
from shardwise.cost.operators.sharded_inventory import even_sites
from shardwise.cost.stages.base import LayerCost, StageBaseCost, UnlayeredCost, copy_for_stage, stage_base_cost
from shardwise.cost.stages.gradients import MIN_GAIN, HiddenCollectives, best_bucket_bytes, gradient_reduction_s, replica_reduction_s
from shardwise.cost.stages.section_cache import CostClasses, SectionCache
from shardwise.cost.stages.stage import StageCost, combine_stage_memory
from shardwise.errors import Infeasible
from shardwise.model.chunked_loss import find_chunkable_losses
from shardwise.model.dims.labels import expert_weights
from shardwise.model.graph import running_statistics_of
from shardwise.model.stages.stages import Stage, StageCut, batch_only_operators, split, stage_cuts
from shardwise.plan.ir.axis import DATA
from shardwise.plan.layout import Layout
from shardwise.plan.plan import BUCKET_BYTES, MemoryBreakdown, Prediction
from shardwise.schedules import schedule_of

__all__ = ["Pricer", "StageCost", "combine_stage_memory"]

NO_MEMORY = StageMemory(MemoryBreakdown(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))


def _weighted_seconds(shares: Sequence[float], seconds: Sequence[float]) -> float:
    """Return seconds of a microbatch, each stage weighted by the share of its microbatches that the rank computes."""
    return sum(share * s for share, s in zip(shares, seconds, strict=True))


@dataclass
class Pricer(OperatorPricer):
    """Cost model of the layouts of one graph on one cluster for one batch, from operators up."""

    balanced_sites: dict[tuple[object, ...], tuple[str, ...]] = field(default_factory=dict)  # first operators of balanced stages, by layout
    cut_candidates: dict[tuple[int, bool], list[StageCut]] = field(default_factory=dict)  # cuts that are tried, by number
    send_bounds: dict[tuple[object, ...], float] = field(default_factory=dict)  # lower bounds of send times, by layout
    first_rank: int = 0  # first rank of this part of a heterogeneous cluster
    _kinds: dict[tuple[object, ...], CostClasses] = field(default_factory=dict)
    _sections: dict[tuple[object, ...], SectionCache] = field(default_factory=dict)
    _splits: dict[tuple[str, ...], tuple[Stage, ...]] = field(default_factory=dict)
    _bases: dict[tuple[object, ...], dict[int, StageBaseCost]] = field(default_factory=dict)
    _bucket_sizes: dict[tuple[object, ...], float] = field(default_factory=dict)
    _smaller: dict[int, Pricer] = field(default_factory=dict)
    _busy: dict[tuple[int, int], Pricer] = field(default_factory=dict)

    @cached_property
    def cuts(self) -> tuple[StageCut, ...]:
        """Positions at which a stage may begin, without the graph's first operator."""
        return tuple(cut for cut in stage_cuts(self.graph) if cut.index > 0)

    @cached_property
    def chunked_cuts(self) -> tuple[StageCut, ...]:
        """The same with losses in chunks: none between the layer that computes logits and the loss."""
        position, losses = self.operator_facts.position, find_chunkable_losses(self.graph)
        spans = [(position[loss.linear.name], position[loss.loss.name]) for loss in losses]
        return tuple(cut for cut in self.cuts if not any(first < cut.index <= last for first, last in spans))

    def cuts_of(self, layout: Layout) -> tuple[StageCut, ...]:
        """Return the cuts that a layout allows: none inside a region of branches, which ranks of one stage run in parallel,
        and none inside a loss in chunks."""
        sharding, position = self.sharding(layout), self.operator_facts.position
        regions = () if sharding is None else sharding.regions
        spans = [(min(positions), max(positions)) for r in regions if (positions := [position[name] for name in r.rank_of])]
        cuts = self.cuts if layout.loss_chunks == 1 else self.chunked_cuts
        return cuts if not spans else tuple(cut for cut in cuts if not any(first < cut.index <= last for first, last in spans))

    def with_changes(self, stack: EfficiencySet | None = None, batch_size: int = 0) -> Pricer:
        """Return a pricer with another efficiency set or batch size; what depends on the graph alone is shared."""
        pricer = replace(
            self,
            stack=stack or self.stack,
            batch_size=batch_size or self.batch_size,
            balanced_sites={},
            send_bounds={},
            _times={},
            _bases={},
            _bucket_sizes={},
            _smaller={},
            _busy={},
        )
        return self._with_shared_caches(pricer)

    def under_load(self, ranks: int, threads: int) -> Pricer:
        """Return a pricer for CPUs on which `ranks` ranks of `threads` threads each compute concurrently."""
        if (ranks, threads) not in self._busy:
            pricer = self.with_changes()
            pricer.busy = ranks, threads
            self._busy[ranks, threads] = pricer
        return self._busy[ranks, threads]

    def with_buckets(self, bucket_bytes: float) -> Pricer:
        """Return a pricer with another size of gradient buckets."""
        return self._with_shared_caches(replace(self, bucket_bytes=bucket_bytes, _busy={}, _smaller={}))

    @cached_property
    def with_default_buckets(self) -> Pricer:
        """A pricer with buckets of the default size, for pipelines whose stages choose none in common."""
        return self if self.bucket_bytes else self.with_buckets(BUCKET_BYTES)

    def with_buckets_of(self, other: Pricer, layout: Layout, sites: Sequence[str] = ()) -> Pricer:
        """Return a pricer with the buckets that `other` prices a layout with: a run has the same for all its microbatches."""
        return self if self.bucket_bytes else self.with_buckets(other.bucket_size(layout, sites))

    def bucket_size(self, layout: Layout, sites: Sequence[str] = (), min_gain: float = MIN_GAIN) -> float:
        """Return the bytes of a bucket of gradients that a layout is priced and planned with, for the stages that begin at `sites`.

        It is the given size, or the one with the least exposed reduction while layers are neither recomputed nor offloaded; the default
        where reductions do not overlap: between ranks of one host, where small tensors of a measured table look faster because they stay
        in caches, unlike those of a step.
        """
        if self.bucket_bytes:
            return self.bucket_bytes
        if layout.stage_ranks == 1 or layout.inner or not self.devices.overlap(layout) or len(sites) + 1 not in (1, layout.num_stages):
            return BUCKET_BYTES
        schedule = schedule_of(layout)
        key = (
            self._bases_key(layout, sites), layout.zero, layout.servers, layout.compress, layout.staleness, layout.all_reduce,
            schedule.stages_of, min_gain,
        )  # fmt: skip
        if key not in self._bucket_sizes:
            bases = self._bases_of(layout, sites, None)

            def exposed_s(bucket_bytes: float) -> float:
                cache: dict[tuple[int, int], float] = {}
                for i, base in bases:
                    place = base.first_equal, i // layout.pipeline
                    if place not in cache:
                        after_s, inside, _ = self._reduction_s(layout, i, base, base.compute, base.collectives, bucket_bytes)
                        cache[place] = layout.microbatches * inside.total + after_s
                seconds = [cache[base.first_equal, i // layout.pipeline] for i, base in bases]
                return max(sum(seconds[s] for s in mine) for mine in schedule.stages_of) if len(seconds) > 1 else seconds[0]

            self._bucket_sizes[key] = best_bucket_bytes(exposed_s, min_gain)
        return self._bucket_sizes[key]

    def _with_shared_caches(self, pricer: Pricer) -> Pricer:
        shared = ("inventory", "operator_facts", "cuts", "_first_reads", "_narrow", "_flops", "weighted")
        pricer.__dict__.update({key: getattr(self, key) for key in shared})
        return pricer

    def remainder_pricer(self, layout: Layout) -> tuple[int, Pricer | None]:
        """Return (number of smaller microbatches, their pricer) if the batch does not divide into equal microbatches, else (0, None)."""
        data = layout.replicas // layout.branch if layout.inner else layout.data
        each, more = divmod(-(-self.batch_size // data), layout.microbatches)
        if not more or not each or layout.shares:
            return 0, None
        batch = each * data * layout.microbatches
        if batch not in self._smaller:
            self._smaller[batch] = self.with_changes(batch_size=batch)
            self._smaller[batch].placement_batch_size = self.placement_batch_size or self.batch_size
        return layout.microbatches - more, self._smaller[batch]

    def stages_at(self, sites: Sequence[str]) -> tuple[Stage, ...]:
        """Return the stages that begin at `sites`; one stage of the whole graph if there are none."""
        key = tuple(sites)
        if key not in self._splits:
            self._splits[key] = split(self.graph, key)
        return self._splits[key]

    def _sections_of(self, layout: Layout, sites: tuple[str, ...]) -> SectionCache:
        half, saving = self.devices.is_half(layout), self.devices.layer_saving(layout)
        cutting = (*self._canonical_key(layout), self.devices.cast_mode(layout), layout.loss_chunks, saving)
        key = (*cutting, half, sites)
        if key not in self._sections:
            if cutting not in self._kinds:
                inventory = self.inventory_in_precision(layout)
                self._kinds[cutting] = CostClasses(
                    inventory,
                    self.sharding(layout),
                    self.with_layer_saving(layout, self.cast_sharded_inventory(layout)),
                    self._experts,
                    self.weighted_under(layout),
                )
            self._sections[key] = SectionCache(self._kinds[cutting], self.stages_at(sites), half)
        return self._sections[key]

    @cached_property
    def _experts(self) -> frozenset[str]:
        return frozenset(expert_weights(self.graph))

    def even_stage_sites(self, layout: Layout) -> tuple[str, ...]:
        """Return the first sites of stages with equal numbers of blocks, as GPU frameworks split a model; () if blocks do not divide.

        All blocks must send equally many bytes: in a model with several kinds of blocks stages are balanced instead.
        """
        if not self.devices.has_even_stages or self.cluster.parts or layout.begins:
            return ()
        return even_sites(self.cuts_of(layout), layout.num_stages)

    def stages(
        self, layout: Layout, sites: Sequence[str] = (), *, only: Sequence[int] | None = None, place: int | None = None
    ) -> tuple[StageCost, ...]:
        """Return the cost of every stage, or of the stages `only`. `sites`: first sites of the stages after the first. `place`: price each
        as if it were that stage of the pipeline.

        Raises:
            LayoutError: sites that the graph does not have, or not in order.
        """
        is_distinct = layout.residency.is_partial or schedule_of(layout).has_replicas  # equal stages may still differ
        cache: dict[tuple[int, int], StageCost] = {}
        bucket, stage_costs = self.bucket_size(layout, sites), []
        for i, base in self._bases_of(layout, sites, only):
            index = i if place is None else place
            key = (i, index) if is_distinct else (base.first_equal, index // layout.pipeline)
            if key not in cache:
                cache[key] = self._seconds(layout, index, base, bucket)
            stage_costs.append(replace(cache[key], memory=self._memory(layout, index, base, bucket)))
        return tuple(stage_costs)

    def single_stage(self, layout: Layout) -> StageCost:
        """Return the cost of the whole model as one stage, without its memory: for bounds."""
        ((_, base),) = self._bases_of(layout, (), None)
        # The whole model's best bucket bounds what any bucket of the stages costs; without a pipeline it is the price itself.
        bucket = self.bucket_size(layout, (), MIN_GAIN if layout.pipeline == 1 else 0.0)
        return self._seconds(layout, 0, base, bucket)

    def stage_memories(self, layout: Layout, sites: Sequence[str], only: Sequence[int]) -> tuple[StageMemory, ...]:
        """Return the memory of the stages `only`, without their seconds."""
        bucket = self.bucket_size(layout, sites)
        return tuple(self._memory(layout, i, base, bucket) for i, base in self._bases_of(layout, sites, only))

    def layer_costs(self, layout: Layout, sites: Sequence[str], stage: int) -> tuple[LayerCost, ...]:
        """Return the layers of a stage that can be recomputed or offloaded, in order; a stage without numbered blocks is one layer."""
        ((_, base),) = self._bases_of(layout, sites, (stage,))
        return base.layer_costs()

    def unlayered_cost(self, layout: Layout, sites: Sequence[str], stage: int) -> UnlayeredCost:
        """Return the cost of what lies before and after those layers."""
        ((_, base),) = self._bases_of(layout, sites, (stage,))
        return base.unlayered_cost()

    def stage_state(self, layout: Layout, sites: Sequence[str], stage: int) -> StageState:
        """Return the memory of a stage for one microbatch under the layout's recomputation and offload."""
        ((_, base),) = self._bases_of(layout, sites, (stage,))
        return self._state(layout, base, self.bucket_size(layout, sites))

    def _bases_of(self, layout: Layout, sites: Sequence[str], only: Sequence[int] | None) -> list[tuple[int, StageBaseCost]]:
        positions = self._pipeline_positions(layout)
        bases, stages = self._bases.setdefault(self._bases_key(layout, sites), {}), self.stages_at(sites)
        wanted = only or range(len(stages))
        if any(i not in bases for i in wanted):
            sections = self._sections_of(layout, tuple(sites))
            firsts = (
                self._first_equal(layout, stages, sections.first_equal, positions)
                if len(stages) == len(positions)
                else sections.first_equal
            )

            def base_at(i: int) -> StageBaseCost:
                return stage_base_cost(self, layout, stages[i], sections.section_of(i))

            def names(i: int) -> Sequence[str]:
                return sections.section_of(i).groups.names

            for i in wanted:
                first = firsts[i]
                if first not in bases:
                    bases[first] = base_at(first)
                if i not in bases:
                    bases[i] = copy_for_stage(bases[first], i, partial(names, i), cache(partial(base_at, i)))
        return [(i, bases[i]) for i in wanted]

    def _bases_key(self, layout: Layout, sites: Sequence[str]) -> tuple[object, ...]:
        """Return what the base costs of stages depend on."""
        return (
            *self._canonical_key(layout), layout.axes, layout.chunks, layout.microbatches, layout.precision, layout.compile, layout.threads,
            layout.shard, layout.batch_norm, layout.shares, tuple(sites), self._pipeline_positions(layout), layout.begins,
            layout.loss_chunks, self.devices.fuses_products(layout), self.gathers_again(layout),
        )  # fmt: skip

    def _pipeline_positions(self, layout: Layout) -> tuple[int, ...]:
        """[stage] -> its pipeline rank under the schedule; () if that does not affect costs."""
        matters = layout.pipeline > 1 and self.devices.exposed_send_fraction(layout)
        return tuple([ranks[0] for ranks in schedule_of(layout).ranks_of]) if matters else ()

    def _first_equal(self, layout: Layout, split: Sequence[Stage], first: Sequence[int], places: Sequence[int]) -> Sequence[int]:
        """[stage] -> the first equal stage: with equal operators (`first`) and equal distances to the stages it exchanges values with."""
        firsts: dict[tuple[object, ...], int] = {}
        numbers = []
        for i, stage in enumerate(split):
            ends = (stage.sends, stage.receives)
            distances = tuple(tuple(self.rank_distance(layout, places[i], places[peer]) for peer, _ in links) for links in ends)
            numbers.append(firsts.setdefault((first[i], distances), i))
        return numbers

    def _seconds(self, layout: Layout, index: int, base: StageBaseCost, bucket: float) -> StageCost:
        """Return the cost of a stage without its memory."""
        busy, network = base.compute, base.collectives
        if layout.recomputes_layers:
            block = base.recomputed(layout.residency)
            busy = Seconds(busy.forward, busy.backward + block.forward)
            network = Seconds(network.forward, network.backward + block.backward)
        elif layout.recompute == "selective":
            busy = Seconds(busy.forward, busy.backward + base.scores_s)
        if layout.offloads_layers:
            busy = self.devices.copies(layout).with_copies(busy, self._state(layout, base, bucket).offloaded_bytes)
        optimizer = self._optimizer_s(layout, base)
        summing, inside, hidden = self._reduction_s(layout, index, base, busy, network, bucket)
        hidden = replace(hidden, layers_s=base.hidden_s)
        widths = self.devices.widths(layout)
        summing += replica_reduction_s(self, layout, index, base.gradient_volume, widths) + self._statistics_s(layout)
        if self.is_plain_loop:
            copied = plain_loop_copied_bytes(layout, base.state.num_trainable, widths, self.cluster.kind.shares_hosts)
            summing += copied / self.devices.speed(layout).memory_bandwidth_bytes_per_s
        network += inside
        if network.total > 0:  # ranks synchronise inside layers
            waits = self.devices.layer_collectives(layout).wait_fraction
            network += Seconds(waits * busy.forward, waits * busy.backward)
        return StageCost(busy, network, summing, optimizer, NO_MEMORY, base.weight_s, hidden)

    def _optimizer_s(self, layout: Layout, base: StageBaseCost) -> float:
        """Seconds of a stage's update."""
        trained = base.state.num_trainable
        num_sharing = layout.weight_ranks // layout.zero_groups
        updated = (trained + base.state.num_remote_experts) / num_sharing if layout.zero else trained / max(1, layout.servers)
        return self.devices.optimizer_s(layout, updated, self.optimizer_states)

    def _reduction_s(
        self, layout: Layout, index: int, base: StageBaseCost, busy: Seconds, network: Seconds, bucket: float
    ) -> tuple[float, Seconds, HiddenCollectives]:
        """Return (exposed seconds of a stage's gradient reduction, exposed collectives of every microbatch, what is hidden), beside
        `busy` seconds of compute and `network` seconds of collectives inside layers."""
        # Reductions of every chunk but the first overlap with the backward of the other chunks of p microbatches,
        backward_s = busy.backward + network.backward
        num_computes = layout.pipeline if index >= layout.pipeline else 1  # and gathers with the forward
        window = Seconds(num_computes * (busy.forward + network.forward), num_computes * backward_s)
        step = layout.microbatches * (busy + network).total + self._optimizer_s(layout, base)
        widths = self.devices.widths(layout)
        return gradient_reduction_s(self, layout, base.gradient_volume, widths, bucket, window, backward_s, step)

    def _statistics_s(self, layout: Layout) -> float:
        """Seconds of reducing a stage's running statistics over replicas after a step (`run/gradients/deferred_buffers`)."""
        if not layout.local_statistics_axes:
            return 0.0
        size = 4.0 * layout.microbatches * self._num_running_statistics / layout.num_stages
        return self.collective("all_reduce", size, self.group(layout, *layout.local_statistics_axes))

    @cached_property
    def _num_running_statistics(self) -> float:
        """Number of elements of the running statistics that training updates."""
        written = {value for op in self.graph.operators for value in running_statistics_of(op)}
        return float(sum(self.graph.tensors[value].size for value in written))

    def _state(self, layout: Layout, base: StageBaseCost, bucket: float) -> StageState:
        drops_scores = layout.recompute == "selective" and self.devices.recomputes_by_operator
        by_layer = layout.recomputes_layers or layout.offloads_layers or drops_scores
        elements = bucket / self.devices.widths(layout).gradient
        return base.by_layer(layout.residency, elements) if by_layer else base.state_with(elements)

    def _memory(self, layout: Layout, index: int, base: StageBaseCost, bucket: float) -> StageMemory:
        state = replace(self._state(layout, base, bucket), bucket_bytes=bucket)
        defers_weights = (layout.recomputes_layers or layout.offloads_layers) and schedule_of(layout).splits_backward
        widths = self.devices.widths(layout)
        memory = memory_of(
            state, layout_as_held(layout) if self.is_plain_loop else layout, index, widths,
            scratch_bytes=self.cluster.device.scratch_bytes + self.fused_workspace_bytes(layout), optimizer_states=self.optimizer_states,
            deferred_bytes=max(0.0, base.state.saved_bytes - state.saved_bytes) if defers_weights else 0.0,
            num_host_replicas=split_by_host(self.cluster, self.group(layout, DATA))[0].size if layout.compress != "none" else 1,
        )  # fmt: skip
        return add_plain_loop(memory, state, layout, widths, self.cluster.kind.shares_hosts) if self.is_plain_loop else memory

    def boundary_bytes(self, layout: Layout, values: Sequence[str]) -> float:
        """Return the bytes of `values` for one microbatch, summed over data replicas."""
        scale = self.microbatch(layout)
        width = self._width_factor(layout, narrow=False)
        # Values without a batch dimension exist on each replica.
        return width * sum(self.graph.tensors[v].size_bytes * (scale if v in self.inventory.batched else layout.data) for v in values)

    def received_bytes_lower_bound(self, layout: Layout) -> NDArray[np.float64]:
        """[cut] -> lower bound of the bytes of one microbatch that a stage beginning there receives, as counted by `boundary_bytes`."""
        batched, fixed = self._first_reads
        received: NDArray[np.float64] = self._width_factor(layout, narrow=False) * (self.microbatch(layout) * batched + layout.data * fixed)
        return received

    @cached_property
    def _first_reads(self) -> NDArray[np.float64]:
        """[is on each replica, cut] -> bytes made before a cut that operators read between it and the next cut."""
        tensors, batched, free = self.graph.tensors, self.inventory.batched, batch_only_operators(self.graph)
        ends = [*(cut.index for cut in self.cuts[1:]), len(self.graph.operators)]
        received = np.zeros((2, len(self.cuts)))
        for at, (cut, end) in enumerate(zip(self.cuts, ends, strict=True)):
            read = {v for op in self.graph.operators[cut.index : end] if op.name not in free for v in op.inputs}
            for value in read.intersection(cut.values):
                received[int(value not in batched), at] += tensors[value].size_bytes
        return received

    def transfer_s(self, layout: Layout, size_bytes: float, here: int = 0, there: int = 1) -> float:
        """Seconds to send one microbatch's `size_bytes` between two pipeline ranks, every replica (or every rank of it) its shard. Between
        pipeline ranks of unequal width the narrower decides, with equal shards."""
        if layout.begins:
            fewest = min(end - first for first, end in (layout.stage_rank_range(here), layout.stage_rank_range(there)))
            return send_s(self.cluster, size_bytes / fewest, self.rank_distance(layout, here, there), fewest)
        parts = layout.data * (layout.replica_ranks if self.devices.scatters_sends else 1)
        return send_s(self.cluster, size_bytes / parts, self.rank_distance(layout, here, there), layout.stage_stride)

    def rank_distance(self, layout: Layout, here: int, there: int) -> int:
        """Return the distance between two pipeline ranks in global ranks, as `stage_rank_distance` does."""
        if layout.begins:
            begin, end = layout.stage_rank_range(min(here, there))[0], layout.stage_rank_range(max(here, there))[1]
            return rank_distance(self.cluster, begin - self.first_rank, end - 1 - self.first_rank)
        first = self.first_rank // layout.stage_stride
        return stage_rank_distance(self.cluster, layout, here - first, there - first)

    def predict(
        self, layout: Layout, costs: Sequence[StageCost], transfers_s: Sequence[float], pipeline_s: float | None = None,
        remainder_costs: Sequence[StageCost] = (),
    ) -> Prediction:  # fmt: skip
        """Predict the step. `transfers_s`: seconds of each stage boundary's transfer, one way. `pipeline_s`: simulated time of all
        microbatches, if known. `remainder_costs`: costs of the smaller microbatches if they are unequal.

        `costs` are of all stages in order; `Schedule.stages_of` maps them to ranks. With v chunks a rank the bubble is that of one
        chunk of each rank (Narayanan et al. 2021, section 2.2), and each microbatch passes v times as many boundaries.
        """
        few = self.remainder_pricer(layout)[0] if remainder_costs else 0
        m = layout.microbatches - few
        ranks = self.by_rank(layout, costs)
        schedule = schedule_of(layout)
        shares = [[mine[s] for s in sorted(mine)] for mine in schedule.shares] if len(costs) > 1 else [[1.0]]
        microbatch_s = [
            _weighted_seconds(mine, [c.forward_s + c.backward_s for c in of_rank]) for mine, of_rank in zip(shares, ranks, strict=True)
        ]
        busy = microbatch_s.index(max(microbatch_s))
        busiest, share = ranks[busy], shares[busy]
        remainder = self.by_rank(layout, remainder_costs or costs)[busy]
        if pipeline_s is None:
            first_s = sum(microbatch_s) / layout.chunks + max(microbatch_s) * (1 - 1 / layout.chunks)
            pipeline_s = first_s + (m - 1) * max(microbatch_s) + 2 * sum(transfers_s) / layout.chunks
            pipeline_s += few * _weighted_seconds(share, [c.forward_s + c.backward_s for c in remainder])
        compute = m * _weighted_seconds(share, [c.compute.total for c in busiest]) + few * _weighted_seconds(
            share, [c.compute.total for c in remainder]
        )
        tensor = m * _weighted_seconds(share, [c.collectives.total for c in busiest]) + few * _weighted_seconds(
            share, [c.collectives.total for c in remainder]
        )
        compute = min(compute, max(0.0, pipeline_s - tensor))  # less than its own if other ranks lent it their cores
        gradients = max(sum(c.gradients_s for c in of_rank) for of_rank in ranks)
        optimizer = max(sum(c.optimizer_s for c in of_rank) for of_rank in ranks)
        overhead = self.devices.overhead_s(layout, pipeline_s)
        total = pipeline_s + gradients + optimizer + overhead
        parts = (
            ("compute", compute),
            ("tensor", tensor),
            ("pipeline", max(0.0, pipeline_s - compute - tensor)),
            ("gradients", gradients),
            ("optimizer", optimizer),
            ("overhead", overhead),
        )
        fullest = max(
            (combine_stage_memory([c.memory for c in of_rank], schedule, r) for r, of_rank in enumerate(ranks)),
            key=lambda memory: memory.total,
        )
        flops = self.model_flops
        return Prediction(total, flops / total / self.peak_flops(layout), flops, fullest, parts)

    @staticmethod
    def by_rank(layout: Layout, costs: Sequence[StageCost]) -> list[list[StageCost]]:
        """[pipeline rank] -> the costs of its stages."""
        return [[costs[s] for s in mine] for mine in schedule_of(layout).stages_of] if len(costs) > 1 else [list(costs)]

    def peak_flops(self, layout: Layout) -> float:
        """FLOP/s of all devices that the layout uses, at its precision."""
        threads = max(1, self.cluster.threads_of(layout.num_ranks, layout.threads))
        return self.cluster.device.peak(layout.precision) * min(layout.num_ranks * threads, max(self.cluster.num_devices, layout.num_ranks))

    def check_memory(self, layout: Layout, prediction: Prediction) -> None:
        """Raise `Infeasible` with the numbers where the fullest rank does not fit."""
        have = self.cluster.memory_of(layout.num_ranks)
        need = prediction.memory.total
        if need > have:
            m = prediction.memory
            by_kind = ", ".join(f"{name} {value / 2**30:.2f}" for name, value in (
                ("parameters", m.parameters), ("gradients", m.gradients), ("optimizer", m.optimizer),
                ("activations", m.activations), ("buffers", m.buffers), ("margin", m.margin)))  # fmt: skip
            remedies = "more microbatches, "
            remedies += "recompute=full, " if layout.recompute != "full" else ""
            remedies += f"zero={layout.zero + 1}, " if layout.zero < 3 and layout.weight_ranks > 1 else ""
            raise Infeasible(
                f"{layout}: the fullest rank needs {need / 2**30:.2f} GiB ({by_kind}), and has {have / 2**30:.2f} GiB; "
                f"use {remedies}or more devices"
            )
