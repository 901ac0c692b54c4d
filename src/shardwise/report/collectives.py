"""Pictures of collective algorithms: times against sizes, or the messages of one algorithm step by step.

Times have logarithmic axes, a line per algorithm, and a band below that shows the fastest by size. Steps have a column per rank, time
going down, and an arrow per message, labelled with the chunks that it carries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from shardwise.report.canvas import GRID, INK, PALE, Picture, Polyline, Rectangle, Shape, TextLabel
from shardwise.report.chart import PALETTE
from shardwise.units import format_bytes, format_seconds

COLOURS = (*PALETTE, "#3b3b40", "#b8a000", "#6a3d9a")
LEFT, RIGHT, TOP, BAND = 74.0, 178.0, 54.0, 26.0
ROW, COLUMN = 40.0, 150.0


@dataclass(frozen=True, slots=True)
class Arrow:
    """A message from `source` to `target` from `start_step` to `end_step` (in steps); `is_added`: the target reduces it; `label`: its
    label."""

    source: int
    target: int
    start_step: float
    end_step: float
    is_added: bool
    label: str


def times_picture(title: str, times: Mapping[str, Sequence[tuple[float, float]]], marked: str = "") -> Picture:
    """Draw `times`: algorithm -> (bytes, seconds) by ascending bytes, the same for all; `marked` is drawn dashed (it is no program).

    The band below has the colour of the fastest, with borders half-way between sizes.
    """
    names = list(times)
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    sizes = [size for size, _ in times[names[0]]]
    width, height, bottom = 860.0, 470.0, 390.0
    low = floor(log10(min(s for row in times.values() for _, s in row)))
    high = max(low + 1, ceil(log10(max(s for row in times.values() for _, s in row))))
    left, right = log10(sizes[0]), log10(sizes[-1])
    right = right if right > left else left + 1

    def at_x(size: float) -> float:
        return LEFT + (log10(size) - left) / (right - left) * (width - LEFT - RIGHT)

    def at_y(seconds: float) -> float:
        return TOP + (high - log10(seconds)) / (high - low) * (bottom - TOP)

    end = width - RIGHT
    shapes: list[Shape] = [TextLabel(LEFT, 24, title, size=14, is_bold=True)]
    for power in range(low, high + 1):
        y = at_y(10.0**power)
        shapes += [Polyline(((LEFT, y), (end, y))), TextLabel(LEFT - 8, y + 4, _trim_zeros(format_seconds(10.0**power)), "end", 11, PALE)]
    stride = max(1, ceil(len(sizes) / 7))
    for size in sizes[::stride]:
        x = at_x(size)
        shapes += [Polyline(((x, TOP), (x, bottom))), TextLabel(x, bottom + BAND + 24, _trim_zeros(format_bytes(size)), "middle", 11, PALE)]
    for name in reversed(names):
        line = tuple((at_x(size), at_y(seconds)) for size, seconds in times[name])
        shapes.append(Polyline(line, colour[name], 2.0, name == marked))
    shapes += _place_labels([(at_y(times[name][-1][1]), name, colour[name]) for name in names], end)
    for name, start, stop in fastest_ranges(times):
        x, end_x = at_x(start), at_x(stop)
        shapes.append(Rectangle(x, bottom + 8, end_x - x, BAND - 10, colour[name]))
        if end_x - x > 7 * len(name):
            shapes.append(TextLabel((x + end_x) / 2, bottom + 20, name, "middle", 11, "#ffffff", True))
    shapes += [
        TextLabel(LEFT - 8, bottom + 20, "fastest", "end", 11, PALE),
        TextLabel((LEFT + end) / 2, bottom + BAND + 44, "bytes of the tensor", "middle", 11, PALE),
        TextLabel(LEFT, TOP - 10, "time", "start", 11, PALE),
    ]
    return Picture(width, height, tuple(shapes), title)


def fastest_ranges(times: Mapping[str, Sequence[tuple[float, float]]]) -> list[tuple[str, float, float]]:
    """Return (fastest, from bytes, to bytes) by ascending bytes; borders are the geometric means of adjacent sizes.

    >>> fastest_ranges({"a": [(1, 1.0), (4, 2.0), (16, 9.0)], "b": [(1, 3.0), (4, 3.0), (16, 3.0)]})
    [('a', 1, 8.0), ('b', 8.0, 16)]
    """
    rows = list(zip(*times.values(), strict=True))
    sizes = [row[0][0] for row in rows]
    best = [min(times, key=lambda name, i=i: times[name][i][1]) for i in range(len(rows))]  # type: ignore[misc]
    ranges: list[tuple[str, float, float]] = []
    for i, name in enumerate(best):
        start = sizes[0] if i == 0 else (sizes[i - 1] * sizes[i]) ** 0.5
        stop = sizes[-1] if i == len(sizes) - 1 else (sizes[i] * sizes[i + 1]) ** 0.5
        if ranges and ranges[-1][0] == name:
            ranges[-1] = (name, ranges[-1][1], stop)
        else:
            ranges.append((name, start, stop))
    return ranges


def _place_labels(at: Sequence[tuple[float, str, str]], x: float) -> list[Shape]:
    """Label the lines' ends, with labels shifted where they would overlap."""
    shapes: list[Shape] = []
    last = 0.0
    for y, name, colour in sorted(at):
        place = max(y, last + 15)
        shapes += [
            Polyline(((x, y), (x + 14, place)), colour, 1.0),
            TextLabel(x + 18, place + 4, name, size=12, colour=colour, is_bold=True),
        ]
        last = place
    return shapes


