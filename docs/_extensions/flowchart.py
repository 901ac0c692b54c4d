"""Draws a Mermaid flow chart as SVG while the site is built, so that a page needs no script from elsewhere.

Understands what DESIGN.md has: `a --> b & c`, a label `a["words"]`, a dotted arrow with words, `a -. "words" .-> b`. Nodes stand in
columns: the first has those without arrows, and each other node stands behind the farthest that it leads to.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

_ARROW = re.compile(r'^ *(?P<sources>.+?) (?:-->|-\. "(?P<words>[^"]*)" \.->) (?P<targets>.+)$')
_NODE = re.compile(r'(\w+)(?:\["([^"]*)"\])?')
_HEIGHT, _GAP_X, _GAP_Y, _LETTER = 38, 42, 26, 8.6
_TIP = (
    '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z"/></marker>'
)
_STYLE = (
    ".flowchart{max-width:100%;height:auto}.flowchart path{fill:none;stroke:#888}.flowchart marker path{fill:#888}"
    ".flowchart rect{fill:#eef3fa;stroke:#5b7fa6}.flowchart text{fill:#223}"
)


@dataclass(frozen=True)
class Arrow:
    """An arrow; `words` stand at a dotted one."""

    source: str
    target: str
    words: str | None


@dataclass(frozen=True)
class Box:
    """Where a node stands: its left side, the middle of its height, its width."""

    left: float
    middle: float
    width: float


def parse_flowchart(text: str) -> tuple[dict[str, str], list[Arrow]]:
    """Return labels by node and the arrows; a line that is neither a head nor an arrow is an error."""
    labels: dict[str, str] = {}
    arrows: list[Arrow] = []
    for line in text.strip().splitlines():
        if line.startswith("flowchart"):
            continue
        match = _ARROW.match(line)
        if match is None:
            raise ValueError(f"no arrow of a flow chart: {line!r}")
        ends: list[list[str]] = []
        for side in (match["sources"], match["targets"]):
            named = _NODE.findall(side)
            labels.update({name: label or labels.get(name, name.replace("_", "/")) for name, label in named})
            ends.append([name for name, _ in named])
        arrows += [Arrow(source, target, match["words"]) for source in ends[0] for target in ends[1]]
    return labels, arrows


def arrange_columns(labels: dict[str, str], arrows: list[Arrow]) -> list[list[str]]:
    """Return the nodes of each column; dotted arrows move nothing."""
    targets = {name: {a.target for a in arrows if a.source == name and a.words is None} for name in labels}
    column: dict[str, int] = {}
    while len(column) < len(labels):
        ready = [name for name in labels if name not in column and targets[name] <= set(column)]
        if not ready:
            raise ValueError(f"arrows go in a circle: {sorted(set(labels) - set(column))}")
        column.update({name: 1 + max((column[t] for t in targets[name]), default=-1) for name in ready})
    return [[name for name in labels if column[name] == i] for i in range(1 + max(column.values()))]


def draw_flowchart(text: str) -> str:
    """Return the SVG of a flow chart, first column to the left; a window that is narrower scales it."""
    labels, arrows = parse_flowchart(text)
    boxes: dict[str, Box] = {}
    columns = arrange_columns(labels, arrows)
    left, height = 2.0, max(map(len, columns)) * (_HEIGHT + _GAP_Y)
    for names in columns:
        width = max(_LETTER * len(labels[name]) for name in names) + 16
        boxes.update({name: Box(left, (j + 0.5) * height / len(names), width) for j, name in enumerate(names)})
        left += width + _GAP_X
    parts = [_draw_arrow(boxes[arrow.source], boxes[arrow.target], arrow.words) for arrow in arrows]
    parts += [_draw_node(labels[name], boxes[name]) for name in labels]
    left -= _GAP_X - 2
    return (
        f'<svg class="flowchart" role="img" viewBox="0 0 {left:g} {height}" width="{left:g}" font-family="sans-serif" font-size="17">'
        f"<style>{_STYLE}</style><defs>{_TIP}</defs>{''.join(parts)}</svg>"
    )


def _draw_arrow(source: Box, target: Box, words: str | None) -> str:
    start, end = source.left, target.left
    if start > end:
        end += target.width
    elif start < end:
        start += source.width
    bend = (end - start) / 2
    dash, title = (' stroke-dasharray="4 4"', f"<title>{html.escape(words)}</title>") if words else ("", "")
    return (
        f'<path d="M{start:g} {source.middle:g}C{start + bend:g} {source.middle:g} {end - bend:g} {target.middle:g} {end:g} '
        f'{target.middle:g}"{dash} marker-end="url(#tip)">{title}</path>'
    )


def _draw_node(label: str, box: Box) -> str:
    return (
        f'<rect x="{box.left:g}" y="{box.middle - _HEIGHT / 2:g}" width="{box.width:g}" height="{_HEIGHT}" rx="5"/>'
        f'<text x="{box.left + box.width / 2:g}" y="{box.middle + 6:g}" text-anchor="middle">{html.escape(label)}</text>'
    )


class FlowchartDirective(Directive):
    """A fence of the language `mermaid`."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the picture, in a box that scrolls by itself."""
        picture = draw_flowchart("\n".join(self.content))
        return [nodes.raw("", f'<div class="picture-wrapper">{picture}</div>', format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("mermaid", FlowchartDirective)
    return {"parallel_read_safe": True}
