"""Where stages may begin. In: the places where a model can be cut, the work of its operators. Out: those that are worth trying."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from weft.model.stages.stages import Cut

MOST_CUTS = 400
WIDE, FINE = 0.75, 0.25  # of a stage's even share: work between two places from which on there are more of them, and how much is left


def useful(cuts: Sequence[Cut], least: int, work: Sequence[float] = ()) -> list[Cut]:
    """The cuts worth trying: those where little crosses, but at least `least` of them, and as many as divide the work.

    Between two layers of a transformer only the residual crosses; inside one several times as much does. Where activations shrink from
    layer to layer, least crosses between the last ones, which alone would leave nearly all of the model to one stage: so what lies
    between two places is cut where least crosses there, until it can be divided.

    Args:
        work: of every operator, in any unit; what crosses alone decides where there is none.
    """
    if not cuts:
        return []
    sizes = sorted({cut.size_bytes for cut in cuts})
    kept_cuts: list[Cut] = []
    for limit in sizes:
        kept_cuts = [cut for cut in cuts if cut.size_bytes <= limit]
        # Beyond the least size, only as many as are needed to have a choice.
        if len(kept_cuts) >= max(2 * least, 8):
            break
    if sum(work) > 0:
        kept_cuts = _refined(cuts, kept_cuts, work, sum(work) / (least + 1))
    if len(kept_cuts) > MOST_CUTS:
        step = len(kept_cuts) / MOST_CUTS
        kept_cuts = [kept_cuts[int(i * step)] for i in range(MOST_CUTS)]
    return kept_cuts


def _refined(cuts: Sequence[Cut], chosen: Sequence[Cut], work: Sequence[float], share: float) -> list[Cut]:
    """`chosen`, and more where more than a stage's even `share` lies between two of them."""
    done = [0.0, *accumulate(work)]
    ends = [0, *(cut.index for cut in chosen), len(work)]
    more: list[Cut] = []
    for start, end in pairwise(ends):
        if done[end] - done[start] > WIDE * share:
            more += _between([cut for cut in cuts if start < cut.index < end], start, end, done, FINE * share)
    return sorted([*chosen, *more], key=lambda cut: cut.index)


def _between(cuts: Sequence[Cut], start: int, end: int, done: Sequence[float], enough: float) -> list[Cut]:
    """Cuts of a stretch at which least crosses, until no more than `enough` work lies between two, as far as there are any."""
    if not cuts or done[end] - done[start] <= enough:
        return []
    least = min(cut.size_bytes for cut in cuts)
    here = [cut for cut in cuts if cut.size_bytes <= least]
    cuts_between = list(here)
    ends = [start, *(cut.index for cut in here), end]
    for first, last in pairwise(ends):
        cuts_between += _between([cut for cut in cuts if first < cut.index < last], first, last, done, enough)
    return cuts_between
