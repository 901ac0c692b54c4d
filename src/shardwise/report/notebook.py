"""Notebook views of plans, timelines and answers: HTML with the tables and pictures of the page."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from shardwise.plan.ir.notebook_html import draw_bars, render_html
from shardwise.plan.ir.timeline import Timeline
from shardwise.plan.plan import Plan
from shardwise.report.gantt import gantt_svg
from shardwise.report.tables import TextTable, candidates_table, memory_table, parts_table, reasons_table, summary_table
from shardwise.units import format_seconds

_MOST_RANKS = 32
_WIDTH = "max-width: 100%; overflow-x: auto"


def html_table(table: TextTable) -> str:
    """Return a table as HTML, without empty columns."""
    filled = table.nonempty_columns
    head = "".join(f"<th>{escape(table.columns[i])}</th>" for i in filled) if any(table.columns) else ""
    rows = []
    for number, row in enumerate(table.rows):
        bold = "font-weight: bold; " if number in table.marked else ""
        cells = (f'<td style="{bold}text-align: {"right" if i in table.right else "left"}">{escape(row[i])}</td>' for i in filled)
        rows.append(f"<tr>{''.join(cells)}</tr>")
    title = f"<p><b>{escape(table.title)}</b></p>" if table.title else ""
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    return f'{title}<div style="{_WIDTH}"><table>{f"<thead><tr>{head}</tr></thead>" if head else ""}{"".join(rows)}</table></div>{note}'


def html_tables(tables: Iterable[TextTable]) -> str:
    """Return tables as HTML, without those that have no rows."""
    return "".join(html_table(table) for table in tables if table.rows)


@render_html.register
def _plan_html(value: Plan) -> str:
    shown = [summary_table(value), candidates_table(value), reasons_table(value)]
    picture = ""
    if value.prediction is not None:
        shown += [parts_table(value.prediction), memory_table(value.prediction.memory, value.protection_bytes)]
        step = value.prediction.step_time_s or 1.0
        picture = draw_bars([(name, s / step, format_seconds(s)) for name, s in value.prediction.parts if s >= 0.005 * step])
    return picture + html_tables(shown)


@render_html.register
def _timeline_html(value: Timeline) -> str:
    shown = value
    if value.num_ranks > _MOST_RANKS:
        spans = tuple(span for span in value.spans if span.rank < _MOST_RANKS)
        shown = Timeline(f"{value.name}, the first {_MOST_RANKS} of {value.num_ranks} ranks", _MOST_RANKS, spans)
    return f'<div style="{_WIDTH}">{gantt_svg(shown)}</div>'
