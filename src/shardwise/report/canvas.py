"""Pictures of lines, rectangles and text, in pixels from the upper left corner, as SVG, or as PNG where matplotlib is installed.

The SVG is self-contained: no scripts, external fonts or files. All text is escaped. Not modelled: animation.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from shardwise.errors import UsageError

SUFFIXES = (".svg", ".png")
INK, PALE, GRID = "#3b3b40", "#6b6b72", "#dcdce2"


@dataclass(frozen=True, slots=True)
class Polyline:
    """Straight lines through `points`, with an arrow head at the last one where `has_arrow` is set."""

    points: tuple[tuple[float, float], ...]
    colour: str = GRID
    width: float = 1.0
    is_dashed: bool = False
    has_arrow: bool = False


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True, slots=True)
class TextLabel:
    """A line of text; `anchor`: start, middle or end at x; baseline at y."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    size: float = 12.0
    colour: str = INK
    is_bold: bool = False


Shape = Polyline | Rectangle | TextLabel


@dataclass(frozen=True, slots=True)
class Picture:
    """Shapes on white, drawn in order."""

    width: float
    height: float
    shapes: tuple[Shape, ...]
    title: str = ""

    def svg(self) -> str:
        """Return one `<svg>` element."""
        size = f'width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        style = "font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" style="{style}"><title>{escape(self.title)}</title>'
        back = f'<rect width="{self.width:g}" height="{self.height:g}" fill="#ffffff"/>'
        return "\n".join([head, back, *map(_svg_element, self.shapes), "</svg>"])

    def png(self, scale: float = 2.0) -> bytes:
        """Return a PNG with `scale` pixels per pixel of the picture.

        Raises:
            UsageError: matplotlib is not installed.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg  # here: slow to import
            from matplotlib.figure import Figure
        except ImportError:
            raise UsageError("a .png needs matplotlib: name the picture .svg, or pip install 'shardwise[pictures]'") from None
        figure = Figure(figsize=(self.width / 100, self.height / 100), dpi=100 * scale, facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, self.width)
        axes.set_ylim(self.height, 0)
        axes.axis("off")
        point = 72 / 100  # typographic points a pixel
        for order, shape in enumerate(self.shapes):
            if isinstance(shape, Polyline):
                xs, ys = zip(*shape.points, strict=True)
                dashes = (0, (5, 3)) if shape.is_dashed else "-"
                axes.plot(xs, ys, color=shape.colour, linewidth=shape.width * point, linestyle=dashes, zorder=order)
                if shape.has_arrow:
                    look = {"arrowstyle": "->", "color": shape.colour, "linewidth": shape.width * point, "shrinkA": 0, "shrinkB": 0}
                    axes.annotate("", shape.points[-1], shape.points[-2], arrowprops=look)
            elif isinstance(shape, Rectangle):
                across, down = [shape.x, shape.x + shape.width], (shape.y, shape.y + shape.height)
                axes.fill_between(across, *down, color=shape.colour, linewidth=0, zorder=order)
            else:
                align = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
                axes.text(shape.x, shape.y, shape.text.replace("$", r"\$"), size=shape.size * point, color=shape.colour, ha=align,
                          va="baseline", weight="bold" if shape.is_bold else "normal", zorder=order)  # fmt: skip
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=100 * scale)
        return out.getvalue()

    def write(self, target: Path) -> None:
        """Write to `target`, in the format of its suffix.

        Raises:
            UsageError: another suffix than .svg and .png, a file that cannot be written, no matplotlib for a .png.
        """
        check_suffix(target)
        data = self.png() if target.suffix == ".png" else (self.svg() + "\n").encode()
        try:
            target.write_bytes(data)
        except OSError as error:
            raise UsageError(f"cannot write {target}: {error.strerror}; choose a folder that can be written to") from None


def check_suffix(target: Path) -> None:
    """Raise UsageError for a picture that is neither .svg nor .png."""
    if target.suffix not in SUFFIXES:
        raise UsageError(f"-o {target}: a picture is written as {' or '.join(SUFFIXES)}; name the file so")


def _svg_element(shape: Shape) -> str:
    if isinstance(shape, Rectangle):
        return f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}" fill="{shape.colour}"/>'
    if isinstance(shape, TextLabel):
        weight = ' font-weight="600"' if shape.is_bold else ""
        place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}"'
        return f'<text {place} font-size="{shape.size:g}" fill="{shape.colour}"{weight}>{escape(shape.text)}</text>'
    points = [*shape.points, *(_arrow_head(shape.points) if shape.has_arrow else ())]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="5 3"' if shape.is_dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{shape.colour}" stroke-width="{shape.width:g}"{dashes}/>'


def _arrow_head(points: Sequence[tuple[float, float]], length: float = 6.0) -> list[tuple[float, float]]:
    """Return the points of an arrow's head: barb, tip, barb."""
    (ax, ay), (bx, by) = points[-2:]
    far = ((bx - ax) ** 2 + (by - ay) ** 2) ** 0.5 or 1.0
    ux, uy = (bx - ax) / far * length, (by - ay) / far * length
    return [(bx - ux - uy / 2, by - uy + ux / 2), (bx, by), (bx - ux + uy / 2, by - uy - ux / 2)]
