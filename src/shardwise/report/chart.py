"""Line charts and bars as HTML fragments without scripts or network access.

Lines are SVG stretched to the available width; text is HTML next to it, so that it keeps its size in a narrow window.
All names are escaped. Not modelled: interaction beyond a browser's own tooltips.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10

# Okabe and Ito's palette, distinguishable for most colour-blind readers.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c")
MAX_POINTS = 600
MIN_SHARE = 1e-9  # shares of a total below this are rounding errors


@dataclass(frozen=True, slots=True)
class Series:
    """One line: (x, y) points by ascending x. `is_faint`: raw values behind a smoothed line; `has_dots`: draw points."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: str = PALETTE[0]
    is_faint: bool = False
    has_dots: bool = False


@dataclass(frozen=True, slots=True)
class BarRow:
    """One bar of several: its name, its parts, and text for its total. `is_chosen`: the chosen one, `is_refused`: a refused one.

    `format_amount` formats a part's amount.
    """

    name: str
    parts: tuple[tuple[str, float], ...]
    words: str
    format_amount: Callable[[float], str]
    is_chosen: bool = False
    is_refused: bool = False


def line_chart(
    series: Sequence[Series], x_name: str, y_name: str, levels: Sequence[tuple[str, float]] = (), from_zero: bool = False
) -> str:
    """Return lines over a common x; `levels`: named horizontal lines. Empty where nothing can be drawn."""
    series = [Series(s.name, _finite_points(s.points), s.colour, s.is_faint, s.has_dots) for s in series]
    points = [point for s in series for point in s.points]
    if not points:
        return ""
    low = min([y for _, y in points] + [y for _, y in levels])
    high = max([y for _, y in points] + [y for _, y in levels])
    ticks_y = axis_ticks(min(0.0, low) if from_zero else low, high)
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    right = right if right > left else left + 1
    low, high = min(low, ticks_y[0]), max(high, ticks_y[-1])

    def at_x(x: float) -> float:
        return (x - left) / (right - left) * 100

    def at_y(y: float) -> float:
        return (high - y) / (high - low) * 100

    drawn, words = [], []
    for y in ticks_y:
        drawn.append(f'<line class="grid" x1="0" x2="100" y1="{at_y(y):.2f}" y2="{at_y(y):.2f}"/>')
        words.append(f'<span class="y" style="top:{at_y(y):.2f}%">{_format_number(y)}</span>')
    for x in (tick for tick in axis_ticks(left, right) if left <= tick <= right):
        words.append(f'<span class="x" style="left:{at_x(x):.2f}%">{_format_number(x)}</span>')
    for name, y in levels:
        drawn.append(f'<line class="level" x1="0" x2="100" y1="{at_y(y):.2f}" y2="{at_y(y):.2f}"/>')
        words.append(f'<span class="level" style="top:{at_y(y):.2f}%">{escape(name)} {_format_number(y)}</span>')
    for s in series:
        path = " ".join(f"{at_x(x):.2f},{at_y(y):.2f}" for x, y in thin_points(s.points, MAX_POINTS))
        kind = "faint" if s.is_faint else "line"
        if s.has_dots or len(s.points) == 1:
            words += [
                f'<i class="dot" style="left:{at_x(x):.2f}%;top:{at_y(y):.2f}%;background:{s.colour}" '
                f'title="{escape(s.name)}: {y:.4g}"></i>'
                for x, y in thin_points(s.points, MAX_POINTS)
            ]
        if len(s.points) > 1:
            drawn.append(f'<polyline class="{kind}" points="{path}" stroke="{s.colour}"/>')
    legend = _legend_html([(s.name, s.colour) for s in series if not s.is_faint or len(series) == 1])
    return (
        f'<figure class="chart">{legend}<div class="plot" role="img" aria-label="{escape(y_name)} against {escape(x_name)}">'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{"".join(drawn)}</svg>{"".join(words)}</div>'
        f"<figcaption>{escape(y_name)} against {escape(x_name)}</figcaption></figure>"
    )


