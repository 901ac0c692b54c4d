"""Seconds of gradient reduction over data replicas (all-reduce, ZeRO, parameter servers, compression), exposed after overlap with backward.

Reductions run in buckets concurrently with the last backward if a framework overlaps them, else at once after it. ZeRO (Rajbhandari et al.
2020): stages 1 and 2 reduce-scatter gradients and all-gather the new weights behind the next forward (`run.residency.deferred_gathers`);
from stage 2 gradients are scattered every microbatch, since none stays unsharded; stage 3 gathers weights for every forward and backward,
two layers ahead of use. With parameter servers gradients are pushed by bucket, and weights are pulled after the update, without overlap,
through the server's port. Compressed reductions exchange and gather shards (`run.compressed`), between hosts after a reduction inside each,
and packing takes compute time. With stale updates reductions overlap with the next steps too. On GPUs overlapped communication takes a
fraction of its time from compute. Not modelled: buckets that start late, and random stragglers, which are the reason for stale updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

from shardwise.cost.devices.compute import Seconds
from shardwise.cost.devices.devices import Widths
from shardwise.cost.network.collectives import hops_of, push_pull_s
from shardwise.cost.network.network import RankGroup, split_by_host
from shardwise.plan.ir.axis import DATA, EXPERT
from shardwise.plan.ir.compression import Compression
from shardwise.plan.layout import Layout
from shardwise.plan.plan import BUCKET_BYTES
from shardwise.schedules import schedule_of

if TYPE_CHECKING:
    from shardwise.cost.step import Pricer

BUCKETS = tuple(sorted({2**k for k in range(20, 29)} | {BUCKET_BYTES}))  # sizes tried: the first bucket of a run is 1 MiB
MIN_GAIN = 0.01  # fraction of the exposed reduction that another size than the default must save
# Bytes of memory traffic per element: counted from the operators, except for top-k's selection, which is measured.
ENCODE_BYTES = {"bfloat16": 10.0, "int8": 80.0, "topk": 400.0}
ADD_BYTES = {"bfloat16": 10.0, "int8": 25.0, "topk": 24.0}  # per received element


@dataclass(frozen=True, slots=True)
class GradientVolume:
    """Numbers of gradients to reduce over each set of axes; `num_tied` are reduced with the stage that shares them; `num_parameters`:
    parameters. `by_run`: numbers of trainable parameters of the runs of operators that, from ZeRO stage 2 on, share no bucket."""

    reductions: tuple[tuple[tuple[str, ...], float], ...]
    num_tied: float
    num_parameters: float
    by_run: tuple[float, ...] = ()

    def num_buckets_of_runs(self, num_elements: float, bucket_elements: float) -> int:
        """Return the number of buckets of `num_elements` gradients that are divided over the runs as all parameters are."""
        total = sum(self.by_run)
        return sum(ceil(each / total * num_elements / bucket_elements) for each in self.by_run if each) if total else 1


@dataclass(frozen=True, slots=True)
class HiddenCollectives:
    """Seconds of a stage's collectives that run behind its compute: gathers of updated weights behind a step's first forward, reductions
    behind its last backward, and `per_microbatch` the gathers and scatters behind every forward and backward. `layers_s`: those inside
    layers behind every backward, beside products."""

    gathers_s: float = 0.0
    reductions_s: float = 0.0
    per_microbatch: Seconds = field(default_factory=Seconds)
    layers_s: float = 0.0


NOTHING_HIDDEN = HiddenCollectives()


@dataclass(frozen=True, slots=True)
class _BucketQueue:
    """Buckets that become ready during backward and are reduced in order: `full` ones of `bucket_bytes`, which take `each_s`,
    and a partial one, which takes `tail_s` (0 if there is none)."""

    size_bytes: float
    full: float
    bucket_bytes: float
    each_s: float
    tail_s: float

    @property
    def seconds(self) -> float:
        return self.full * self.each_s + self.tail_s

    def exposed_s(self, total_s: float, window_s: float, total_bytes: float) -> float:
        """Seconds of `total_s` of reductions that are exposed after a backward of `window_s`, in which `total_bytes` become ready evenly.

        Reductions run without a pause from the first bucket on, or from the last full one, or from the partial one; nothing overlaps
        before the first is ready.
        """
        ready = self.bucket_bytes / total_bytes
        last_ready = ready * self.full if self.tail_s else 1.0  # when the last full one is ready
        last = self.tail_s or self.each_s
        tail_end_s = window_s * (last_ready - 1) + self.each_s + self.tail_s
        return max(min(last, total_s), min(tail_end_s, total_s), total_s - window_s * (1 - ready))


def gradient_reduction_s(
    pricer: Pricer, layout: Layout, sums: GradientVolume, widths: Widths, bucket_bytes: float, window: Seconds, each_s: float,
    step_s: float = 0.0,
) -> tuple[float, Seconds, HiddenCollectives]:  # fmt: skip
    """Return (exposed seconds of a step, exposed collectives of every microbatch, what is hidden).

    `window`: compute that gathers (forward) and reductions (backward) of a step may overlap with; `each_s`: for those of a microbatch;
    `step_s`: the compute of a whole step. With staleness=K a step's reductions have the next K steps as their window, in which K
    more steps' reductions run too: so the overlap per step is one step, whatever K.
    """
    after_s, packing_s, pull_s, gathers_s, num_buckets, beyond_s, hidden_s, hidden_gathers_s = (0.0,) * 8
    devices, per_microbatch, queues = pricer.devices, Seconds(), list[_BucketQueue]()
    overlap, contention = devices.overlap(layout), devices.contention
    for axes, count in sums.reductions:
        group = pricer.group(layout, *axes)
        if group.size == 1 or not count:
            continue
        if DATA in axes and EXPERT not in axes:  # experts are sharded
            count /= pricer.expert_divisor(layout)
        size = widths.gradient * count
        if layout.servers:  # partial sums inside a replica are reduced before
            local_group = pricer.group(layout, *(axis for axis in axes if axis != DATA))
            after_s += pricer.collective("all_reduce", size, local_group)
            group = pricer.group(layout, DATA)
        num_full, bucket, rest = _divide_into_buckets(size, sums, layout.zero, widths, bucket_bytes if devices.uses_buckets else size)
        parts = [bucket_reduction_s(pricer, layout, group, part, widths) if part else (0.0, 0.0) for part in (bucket, rest)]
        (each, moved), (tail, moved_last) = parts
        packing_s += (num_full * moved + moved_last) / devices.speed(layout).memory_bandwidth_bytes_per_s if moved + moved_last else 0.0
        if layout.servers:
            pull_s += push_pull_s(widths.weight * count, hops_of(pricer.cluster, group), layout.servers)[1]
        queues.append(queue := _BucketQueue(size, num_full, bucket, each, tail))
        sharing, beyond = split_by_zero_group(group, layout)
        weights = pricer.collective("all_gather", widths.weight * count, sharing) if layout.zero else 0.0
        if layout.zero >= 2:  # shards are summed over the groups once for all microbatches, after the last
            beyond_s += pricer.collective("all_reduce", size / sharing.size, beyond)
        if layout.zero < 3:
            gathers_s, num_buckets = gathers_s + weights, num_buckets + num_full + (rest > 0)
        is_once = layout.zero < 2 or layout.scatters_last
        after_s += queue.seconds * is_once
        per_microbatch += Seconds(0.0, queue.seconds * (not is_once))
        if layout.zero == 3:  # gathered anew for recomputed layers; an upper bound if only some are
            again = layout.residency.recompute.kind == "full" and not devices.gathers_once
            per_microbatch += Seconds(weights, (1 + again) * weights)
    tied_s = _tied_reduction_s(pricer, layout, sums, widths)
    if devices.overlaps_tied_reduction:
        after_s += tied_s
    if layout.staleness:
        after_s, pull_s = max(0.0, after_s + pull_s + gathers_s - overlap * step_s), 0.0
    elif overlap and after_s and layout.branch == 1 and not devices.defers_sums(layout):  # with branches reductions follow backward
        shown = _exposed_reductions_s(queues, after_s, overlap * window.backward)
        after_s, hidden_s = shown + contention * (after_s - shown), after_s - shown
    if gathers_s and not layout.staleness:
        shown = _exposed_gathers_s(layout, gathers_s, num_buckets, overlap * window.forward)
        hidden_gathers_s = gathers_s - shown
        after_s += shown + contention * hidden_gathers_s
    # An embedding's gradient is complete with the last backward: on CPUs nothing is left to overlap with.
    after_s += packing_s + pull_s + beyond_s + (0.0 if devices.overlaps_tied_reduction else tied_s)
    exposed = _exposed_fraction(pricer, per_microbatch, each_s)
    hidden = HiddenCollectives(hidden_gathers_s, hidden_s, _scaled(per_microbatch, 1 - exposed))
    return after_s, _scaled(per_microbatch, exposed + contention * (1 - exposed)), hidden


def _exposed_reductions_s(queues: Sequence[_BucketQueue], total_s: float, window_s: float) -> float:
    """Return the exposed seconds of `total_s` of reductions behind a backward of `window_s`; without buckets, of tied weights."""
    total_bytes = sum(queue.size_bytes for queue in queues)
    return max((queue.exposed_s(total_s, window_s, total_bytes) for queue in queues), default=max(0.0, total_s - window_s))


def _exposed_gathers_s(layout: Layout, gathers_s: float, num_buckets: float, window_s: float) -> float:
    """Return the exposed seconds of gathers of updated weights (ZeRO-1 and 2) behind a forward of `window_s`.

    Its first layer waits for the first of `num_buckets`. An update on the host, or under a custom schedule, waits for all.
    """
    if not window_s or layout.offloads_optimizer or layout.actions:
        return gathers_s
    return min(gathers_s, max(gathers_s / max(1.0, num_buckets), gathers_s - window_s))


def _divide_into_buckets(
    size_bytes: float, sums: GradientVolume, zero: int, widths: Widths, bucket_bytes: float
) -> tuple[float, float, float]:
    """Return (number of full buckets, their bytes, bytes of a partial one) of `size_bytes` of gradients, as `run.state.parameters` divides
    them: from ZeRO stage 2 on no bucket is shared by two runs of operators, and all count as equal here."""
    if zero < 2 or bucket_bytes >= size_bytes:
        bucket = min(size_bytes, bucket_bytes)
        num_full, rest = divmod(size_bytes, bucket)
        return num_full, bucket, rest
    count = sums.num_buckets_of_runs(size_bytes / widths.gradient, bucket_bytes / widths.gradient)
    return float(count), size_bytes / count, 0.0


def _tied_reduction_s(pricer: Pricer, layout: Layout, sums: GradientVolume, widths: Widths) -> float:
    """Seconds of reducing tied gradients between the first and last stage."""
    if not sums.num_tied or layout.pipeline == 1:
        return 0.0
    ends = RankGroup(2, layout.stage_stride * (layout.pipeline - 1), layout.num_ranks)
    return pricer.collective("all_reduce", widths.gradient * sums.num_tied, ends)


def _exposed_fraction(pricer: Pricer, collectives: Seconds, each_s: float) -> float:
    """Return the fraction of a microbatch's collectives beyond its compute of `each_s`, with which they overlap."""
    return max(0.0, 1 - each_s * pricer.devices.zero_overlap / collectives.total) if collectives.total else 1.0


