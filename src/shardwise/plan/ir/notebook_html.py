"""HTML of plans and timelines in notebooks, and horizontal bar charts of fractions as SVG text.

The report registers its drawings (`shardwise.report.notebook` imports this module, not the other way round); unless it is loaded, it is
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from html import escape

_ROW, _NAME, _BAR, _WORDS = 20, 110, 260, 130
_COLOUR, _OVER = "#4c78a8", "#e45756"


@singledispatch
def render_html(value: object) -> str:
    """Render `value` as HTML: as its text, for a class that nothing is registered for."""
    return f"<pre>{escape(repr(value))}</pre>"


def draw_bars(rows: Sequence[tuple[str, float, str]], mark: float | None = None) -> str:
    """Draw a bar for each row, `share` of 1 wide; with `mark` a line there, and what exceeds it in another colour.

    >>> draw_bars([("compute", 0.5, "1 ms")]).count("<rect")
    1
    """
    height, width = _ROW * len(rows), _NAME + _BAR + _WORDS
    parts = []
    for number, (name, share, words) in enumerate(rows):
        y, long = number * _ROW, _BAR * min(max(share, 0.0), 1.0)
        colour = _OVER if mark is not None and share > mark else _COLOUR
        parts.append(f'<text x="0" y="{y + 14}">{escape(name)}</text>')
        parts.append(f'<rect x="{_NAME}" y="{y + 3}" width="{long:.1f}" height="{_ROW - 6}" fill="{colour}"></rect>')
        parts.append(f'<text x="{_NAME + _BAR + 6}" y="{y + 14}">{escape(words)}</text>')
    if mark is not None:
        x = _NAME + _BAR * mark
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" stroke="currentColor" stroke-dasharray="3 2"></line>')
    style = f'style="max-width: 100%; width: {width}px; font: 12px sans-serif; fill: currentColor" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {style}>{"".join(parts)}</svg>'
