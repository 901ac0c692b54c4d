"""A timeline as a picture: text for a terminal, with colours where it has them, and SVG for a page.

In: a `Timeline`, simulated or measured. Out: text, or SVG. One row per rank; computes are drawn, and in the SVG transfers
as thin strips below the sender. A label is the microbatch, with the stage before it where a rank has several.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from rich.text import Text

from weft.plan.timeline import COMPUTE_LANE, Span, Timeline
from weft.units import format_percent, format_seconds

# Blue and orange stay apart for colour-blind eyes and in grey print; W is the lighter kin of B, which it was split from.
FILL = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#ffbf79"}
INK = {"F": "#ffffff", "B": "#3a1c00", "I": "#3a1c00", "W": "#5c3200"}
OTHER_FILL, OTHER_INK = "#9d9da1", "#1b1b1d"
KIND_WORDS = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}
SEND_LANE = "send"
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, slots=True)
class _Cell:
    """One compute on the character grid: columns [start, end)."""

    start: int
    end: int
    kind: str
    text: str


def gantt(timeline: Timeline, width: int = 100) -> str:
    """Plain characters, at most `width` columns for the time and some more for the margins.

    A compute is its kind and microbatch and then `=` up to its end; where only one column is left for it, its kind alone.
    Idle time is `.`.

    >>> from weft.schedules import build
    >>> from weft.simulate.clock import simulate
    >>> print(gantt(simulate(build("gpipe", 2, 2), lambda action: 1.0, lambda *_: 0.0), width=24))
    gpipe: 6.00 s, 2 ranks, idle 33.3 % of the time
    rank 0 |F0==F1==........B0==B1==| busy 66.7 %
    rank 1 |....F0==F1==B0==B1==....| busy 66.7 %
            0                 6.00 s
    """
    return gantt_text(timeline, width).plain


def gantt_text(timeline: Timeline, width: int = 100) -> Text:
    """The same as `gantt`, with colours, for a `rich` console."""
    columns = _columns(timeline, width)
    out = Text(f"{_headline(timeline)}\n", no_wrap=True, overflow="crop")
    margin = len(f"rank {timeline.num_ranks - 1}")
    several = _several_stages(timeline)
    for rank, computes in enumerate(_computes(timeline)):
        out.append(f"{f'rank {rank}':<{margin}} |")
        at = 0
        for cell in _cells(timeline, computes, several, columns):
            out.append("." * (cell.start - at), "dim")
            out.append(cell.text, f"{INK.get(cell.kind, OTHER_INK)} on {FILL.get(cell.kind, OTHER_FILL)}")
            at = cell.end
        out.append("." * (columns - at), "dim")
        out.append(f"| busy {format_percent(timeline.busy(rank))}\n")
    out.append(f"{'':<{margin}}  0{format_seconds(timeline.total_s):>{max(0, columns - 1)}}")
    return out


def svg(timeline: Timeline, width: int = 960) -> str:
    """A picture of `width` pixels as one self-contained `<svg>` element: no script, no font or file from elsewhere.

    Of spans that end within a third of a pixel the first is drawn. Names are escaped, so that a page may show any timeline.
    """
    row, bar, strip, left, right, top = 34, 24, 5, 64, 66, 58
    sends = any(span.lane == SEND_LANE and span.duration_s > 0 for span in timeline.spans)
    height_of_row = row + strip * sends
    bottom = top + height_of_row * timeline.num_ranks
    scale = (width - left - right) / (timeline.total_s or 1.0)
    several = _several_stages(timeline)
    body = [_legend(timeline, sends, left, 34)]
    for tick_s in _ticks(timeline.total_s):
        x = left + tick_s * scale
        body.append(f'<line x1="{x:.1f}" y1="{top - 4}" x2="{x:.1f}" y2="{bottom}" class="grid"/>')
        body.append(f'<text x="{x:.1f}" y="{bottom + 16}" class="axis" text-anchor="middle">{_short(tick_s)}</text>')
    for rank in range(timeline.num_ranks):
        y = top + rank * height_of_row
        body.append(f'<text x="{left - 10}" y="{y + bar / 2 + 4:.0f}" class="rank" text-anchor="end">rank {rank}</text>')
        body.append(f'<rect x="{left}" y="{y}" width="{width - left - right}" height="{bar}" class="idle"/>')
        body.append(f'<text x="{width - right + 8}" y="{y + bar / 2 + 4:.0f}" class="axis">{format_percent(timeline.busy(rank))}</text>')
    drawn: dict[tuple[int, str], float] = {}  # up to which pixel
    for span in sorted(timeline.spans, key=lambda span: span.start_s):
        wide = span.duration_s * scale
        x, y = left + (span.start_s - timeline.start_s) * scale, top + span.rank * height_of_row
        if span.duration_s <= 0 or x + wide < drawn.get((span.rank, span.lane), 0.0) + 1 / 3:
            continue
        drawn[span.rank, span.lane] = x + wide
        hint = f"<title>{escape(span.name)} on rank {span.rank}, {format_seconds(span.duration_s)}</title>"
        if span.lane == COMPUTE_LANE:
            fill, ink = FILL.get(span.kind, OTHER_FILL), INK.get(span.kind, OTHER_INK)
            shown = max(wide - min(0.8, 0.1 * wide), 0.33)
            # A hair narrower than the time it took, so that neighbours of one colour stay apart.
            body.append(f'<rect x="{x:.2f}" y="{y}" width="{shown:.2f}" height="{bar}" rx="1.5" fill="{fill}">{hint}</rect>')
            label = _label(span, several)
            if wide > 5.6 * len(label) + 0.8:
                middle = f'x="{x + wide / 2:.1f}" y="{y + bar / 2 + 4:.0f}"'
                body.append(f'<text {middle} class="label" style="fill:{ink}" text-anchor="middle">{escape(label)}</text>')
        elif span.lane == SEND_LANE:
            body.append(f'<rect x="{x:.2f}" y="{y + bar + 1}" width="{wide:.2f}" height="{strip}" class="send">{hint}</rect>')
    title = f'<text x="{left}" y="18" class="title">{escape(_headline(timeline))}</text>'
    axis = f'<text x="{left + (width - left - right) / 2:.0f}" y="{bottom + 34}" class="axis" text-anchor="middle">time</text>'
    busy = f'<text x="{width - right + 8}" y="{top - 8}" class="axis">busy</text>'
    size = f'class="weft-gantt" width="{width}" height="{bottom + 44}" viewBox="0 0 {width} {bottom + 44}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', _STYLE, title, *body, axis, busy, "</svg>"])


_STYLE = """<style>
.weft-gantt text{font-family:system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;font-size:12px;fill:#3b3b40}
.weft-gantt text.title{font-size:14px;font-weight:600}.weft-gantt text.axis{font-size:11px;fill:#6b6b72}
.weft-gantt text.label{font-size:10px}.weft-gantt .idle{fill:#f1f1f4}.weft-gantt .grid{stroke:#dcdce2}.weft-gantt .send{fill:#54a24b}
</style>"""


def _headline(timeline: Timeline) -> str:
    ranks = "1 rank" if timeline.num_ranks == 1 else f"{timeline.num_ranks} ranks"
    return f"{timeline.name}: {format_seconds(timeline.total_s)}, {ranks}, idle {format_percent(timeline.bubble)} of the time"


def _computes(timeline: Timeline) -> list[list[Span]]:
    """[rank] -> its computes in order of time."""
    rows: list[list[Span]] = [[] for _ in range(timeline.num_ranks)]
    for span in sorted((s for s in timeline.spans if s.lane == COMPUTE_LANE), key=lambda s: s.start_s):
        rows[span.rank].append(span)
    return rows


def _several_stages(timeline: Timeline) -> bool:
    stage_of = {(span.rank, found[1]) for span in timeline.spans if (found := _ACTION.fullmatch(span.name))}
    return len(stage_of) > len({rank for rank, _ in stage_of})


def _label(span: Span, several: bool) -> str:
    found = _ACTION.fullmatch(span.name)
    if not found:
        return span.name
    return f"{found[1]}.{found[3]}" if several else found[3]


def _columns(timeline: Timeline, width: int) -> int:
    """Columns for the whole time: a multiple of the shortest compute's, where all computes are, so that equal ones look equal."""
    computes = [s for s in timeline.spans if s.lane == COMPUTE_LANE and s.duration_s > 0]
    tick_s = min((s.duration_s for s in computes), default=0.0)
    if not tick_s:
        return width
    num_ticks = timeline.total_s / tick_s
    edges = ((s.start_s - timeline.start_s) / tick_s for s in computes)
    even = all(abs(edge - round(edge)) < 1e-6 for edge in edges) and abs(num_ticks - round(num_ticks)) < 1e-6
    return round(num_ticks) * (width // round(num_ticks)) if even and num_ticks <= width else width


def _cells(timeline: Timeline, computes: list[Span], several: bool, columns: int) -> Iterator[_Cell]:
    scale, at = columns / (timeline.total_s or 1.0), 0
    for span in computes:
        start = max(at, round((span.start_s - timeline.start_s) * scale))
        end = min(columns, max(round((span.end_s - timeline.start_s) * scale), round((span.start_s - timeline.start_s) * scale) + 1))
        if end <= start:  # where many fall into one column the first stands for all
            continue
        at = end
        found = _ACTION.fullmatch(span.name)
        name = f"{found[1] if several else ''}{found[2]}{found[3]}" if found else span.name
        room = end - start
        if len(name) > room:
            name = (found[2] if found else span.name)[:room]
        yield _Cell(start, end, span.kind, name + "=" * (room - len(name)))


def _ticks(total_s: float) -> list[float]:
    """Five to ten round times from 0 to the total."""
    if total_s <= 0:
        return [0.0]
    step = 10.0 ** _floor_log10(total_s / 5)
    step *= next((n for n in (5, 2) if step * n <= total_s / 5), 1)
    return [i * step for i in range(int(total_s / step + 1e-9) + 1)]


def _short(seconds: float) -> str:
    """A round time without the zeros behind its point: 50 ms, not 50.0 ms."""
    return re.sub(r"\.(\d*?)0+(?=\s)", lambda found: f".{found[1]}" if found[1] else "", format_seconds(seconds))


def _floor_log10(number: float) -> int:
    return int(f"{number:e}".partition("e")[2])


def _legend(timeline: Timeline, sends: bool, x: float, y: float) -> str:
    kinds = dict.fromkeys(s.kind for s in timeline.spans if s.lane == COMPUTE_LANE)
    entries = [(KIND_WORDS.get(kind, kind), f'fill="{FILL.get(kind, OTHER_FILL)}"') for kind in kinds]
    entries += [("sending", 'class="send"')] if sends else []
    parts = []
    for words, paint in entries:
        parts.append(f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="10" height="10" rx="1.5" {paint}/>')
        parts.append(f'<text x="{x + 15:.0f}" y="{y:.0f}">{escape(words)}</text>')
        x += 15 + 6.6 * len(words) + 18
    return "\n".join(parts)
