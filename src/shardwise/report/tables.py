"""Tables of a plan that the command line and the page both show, and its JSON object.

Rendering is elsewhere: `cli/output` draws tables with rich, `page` as HTML; both escape the cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from shardwise.errors import UsageError
from shardwise.plan.ir.patterns import shorten_sites
from shardwise.plan.layout import Layout
from shardwise.plan.microbatches import replica_sizes
from shardwise.plan.plan import MemoryBreakdown, Plan, Prediction
from shardwise.units import format_bytes, format_count, format_flops, format_percent, format_seconds

SMALL_BYTES, SMALL_PART = 16 << 20, 0.05  # below them a difference of memory is given in bytes: a ratio of little says nothing
MIN_SHARE = 1e-9  # shares of a step below this are rounding errors
PARTS = tuple(field.name for field in fields(MemoryBreakdown))


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of text cells. `right`: right-aligned columns (numbers); `marked`: rows that are emphasised."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()
    marked: tuple[int, ...] = ()
    note: str = ""

    @property
    def nonempty_columns(self) -> tuple[int, ...]:
        """Indices of the columns that are not empty."""
        return tuple(i for i in range(len(self.columns)) if any(row[i] for row in self.rows))

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise UsageError(f"table {self.title!r} has {len(self.columns)} columns, but a row of {len(row)} cells: {row}")


def summary_table(plan: Plan) -> TextTable:
    """Tabulate the chosen plan and its predicted cost."""
    layout = plan.layout
    parts = {n for size in dict.fromkeys(plan.microbatch_sizes) for n in replica_sizes(size, layout)}
    sizes = " or ".join(map(str, sorted(parts, reverse=True)))
    rows = [
        ("model", plan.model),
        ("machines", plan.cluster),
        ("layout", str(layout)),
        ("ranks", f"{layout.num_ranks}"),
        ("batch", f"{plan.batch_size} samples a step: {layout.data} x {layout.microbatches} microbatches of {sizes}"),
    ]
    if plan.prediction is not None:
        p = plan.prediction
        rows += [
            ("step time", f"{format_seconds(p.step_time_s)} (predicted)"),
            ("throughput", f"{format_count(plan.batch_size / p.step_time_s)} samples/s" if p.step_time_s > 0 else "unknown"),
            ("MFU", f"{format_percent(p.mfu)} of the machines' peak; {format_flops(p.model_flops)} a step"),
            ("memory", f"{format_bytes(p.memory.total)} on the fullest device"),
        ]
    if plan.stages:
        rows.append(("stages begin at", ", ".join(shorten_sites(plan.stages))))
    if plan.uncaptured:
        rows.append(("not captured", f"{plan.uncaptured}; only data parallelism and ZeRO apply"))
    if plan.replicated_operators:
        rows.append(("replicated", f"{len(plan.replicated_operators)} operators without a rule: {_first_names(plan.replicated_operators)}"))
    return TextTable("Plan", ("", ""), tuple(rows))


def reasons_table(plan: Plan) -> TextTable:
    """Tabulate the reason for each axis and choice."""
    return TextTable("Why", ("choice", "reason"), plan.reasons)


def parts_table(prediction: Prediction) -> TextTable:
    """Tabulate step time by cause, longest first."""
    parts = sorted(prediction.parts, key=lambda part: -part[1])
    rows = tuple(
        (name, format_seconds(time_s), _format_share(time_s, prediction.step_time_s))
        for name, time_s in parts
        if time_s > MIN_SHARE * prediction.step_time_s
    )
    return TextTable("Step time by cause", ("cause", "time", "share"), rows, right=(1, 2))


def memory_table(memory: MemoryBreakdown, protection: float) -> TextTable:
    """Tabulate memory on the fullest device by purpose. `protection`: bytes in its host's memory."""
    sizes = [(name, getattr(memory, name)) for name in PARTS]
    rows = [(name, format_bytes(size_bytes), _format_share(size_bytes, memory.total)) for name, size_bytes in sizes]
    rows.append(("total", format_bytes(memory.total), format_percent(1.0)))
    note = (
        f"and in its host's memory {format_bytes(protection)}, to lose no step where a rank is lost (run.protect); up to "
        f"{format_bytes(memory.async_save_bytes)} to save while training goes on (run.save); of several hosts "
        f"up to {format_bytes(memory.buddy_copy_bytes)} more, for what another host alone has"
    )
    return TextTable(
        "Memory on the fullest device", ("holds", "size", "share"), tuple(rows), right=(1, 2), marked=(len(rows) - 1,), note=note
    )


def candidates_table(plan: Plan, most: int = 8) -> TextTable:
    """Tabulate the candidates by predicted step time, then the refused ones with reasons; the chosen one is marked."""
    timed = [c for c in plan.candidates if c.prediction is not None and not c.note]
    timed.sort(key=lambda c: c.prediction.step_time_s if c.prediction else 0.0)
    refused = [c for c in plan.candidates if c.prediction is None or c.note]
    best = plan.prediction.step_time_s if plan.prediction else (timed[0].prediction.step_time_s if timed and timed[0].prediction else 0.0)
    refused.sort(key=lambda c: c.prediction.step_time_s if c.prediction else float("inf"))
    shown = [*timed, *refused][:most]
    rows = []
    for c in shown:
        p = c.prediction
        numbers = ("", "", "", "")
        if p is not None:
            numbers = (
                format_seconds(p.step_time_s),
                _format_ratio(p.step_time_s, best),
                format_percent(p.mfu),
                format_bytes(p.memory.total),
            )
        rows.append((layout_words(c.layout), *numbers, refusal_words(c.note)))
    marked = tuple(i for i, c in enumerate(shown) if c.layout == plan.layout)
    num_hidden = len(plan.candidates) - len(rows)
    note = f"{num_hidden} more were considered" if num_hidden > 0 else ""
    columns = ("layout", "step time", "against chosen", "MFU", "memory", "note")
    return TextTable("Candidates", columns, tuple(rows), right=(1, 2, 3, 4), marked=marked, note=note)