def _trim_zeros(text: str) -> str:
    """Drop trailing zeros: 1 ms, not 1.00 ms."""
    return text.replace(".00 ", " ").replace(".0 ", " ")


def steps_picture(title: str, num_ranks: int, arrows: Sequence[Arrow]) -> Picture:
    """Draw a column per rank and a row per step; a message labelled + is reduced into the target's value."""
    column = COLUMN if num_ranks <= 8 else max(40.0, 1200.0 / num_ranks)
    last = max([ceil(arrow.end_step) for arrow in arrows], default=1)
    left, top = 90.0, 66.0
    width, bottom = max(420.0, left + column * (num_ranks - 1) + 60), top + ROW * last
    shapes: list[Shape] = [TextLabel(left - 60, 24, title, size=14, is_bold=True)]
    for step in range(last):
        y = top + step * ROW
        shapes += [Polyline(((left - 14, y), (width - 40, y)), GRID), TextLabel(left - 34, y + ROW / 2 + 4, str(step + 1), "end", 11, PALE)]
    shapes += [Polyline(((left - 14, bottom), (width - 40, bottom)), GRID), TextLabel(left - 34, top - 10, "step", "end", 11, PALE)]
    for rank in range(num_ranks):
        x = left + rank * column
        name = f"rank {rank}" if column > 60 else str(rank)
        shapes += [TextLabel(x, top - 10, name, "middle", 12, INK, True), Polyline(((x, top), (x, bottom)), "#a9a9b0", 1.5)]
    crowded = len(arrows) > 160
    for i, arrow in enumerate(arrows):
        colour = COLOURS[arrow.source % len(COLOURS)]
        ax, bx = left + arrow.source * column, left + arrow.target * column
        ay, by = top + arrow.start_step * ROW + 5, top + arrow.end_step * ROW - 5
        shapes.append(Polyline(((ax, ay), (bx, by)), colour, 1.6, False, True))
        if not crowded:
            # Near its sender, where few arrows cross; alternately shifted.
            part = 0.24 if abs(bx - ax) <= column else 0.24 * column / abs(bx - ax) + 0.02 * (i % 2)
            words = f"+ {arrow.label}" if arrow.is_added else arrow.label
            shapes.append(TextLabel(ax + (bx - ax) * part, ay + (by - ay) * part - 3, words, "middle", 10, colour))
    shapes.append(
        TextLabel(
            left - 14,
            bottom + 22,
            "an arrow is a message, a number a piece of the tensor; + is added where it arrives",
            size=11,
            colour=PALE,
        )
    )
    return Picture(width, bottom + 36, tuple(shapes), title)