def _scaled(seconds: Seconds, factor: float) -> Seconds:
    return Seconds(seconds.forward * factor, seconds.backward * factor)


def bucket_reduction_s(pricer: Pricer, layout: Layout, group: RankGroup, size_bytes: float, widths: Widths) -> tuple[float, float]:
    """Return (network seconds, memory traffic of packing) of reducing a bucket; with servers until it is pushed and added."""
    compression = Compression.parse(layout.compress)
    if compression.kind != "none":
        return compressed_reduction_s(pricer, compression, size_bytes / widths.gradient, group, layout.zero, widths)
    if layout.servers:
        return push_pull_s(size_bytes, hops_of(pricer.cluster, group), layout.servers)[0], 0.0
    if not layout.zero:
        return pricer.collective("all_reduce", size_bytes, group), 0.0
    if layout.zero == 1 and pricer.devices.all_reduces:
        return pricer.collective("all_reduce", size_bytes * 4.0 / widths.gradient, group), 0.0
    sharing, beyond = split_by_zero_group(group, layout)
    beyond_s = pricer.collective("all_reduce", size_bytes / sharing.size, beyond) if layout.zero == 1 else 0.0
    return pricer.collective("reduce_scatter", size_bytes, sharing) + beyond_s, 0.0


def split_by_zero_group(group: RankGroup, layout: Layout) -> tuple[RankGroup, RankGroup]:
    """Return the ranks of `group` that shard state among them, which are adjacent, and those with equal shards (`shard`).

    >>> inside, beyond = split_by_zero_group(RankGroup(8, 2, 16), Layout(data=8, tensor=2, zero=1, shard=4))
    >>> (inside.size, inside.stride), (beyond.size, beyond.stride)
    ((4, 2), (2, 8))
    """
    num_groups = layout.zero_groups
    if num_groups == 1 or group.size % num_groups or group.size == num_groups:
        return group, RankGroup(1)
    size = group.size // num_groups
    return RankGroup(size, group.stride, group.num_ranks), RankGroup(num_groups, group.stride * size, group.num_ranks)


