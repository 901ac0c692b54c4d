"""Self-contained HTML page about a run or a plan, `report.html`.

The page has no scripts and no network access, which its content-security policy enforces. All names are escaped. The files of a run
folder are read in `run_folder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from shardwise.plan.ir.timeline import Timeline
from shardwise.plan.plan import Plan
from shardwise.report.canvas import Picture
from shardwise.report.chart import PALETTE, BarRow, Series, compared_bars, line_chart, smooth_points, stacked_bar
from shardwise.report.gantt import gantt_svg
from shardwise.report.tables import PARTS, TextTable, candidates_table, parts_table, reasons_table, split_common_words, summary_table
from shardwise.units import format_bytes, format_count, format_percent, format_seconds

MAX_BARS = 10
SMOOTH_FROM = 40  # fewer steps than this are not smoothed


@dataclass(frozen=True)
class PageSubject:
    """Content of a page; everything but the title may be missing.

    `metrics`: rows of numbers by name, ascending `step` (`loss`, `eval_loss`, `tokens_per_s`, `step_time_s`, `mfu`).
    `levels`: named losses to compare with. `memory_limit_bytes`: of a device. `next_commands`: shell commands to continue with.
    """

    title: str
    lead: str = ""
    plan: Plan | None = None
    metrics: tuple[dict[str, float], ...] = ()
    levels: tuple[tuple[str, float], ...] = ()
    simulated: Timeline | None = None
    measured: Timeline | None = None
    machine: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    config: str = ""
    sample: str = ""
    next_commands: tuple[str, ...] = ()
    memory_limit_bytes: float = 0.0


def page_html(subject: PageSubject) -> str:
    """Return the page as text.

    >>> "<b>" in page_html(PageSubject("<b>bold</b>")), "&lt;b&gt;bold" in page_html(PageSubject("<b>bold</b>"))
    (False, True)
    """
    plan = subject.plan
    parts = [_summary_tiles(subject), _metric_curves(subject)]
    if plan is not None:
        summary = summary_table(plan)
        parts.append(_html_section(summary.title, _facts_table(summary.rows)))
        parts.append(_table_section(reasons_table(plan)))
        parts.append(_two_columns(_time_section(plan), _memory_section(plan, subject.memory_limit_bytes)))
    for name, timeline in (("Timeline, simulated", subject.simulated), ("Timeline, measured", subject.measured)):
        headline = (
            f"{timeline.name}: {plan.prediction.time_breakdown}" if timeline and plan and plan.prediction and timeline.is_step else ""
        )
        parts.append(_html_section(name, f'<div class="scroll picture">{gantt_svg(timeline, headline=headline)}</div>') if timeline else "")
    if plan is not None:
        parts += _candidate_sections(plan, subject.memory_limit_bytes)
        parts.append(_table_section(candidates_table(plan)))
    if subject.sample:
        parts.append(_html_section("Generated text", f"<pre>{escape(subject.sample)}</pre>"))
    parts.append(_two_columns(_html_section("Machine", _facts_table(subject.machine)), _html_section("Files", _facts_table(subject.files))))
    if subject.next_commands:
        parts.append(_html_section("Go on", f"<pre>{escape(chr(10).join(subject.next_commands))}</pre>"))
    if subject.config:
        parts.append(_html_section("Configuration", f"<pre>{escape(subject.config)}</pre>"))
    return _html_document(subject.title, subject.lead, parts)


def picture_page(picture: Picture, table: TextTable) -> str:
    """Return a page of one picture and its table, with the picture's title."""
    shown = f'<section><div class="scroll picture">{picture.svg()}</div></section>'
    return _html_document(picture.title, "", [shown, _table_section(table)])


def _html_document(title: str, lead: str, parts: Sequence[str]) -> str:
    css = resources.files("shardwise.report").joinpath("page.css").read_text()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{css}</style></head>\n<body><main>"
        f'<h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>\n' + "\n".join(filter(None, parts)) + "\n</main></body></html>\n"
    )


def _summary_tiles(subject: PageSubject) -> str:
    """Return tiles of the key figures: measured where there was a run, predicted otherwise."""
    plan, metrics = subject.plan, subject.metrics
    predicted = plan.prediction if plan is not None else None
    step_s, mfu, speed = (_median_metric(metrics, key) for key in ("step_time_s", "mfu", "tokens_per_s"))
    loss = [row["loss"] for row in metrics if "loss" in row]
    tiles = []
    if loss:
        tiles.append(("loss", f"{loss[-1]:.3f}", f"from {loss[0]:.3f}, {len(loss)} steps recorded"))
    if speed is not None:
        tiles.append(("tokens/s", format_count(speed), "median over the run"))
    if step_s is not None:
        note = f"predicted {format_seconds(predicted.step_time_s)}" if predicted else "median over the run"
        tiles.append(("step time", format_seconds(step_s), note))
    elif predicted:
        tiles.append(("step time", format_seconds(predicted.step_time_s), "predicted"))
    if mfu is not None:
        tiles.append(("MFU", format_percent(mfu), "of the machines' peak, measured"))
    elif predicted:
        tiles.append(("MFU", format_percent(predicted.mfu), "of the machines' peak, predicted"))
    if predicted:
        tiles.append(("memory", format_bytes(predicted.memory.total), "fullest device, predicted"))
    if plan is not None:
        tiles.append(("ranks", str(plan.layout.num_ranks), plan.layout.precision))
    cells = "".join(f"<div><span>{escape(a)}</span><b>{escape(b)}</b><span>{escape(c)}</span></div>" for a, b, c in tiles)
    return f'<div class="tiles">{cells}</div>' if tiles else ""


