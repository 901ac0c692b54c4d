"""Losses in chunks (`loss_chunks`) for leading layouts that memory binds.

A loss in chunks takes the time of the head's forward once more, and the memory of one chunk's logits in place of all. So it pays only
where a layout otherwise recomputes or offloads layers, shards more, or does not fit; those are searched again with it, in the order of
their bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from shardwise.cost.step import Pricer
from shardwise.cost.step_time.timing import PricedLayout
from shardwise.errors import Infeasible, LayoutError
from shardwise.model.chunked_loss import find_chunkable_losses
from shardwise.plan.compatibility import LAST
from shardwise.plan.layout import Layout
from shardwise.solve.bounds import base_lower_bound_s, largest_device_memory
from shardwise.solve.space import SearchSpace

NUM_CHUNKS = 8  # as torchtitan has it
OTHER_CHUNKS = (2, 4, 16, 32)  # numbers tried for the best layout that has chunks
MAX_CHUNKED_BASES = 512  # searched again with chunks: a twentieth of the time of a search, and a bound as near as without
MIN_FRACTION = 0.01  # of the memory that logits take at least


def bases_to_chunk(
    pricer: Pricer, space: SearchSpace, bases: Iterable[tuple[object, int, Layout, bool]], timed: Iterable[PricedLayout],
    cannot_win: Callable[[Layout, float], bool],
) -> Iterator[tuple[float, Layout, bool]]:  # fmt: skip
    """Yield (lower bound in seconds, base, whether it is interleaved) of bases that memory binds, with their losses in chunks.

    `bases`: in the order of their bounds. `timed`: layouts that fit. `cannot_win`: whether a layout of at least so many seconds cannot be
    the best.
    """
    free = {
        _base_of(p.layout) for p in timed if p.layout.recompute == "none" and p.layout.offload == "none" and p.layout.zero <= 1
    }  # what these save nothing of
    for _, _, base, interleaved in bases:
        if base.loss_chunks > 1 or base.inner or not space.admits("loss_chunks", NUM_CHUNKS) or _base_of(base) in free:
            continue
        if _logits_bytes(pricer, base) > MIN_FRACTION * largest_device_memory(pricer, base):
            with suppress(Infeasible, LayoutError):  # ranks exchange rows of the logits
                chunked = replace(base, loss_chunks=NUM_CHUNKS)
                bound_s = base_lower_bound_s(pricer, chunked, interleaved)
                if not cannot_win(chunked, bound_s):
                    yield bound_s, chunked, interleaved


def other_chunk_counts(space: SearchSpace, best: PricedLayout | None) -> Iterator[Layout]:
    """Yield the best layout with other numbers of chunks, where it has those of the search."""
    for count in OTHER_CHUNKS if best is not None and best.layout.loss_chunks == NUM_CHUNKS else ():
        if best is not None and space.admits("loss_chunks", count):
            yield replace(best.layout, loss_chunks=count)


def other_choices(layout: Layout, space: SearchSpace) -> Iterator[Layout]:
    """Yield what a plan compares its layout with: gradients scattered once, and a loss as a whole."""
    if layout.zero >= 2 and space.admits("scatter", LAST):
        yield replace(layout, scatter=LAST)
    if layout.loss_chunks > 1 and space.admits("loss_chunks", 1):
        yield replace(layout, loss_chunks=1)


def _base_of(layout: Layout) -> Layout:
    return replace(
        layout, schedule="1f1b", chunks=1, zero=0, recompute="none", segment=1, offload="none", shard=0, scatter="each", lend="off"
    )


def _logits_bytes(pricer: Pricer, layout: Layout) -> float:
    """Bytes of the logits of one microbatch on one rank, as float32; 0 where their loss cannot be computed in chunks."""
    try:
        losses = find_chunkable_losses(pricer.graph)
    except LayoutError:
        return 0.0
    size = sum(pricer.graph.tensors[loss.linear.outputs[0]].size for loss in losses)
    return 4.0 * size * pricer.microbatch(layout) / (layout.data * layout.tensor * layout.context)
