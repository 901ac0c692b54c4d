"""Seconds of summing gradients over data replicas. In: how many, a layout, widths. Out: seconds of the step and of each microbatch.

Sums run in buckets behind the last backward where a framework overlaps them, in one go after it where not. ZeRO (Rajbhandari et al.
2020): stages 1 and 2 reduce-scatter gradients and gather the new weights; from stage 2 gradients are scattered every microbatch, since
none is kept whole; stage 3 gathers weights for every forward and backward, two layers ahead of use. To servers gradients are pushed bucket
by bucket, and weights are pulled after the update, when nothing hides them; a server's port passes all of it. Compressed sums are exchanged
in pieces and gathered (`run.compressed`), between hosts once the ranks of each have summed, and what packs and unpacks them takes the
compute's time. Where updates come late,
sums of a step hide behind the next steps too. On GPUs what hides takes a part of its time from the compute that it hides behind. Not
modelled: buckets that start late, and ranks that are late by chance, for which late updates are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from weft.cost.devices.compute import Seconds
from weft.cost.devices.devices import Widths
from weft.cost.network.collectives import served_s, ways
from weft.cost.network.network import Group, by_host
from weft.plan.axis import DATA, EXPERT
from weft.plan.compression import Compression
from weft.plan.layout import Layout
from weft.plan.plan import BUCKET_BYTES
from weft.schedules import schedule_of

if TYPE_CHECKING:
    from weft.cost.step import Pricer

BUCKETS = tuple(sorted({2**k for k in range(20, 29)} | {BUCKET_BYTES}))  # what is tried: the first bucket of a run is 1 MiB
WORTH = 0.01  # part of the sums' seconds that another size than the usual one must save
# Bytes of memory that each element takes on the way: counted from the operators, but for top-k's selection, which is measured.
ENCODE_BYTES = {"bfloat16": 10.0, "int8": 80.0, "topk": 400.0}
ADD_BYTES = {"bfloat16": 10.0, "int8": 25.0, "topk": 24.0}  # each that arrives


@dataclass(frozen=True, slots=True)
class Sums:
    """Numbers of gradients to sum over each set of axes; `tied` are summed with the other stage that has them; `number`: parameters."""

    over: tuple[tuple[tuple[str, ...], float], ...]
    tied: float
    number: float


@dataclass(frozen=True, slots=True)
class _Queue:
    """Buckets that are ready one after another during backward and are summed in turn: `full` ones of `bucket_bytes`, which take `each_s`,
    and one of what is left over, which takes `tail_s` (0 where nothing is)."""

    size_bytes: float
    full: float
    bucket_bytes: float
    each_s: float
    tail_s: float

    @property
    def seconds(self) -> float:
        return self.full * self.each_s + self.tail_s

    def left_s(self, total_s: float, window_s: float, total_bytes: float) -> float:
        """Of `total_s` of sums what is left after a backward of `window_s`, in which `total_bytes` get ready evenly.

        The sums go on without a pause from the first bucket on, or from the last full one, or from what is left over; nothing hides
        before the first is ready.
        """
        ready = self.bucket_bytes / total_bytes
        full = ready * self.full if self.tail_s else 1.0  # when the last full one is ready
        last = self.tail_s or self.each_s
        overdue_s = window_s * (full - 1) + self.each_s + self.tail_s
        return max(min(last, total_s), min(overdue_s, total_s), total_s - window_s * (1 - ready))


def summing_s(
    pricer: Pricer, layout: Layout, sums: Sums, widths: Widths, window_s: float, each_s: float, step_s: float = 0.0
) -> tuple[float, Seconds]:
    """(seconds of a step that show, collectives of every microbatch that show).

    `window_s`: what the sums of a step could hide behind; `each_s`: what those of a microbatch could;
    `step_s`: the compute of a whole step. With staleness=K a step's sums have those of the next K steps as their window, in which K
    more steps' sums pass too: so per step one is what hides, whatever K.
    """
    after, packing, pulled = 0.0, 0.0, 0.0
    queues: list[_Queue] = []
    inside = Seconds()
    devices = pricer.devices
    overlap, contention = devices.overlap(layout), devices.contention
    for axes, count in sums.over:
        group = pricer.group(layout, *axes)
        if group.size == 1 or not count:
            continue
        if DATA in axes and EXPERT not in axes:  # of experts, of which a rank has some
            count /= pricer.expert_ways(layout)
        size = widths.gradient * count
        if layout.servers:  # summands inside of a replica are added up before
            inside_it = pricer.group(layout, *(axis for axis in axes if axis != DATA))
            after += pricer.collective("all_reduce", size, inside_it)
            group = pricer.group(layout, DATA)
        bucket = min(size, pricer.bucket_bytes) if devices.buckets else size
        full, rest = divmod(size, bucket)
        parts = [bucket_s(pricer, layout, group, part, widths) if part else (0.0, 0.0) for part in (bucket, rest)]
        (each, touched), (tail, more) = parts
        packing += (full * touched + more) / devices.speed(layout).memory_bandwidth_bytes_per_s if touched + more else 0.0
        if layout.servers:
            pulled += served_s(widths.weight * count, ways(pricer.cluster, group), layout.servers)[1]
        queue = _Queue(size, full, bucket, each, tail)
        queues.append(queue)
        weights = pricer.collective("all_gather", widths.weight * count, group) if layout.zero else 0.0
        if layout.zero < 2:
            after += queue.seconds + weights
        elif layout.zero == 2:
            inside += Seconds(0.0, queue.seconds)
            after += weights
        else:
            again = 2 if layout.repeats_layers else 1  # also where only some are: at most what is counted here
            inside += Seconds(weights, again * weights + queue.seconds)
    tied = 0.0
    if sums.tied and layout.pipeline > 1:
        ends = Group(2, layout.stage_stride * (layout.pipeline - 1), layout.num_ranks)
        tied = pricer.collective("all_reduce", widths.gradient * sums.tied, ends)
    if devices.ties_hide:
        after += tied
    if layout.staleness:
        after, pulled = max(0.0, after + pulled - overlap * step_s), 0.0
    elif overlap and after:
        window, total_bytes = overlap * window_s, sum(queue.size_bytes for queue in queues)
        # Without buckets there is the sum of tied weights alone.
        shown = max((queue.left_s(after, window, total_bytes) for queue in queues), default=max(0.0, after - window))
        after = shown + contention * (after - shown)
    # An embedding's gradient is complete with the last backward: between processors nothing is left that its sum would hide behind.
    after += packing + pulled + (0.0 if devices.ties_hide else tied)
    if inside.total:
        # Every microbatch's collectives run beside its compute; what is longer shows.
        shown = max(0.0, 1 - each_s * devices.zero_hides / inside.total)
        shown += contention * (1 - shown)
        inside = Seconds(inside.forward * shown, inside.backward * shown)
    return after, inside


def bucket_s(pricer: Pricer, layout: Layout, group: Group, size_bytes: float, widths: Widths) -> tuple[float, float]:
    """(seconds of the network, bytes of memory that packing touches) of summing a bucket; to servers: until it is pushed and added."""
    how = Compression.parse(layout.compress)
    if how.kind != "none":
        return compressed_s(pricer, how, size_bytes / widths.gradient, group, layout.zero, widths)
    if layout.servers:
        return served_s(size_bytes, ways(pricer.cluster, group), layout.servers)[0], 0.0
    return pricer.collective("reduce_scatter" if layout.zero else "all_reduce", size_bytes, group), 0.0


def compressed_s(pricer: Pricer, how: Compression, num_elements: float, group: Group, zero: int, widths: Widths) -> tuple[float, float]:
    """(seconds of the network, bytes of memory that packing touches) of summing one bucket of `num_elements` compressed."""
    host, rail = by_host(pricer.cluster, group)
    inside_s = pricer.collective("reduce_scatter", widths.gradient * num_elements, host)
    if not zero:
        inside_s += pricer.collective("all_gather", widths.gradient * num_elements, host)
    seconds, touched = _between_s(pricer, how, ceil(num_elements / host.size), rail, zero, round(widths.gradient))
    return inside_s + seconds, touched


def _between_s(pricer: Pricer, how: Compression, size: int, group: Group, zero: int, width: int) -> tuple[float, float]:
    """The same among ranks that each compress their `size` elements."""
    n = group.size
    piece = -(-size // n)
    if how.kind == "topk" and not zero:
        arrived = n * how.sent(size)
        seconds = pricer.collective("all_gather", n * how.message_bytes(size, width), group)
        return seconds, ENCODE_BYTES["topk"] * size + ADD_BYTES["topk"] * arrived
    message = how.message_bytes(piece, width)
    seconds = pricer.collective("all_to_all", n * n * message, group)  # each member has a message for every one
    touched = ENCODE_BYTES[how.kind] * size + ADD_BYTES[how.kind] * n * how.sent(piece)
    if not zero:
        seconds += pricer.collective("all_gather", n * message, group)
        touched += ENCODE_BYTES[how.kind] * piece + ADD_BYTES[how.kind] * size
    return seconds, touched


def best_bucket_bytes(pricer: Pricer, layout: Layout, sites: Sequence[str] = ()) -> int:
    """The size of buckets for which sums of gradients show the fewest seconds of a step, of the stages that begin at `sites`.

    Small buckets pay the start of a collective often; of large ones the last is long, behind which nothing hides. 0: no size
    is better by more than `WORTH` than the usual one, or sums hide behind nothing: between ranks of one host, where a table's small
    tensors look faster because they stay in caches, as a step's do not.
    """

    def seconds(bucket_bytes: int) -> float:
        costs = pricer.with_buckets(bucket_bytes).stages(layout, sites)
        each = [layout.microbatches * c.tensor.total + c.gradients_s for c in costs]
        return max(sum(each[s] for s in mine) for mine in schedule_of(layout).stages_of) if len(costs) > 1 else each[0]

    if layout.stage_ranks == 1 or not pricer.devices.overlap(layout):
        return 0
    shown = {size: seconds(size) for size in BUCKETS}
    best = min(BUCKETS, key=lambda size: shown[size])
    return best if shown[best] < (1 - WORTH) * shown[BUCKET_BYTES] else 0


def exchange_s(pricer: Pricer, layout: Layout, stage: int, sums: Sums, widths: Widths) -> float:
    """Seconds of summing a stage's gradients with the ranks that have its other replicas, where there are any."""
    holders = schedule_of(layout).ranks_of[stage]
    if len(holders) == 1:
        return 0.0
    away = (max(holders) - min(holders)) // (len(holders) - 1)
    replicas = Group(len(holders), away * layout.stage_stride, layout.num_ranks)
    return pricer.collective("all_reduce", widths.gradient * sums.number, replicas)
