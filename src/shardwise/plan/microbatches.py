"""Sizes of microbatches: the number of samples of each, and of each replica in it, from the samples of a batch and a layout.

Microbatches differ by at most one sample of each replica, the larger ones first; samples that do not divide over the replicas are in one of
them. A microbatch's loss is weighted by its samples, so that the step is that of the mean over the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.errors import Infeasible
from shardwise.plan.ir.placement import Range, even_shard_range, shard
from shardwise.plan.ir.schedule_sizes import limits_of_schedule
from shardwise.plan.layout import Layout


def microbatch_sizes(samples: int, data: int = 1, microbatches: int = 1, shares: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Number of samples of each microbatch, of all `data` replicas; with `shares`, multiples of their sum where the batch allows.

    >>> microbatch_sizes(10, 1, 4), microbatch_sizes(10, 2, 4), microbatch_sizes(11, 2, 4), microbatch_sizes(16, 4, 2, (3, 2, 2, 1))
    ((3, 3, 2, 2), (4, 2, 2, 2), (4, 3, 2, 2), (8, 8))

    Raises:
        Infeasible: microbatches without a sample for each replica.
    """
    unit = sum(shares) if samples % (sum(shares) * microbatches or 1) == 0 and shares else data
    base, num_larger = divmod(samples // unit, microbatches)
    if base < 1:
        raise Infeasible(
            f"a batch of {samples} samples has {samples // data} for each of data={data}, which are too few for "
            f"microbatches={microbatches}; use microbatches={max(1, samples // data)} or less, or a batch of {data * microbatches} or more"
        )
    sizes = [unit * (base + 1)] * num_larger + [unit * base] * (microbatches - num_larger)
    sizes[num_larger] += samples % unit
    return tuple(sizes)


def replica_rows(size: int, layout: Layout, replica: int) -> tuple[int, int]:
    """Return (first row, number of rows) of a replica in a microbatch of `size` samples.

    >>> [replica_rows(9, Layout(data=4, shares="3/2/2/1"), i) for i in range(4)]
    [(0, 4), (4, 2), (6, 2), (8, 1)]
    """
    start, stop = _replica_ranges(size, layout)[replica]
    return start, stop - start


def replica_sizes(size: int, layout: Layout) -> tuple[int, ...]:
    """Number of samples of every replica in a microbatch of `size`.

    >>> replica_sizes(7, Layout(data=2))
    (4, 3)
    """
    return tuple(stop - start for start, stop in _replica_ranges(size, layout))


def _replica_ranges(size: int, layout: Layout) -> tuple[Range, ...]:
    return shard(0, size, layout.replicas, 1, layout.replica_shares).ranges(size, layout.replicas)


def max_rows(samples: int, layout: Layout, replicas: tuple[int, int] | None = None) -> int:
    """Number of samples of a microbatch that a replica has at most; of the `replicas` from one to another where given.

    >>> max_rows(16, Layout(data=4, shares="3/2/2/1", microbatches=2)), max_rows(16, Layout(data=4, shares="3/2/2/1"), (2, 4))
    (3, 4)
    """
    if not layout.shares:
        return -(-samples // (layout.data * layout.microbatches))
    first, last = replicas or (0, layout.data)
    return max(replica_sizes(layout_microbatch_sizes(samples, layout)[0], layout)[first:last])


def check_equal_shares(samples: int, layout: Layout, reason: str) -> None:
    """Raise Infeasible where replicas would have unequal parts of so many samples, and must not, for the given `reason`."""
    data = layout.data
    if layout.shares:
        raise Infeasible(f"{layout}: {reason}, so that replicas have equal parts of a batch; leave shares out")
    if samples % data:
        near = max(1, samples // data) * data
        raise Infeasible(
            f"a batch of {samples} samples does not divide into data={data} equal shares; use a multiple of {data} such as {near}, or drop "
            f"the rest: {reason}"
        )


def layout_microbatch_sizes(samples: int, layout: Layout) -> tuple[int, ...]:
    """Return `microbatch_sizes` for a layout.

    Raises:
        Infeasible: as there; unequal parts of samples that another axis shards once more.
    """
    if layout.expert > 1:
        check_equal_shares(samples, layout, f"expert={layout.expert} cuts those of replicas once more")
    if layout.branch > 1 and layout.data > 1 and samples % layout.replicas:
        raise Infeasible(
            f"a batch of {samples} samples does not divide into data={layout.data} x branch={layout.branch} equal shares; use a multiple "
            f"of {layout.replicas}, or drop the rest: branch cuts those of replicas once more"
        )
    return microbatch_sizes(samples, layout.replicas, layout.microbatches, layout.replica_shares)


def partial_batch_sizes(samples: int, layout: Layout, batch_size: int, min_microbatches: int) -> tuple[int, ...]:
    """Return microbatch sizes of a batch that may be smaller than the layout's own of `batch_size`: then in as few as are no larger, and at
    least the `min_microbatches` that its schedule runs.

    >>> partial_batch_sizes(5, Layout(microbatches=4), 12, 1), partial_batch_sizes(5, Layout(microbatches=4, pipeline=2, schedule="chimera"), 12, 2)
    ((3, 2), (3, 2))

    With fewer samples than replicas the last replicas have none.

    >>> partial_batch_sizes(1, Layout(data=2), 4, 1)
    (1,)
    >>> partial_batch_sizes(3, Layout(data=2, microbatches=2, pipeline=2, schedule="chimera"), 12, 2)
    (2, 1)

    Raises:
        Infeasible: it is too small for that many microbatches, where every replica needs samples (`shares`, `inner`, `expert`).
    """  # noqa: E501
    sizes = layout_microbatch_sizes(batch_size, layout)
    if samples == batch_size:
        return sizes
    count = num_microbatches(samples, sizes[0], layout, min_microbatches)
    if samples < layout.data * count and layout.replicas == layout.data and not layout.shares and not layout.inner and layout.expert == 1:
        return tuple(map(sum, rows_by_replica([even_shard_range(samples, layout.data, i)[1] for i in range(layout.data)], count)))
    return layout_microbatch_sizes(samples, layout.with_microbatches(count))


def num_microbatches(samples: int, max_size: int, layout: Layout, min_microbatches: int) -> int:
    """Number of microbatches for `samples`, of at most `max_size` in each, and at least the `min_microbatches` that the schedule runs."""
    multiple = limits_of_schedule(layout.schedule).microbatch_multiple
    return max(min_microbatches, -(-max(1, -(-samples // max_size)) // multiple) * multiple)


def rows_by_replica(rows: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Return [microbatch][replica] -> samples, of replicas that have so many `rows` each.

    >>> rows_by_replica([5, 4], 4)
    ((2, 1), (1, 1), (1, 1), (1, 1))
    """
    return tuple(tuple(even_shard_range(each, count, m)[1] for each in rows) for m in range(count))
