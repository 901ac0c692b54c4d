"""Pipelines whose stages have unequal numbers of ranks (`inner=1x1/2x1`): yield the bases of a search space with such stages.

They are for devices that differ: on a heterogeneous cluster every part has stages of its own, equal on it, as wide as the part at most; and
for numbers of devices that are no power of two, where stages of two widths follow one another. Not searched: stages that differ within a
part, more of them than `MAX_STAGES`, stages that begin within a node and end in another, and axes other than data and tensor.
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
MOST_DEVICES = 16  # at most, for `MAX_STAGES_PER_PART` stages of a part, and for stages of two widths on equal devices
ALONE: dict[str, int | str] = {
    "expert": 1, "branch": 1, "context": 1, "channel": 1, "spatial": "1", "sequence_parallel": "off", "sample_parallel": "off",
    "threads": 0, "neighbours": BRANCH,
}  # fmt: skip


def widths(cluster: Cluster) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield (number of stages, ranks of each) along the pipeline, on all devices.

    >>> list(widths(Cluster.parse("3 devices of dgx-h100")))
    [((1, 1), (1, 2)), ((1, 2), (1, 1))]
    """
    num_devices = cluster.num_devices
    if cluster.parts:
        limit = MOST_OF_A_PART if num_devices <= MOST_DEVICES else MOST_OF_A_LARGE
        by_part = [[(k, part.num_devices // k) for k in divisors(part.num_devices) if k <= limit] for part in cluster.parts]
        yield from (one for one in product(*by_part) if len({width for _, width in one}) > 1 and _fits(cluster, one))
    elif num_devices <= MOST_DEVICES and num_devices & (num_devices - 1):
        for first, one, other in product(range(1, num_devices), range(1, num_devices), range(1, num_devices)):
            stages, rest = divmod(num_devices - first * one, other)
            if one != other and stages > 0 and not rest and _fits(cluster, row := ((first, one), (stages, other))):
                yield row


def _fits(cluster: Cluster, stages: tuple[tuple[int, int], ...]) -> bool:
    """Return whether there are not too many stages, and each is within a node or begins one."""
    stage_widths = [width for count, width in stages for _ in range(count)]
    node = min(part.node_size for part in cluster.parts) if cluster.parts else cluster.node_size
    ends = pairwise(accumulate(stage_widths, initial=0))
    return len(stage_widths) <= MOST_STAGES and all(begin % node == 0 or begin // node == (end - 1) // node for begin, end in ends)


def submeshes(space: Space) -> Iterator[Layout]:
    """Yield the bases on all devices, that constraints admit, of stages with unequal numbers of ranks."""
    cluster, batch = space.cluster, space.batch_size
    is_admitted = all(space.admits(key, value) for key, value in ALONE.items()) and space.grid is None
    if not is_admitted or cluster.num_devices not in wanted_ranks(cluster, space.constraints):
        return
    for stages in widths(cluster):
        num_stages = sum(count for count, _ in stages)
        is_too_deep = num_stages > space.num_chunks and not space.asked("pipeline", num_stages)
        if is_too_deep or num_stages > space.num_layers or not space.admits("pipeline", num_stages):
            continue
        for axes in product(*(_arranged(space, width) for _, width in stages)):
            max_data = max(data for data, _ in axes)
            inner = "/".join(f"{data}x{tensor}" for (count, _), (data, tensor) in zip(stages, axes, strict=True) for _ in range(count))
            for microbatches in range(1, min(batch // max_data, MOST_MICROBATCHES) + 1):
                size, rest = divmod(batch, microbatches)
                is_even = not rest and not size % max_data and all(-(-size // data) * data <= (1 + WASTED) * size for data, _ in axes)
                if is_even and space.admits("microbatches", microbatches):
                    yield from _bases(space, Layout(pipeline=num_stages, inner=inner, microbatches=microbatches))


def _arranged(space: Space, width: int) -> list[tuple[int, int]]:
    """Return (data, tensor) of so many ranks; tensor ranks lie in one node."""
    node = space.cluster.node_size
    options = [(width // tensor, tensor) for tensor in divisors(width) if tensor <= node]
    return [(data, tensor) for data, tensor in options if space.admits("data", data) and space.admits("tensor", tensor)]


def _bases(space: Space, layout: Layout) -> Iterator[Layout]:
    for precision in space.precisions():
        with suppress(LayoutError):  # a constraint is incompatible with such stages
            yield replace(
                layout, precision=precision, all_reduce=space.sums, compress=space.compress, staleness=space.fewest("staleness"),
                servers=space.fewest("servers"), lend=space.lend, batch_norm=space.batch_norm,
                compile="on" if space.asked("compile", "on") else "off",
            )  # fmt: skip
