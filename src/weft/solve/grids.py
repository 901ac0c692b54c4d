"""Tensor ranks of leading layouts in grids. In: what was priced with them in a line. Out: layouts worth pricing, with what none beats.

A grid changes what tensor ranks say to each other and how much, by the 2-D and 3-D parallel matrix products of Agarwal et al. 1995 as
AxoNN has them (Singh et al. SC'24). To search them with everything else would multiply the space, so only those of the best layouts of
a few meshes are tried; a layout whose time without the collectives of its tensor ranks is no better than the best is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from weft.cost.step import Pricer
from weft.errors import Infeasible, LayoutError
from weft.plan.grid import grids_of
from weft.plan.layout import Layout
from weft.solve.bounds import least_s, least_saving_s, sent_share
from weft.solve.timing import Priced, waits_to_fill

LEAST, MOST_LAYOUTS, MOST_GRIDS = 4, 2, 6  # tensor ranks that are arranged, layouts whose are, and grids of each


def in_grids(pricer: Pricer, priced: Iterable[Priced], hopeless: Callable[[Layout, float], bool]) -> Iterator[tuple[Layout, float]]:
    """Layouts with their tensor ranks in a grid, and seconds that each takes at least.

    `hopeless`: whether a layout of at least so many seconds cannot be the best.
    """
    leading: dict[tuple[int, ...], Priced] = {}
    for one in sorted(priced, key=lambda p: p.prediction.step_time_s):
        if one.layout.tensor >= LEAST:
            leading.setdefault((one.layout.data, one.layout.tensor, one.layout.pipeline), one)
    for one in list(leading.values())[:MOST_LAYOUTS]:
        talk_s = dict(one.prediction.parts).get("tensor", 0.0)
        if hopeless(one.layout, one.prediction.step_time_s - talk_s):
            continue
        for grid in grids_of(one.layout.tensor)[:MOST_GRIDS]:
            try:
                layout = replace(one.layout, grid=grid)
                yield layout, least_saving_s(pricer, layout, not waits_to_fill(layout))
            except (Infeasible, LayoutError):
                continue


def left_out(
    pricer: Pricer, priced: Iterable[Priced], frames: Iterable[Layout], hopeless: Callable[[Layout, float], bool]
) -> Iterator[Layout]:
    """Of the leading meshes those that nobody priced: what their tensor ranks send in a line bars them, and in a grid it may be less.

    `frames`: of schedules of one stage a rank, in the order of their bounds. `hopeless` is asked as for `in_grids`.
    """
    done = {(one.layout.data, one.layout.tensor, one.layout.pipeline) for one in priced}
    seen: set[tuple[int, ...]] = set()
    for frame in frames:
        mesh = (frame.data, frame.tensor, frame.pipeline)
        if frame.tensor < LEAST or mesh in seen:
            continue
        if hopeless(frame, least_s(pricer, frame, False) * (1 - sent_share(pricer, frame))):
            continue
        seen.add(mesh)
        if mesh not in done:
            yield frame
        if len(seen) == MOST_LAYOUTS:
            return
