"""Candidate stage boundaries of a pipeline: the cuts of a model that are worth trying, by the bytes that cross them and the work
between."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from shardwise.model.stages.stages import StageCut

MAX_CUTS = 400
MAX_GAP, MIN_GAP = 0.75, 0.25  # of a stage's even share: work between two cuts above which more are added, and the target


def select_cuts(cuts: Sequence[StageCut], min_cuts: int, work: Sequence[float] = ()) -> list[StageCut]:
    """Select the cuts worth trying: those where little crosses, but at least `min_cuts` of them, and as many as divide the work.

    Between two layers of a transformer only the residual crosses; inside one several times as much does. Where activations shrink from
    layer to layer, least crosses between the last ones, which alone would leave nearly all of the model to one stage: so the stretch
    between two cuts is cut again where least crosses, until the work can be divided.

    Args:
        work: of every operator, in any unit; if empty, the bytes that cross decide alone.
    """
    if not cuts:
        return []
    sizes = sorted({cut.size_bytes for cut in cuts})
    kept_cuts: list[StageCut] = []
    for limit in sizes:
        kept_cuts = [cut for cut in cuts if cut.size_bytes <= limit]
        # Above the smallest size, only as many as are needed to have a choice.
        if len(kept_cuts) >= max(2 * min_cuts, 8):
            break
    if sum(work) > 0:
        kept_cuts = _add_cuts(cuts, kept_cuts, work, sum(work) / (min_cuts + 1))
    if len(kept_cuts) > MAX_CUTS:
        step = len(kept_cuts) / MAX_CUTS
        kept_cuts = [kept_cuts[int(i * step)] for i in range(MAX_CUTS)]
    return kept_cuts


def _add_cuts(cuts: Sequence[StageCut], chosen: Sequence[StageCut], work: Sequence[float], stage_work: float) -> list[StageCut]:
    """Return `chosen`, and further cuts where more than a stage's even `stage_work` lies between two of them."""
    cumulative = [0.0, *accumulate(work)]
    ends = [0, *(cut.index for cut in chosen), len(work)]
    added: list[StageCut] = []
    for start, end in pairwise(ends):
        if cumulative[end] - cumulative[start] > MAX_GAP * stage_work:
            added += _cuts_between([cut for cut in cuts if start < cut.index < end], start, end, cumulative, MIN_GAP * stage_work)
    return sorted([*chosen, *added], key=lambda cut: cut.index)


def _cuts_between(cuts: Sequence[StageCut], start: int, end: int, cumulative_work: Sequence[float], max_work: float) -> list[StageCut]:
    """Return the cuts of a stretch at which least crosses, so that at most `max_work` lies between two, as far as there are any."""
    if not cuts or cumulative_work[end] - cumulative_work[start] <= max_work:
        return []
    least = min(cut.size_bytes for cut in cuts)
    smallest = [cut for cut in cuts if cut.size_bytes <= least]
    cuts_between = list(smallest)
    ends = [start, *(cut.index for cut in smallest), end]
    for first, last in pairwise(ends):
        cuts_between += _cuts_between([cut for cut in cuts if first < cut.index < last], first, last, cumulative_work, max_work)
    return cuts_between
