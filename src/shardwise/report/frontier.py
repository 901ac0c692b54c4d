"""Picture of the Pareto frontier of accuracy and price, with the chosen point and those of baselines."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.report.canvas import PALE, Picture, Polyline, Rectangle, Shape, TextLabel
from shardwise.report.chart import PALETTE, axis_ticks

LEFT, TOP, END, BOTTOM = 74.0, 58.0, 780.0, 380.0
MARK = 8.0
Points = Sequence[tuple[float, float]]


def frontier_picture(title: str, best: Points, chosen: tuple[float, float], others: Sequence[tuple[str, Points]] = ()) -> Picture:
    """Draw steps of (accuracy, $/h), below which nothing is feasible. `others`: baselines by name, drawn as marks."""
    every = [*best, chosen, *(point for _, points in others for point in points)]
    xs, ys = axis_ticks(min(x for x, _ in every), max(x for x, _ in every)), axis_ticks(0.0, max(y for _, y in every))
    low, high = min(xs[0], *(x for x, _ in every)), max(xs[-1], *(x for x, _ in every))
    top = max(ys[-1], *(y for _, y in every))

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - low) / ((high - low) or 1.0)
        return LEFT + 10 + across * (END - LEFT - 30), BOTTOM - y / (top or 1.0) * (BOTTOM - TOP)

    shapes: list[Shape] = [TextLabel(LEFT, 24, title, size=14, is_bold=True)]
    for y in ys:
        shapes += [
            Polyline(((LEFT, at(low, y)[1]), (END, at(low, y)[1]))),
            TextLabel(LEFT - 8, at(low, y)[1] + 4, f"{y:g}", "end", 11, PALE),
        ]
    shapes += [TextLabel(at(x, 0)[0], BOTTOM + 18, f"{x:g}", "middle", 11, PALE) for x in xs if low <= x <= high]
    steps: list[tuple[float, float]] = []
    for x, y in sorted(best):
        steps += [at(x, y)] if not steps else [(steps[-1][0], at(x, y)[1]), at(x, y)]
    if len(steps) > 1:
        shapes.append(Polyline(tuple(steps), PALETTE[0], 2.0))
    for i, (name, points) in enumerate((("least price", best), *others)):
        colour = PALETTE[i % len(PALETTE)]
        shapes += [Rectangle(x - MARK / 2, y - MARK / 2, MARK, MARK, colour) for x, y in (at(*point) for point in points)]
        shapes.append(TextLabel(LEFT + 14, TOP + 12 + 16 * i, name, size=11, colour=colour))
    x, y = at(*chosen)
    shapes.append(TextLabel(x - 10, y - 10, f"chosen: ${chosen[1]:,.4g}/h", "end" if x > (LEFT + END) / 2 else "start", 12, is_bold=True))
    shapes += [TextLabel(LEFT, TOP - 10, "$ an hour", size=11, colour=PALE), TextLabel(END, BOTTOM + 36, "accuracy", "end", 11, PALE)]
    return Picture(END + 20, BOTTOM + 56, tuple(shapes), title)