def stacked_bar(parts: Sequence[tuple[str, float, str]], total: float = 0.0) -> str:
    """Return one bar of (name, amount, text); `total`: its full length where that exceeds the sum of the amounts."""
    most = max((amount for _, amount, _ in parts), default=0.0)
    parts = [part for part in parts if part[1] > MIN_SHARE * most]
    used = sum(amount for _, amount, _ in parts)
    total = max(total, used)
    if total <= 0:
        return ""
    pieces = [
        f'<i style="width:{amount / total * 100:.3f}%;background:{PALETTE[i % len(PALETTE)]}" title="{escape(name)}: {escape(words)}"></i>'
        for i, (name, amount, words) in enumerate(parts)
    ]
    legend = _legend_html([(f"{name} {words}", PALETTE[i % len(PALETTE)]) for i, (name, _, words) in enumerate(parts)])
    return f'<div class="bar">{"".join(pieces)}</div>{legend}'


def compared_bars(rows: Sequence[BarRow], limit: tuple[str, float] | None = None) -> str:
    """Return bars on one scale with the same colours for the same parts; `limit` is drawn through all of them.

    Empty where no row has a length.
    """
    rows = [row for row in rows if sum(amount for _, amount in row.parts) > 0]
    if not rows:
        return ""
    longest = max(max(sum(amount for _, amount in row.parts) for row in rows), limit[1] if limit else 0.0)
    names = list(dict.fromkeys(name for row in rows for name, amount in row.parts if amount > MIN_SHARE * longest))
    colours = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(names)}
    line = f'<b style="left:{limit[1] / longest * 100:.3f}%"></b>' if limit else ""
    drawn = []
    for row in rows:
        pieces = "".join(
            f'<i style="width:{amount / longest * 100:.3f}%;background:{colours[name]}" '
            f'title="{escape(name)}: {escape(row.format_amount(amount))}"></i>'
            for name, amount in row.parts
            if amount > MIN_SHARE * longest
        )
        kind = "row mark" if row.is_chosen else "row off" if row.is_refused else "row"
        drawn.append(
            f'<div class="{kind}"><span>{escape(row.name)}</span><div class="track">{pieces}{line}</div>'
            f"<span>{escape(row.words)}</span></div>"
        )
    note = f'<p class="note">The line: {escape(limit[0])}.</p>' if limit else ""
    return f'<div class="bars">{"".join(drawn)}</div>{_legend_html([(name, colours[name]) for name in names])}{note}'


def axis_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten) that enclose low to high, at most about `most` of them.

    >>> axis_ticks(1.3, 5.6)
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    """
    if high - low <= 1e-9 * max(abs(low), 1.0):  # a flat line gets a margin
        half = max(abs(low), 1e-6) / 2
        low, high = low - half, high + half
    rough = (high - low) / (most - 1)
    power = 10.0 ** floor(log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def smooth_points(points: Sequence[tuple[float, float]], weight: float = 0.9) -> tuple[tuple[float, float], ...]:
    """Return the exponentially weighted mean, corrected for its start (Kingma and Ba, 2015, section 3)."""
    mean, result = 0.0, []
    for i, (x, y) in enumerate(points, start=1):
        mean = weight * mean + (1 - weight) * y
        result.append((x, mean / (1 - weight**i)))
    return tuple(result)


def thin_points(points: Sequence[tuple[float, float]], most: int) -> Sequence[tuple[float, float]]:
    """Return at most about `most` points at an equal stride, and the last one."""
    stride = max(1, ceil(len(points) / most))
    shown = list(points[::stride])
    if points and shown[-1] != points[-1]:
        shown.append(points[-1])
    return shown


def _finite_points(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple((x, y) for x, y in points if isfinite(x) and isfinite(y))


def _legend_html(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<li><i style="background:{colour}"></i>{escape(name)}</li>' for name, colour in entries)
    return f'<ul class="legend">{items}</ul>'


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