def compressed_reduction_s(
    pricer: Pricer, how: Compression, num_elements: float, group: RankGroup, zero: int, widths: Widths
) -> tuple[float, float]:
    """Return (network seconds, memory traffic of packing) of the compressed reduction of one bucket of `num_elements`."""
    host, rail = split_by_host(pricer.cluster, group)
    inside_s = pricer.collective("reduce_scatter", widths.gradient * num_elements, host)
    if not zero:
        inside_s += pricer.collective("all_gather", widths.gradient * num_elements, host)
    seconds, touched = _compressed_exchange_s(pricer, how, ceil(num_elements / host.size), rail, zero, round(widths.gradient))
    return inside_s + seconds, touched


def _compressed_exchange_s(pricer: Pricer, how: Compression, size: int, group: RankGroup, zero: int, width: int) -> tuple[float, float]:
    """Return the same between ranks that each compress their `size` elements."""
    n = group.size
    piece = -(-size // n)
    if how.kind == "topk" and not zero:
        arrived = n * how.num_sent(size)
        seconds = pricer.collective("all_gather", n * how.message_bytes(size, width), group)
        return seconds, ENCODE_BYTES["topk"] * size + ADD_BYTES["topk"] * arrived
    message = how.message_bytes(piece, width)
    seconds = pricer.collective("all_to_all", n * n * message, group)  # every rank has a message for every rank
    touched = ENCODE_BYTES[how.kind] * size + ADD_BYTES[how.kind] * n * how.num_sent(piece)
    if not zero:
        seconds += pricer.collective("all_gather", n * message, group)
        touched += ENCODE_BYTES[how.kind] * piece + ADD_BYTES[how.kind] * size
    return seconds, touched


def best_bucket_bytes(exposed_s: Callable[[int], float], min_gain: float = MIN_GAIN) -> int:
    """Return the bucket size with the least exposed gradient reduction, `exposed_s` by size; the default unless another is better by more
    than the fraction `min_gain`.

    Small buckets pay the start of a collective often; the last of large ones is long and does not overlap.
    """
    seconds = {size: exposed_s(size) for size in BUCKETS}
    best = min(BUCKETS, key=lambda size: seconds[size])
    return best if seconds[best] < (1 - min_gain) * seconds[BUCKET_BYTES] else BUCKET_BYTES


def replica_reduction_s(pricer: Pricer, layout: Layout, stage: int, sums: GradientVolume, widths: Widths) -> float:
    """Seconds of reducing a stage's gradients with the pipeline ranks of its other replicas, if there are any."""
    holders = schedule_of(layout).ranks_of[stage]
    if len(holders) == 1:
        return 0.0
    stride = (max(holders) - min(holders)) // (len(holders) - 1)
    replicas = RankGroup(len(holders), stride * layout.stage_stride, layout.num_ranks)
    return pricer.collective("all_reduce", widths.gradient * sums.num_parameters, replicas)
