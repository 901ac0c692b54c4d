"""Table and picture of speed-up and efficiency against the number of devices.

Speed-up is throughput relative to the smallest number of devices that has a plan; efficiency is speed-up over the ratio of the numbers of
devices. Both axes of the picture are logarithmic, so that ideal scaling is a straight line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from shardwise.plan.layout import Layout
from shardwise.plan.plan import Prediction
from shardwise.report.canvas import PALE, Picture, Polyline, Rectangle, Shape, TextLabel
from shardwise.report.chart import PALETTE
from shardwise.report.economy import format_usd
from shardwise.report.tables import TextTable, split_common_words
from shardwise.units import format_bytes, format_percent, format_seconds

LEFT, TOP, END, BOTTOM = 74.0, 58.0, 780.0, 380.0
MARK = 7.0


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """A number of devices with its plan. `prediction` is None where there is none; `note` says why. `usd`: per unit of work."""

    devices: int
    batch_size: int
    layout: Layout
    prediction: Prediction | None
    usd: float | None = None
    note: str = ""

    @property
    def samples_per_s(self) -> float:
        """Throughput in samples a second; 0 where there is no plan."""
        return self.batch_size / self.prediction.step_time_s if self.prediction is not None else 0.0


def speedups_and_efficiencies(sizes: Sequence[ScalingPoint]) -> list[tuple[float, float] | None]:
    """Return (speed-up, efficiency) of each size; None where there is no plan.

    >>> from shardwise.plan.plan import MemoryBreakdown
    >>> steps = [(8, 4.0), (16, 2.5)]
    >>> speedups_and_efficiencies([ScalingPoint(n, 64, Layout(data=n), Prediction(step, 0.5, 1e15, MemoryBreakdown())) for n, step in steps])
    [(1.0, 1.0), (1.6, 0.8)]
    """  # noqa: E501
    first = next((s for s in sizes if s.prediction is not None), None)
    if first is None:
        return [None] * len(sizes)
    ratios = [s.samples_per_s / first.samples_per_s for s in sizes]
    return [(up, up * first.devices / s.devices) if s.prediction is not None else None for s, up in zip(sizes, ratios, strict=True)]


def scaling_table(title: str, sizes: Sequence[ScalingPoint], unit: str) -> TextTable:
    """Tabulate one row per size; empty columns are left out when the table is drawn."""
    planned = [s for s in sizes if s.prediction is not None]
    common, words = split_common_words([s.layout for s in planned]) if planned else ("", [])
    layouts = iter(words)
    rows = []
    for s, up in zip(sizes, speedups_and_efficiencies(sizes), strict=True):
        cells = ("", "", "", "", "", "", "")
        if s.prediction is not None and up is not None:
            p = s.prediction
            cells = (
                next(layouts), format_seconds(p.step_time_s), f"{up[0]:.2f}x", format_percent(up[1]), format_percent(p.mfu),
                format_bytes(p.memory.total), format_usd(s.usd),
            )  # fmt: skip
        rows.append((f"{s.devices:,}", f"{s.batch_size:,}", *cells, s.note))
    columns = ("devices", "batch", "layout", "step time", "speed-up", "efficiency", "MFU", "memory", f"$ per {unit}", "note")
    return TextTable(title, columns, tuple(rows), right=(0, 1, 3, 4, 5, 6, 7, 8), note=f"All have {common}." if common else "")


def scaling_picture(title: str, sizes: Sequence[ScalingPoint]) -> Picture:
    """Draw speed-up against devices, with the ideal line; below each size its step time and MFU. `sizes`: at least one has a plan."""
    drawn = [(s, up) for s, up in zip(sizes, speedups_and_efficiencies(sizes), strict=True) if up is not None]
    devices = [s.devices for s in sizes]
    base, most = drawn[0][0].devices, max(devices)
    ideal = most / base
    left, right = log10(min(devices)), log10(most)
    right = right if right > left else left + 1
    marks = _log_ticks(min(1.0, min(devices) / base, *(up for _, (up, _) in drawn)), max(2.0, ideal, *(up for _, (up, _) in drawn)))
    low, high = log10(marks[0]), log10(marks[-1])

    def at(count: float, up: float) -> tuple[float, float]:
        x = LEFT + 20 + (log10(count) - left) / (right - left) * (END - LEFT - 90)
        return x, TOP + (high - log10(up)) / (high - low) * (BOTTOM - TOP)

    shapes: list[Shape] = [TextLabel(LEFT, 24, title, size=14, is_bold=True)]
    for mark in marks:
        y = at(base, mark)[1]
        shapes += [Polyline(((LEFT, y), (END, y))), TextLabel(LEFT - 8, y + 4, f"{mark:g}x", "end", 11, PALE)]
    for row, name in enumerate(("devices", "step", "MFU")):
        shapes.append(TextLabel(LEFT - 8, BOTTOM + 38 + 16 * row, name, "end", 11, PALE))
    for s in sizes:
        x = at(s.devices, 1.0)[0]
        p = s.prediction
        labels = ("no plan",) if p is None else (format_seconds(p.step_time_s), format_percent(p.mfu))
        shapes.append(Polyline(((x, TOP), (x, BOTTOM))))
        shapes += [TextLabel(x, BOTTOM + 38 + 16 * row, text, "middle", 11, PALE) for row, text in enumerate((f"{s.devices:,}", *labels))]
    shapes.append(Polyline((at(base, 1.0), at(most, ideal)), PALE, 1.5, is_dashed=True))
    for y, name, colour in ((TOP + 14, "ideal", PALE), (TOP + 32, "predicted, with efficiency", PALETTE[0])):
        shapes.append(Polyline(((LEFT + 14, y), (LEFT + 44, y)), colour, 2.0, is_dashed=colour == PALE))
        shapes.append(TextLabel(LEFT + 50, y + 4, name, size=11, colour=colour))
    line = tuple(at(s.devices, up) for s, (up, _) in drawn)
    shapes += [Polyline(line, PALETTE[0], 2.0)] if len(line) > 1 else []
    for (x, y), (_, (_, efficiency)) in zip(line, drawn, strict=True):
        shapes.append(Rectangle(x - MARK / 2, y - MARK / 2, MARK, MARK, PALETTE[0]))
        shapes.append(TextLabel(x + 8, y + 18, format_percent(efficiency), size=12, colour=PALETTE[0], is_bold=True))
    shapes.append(TextLabel(LEFT, TOP - 10, "speed-up", size=11, colour=PALE))
    return Picture(END + 20, BOTTOM + 86, tuple(shapes), title)


def _log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten that enclose low to high.

    >>> _log_ticks(1.0, 8.0)
    [1.0, 2.0, 5.0, 10.0]
    """
    every = [factor * 10.0**power for power in range(floor(log10(low)), ceil(log10(high)) + 1) for factor in (1, 2, 5)]
    first = max(i for i, mark in enumerate(every) if mark <= low * 1.0001)
    last = min(i for i, mark in enumerate(every) if mark >= high * 0.9999)
    return every[first : last + 1]
