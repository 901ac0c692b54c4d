"""Pipelines whose stages have unlike numbers of ranks (`inner=1x1/2x1`). In: a space. Out: its bases with such stages.

They are for devices that differ: on a mixed cluster every part has stages of its own, alike on it, which may be as wide as the part is; and
for as many devices as are no power of two, where stages of two widths stand one after another. Not searched: stages that differ within a
part, more of them than `MOST_STAGES`, stages that begin within a node and end in another, and axes beside data and tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise, product

from weft.cluster.cluster import Cluster
from weft.errors import LayoutError
from weft.plan.axis import BRANCH
from weft.plan.layout import Layout
from weft.solve.space import MOST_MICROBATCHES, WASTED, Space, divisors, wanted_ranks

MOST_STAGES, MOST_OF_A_PART, MOST_OF_A_LARGE = 8, 4, 2
MOST_DEVICES = 16  # up to which parts may have `MOST_OF_A_PART` stages, and devices of one kind stages of two widths
ALONE: dict[str, int | str] = {
    "expert": 1, "branch": 1, "context": 1, "channel": 1, "spatial": "1", "sequence_parallel": "off", "sample_parallel": "off",
    "threads": 0, "neighbours": BRANCH,
}  # fmt: skip


def widths(cluster: Cluster) -> Iterator[tuple[tuple[int, int], ...]]:
    """(how many stages, ranks of each) one after another, on all devices.

    >>> list(widths(Cluster.parse("3 devices of dgx-h100")))
    [((1, 1), (1, 2)), ((1, 2), (1, 1))]
    """
    number = cluster.num_devices
    if cluster.parts:
        most = MOST_OF_A_PART if number <= MOST_DEVICES else MOST_OF_A_LARGE
        each = [[(k, part.num_devices // k) for k in divisors(part.num_devices) if k <= most] for part in cluster.parts]
        yield from (one for one in product(*each) if len({width for _, width in one}) > 1 and _fits(cluster, one))
    elif number <= MOST_DEVICES and number & (number - 1):
        for first, one, other in product(range(1, number), range(1, number), range(1, number)):
            stages, rest = divmod(number - first * one, other)
            if one != other and stages > 0 and not rest and _fits(cluster, row := ((first, one), (stages, other))):
                yield row


def _fits(cluster: Cluster, stages: tuple[tuple[int, int], ...]) -> bool:
    """Whether there are not too many stages, and each is in a node or begins one."""
    each = [width for count, width in stages for _ in range(count)]
    node = min(part.node_size for part in cluster.parts) if cluster.parts else cluster.node_size
    ends = pairwise(accumulate(each, initial=0))
    return len(each) <= MOST_STAGES and all(begin % node == 0 or begin // node == (end - 1) // node for begin, end in ends)


def submeshes(space: Space) -> Iterator[Layout]:
    """Bases on all devices, that constraints admit, of stages with unlike numbers of ranks."""
    cluster, batch = space.cluster, space.batch_size
    asked_for = all(space.admits(key, value) for key, value in ALONE.items()) and space.grid is None
    if not asked_for or cluster.num_devices not in wanted_ranks(cluster, space.constraints):
        return
    for stages in widths(cluster):
        number = sum(count for count, _ in stages)
        deep = number > space.num_chunks and not space.asked("pipeline", number)
        if deep or number > space.num_layers or not space.admits("pipeline", number):
            continue
        for axes in product(*(_arranged(space, width) for _, width in stages)):
            most = max(data for data, _ in axes)
            inner = "/".join(f"{data}x{tensor}" for (count, _), (data, tensor) in zip(stages, axes, strict=True) for _ in range(count))
            for microbatches in range(1, min(batch // most, MOST_MICROBATCHES) + 1):
                size, rest = divmod(batch, microbatches)
                even = not rest and not size % most and all(-(-size // data) * data <= (1 + WASTED) * size for data, _ in axes)
                if even and space.admits("microbatches", microbatches):
                    yield from _bases(space, Layout(pipeline=number, inner=inner, microbatches=microbatches))


def _arranged(space: Space, width: int) -> list[tuple[int, int]]:
    """(data, tensor) of so many ranks; tensor ranks lie in one node."""
    node = space.cluster.node_size
    ways = [(width // tensor, tensor) for tensor in divisors(width) if tensor <= node]
    return [(data, tensor) for data, tensor in ways if space.admits("data", data) and space.admits("tensor", tensor)]


def _bases(space: Space, layout: Layout) -> Iterator[Layout]:
    for precision in space.precisions():
        with suppress(LayoutError):  # what is asked for does not go with such stages
            yield replace(
                layout, precision=precision, all_reduce=space.sums, compress=space.compress, staleness=space.fewest("staleness"),
                servers=space.fewest("servers"), lend=space.lend, batch_norm=space.batch_norm,
                compile="on" if space.asked("compile", "on") else "off",
            )  # fmt: skip