def _metric_curves(subject: PageSubject) -> str:
    loss = _metric_points(subject.metrics, "loss")
    lines = [Series("loss", loss)]
    if len(loss) >= SMOOTH_FROM:
        lines = [Series("loss, each step", loss, is_faint=True), Series("loss, smoothed", smooth_points(loss))]
    held_out = _metric_points(subject.metrics, "eval_loss")
    if held_out:
        lines.append(Series("loss, held out", held_out, PALETTE[5], has_dots=True))
    speed = Series("tokens/s", _metric_points(subject.metrics, "tokens_per_s"), PALETTE[2])
    return _two_columns(
        _html_section("Loss", line_chart(lines, "step", "loss", subject.levels)),
        _html_section("Throughput", line_chart([speed], "step", "tokens/s", from_zero=True)),
    )


def _time_section(plan: Plan) -> str:
    if plan.prediction is None:
        return ""
    table = parts_table(plan.prediction)
    parts = [(name, time_s, format_seconds(time_s)) for name, time_s in sorted(plan.prediction.parts, key=lambda part: -part[1])]
    return _html_section(table.title, stacked_bar(parts))


def _memory_section(plan: Plan, limit_bytes: float) -> str:
    if plan.prediction is None:
        return ""
    memory = plan.prediction.memory
    bar = stacked_bar([(name, getattr(memory, name), format_bytes(getattr(memory, name))) for name in PARTS], limit_bytes)
    note = f"{format_bytes(memory.total)} of {format_bytes(limit_bytes)}" if limit_bytes else f"{format_bytes(memory.total)} in all"
    return _html_section("Memory on the fullest device", bar and bar + f'<p class="note">{escape(note)}</p>')


def _candidate_sections(plan: Plan, limit_bytes: float) -> list[str]:
    """Return bars of the candidates' step time and memory by part; empty where there is only the plan itself."""
    priced = [c for c in plan.candidates if c.prediction is not None]
    priced.sort(key=lambda c: (bool(c.note), c.prediction.step_time_s if c.prediction else 0.0))
    shown = [(c, c.prediction) for c in priced[:MAX_BARS] if c.prediction is not None]
    if len(shown) < 2:
        return []
    times, sizes = [], []
    common, names = split_common_words([c.layout for c, _ in shown])
    for (c, p), name in zip(shown, names, strict=True):
        chosen, off = c.layout == plan.layout, bool(c.note)
        times.append(BarRow(name, p.parts, format_seconds(p.step_time_s), format_seconds, chosen, off))
        memory = tuple((part, getattr(p.memory, part)) for part in PARTS)
        sizes.append(BarRow(name, memory, format_bytes(p.memory.total), format_bytes, chosen, off))
    limit = (f"{format_bytes(limit_bytes)}, what a device has", limit_bytes) if limit_bytes else None
    notes = [f"All have {common}."] if common else []
    notes += ["Faint: refused, since it does not fit."] if any(c.note for c, _ in shown) else []
    faint = f'<p class="note">{escape(" ".join(notes))}</p>' if notes else ""
    return [
        _html_section("Candidates: where a step's time goes", compared_bars(times) + faint),
        _html_section("Candidates: memory on the fullest device", compared_bars(sizes, limit) + faint),
    ]


def _table_section(table: TextTable) -> str:
    if not table.rows:
        return ""
    head = "".join(f"<th{_number_class(i, table)}>{escape(table.columns[i])}</th>" for i in table.nonempty_columns)
    body = "".join(
        ('<tr class="mark">' if r in table.marked else "<tr>")
        + "".join(f"<td{_number_class(i, table)}>{escape(row[i])}</td>" for i in table.nonempty_columns)
        + "</tr>"
        for r, row in enumerate(table.rows)
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return _html_section(table.title, f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}')


def _number_class(column: int, table: TextTable) -> str:
    return ' class="number"' if column in table.right else ""


def _facts_table(rows: Sequence[tuple[str, ...]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="facts"><tbody>{body}</tbody></table>' if body else ""


def _html_section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _two_columns(left: str, right: str) -> str:
    return f'<div class="pair">{left}{right}</div>' if left or right else ""


def _metric_points(metrics: Sequence[dict[str, float]], key: str) -> tuple[tuple[float, float], ...]:
    return tuple((row["step"], row[key]) for row in metrics if key in row and "step" in row)


def _median_metric(metrics: Sequence[dict[str, float]], key: str) -> float | None:
    """Median of a metric, insensitive to the slow first step; None without values."""
    values = sorted(row[key] for row in metrics if key in row)
    return values[len(values) // 2] if values else None
