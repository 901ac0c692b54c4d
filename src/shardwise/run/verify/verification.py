"""Results of a verification: worst errors, the share of the model that was sharded, and warnings; for one layout or several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from math import log10

from shardwise.plan.ir.grid import GRID_AXES as GRID
from shardwise.plan.ir.notebook_html import draw_bars
from shardwise.run.verify.sharded_shares import SharesByAxis

_WORDS = {"input_gradients": "input gradients"}
_SMALLEST_SHOWN = 1e-18  # the smallest error that a bar shows


@dataclass(frozen=True, repr=False)
class Verification:
    """The result: worst relative error of each kind of tensor, and the first tensor above the tolerance. In 16 bits (`in_noise`) errors and
    tolerance are multiples of the serial runs' rounding noise.

    `divided`: by axis the share of parameters and of FLOPs that it shards, see `run/verify/sharded_shares`. `warnings`: what equality does
    not prove, a sentence each. `memory`: peak bytes of the fullest device, by category and in `total`; empty if memory is not counted.
    `whole_batch`: if microbatches change what is trained, the distance of loss and gradients of the first step from the whole batch's, each
    as the norm of the difference over the norm of the whole batch's; empty if the serial run computed the whole batch at once.

    For several layouts, `layouts` has the result of each, in the given order, and `worst` is the maximum over them.
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
    divided: SharesByAxis = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    layouts: tuple[Verification, ...] = ()
    whole_batch: dict[str, float] = field(default_factory=dict)
    in_noise: bool = False

    @property
    def unit(self) -> str:
        """Unit of `worst`."""
        return "difference in multiples of serial rounding noise" if self.in_noise else "relative error"

    @classmethod
    def combine(cls, results: Sequence[Verification]) -> Verification:
        """Combine the results of several layouts of one model."""
        worst: dict[str, float] = {}
        for result in results:
            for kind, error in result.worst.items():
                worst[kind] = max(worst.get(kind, 0.0), error)
        first = next((f"{result.layout}: {result.first_difference}" for result in results if not result.ok), None)
        replicated = tuple(dict.fromkeys(site for result in results for site in result.replicated_operators))
        warning_texts = tuple(dict.fromkeys(text for result in results for text in result.warnings))
        reference = results[0]
        return cls(
            first is None,
            worst,
            first,
            replicated,
            reference.tolerance,
            {},
            "",
            reference.steps,
            reference.dtype,
            warnings=warning_texts,
            layouts=tuple(results),
            in_noise=reference.in_noise,
        )

    def __repr__(self) -> str:
        layouts = f"{len(self.layouts)} layouts" if self.layouts else self.layout
        worst = max(self.worst.values(), default=0.0)
        outcome = "equal" if self.ok else f"differs first in {self.first_difference}"
        return f"Verification({layouts}: {outcome}, worst {self.unit} {worst:.1e}, tolerance {self.tolerance:.0e})"

    def __str__(self) -> str:
        if self.layouts:
            return _align_columns(*summary_table(self.layouts), summary_notes(self.layouts))
        errors = ", ".join(f"{_WORDS.get(name, name)} {error:.1e}" for name, error in self.worst.items())
        lines = [f"{'equal' if self.ok else f'differs first in {self.first_difference}'} ({self._describe_errors(errors)})"]
        if self.layout:
            lines[0] = f"{self.layout}: {lines[0]}"
        lines += [f"  {axis} divides {words}" for axis, words in self.shares()]
        lines += [f"  warning: {text}" for text in self.warnings]
        return "\n".join(lines)

    def _describe_errors(self, errors: str) -> str:
        if self.in_noise:
            return f"{errors} times the rounding noise; tolerance {self.tolerance:g}"
        return f"{errors}; tolerance {self.tolerance:.0e}"

    def shares(self) -> list[tuple[str, str]]:
        """Return (axis, description of the shares that it shards)."""
        return [
            (axis, f"{100 * share['parameters']:.0f} % of the parameters, {100 * share['flops']:.0f} % of the FLOPs")
            for axis, share in self.divided.items()
        ]

    def record(self) -> dict[str, object]:
        """Return the JSON object of `shardwise verify`."""
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
        return _error_bars_html(self) + _table_html(self.layouts or (self,))


def summary_table(results: Sequence[Verification]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return (columns, rows): one row per layout, with its errors and the shares that its axes shard (parameters / FLOPs)."""
    kinds = list(dict.fromkeys(kind for result in results for kind in result.worst))
    axes = [axis for axis in dict.fromkeys(axis for result in results for axis in result.divided) if axis not in GRID]
    columns = ("layout", "", *(_WORDS.get(kind, kind) for kind in kinds), *(f"by {axis}" for axis in axes))
    rows = []
    for result in results:
        errors = (f"{result.worst[kind]:.1e}" if kind in result.worst else "" for kind in kinds)
        of_axis = (result.divided.get(axis) for axis in axes)
        shares = (f"{100 * s['parameters']:.0f} / {100 * s['flops']:.0f} %" if s else "" for s in of_axis)
        words = [word for word in result.layout.split() if word not in ("data=1", "tensor=1", "pipeline=1")]
        rows.append((" ".join(words) or "one rank", "equal" if result.ok else "differs", *errors, *shares))
    return columns, rows


def summary_notes(results: Sequence[Verification]) -> list[str]:
    """Return the lines below the table: first differences and warnings, each once."""
    lines = [f"{result.layout} differs first in {result.first_difference}" for result in results if not result.ok]
    if any(result.divided for result in results):
        lines.insert(0, "by an axis: the share of parameters / FLOPs that it divides")
    return [*lines, *dict.fromkeys(f"warning: {text}" for result in results for text in result.warnings)]


def _align_columns(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], footer: Sequence[str]) -> str:
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (columns, *rows)]
    return "\n".join([*lines, *footer])


def _error_bars_html(result: Verification) -> str:
    """Draw the worst error of each kind on a logarithmic scale, with the tolerance as a mark."""

    def share(error: float) -> float:
        return 0.0 if error <= _SMALLEST_SHOWN else 1 + log10(min(error, 1.0)) / -log10(_SMALLEST_SHOWN)

    if result.in_noise or not result.worst:
        return ""
    rows = [(_WORDS.get(kind, kind), share(error), f"{error:.1e}") for kind, error in result.worst.items()]
    return draw_bars(rows, mark=share(result.tolerance))


def _table_html(results: Sequence[Verification]) -> str:
    columns, rows = summary_table(results)
    cells = "".join(f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in row)}</tr>" for tag, row in _rows_with_tags(columns, rows))
    return f"<table>{cells}</table>" + "".join(f"<p>{escape(text)}</p>" for text in summary_notes(results))


def _rows_with_tags(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "th", columns
    for row in rows:
        yield "td", row
