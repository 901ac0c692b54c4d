"""What a proof says: worst errors, how much of the model was divided at all, and what it does not prove; for one layout and for several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from math import log10

from weft.plan.bars import bars
from weft.plan.grid import AXES as GRID
from weft.run.proof.division import Division

_WORDS = {"input_gradients": "input gradients"}
_LEAST = 1e-18  # of an error, where a bar begins


@dataclass(frozen=True, repr=False)
class Verification:
    """The result: worst relative error by what was compared, and the first tensor above the tolerance. In 16 bits (`in_noise`) errors and
    tolerance are multiples of the rounding noise that serial runs have.

    `divided`: by axis the share of parameters and of FLOPs that it divides, see `run/proof/division`. `warnings`: what equality does not
    prove, a sentence each. `memory`: bytes that the fullest device held at most, by part and in `total`; empty where nothing counts them.
    `whole_batch`: where microbatches change what is trained, how far loss and gradients of the first step are from the whole batch's,
    each as the norm of the difference over that of the whole batch's; empty where the serial run had the whole batch at once.

    Of several layouts together: `layouts` has each, in the order in which they were given; `worst` is then the worst of any.
    """

    ok: bool
    worst: dict[str, float]
    first_difference: str | None
    replicated_operators: tuple[str, ...]
    tolerance: float
    memory: dict[str, float] = field(default_factory=dict)
    layout: str = ""
    steps: int = 0
    dtype: str = ""
    divided: Division = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    layouts: tuple[Verification, ...] = ()
    whole_batch: dict[str, float] = field(default_factory=dict)
    in_noise: bool = False

    @property
    def unit(self) -> str:
        """What `worst` is in."""
        return "difference in multiples of serial rounding noise" if self.in_noise else "relative error"

    @classmethod
    def together(cls, results: Sequence[Verification]) -> Verification:
        """Several layouts of one model as one answer."""
        worst: dict[str, float] = {}
        for result in results:
            for kind, error in result.worst.items():
                worst[kind] = max(worst.get(kind, 0.0), error)
        first = next((f"{result.layout}: {result.first_difference}" for result in results if not result.ok), None)
        replicated = tuple(dict.fromkeys(site for result in results for site in result.replicated_operators))
        said = tuple(dict.fromkeys(text for result in results for text in result.warnings))
        one = results[0]
        return cls(
            first is None, worst, first, replicated, one.tolerance, {}, "", one.steps, one.dtype, warnings=said, layouts=tuple(results),
            in_noise=one.in_noise,
        )

    def __repr__(self) -> str:
        layouts = f"{len(self.layouts)} layouts" if self.layouts else self.layout
        worst = max(self.worst.values(), default=0.0)
        said = "equal" if self.ok else f"differs first in {self.first_difference}"
        return f"Verification({layouts}: {said}, worst {self.unit} {worst:.1e}, tolerance {self.tolerance:.0e})"

    def __str__(self) -> str:
        if self.layouts:
            return _aligned(*table(self.layouts), notes(self.layouts))
        errors = ", ".join(f"{_WORDS.get(name, name)} {error:.1e}" for name, error in self.worst.items())
        lines = [f"{'equal' if self.ok else f'differs first in {self.first_difference}'} ({self._in_words(errors)})"]
        if self.layout:
            lines[0] = f"{self.layout}: {lines[0]}"
        lines += [f"  {axis} divides {words}" for axis, words in self.shares()]
        lines += [f"  warning: {text}" for text in self.warnings]
        return "\n".join(lines)

    def _in_words(self, errors: str) -> str:
        if self.in_noise:
            return f"{errors} times the rounding noise; tolerance {self.tolerance:g}"
        return f"{errors}; tolerance {self.tolerance:.0e}"

    def shares(self) -> list[tuple[str, str]]:
        """By axis, in words: what it divides."""
        return [
            (axis, f"{100 * share['parameters']:.0f} % of the parameters, {100 * share['flops']:.0f} % of the FLOPs")
            for axis, share in self.divided.items()
        ]

    def record(self) -> dict[str, object]:
        """The JSON object of `weft verify`."""
        return {
            "ok": self.ok,
            "worst": self.worst,
            "first_difference": self.first_difference,
            "replicated_operators": list(self.replicated_operators),
            "divided": self.divided,
            "warnings": list(self.warnings),
            "layout": self.layout,
            "tolerance": self.tolerance,
            "unit": self.unit,
            "steps": self.steps,
            "dtype": self.dtype,
            "memory_bytes": self.memory,
            "whole_batch": self.whole_batch,
            **({"layouts": [layout_result.record() for layout_result in self.layouts]} if self.layouts else {}),
        }

    def _repr_html_(self) -> str:
        return _picture(self) + _page(self.layouts or (self,))


def table(results: Sequence[Verification]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(columns, rows): a layout a row, with its errors and the shares that its axes divide (parameters / FLOPs)."""
    kinds = list(dict.fromkeys(kind for result in results for kind in result.worst))
    axes = [axis for axis in dict.fromkeys(axis for result in results for axis in result.divided) if axis not in GRID]
    columns = ("layout", "", *(_WORDS.get(kind, kind) for kind in kinds), *(f"by {axis}" for axis in axes))
    rows = []
    for result in results:
        errors = (f"{result.worst[kind]:.1e}" if kind in result.worst else "" for kind in kinds)
        of_axis = (result.divided.get(axis) for axis in axes)
        shares = (f"{100 * one['parameters']:.0f} / {100 * one['flops']:.0f} %" if one else "" for one in of_axis)
        words = [word for word in result.layout.split() if word not in ("data=1", "tensor=1", "pipeline=1")]
        rows.append((" ".join(words) or "one rank", "equal" if result.ok else "differs", *errors, *shares))
    return columns, rows


def notes(results: Sequence[Verification]) -> list[str]:
    """What stands below the table: first differences and warnings, each once."""
    said = [f"{result.layout} differs first in {result.first_difference}" for result in results if not result.ok]
    if any(result.divided for result in results):
        said.insert(0, "by an axis: the share of parameters / FLOPs that it divides")
    return [*said, *dict.fromkeys(f"warning: {text}" for result in results for text in result.warnings)]


def _aligned(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], below: Sequence[str]) -> str:
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (columns, *rows)]
    return "\n".join([*lines, *below])


def _picture(result: Verification) -> str:
    """The worst error of each kind on a scale of logarithms, beside the tolerance."""

    def share(error: float) -> float:
        return 0.0 if error <= _LEAST else 1 + log10(min(error, 1.0)) / -log10(_LEAST)

    if result.in_noise or not result.worst:
        return ""
    rows = [(_WORDS.get(kind, kind), share(error), f"{error:.1e}") for kind, error in result.worst.items()]
    return bars(rows, mark=share(result.tolerance))


def _page(results: Sequence[Verification]) -> str:
    columns, rows = table(results)
    cells = "".join(f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in row)}</tr>" for tag, row in _tagged(columns, rows))
    return f"<table>{cells}</table>" + "".join(f"<p>{escape(text)}</p>" for text in notes(results))


def _tagged(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "th", columns
    for row in rows:
        yield "td", row
