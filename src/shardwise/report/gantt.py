"""Gantt charts of a timeline, simulated or measured: text for a terminal, with colours where it has them, and SVG for a page.

One row per rank; computes are drawn, and in the SVG transfers, collectives and copies as thin strips below. A label is the microbatch,
with the stage before it where a rank has several; a second replica is lighter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rich.text import Text

from shardwise.plan.ir.timeline import COMPUTE_LANE, Span, Timeline
from shardwise.units import format_percent, format_seconds

RankColumns = Sequence[tuple[str, Sequence[str]]]  # columns next to the rows: a head, and a text for each rank


@dataclass(frozen=True, slots=True)
class _GridCell:
    """One compute on the character grid: columns [start, end)."""

    start: int
    end: int
    kind: str
    shade: int
    text: str


def gantt_text(
    timeline: Timeline,
    width: int = 100,
    rank_columns: RankColumns = (),
    headline: str = "",
    time_text: Callable[[float], str] = format_seconds,
) -> Text:
    """Return text for a `rich` console, with colours, at most `width` columns for the time and some more for the margins.

    A compute is its kind and microbatch and then `=` up to its end, `-` in a second replica; where only one column is left for it, its
    kind alone. Idle time is `.`.

    Args:
        beside: further columns of each rank. headline: instead of the timeline's own. time_text: formats a time.

    >>> from shardwise.schedules import build
    >>> from shardwise.simulate.clock import simulate
    >>> print(gantt_text(simulate(build("gpipe", 2, 2), lambda action: 1.0, lambda *_: 0.0), width=24).plain)
    gpipe: 6.00 s, 2 ranks, idle 33.3 % of the time
    rank 0 |F0==F1==........B0==B1==| busy 66.7 %
    rank 1 |....F0==F1==B0==B1==....| busy 66.7 %
            0                 6.00 s
    """
    columns = _num_columns(timeline, width)
    out = Text(f"{headline or _default_headline(timeline, time_text)}\n", no_wrap=True, overflow="crop")
    margin = len(f"rank {timeline.num_ranks - 1}")
    look = span_shades(timeline)
    for rank, computes in enumerate(_computes_by_rank(timeline)):
        out.append(f"{f'rank {rank}':<{margin}} |")
        at = 0
        for cell in _grid_cells(timeline, computes, look, columns):
            out.append("." * (cell.start - at), "dim")
            fill, ink = span_colours(cell.kind, cell.shade)
            out.append(cell.text, f"{ink} on {fill}")
            at = cell.end
        out.append("." * (columns - at), "dim")
        more = "".join(f", {head} {words[rank]}" for head, words in rank_columns)
        out.append(f"| busy {format_percent(timeline.busy(rank))}{more}\n")
    out.append(f"{'':<{margin}}  0{time_text(timeline.total_s):>{max(0, columns - 1)}}")
    return out


def gantt_svg(
    timeline: Timeline,
    width: int = 960,
    rank_columns: RankColumns = (),
    headline: str = "",
    time_text: Callable[[float], str] | None = None,
) -> str:
    """Return a chart `width` pixels wide as one self-contained `<svg>` element: no scripts, external fonts or files.

    Of spans that end within a third of a pixel the first is drawn. Names are escaped. Arguments as of `gantt_text`.
    """
    row, bar, strip, left, top = 34, 24, 5, 64, 58
    sides: list[tuple[str, Sequence[str]]] = [
        ("busy", [format_percent(timeline.busy(rank)) for rank in range(timeline.num_ranks)]),
        *rank_columns,
    ]
    widths = [max(50, 7 * max(len(head), *map(len, words), 0) + 10) for head, words in sides]
    right = 16 + sum(widths)
    lanes = [lane for lane in STRIPS if any(span.lane == lane and span.duration_s > 0 for span in timeline.spans)]
    height_of_row = row + strip * len(lanes)
    bottom = top + height_of_row * timeline.num_ranks
    scale = (width - left - right) / (timeline.total_s or 1.0)
    look = span_shades(timeline)
    body = [_svg_legend(timeline, lanes, look, left, 38)]
    for tick_s in _time_ticks(timeline.total_s):
        x = left + tick_s * scale
        body.append(f'<line x1="{x:.1f}" y1="{top - 4}" x2="{x:.1f}" y2="{bottom}" class="grid"/>')
        tick = time_text(tick_s) if time_text else _format_round_time(tick_s)
        body.append(f'<text x="{x:.1f}" y="{bottom + 16}" class="axis" text-anchor="middle">{escape(tick)}</text>')
    for rank in range(timeline.num_ranks):
        y = top + rank * height_of_row
        body.append(f'<text x="{left - 10}" y="{y + bar / 2 + 4:.0f}" class="rank" text-anchor="end">rank {rank}</text>')
        body.append(f'<rect x="{left}" y="{y}" width="{width - left - right}" height="{bar}" class="idle"/>')
    x = width - right + 8
    for (head, words), wide in zip(sides, widths, strict=True):
        body.append(f'<text x="{x}" y="{top - 8}" class="axis">{escape(head)}</text>')
        for rank, word in enumerate(words):
            body.append(f'<text x="{x}" y="{top + rank * height_of_row + bar / 2 + 4:.0f}" class="axis">{escape(word)}</text>')
        x += wide
    body += _svg_bars(timeline, look, lanes, (left, top, scale), (height_of_row, bar, strip), time_text or format_seconds)
    title = f'<text x="{left}" y="18" class="title">{escape(headline or _default_headline(timeline, time_text or format_seconds))}</text>'
    axis = f'<text x="{left + (width - left - right) / 2:.0f}" y="{bottom + 34}" class="axis" text-anchor="middle">time</text>'
    size = f'class="shardwise-gantt" width="{width}" height="{bottom + 44}" viewBox="0 0 {width} {bottom + 44}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', _STYLE, title, *body, axis, "</svg>"])


def _svg_bars(
    timeline: Timeline,
    look: SpanShades,
    lanes: Sequence[str],
    origin: tuple[int, int, float],
    heights: tuple[int, int, int],
    time_text: Callable[[float], str],
) -> Iterator[str]:
    """Draw every compute, and the strips below it. `origin`: left, top, pixels a second; `heights`: of a row, a bar, a strip."""
    (left, top, scale), (height_of_row, bar, strip) = origin, heights
    drawn: dict[tuple[int, str], float] = {}  # right end in pixels
    computes = [span for span in timeline.spans if span.lane == COMPUTE_LANE and span.duration_s > 0]
    # All labels have the same form: without the stage where it does not fit into one of them.
    shows_stage = look.shows_stage and all(_label_fits(_span_label(span, True), span.duration_s * scale) for span in computes)
    for span in sorted(timeline.spans, key=lambda span: span.start_s):
        wide = span.duration_s * scale
        x, y = left + (span.start_s - timeline.start_s) * scale, top + span.rank * height_of_row
        if span.duration_s <= 0 or x + wide < drawn.get((span.rank, span.lane), 0.0) + 1 / 3:
            continue
        drawn[span.rank, span.lane] = x + wide
        hint = f"<title>{escape(span.name)} on rank {span.rank}, {escape(time_text(span.duration_s))}</title>"
        if span.lane == COMPUTE_LANE:
            fill, ink = span_colours(span.kind, look.shade_of(span))
            shown = max(wide - min(0.8, 0.1 * wide), 0.33)
            # Slightly narrower than its duration, so that neighbours of one colour stay distinct.
            yield f'<rect x="{x:.2f}" y="{y}" width="{shown:.2f}" height="{bar}" rx="1.5" fill="{fill}">{hint}</rect>'
            label = _span_label(span, shows_stage)
            if _label_fits(label, wide):
                middle = f'x="{x + wide / 2:.1f}" y="{y + bar / 2 + 4:.0f}"'
                yield f'<text {middle} class="label" style="fill:{ink}" text-anchor="middle">{escape(label)}</text>'
        elif span.lane in lanes:
            below = y + bar + 1 + strip * lanes.index(span.lane)
            yield f'<rect x="{x:.2f}" y="{below}" width="{wide:.2f}" height="{strip - 1}" fill="{STRIPS[span.lane]}">{hint}</rect>'


_STYLE = """<style>
.shardwise-gantt text{font-family:system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;font-size:12px;fill:#3b3b40}
.shardwise-gantt text.title{font-size:14px;font-weight:600}.shardwise-gantt text.axis{font-size:11px;fill:#6b6b72}
.shardwise-gantt text.label{font-size:10px}.shardwise-gantt .idle{fill:#f1f1f4}.shardwise-gantt .grid{stroke:#dcdce2}
</style>"""


def _default_headline(timeline: Timeline, time_text: Callable[[float], str]) -> str:
    ranks = "1 rank" if timeline.num_ranks == 1 else f"{timeline.num_ranks} ranks"
    return f"{timeline.name}: {time_text(timeline.total_s)}, {ranks}, idle {format_percent(timeline.bubble)} of the time"


def _computes_by_rank(timeline: Timeline) -> list[list[Span]]:
    """Return [rank] -> its computes in order of time."""
    rows: list[list[Span]] = [[] for _ in range(timeline.num_ranks)]
    for span in sorted((s for s in timeline.spans if s.lane == COMPUTE_LANE), key=lambda s: s.start_s):
        rows[span.rank].append(span)
    return rows


def _span_label(span: Span, shows_stage: bool) -> str:
    match = ACTION.fullmatch(span.name)
    if not match:
        return span.name
    return f"{match[1]}.{match[3]}" if shows_stage else match[3]


def _label_fits(label: str, wide: float) -> bool:
    return wide > 5.6 * len(label) + 0.8


def _num_columns(timeline: Timeline, width: int) -> int:
    """Number of columns of the time axis: if all computes are multiples of the shortest, such that equal ones have equal widths."""
    computes = [s for s in timeline.spans if s.lane == COMPUTE_LANE and s.duration_s > 0]
    tick_s = min((s.duration_s for s in computes), default=0.0)
    if not tick_s:
        return width
    num_ticks = timeline.total_s / tick_s
    edges = ((s.start_s - timeline.start_s) / tick_s for s in computes)
    is_even = all(abs(edge - round(edge)) < 1e-6 for edge in edges) and abs(num_ticks - round(num_ticks)) < 1e-6
    return round(num_ticks) * (width // round(num_ticks)) if is_even and num_ticks <= width else width


def _grid_cells(timeline: Timeline, computes: list[Span], look: SpanShades, columns: int) -> Iterator[_GridCell]:
    scale, at = columns / (timeline.total_s or 1.0), 0
    for span in computes:
        start = max(at, round((span.start_s - timeline.start_s) * scale))
        end = min(columns, max(round((span.end_s - timeline.start_s) * scale), round((span.start_s - timeline.start_s) * scale) + 1))
        if end <= start:  # of several in one column the first is drawn
            continue
        at = end
        match, shade = ACTION.fullmatch(span.name), look.shade_of(span)
        name = f"{match[1] if look.shows_stage else ''}{match[2]}{match[3]}" if match else span.name
        room = end - start
        if len(name) > room:
            name = (match[2] if match else span.name)[:room]
        yield _GridCell(start, end, span.kind, shade, name + ("-" if shade and look.num_replicas > 1 else "=") * (room - len(name)))


def _time_ticks(total_s: float) -> list[float]:
    """Return five to ten round times from 0 to the total."""
    if total_s <= 0:
        return [0.0]
    step = 10.0 ** _floor_log10(total_s / 5)
    step *= next((n for n in (5, 2) if step * n <= total_s / 5), 1)
    return [i * step for i in range(int(total_s / step + 1e-9) + 1)]


def _format_round_time(seconds: float) -> str:
    """Format a round time without trailing zeros: 50 ms, not 50.0 ms."""
    return re.sub(r"\.(\d*?)0+(?=\s)", lambda match: f".{match[1]}" if match[1] else "", format_seconds(seconds))


def _floor_log10(number: float) -> int:
    return int(f"{number:e}".partition("e")[2])


def _svg_legend(timeline: Timeline, lanes: Sequence[str], look: SpanShades, x: float, y: float) -> str:
    kinds = dict.fromkeys(s.kind for s in timeline.spans if s.lane == COMPUTE_LANE)
    entries = [(WORDS.get(kind, kind), span_colours(kind, 0)[0]) for kind in kinds]
    entries += [(STRIP_WORDS[lane], STRIPS[lane]) for lane in lanes]
    if look.meaning:
        entries.append((look.meaning, span_colours("F", 1)[0]))
    parts = []
    for words, fill in entries:
        parts.append(f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="10" height="10" rx="1.5" fill="{fill}"/>')
        parts.append(f'<text x="{x + 15:.0f}" y="{y:.0f}">{escape(words)}</text>')
        x += 15 + 6.6 * len(words) + 18
    return "\n".join(parts)


# kind -> (fill, ink) in both shades
COLOURS_BY_KIND = {
    "F": (("#2f6db3", "#ffffff"), ("#9dc3ea", "#0d2b4b")),
    "B": (("#e0701a", "#2a1000"), ("#f8c08c", "#4a2000")),
    "I": (("#e0701a", "#2a1000"), ("#f8c08c", "#4a2000")),
    "W": (("#3d9a78", "#04281b"), ("#a9dcc6", "#0b3d2a")),
    "R": (("#a3699c", "#ffffff"), ("#dcbad7", "#41203d")),
}
OTHER = (("#9d9da1", "#1b1b1d"), ("#c9c9cc", "#1b1b1d"))
# Activities concurrent with the compute, by lane.
STRIPS = {"send": "#6b6b72", "collective": "#8a6bb8", "offload": "#9c6b3f", "load": "#c9a26b", "tensor": "#b86b8a", "step": "#5b8a8a"}
WORDS = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights", "R": "recompute"}
STRIP_WORDS = {
    "send": "sending", "collective": "gathering, reducing", "offload": "to the host", "load": "from the host",
    "tensor": "collectives inside layers",
    "step": "gradients, optimizer, the rest",
}  # fmt: skip
ACTION = re.compile(r"(\d+)([FBIWR])(\d+)")


@dataclass(frozen=True, slots=True)
class SpanShades:
    """Lighter shades of computes, and their meaning.

    `replica`: microbatch -> index of the replica; `order`: (rank, stage) -> index among the stages of its rank.
    """

    replica: dict[int, int]
    order: dict[tuple[int, int], int]
    num_replicas: int

    @property
    def meaning(self) -> str:
        """Text of the legend; empty where nothing is lighter."""
        if self.num_replicas > 1:
            return "lighter: replica 2"
        return "lighter: every second stage of a rank" if any(self.order.values()) else ""

    @property
    def shows_stage(self) -> bool:
        """Return whether labels need the stage: ranks have more stages than one per replica."""
        stages = len(self.order)
        ranks = len({rank for rank, _ in self.order})
        return stages > ranks * max(1, self.num_replicas)

    def shade_of(self, span: Span) -> int:
        """Return 0, or 1 for the lighter shade."""
        match = ACTION.fullmatch(span.name)
        if not match:
            return 0
        if self.num_replicas > 1:
            return self.replica.get(int(match[3]), 0) % 2
        return self.order.get((span.rank, int(match[1])), 0) % 2


def span_shades(timeline: Timeline) -> SpanShades:
    """Derive shades; microbatches whose stages are on the same ranks belong to one replica."""
    computes = [(s.rank, int(f[1]), int(f[3])) for s in timeline.spans if s.lane == COMPUTE_LANE and (f := ACTION.fullmatch(s.name))]
    rank_of: dict[int, dict[int, int]] = {}  # microbatch -> stage -> rank
    of_rank: dict[int, set[int]] = {}
    for rank, stage, microbatch in computes:
        rank_of.setdefault(microbatch, {})[stage] = rank
        of_rank.setdefault(rank, set()).add(stage)
    order = {(rank, stage): i for rank, stages in of_rank.items() for i, stage in enumerate(sorted(stages))}
    numbers: dict[tuple[tuple[int, int], ...], int] = {}
    replica = {m: numbers.setdefault(tuple(sorted(rank_of[m].items())), len(numbers)) for m in sorted(rank_of)}
    return SpanShades(replica, order, len(numbers))


def span_colours(kind: str, shade: int) -> tuple[str, str]:
    """Return (fill, ink) of a kind of span."""
    return COLOURS_BY_KIND.get(kind, OTHER)[shade]