def layout_words(layout: Layout) -> str:
    """Format a layout without the axes that it does not use.

    >>> layout_words(Layout(data=8, zero=1)), layout_words(Layout())
    ('data=8 zero=1', 'one device')
    """
    words = [word for word in str(layout).split() if word not in ("data=1", "tensor=1", "pipeline=1")]
    return " ".join(words) or "one device"


def split_common_words(layouts: Sequence[Layout]) -> tuple[str, list[str]]:
    """Return (words that all layouts have, each layout without these).

    >>> split_common_words([Layout(data=8, precision="bfloat16"), Layout(data=4, tensor=2, precision="bfloat16")])
    ('precision=bfloat16', ['data=8', 'data=4 tensor=2'])
    """
    words = [layout_words(layout).split() for layout in layouts]
    common = [word for word in words[0] if all(word in other_words for other_words in words)] if len(words) > 1 else []
    rest = [" ".join(word for word in own_words if word not in common) for own_words in words]
    fallbacks = ["one device" if layout.num_ranks == 1 else "only these" for layout in layouts]
    return " ".join(common), [text or fallback for text, fallback in zip(rest, fallbacks, strict=True)]


def refusal_words(note: str) -> str:
    """Return the reason why a candidate was refused, without its layout and the remedy.

    >>> refusal_words("data=8 zero=1: the fullest rank needs 55.00 GiB (parameters 9.88), and has 39.58 GiB; use zero=1")
    'the fullest rank needs 55.00 GiB, and has 39.58 GiB'
    """
    head, colon, tail = note.partition(": ")
    reason = (tail if colon and "=" in head else note).partition(";")[0]
    before, bracket, after = reason.partition(" (")
    return before + after.partition(")")[2] if bracket else reason


def plan_tables(plan: Plan) -> tuple[TextTable, ...]:
    """Return all tables of a plan, without those that have no rows."""
    tables = [summary_table(plan), reasons_table(plan)]
    if plan.prediction is not None:
        tables += [parts_table(plan.prediction), memory_table(plan.prediction.memory, plan.protection_bytes)]
    tables.append(candidates_table(plan))
    return tuple(table for table in tables if table.rows)


def plan_record(plan: Plan) -> dict[str, object]:
    """Return the JSON object of `shardwise plan`, in SI units."""
    return {
        "layout": str(plan.layout),
        "model": plan.model,
        "cluster": plan.cluster,
        "batch_size": plan.batch_size,
        **prediction_record(plan.prediction),
        "planning_time_s": plan.planning_time_s,
        "bound_gap": plan.bound_gap,
        "reasons": [{"choice": choice, "reason": reason} for choice, reason in plan.reasons],
        "stages": list(plan.stages),
        "replicated_operators": list(plan.replicated_operators),
        "uncaptured": plan.uncaptured or None,
        "candidates": [{"layout": str(c.layout), **prediction_record(c.prediction), "note": c.note} for c in plan.candidates],
    }


def prediction_record(prediction: Prediction | None) -> dict[str, object]:
    """Return step time with its parts, MFU and memory as a record; null where nothing is predicted."""
    if prediction is None:
        return dict.fromkeys(("step_time_s", "mfu", "model_flops", "memory_bytes", "step_time_parts_s"))
    memory = {name: getattr(prediction.memory, name) for name in PARTS} | {"total": prediction.memory.total}
    return {
        "step_time_s": prediction.step_time_s,
        "mfu": prediction.mfu,
        "model_flops": prediction.model_flops,
        "memory_bytes": memory,
        "step_time_parts_s": dict(prediction.parts),
    }


def _format_share(part: float, total: float) -> str:
    return format_percent(part / total) if total > 0 else ""


def _format_ratio(step_time_s: float, best_s: float) -> str:
    return f"{step_time_s / best_s:.2f}x" if best_s > 0 else ""


def _first_names(names: tuple[str, ...], most: int = 6) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _format_difference(predicted: float, measured: float, total: float) -> str:
    """Format a difference of memory: in per cent of what is measured, or in bytes where that is little or a small part of the total.

    >>> _format_difference(1.1 * 2**30, 2**30, 2**30), _format_difference(2**20, 1024, 8192), _format_difference(0, 0, 2**30)
    ('+10.0%', '+1023 KiB', '')
    """
    if measured >= max(SMALL_BYTES, SMALL_PART * total):
        return f"{predicted / measured - 1:+.1%}"
    sign = "+" if predicted > measured else "-"
    return f"{sign}{format_bytes(abs(predicted - measured))}" if round(predicted) != round(measured) else ""


def measured_memory_table(measured: Mapping[str, float], predicted: MemoryBreakdown | None) -> TextTable:
    """Tabulate measured and predicted peak memory of the fullest device by part, the prediction without its margin."""
    rows = []
    for part, size in measured.items():
        expected = None if predicted is None else predicted.total - predicted.margin if part == "total" else getattr(predicted, part)
        shown = "" if expected is None else format_bytes(expected)
        off = "" if expected is None else _format_difference(expected, size, measured.get("total", size))
        rows.append((part, shown, format_bytes(size), off))
    note = "each the most of any rank and moment; predicted without the margin; small differences in bytes"
    return TextTable("Memory of the fullest device", ("", "predicted", "measured", "difference"), tuple(rows), right=(1, 2, 3), note=note)
