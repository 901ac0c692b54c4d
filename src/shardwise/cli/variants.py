"""Priced layouts side by side, as tables and JSON records of time, memory, money and energy."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.cli.pricing_context import PricedVariant
from shardwise.report.economy import Bill, format_kwh, format_usd, training_bill, work_unit
from shardwise.report.tables import PARTS, TextTable, prediction_record, split_common_words
from shardwise.units import format_bytes, format_count, format_percent, format_seconds

EMPTY_CELL = ""


def throughput_per_s(variant: PricedVariant) -> float:
    """Tokens a second, or samples a second for models that read no text; 0 without a prediction."""
    if variant.prediction is None or variant.prediction.step_time_s <= 0:
        return 0.0
    samples = variant.context.batch_size / variant.prediction.step_time_s
    return samples * (work_unit(variant.context.graph).tokens_per_sample or 1)


def unit_bill(variant: PricedVariant) -> Bill | None:
    """Return the cost of a billion tokens or of an epoch."""
    if variant.prediction is None:
        return None
    s = variant.context
    return training_bill(s.cluster, variant.layout, variant.prediction, s.batch_size, work_unit(s.graph).samples)


def variants_table(title: str, first: str, rows: Sequence[PricedVariant], base: PricedVariant, with_layout: bool = True) -> TextTable:
    """Tabulate one row per variant, `base` marked; "speed" is throughput against `base`, so that other batches and sequences compare."""
    unit = work_unit(base.context.graph)
    per = unit.name if unit.tokens_per_sample else "epoch"
    columns = (first, "layout", "step time", "speed", "MFU", "memory", f"$ per {per}", f"kWh per {per}", "note")
    cells = []
    common, layouts = split_common_words([v.layout for v in rows])
    for v, layout in zip(rows, layouts, strict=True):
        p, cost = v.prediction, unit_bill(v)
        numbers = (
            ("", "", "", "", "", "")
            if p is None
            else (
                format_seconds(p.step_time_s),
                f"{throughput_per_s(v) / throughput_per_s(base):.2f}x" if throughput_per_s(base) else "",
                format_percent(p.mfu),
                format_bytes(p.memory.total),
                format_usd(cost.usd if cost else None),
                format_kwh(cost.kwh if cost else None),
            )
        )
        cells.append((v.name, layout if with_layout else EMPTY_CELL, *numbers, v.note))
    marked = tuple(i for i, v in enumerate(rows) if v is base)
    notes = [f"All have {common}."] if common and with_layout else []
    notes += [] if unit.tokens_per_sample else [f"An epoch is {unit.samples:,.0f} samples."]
    note = " ".join(notes)
    return TextTable(title, columns, tuple(cells), right=(2, 3, 4, 5, 6, 7), marked=marked, note=note)


def comparison_table(title: str, left: PricedVariant, right: PricedVariant) -> TextTable:
    """Tabulate every figure of two variants, and the second relative to the first."""
    a, b = left.prediction, right.prediction
    rows: list[tuple[str, str, str, str]] = [
        ("model", left.context.model, right.context.model, ""),
        ("machines", left.context.cluster.name, right.context.cluster.name, ""),
        ("batch", str(left.context.batch_size), str(right.context.batch_size), ""),
        ("layout", str(left.layout), str(right.layout), ""),
    ]
    if a is not None and b is not None:
        words = "tokens/s" if work_unit(left.context.graph).tokens_per_sample else "samples/s"
        rows += [
            ("step time", format_seconds(a.step_time_s), format_seconds(b.step_time_s), _relative_change(a.step_time_s, b.step_time_s)),
            (
                words,
                format_count(throughput_per_s(left)),
                format_count(throughput_per_s(right)),
                _relative_change(throughput_per_s(left), throughput_per_s(right)),
            ),
            ("MFU", format_percent(a.mfu), format_percent(b.mfu), _relative_change(a.mfu, b.mfu)),
        ]
        before, after = dict(a.parts), dict(b.parts)
        for name in {**before, **after}:
            x, y = before.get(name, 0.0), after.get(name, 0.0)
            rows.append((f"time: {name}", format_seconds(x), format_seconds(y), _relative_change(x, y)))
        for name in (*PARTS, "total"):
            x, y = getattr(a.memory, name), getattr(b.memory, name)
            rows.append((f"memory: {name}", format_bytes(x), format_bytes(y), _relative_change(x, y)))
        costs = unit_bill(left), unit_bill(right)
        if costs[0] is not None and costs[1] is not None:
            unit = work_unit(left.context.graph).name
            x, y = costs[0].usd or 0.0, costs[1].usd or 0.0
            rows.append((f"$ per {unit}", format_usd(costs[0].usd), format_usd(costs[1].usd), _relative_change(x, y)))
            x, y = costs[0].kwh or 0.0, costs[1].kwh or 0.0
            rows.append((f"kWh per {unit}", format_kwh(costs[0].kwh), format_kwh(costs[1].kwh), _relative_change(x, y)))
    rows = [row for row in rows if row[1] or row[2]]
    if left.layout.schedule == right.layout.schedule and left.layout.actions != right.layout.actions:
        rows.append(("schedule", left.layout.schedule, f"another {right.layout.schedule}", ""))
    if left.note or right.note:
        rows.append(("note", left.note, right.note, ""))
    return TextTable(title, ("", left.name, right.name, "second against first"), tuple(rows), right=(3,))


def variant_record(variant: PricedVariant, base: PricedVariant | None = None) -> dict[str, object]:
    """Return a variant's JSON object, in SI units."""
    p, cost = variant.prediction, unit_bill(variant)
    unit = work_unit(variant.context.graph)
    return {
        "name": variant.name,
        "layout": str(variant.layout),
        "cluster": variant.context.cluster.name,
        "batch_size": variant.context.batch_size,
        "fits": variant.fits,
        "note": variant.note,
        **prediction_record(p),
        "throughput_per_s": throughput_per_s(variant) or None,
        "speed": throughput_per_s(variant) / throughput_per_s(base)
        if base is not None and p is not None and throughput_per_s(base)
        else None,
        "unit": unit.name,
        "usd_per_unit": cost.usd if cost else None,
        "kwh_per_unit": cost.kwh if cost else None,
    }


def _relative_change(first: float, second: float) -> str:
    if not first or abs(second - first) < 5e-4 * abs(first):
        return "" if not first else "same"
    return f"{(second - first) / first:+.1%}"
