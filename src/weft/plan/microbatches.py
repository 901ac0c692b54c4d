"""Sizes of microbatches: the number of samples of each, and of each replica in it, from the samples of a batch and a layout.

Microbatches differ by at most one sample of each replica, the larger ones first; samples that do not divide over the replicas are in one of
them. A microbatch's loss is weighted by its samples, so that the step is that of the mean over the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import Infeasible
from weft.plan.layout import Layout
from weft.plan.placement import Range, piece, shard
from weft.plan.schedule_sizes import sizes_of


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
    start, stop = _ranges(size, layout)[replica]
    return start, stop - start


def replica_sizes(size: int, layout: Layout) -> tuple[int, ...]:
    """Number of samples of every replica in a microbatch of `size`.

    >>> replica_sizes(7, Layout(data=2))
    (4, 3)
    """
    return tuple(stop - start for start, stop in _ranges(size, layout))


def _ranges(size: int, layout: Layout) -> tuple[Range, ...]:
    return shard(0, size, layout.replicas, 1, layout.weights).ranges(size, layout.replicas)


def most_rows(samples: int, layout: Layout, replicas: tuple[int, int] | None = None) -> int:
    """Number of samples of a microbatch that a replica has at most; of the `replicas` from one to another where given.

    >>> most_rows(16, Layout(data=4, shares="3/2/2/1", microbatches=2)), most_rows(16, Layout(data=4, shares="3/2/2/1"), (2, 4))
    (3, 4)
    """
    if not layout.shares:
        return -(-samples // (layout.data * layout.microbatches))
    first, last = replicas or (0, layout.data)
    return max(replica_sizes(sizes_of_plan(samples, layout)[0], layout)[first:last])


def check_equal(samples: int, layout: Layout, why: str) -> None:
    """Raise Infeasible where replicas would have unequal parts of so many samples, and must not, for the given `reason`."""
    data = layout.data
    if layout.shares:
        raise Infeasible(f"{layout}: {why}, so that replicas have equal parts of a batch; leave shares out")
    if samples % data:
        near = max(1, samples // data) * data
        raise Infeasible(
            f"a batch of {samples} samples does not divide into data={data} equal shares; use a multiple of {data} such as {near}, or drop "
            f"the rest: {why}"
        )


def sizes_of_plan(samples: int, layout: Layout) -> tuple[int, ...]:
    """Return `microbatch_sizes` for a layout.

    Raises:
        Infeasible: as there; unequal parts of samples that another axis shards once more.
    """
    if layout.expert > 1:
        check_equal(samples, layout, f"expert={layout.expert} cuts those of replicas once more")
    if layout.branch > 1 and layout.data > 1 and samples % layout.replicas:
        raise Infeasible(
            f"a batch of {samples} samples does not divide into data={layout.data} x branch={layout.branch} equal shares; use a multiple "
            f"of {layout.replicas}, or drop the rest: branch cuts those of replicas once more"
        )
    return microbatch_sizes(samples, layout.replicas, layout.microbatches, layout.weights)


def sizes_of_part(samples: int, layout: Layout, batch_size: int, fewest: int) -> tuple[int, ...]:
    """Return microbatch sizes of a batch that may be smaller than the layout's own of `batch_size`: then in as few as are no larger, and at
    least the `min_microbatches` that its schedule runs.

    >>> sizes_of_part(5, Layout(microbatches=4), 12, 1), sizes_of_part(5, Layout(microbatches=4, pipeline=2, schedule="chimera"), 12, 2)
    ((3, 2), (3, 2))

    With fewer samples than replicas the last replicas have none.

    >>> sizes_of_part(1, Layout(data=2), 4, 1)
    (1,)
    >>> sizes_of_part(3, Layout(data=2, microbatches=2, pipeline=2, schedule="chimera"), 12, 2)
    (2, 1)

    Raises:
        Infeasible: it is too small for that many microbatches, where every replica needs samples (`shares`, `inner`, `expert`).
    """
    sizes = sizes_of_plan(batch_size, layout)
    if samples == batch_size:
        return sizes
    count = num_microbatches(samples, sizes[0], layout, fewest)
    if samples < layout.data * count and layout.replicas == layout.data and not layout.shares and not layout.inner and layout.expert == 1:
        return tuple(map(sum, rows_by_replica([piece(samples, layout.data, i)[1] for i in range(layout.data)], count)))
    return sizes_of_plan(samples, layout.with_microbatches(count))


def num_microbatches(samples: int, most: int, layout: Layout, fewest: int) -> int:
    """Number of microbatches for `samples`, of at most `max_size` in each, and at least the `min_microbatches` that the schedule runs."""
    multiple = sizes_of(layout.schedule).multiple
    return max(fewest, -(-max(1, -(-samples // most)) // multiple) * multiple)


def rows_by_replica(rows: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Return [microbatch][replica] -> samples, of replicas that have so many `rows` each.

    >>> rows_by_replica([5, 4], 4)
    ((2, 1), (1, 1), (1, 1), (1, 1))
    """
    return tuple(tuple(piece(each, count, m)[1] for each in rows) for m in range(count))
