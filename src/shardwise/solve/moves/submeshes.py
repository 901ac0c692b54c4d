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

from shardwise.cluster.cluster import Cluster
from shardwise.errors import LayoutError
from shardwise.plan.ir.axis import BRANCH
from shardwise.plan.layout import Layout
from shardwise.solve.space import MAX_IDLE_FRACTION, MAX_MICROBATCHES, SearchSpace, admitted_rank_counts, divisors_of

MAX_STAGES, MAX_STAGES_PER_PART, MAX_STAGES_PER_LARGE_PART = 8, 4, 2
MAX_DEVICES = 16  # at most, for `MAX_STAGES_PER_PART` stages of a part, and for stages of two widths on equal devices
REQUIRED_VALUES: dict[str, int | str] = {
    "expert": 1, "branch": 1, "context": 1, "channel": 1, "spatial": "1", "sequence_parallel": "off", "sample_parallel": "off",
    "threads": 0, "neighbours": BRANCH,
}  # fmt: skip


def stage_width_options(cluster: Cluster) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield (number of stages, ranks of each) along the pipeline, on all devices.

    >>> list(stage_width_options(Cluster.parse("3 devices of dgx-h100")))
    [((1, 1), (1, 2)), ((1, 2), (1, 1))]
    """
    num_devices = cluster.num_devices
    if cluster.parts:
        limit = MAX_STAGES_PER_PART if num_devices <= MAX_DEVICES else MAX_STAGES_PER_LARGE_PART
        by_part = [[(k, part.num_devices // k) for k in divisors_of(part.num_devices) if k <= limit] for part in cluster.parts]
        yield from (one for one in product(*by_part) if len({width for _, width in one}) > 1 and _respects_nodes(cluster, one))
    elif num_devices <= MAX_DEVICES and num_devices & (num_devices - 1):
        for first, one, other in product(range(1, num_devices), range(1, num_devices), range(1, num_devices)):
            stages, rest = divmod(num_devices - first * one, other)
            if one != other and stages > 0 and not rest and _respects_nodes(cluster, row := ((first, one), (stages, other))):
                yield row


def _respects_nodes(cluster: Cluster, stages: tuple[tuple[int, int], ...]) -> bool:
    """Return whether there are not too many stages, and each is within a node or begins one."""
    stage_widths = [width for count, width in stages for _ in range(count)]
    node = min(part.node_size for part in cluster.parts) if cluster.parts else cluster.node_size
    ends = pairwise(accumulate(stage_widths, initial=0))
    return len(stage_widths) <= MAX_STAGES and all(begin % node == 0 or begin // node == (end - 1) // node for begin, end in ends)


def submesh_bases(space: SearchSpace) -> Iterator[Layout]:
    """Yield the bases on all devices, that constraints admit, of stages with unequal numbers of ranks."""
    cluster, batch = space.cluster, space.batch_size
    is_admitted = all(space.admits(key, value) for key, value in REQUIRED_VALUES.items()) and space.grid is None
    if not is_admitted or cluster.num_devices not in admitted_rank_counts(cluster, space.constraints):
        return
    for stages in stage_width_options(cluster):
        num_stages = sum(count for count, _ in stages)
        is_too_deep = num_stages > space.num_chunks and not space.is_requested("pipeline", num_stages)
        if is_too_deep or num_stages > space.num_layers or not space.admits("pipeline", num_stages):
            continue
        for axes in product(*(_data_tensor_options(space, width) for _, width in stages)):
            max_data = max(data for data, _ in axes)
            inner = "/".join(f"{data}x{tensor}" for (count, _), (data, tensor) in zip(stages, axes, strict=True) for _ in range(count))
            for microbatches in range(1, min(batch // max_data, MAX_MICROBATCHES) + 1):
                size, rest = divmod(batch, microbatches)
                is_even = (
                    not rest and not size % max_data and all(-(-size // data) * data <= (1 + MAX_IDLE_FRACTION) * size for data, _ in axes)
                )
                if is_even and space.admits("microbatches", microbatches):
                    yield from _bases_of_layout(space, Layout(pipeline=num_stages, inner=inner, microbatches=microbatches))


def _data_tensor_options(space: SearchSpace, width: int) -> list[tuple[int, int]]:
    """Return (data, tensor) of so many ranks; tensor ranks lie in one node."""
    node = space.cluster.node_size
    options = [(width // tensor, tensor) for tensor in divisors_of(width) if tensor <= node]
    return [(data, tensor) for data, tensor in options if space.admits("data", data) and space.admits("tensor", tensor)]


def _bases_of_layout(space: SearchSpace, layout: Layout) -> Iterator[Layout]:
    for precision in space.precisions():
        with suppress(LayoutError):  # a constraint is incompatible with such stages
            yield space.with_fixed_keys(replace(layout, precision=precision, all_reduce=space.all_reduce))
