"""How many samples every microbatch has. In: samples of a batch, data replicas, microbatches. Out: a size for each microbatch.

Sizes differ by one sample of each replica at most, the larger ones first. A microbatch's loss counts by its samples, so that the step is
that of the mean over the whole batch. Not modelled: replicas with unequal shares of a microbatch.
"""

from __future__ import annotations

from weft.errors import Infeasible
from weft.plan.layout import Layout
from weft.plan.sizes import sizes_of


def microbatch_sizes(samples: int, data: int = 1, microbatches: int = 1) -> tuple[int, ...]:
    """Samples of each microbatch, of all `data` replicas together.

    >>> microbatch_sizes(10, 1, 4), microbatch_sizes(10, 2, 4)
    ((3, 3, 2, 2), (4, 2, 2, 2))

    Raises:
        Infeasible: replicas whose shares would differ, or microbatches without a sample.
    """
    if samples % data:
        near = max(1, samples // data) * data
        raise Infeasible(
            f"a batch of {samples} samples does not divide into data={data} equal shares; use a multiple of {data} such as {near}, "
            "or drop the rest"
        )
    base, more = divmod(samples // data, microbatches)
    if base < 1:
        raise Infeasible(
            f"a batch of {samples} samples has {samples // data} for each of data={data}, which are too few for "
            f"microbatches={microbatches}; use microbatches={max(1, samples // data)} or less, or a batch of {data * microbatches} or more"
        )
    return (data * (base + 1),) * more + (data * base,) * (microbatches - more)


def sizes_of_part(samples: int, layout: Layout, batch_size: int, fewest: int) -> tuple[int, ...]:
    """As `microbatch_sizes`, of a batch that may be smaller than the layout's own of `batch_size`: then in as few as are no larger, and at
    least the `fewest` that its schedule runs.

    >>> sizes_of_part(5, Layout(microbatches=4), 12, 1), sizes_of_part(5, Layout(microbatches=4, pipeline=2, schedule="chimera"), 12, 2)
    ((3, 2), (3, 2))

    Raises:
        Infeasible: it does not divide over data, or is too small for the fewest microbatches.
    """
    whole = microbatch_sizes(batch_size, layout.shares, layout.microbatches)
    if samples == batch_size:
        return whole
    count, multiple = -(-samples // whole[0]), sizes_of(layout.schedule).multiple
    return microbatch_sizes(samples, layout.shares, max(fewest, -(-count // multiple) * multiple))
