"""Priced layouts side by side, as tables and JSON records of time, memory, money and energy."""

from __future__ import annotations

from collections.abc import Sequence

from weft.cli.setting import Variant
from weft.report.economy import Bill, bill, format_kwh, format_usd, unit_of
from weft.report.tables import PARTS, Table, prediction_record, told_apart
from weft.units import format_bytes, format_count, format_percent, format_seconds

NOTHING = ""


def throughput(variant: Variant) -> float:
    """Tokens a second, or samples a second for models that read no text; 0 without a prediction."""
    if variant.prediction is None or variant.prediction.step_time_s <= 0:
        return 0.0
    samples = variant.setting.batch_size / variant.prediction.step_time_s
    return samples * (unit_of(variant.setting.graph).tokens_per_sample or 1)


def bill_of(variant: Variant) -> Bill | None:
    """Return the cost of a billion tokens or of an epoch."""
    if variant.prediction is None:
        return None
    s = variant.setting
    return bill(s.cluster, variant.layout, variant.prediction, s.batch_size, unit_of(s.graph).samples)


def variants_table(title: str, first: str, rows: Sequence[Variant], base: Variant, with_layout: bool = True) -> Table:
    """Tabulate one row per variant, `base` marked; "speed" is throughput against `base`, so that other batches and sequences compare."""
    unit = unit_of(base.setting.graph)
    per = unit.name if unit.tokens_per_sample else "epoch"
    columns = (first, "layout", "step time", "speed", "MFU", "memory", f"$ per {per}", f"kWh per {per}", "note")
    cells = []
    common, layouts = told_apart([v.layout for v in rows])
    for v, layout in zip(rows, layouts, strict=True):
        p, cost = v.prediction, bill_of(v)
        numbers = (
            ("", "", "", "", "", "")
            if p is None
            else (
                format_seconds(p.step_time_s),
                f"{throughput(v) / throughput(base):.2f}x" if throughput(base) else "",
                format_percent(p.mfu),
                format_bytes(p.memory.total),
                format_usd(cost.usd if cost else None),
                format_kwh(cost.kwh if cost else None),
            )
        )
        cells.append((v.name, layout if with_layout else NOTHING, *numbers, v.note))
    marked = tuple(i for i, v in enumerate(rows) if v is base)
    notes = [f"All have {common}."] if common and with_layout else []
    notes += [] if unit.tokens_per_sample else [f"An epoch is {unit.samples:,.0f} samples."]
    note = " ".join(notes)
    return Table(title, columns, tuple(cells), right=(2, 3, 4, 5, 6, 7), marked=marked, note=note)


def side_by_side(title: str, left: Variant, right: Variant) -> Table:
    """Tabulate every figure of two variants, and the second relative to the first."""
    a, b = left.prediction, right.prediction
    rows: list[tuple[str, str, str, str]] = [
        ("model", left.setting.model, right.setting.model, ""),
        ("machines", left.setting.cluster.name, right.setting.cluster.name, ""),
        ("batch", str(left.setting.batch_size), str(right.setting.batch_size), ""),
        ("layout", str(left.layout), str(right.layout), ""),
    ]
    if a is not None and b is not None:
        words = "tokens/s" if unit_of(left.setting.graph).tokens_per_sample else "samples/s"
        rows += [
            ("step time", format_seconds(a.step_time_s), format_seconds(b.step_time_s), _against(a.step_time_s, b.step_time_s)),
            (words, format_count(throughput(left)), format_count(throughput(right)), _against(throughput(left), throughput(right))),
            ("MFU", format_percent(a.mfu), format_percent(b.mfu), _against(a.mfu, b.mfu)),
        ]
        before, after = dict(a.parts), dict(b.parts)
        for name in {**before, **after}:
            x, y = before.get(name, 0.0), after.get(name, 0.0)
            rows.append((f"time: {name}", format_seconds(x), format_seconds(y), _against(x, y)))
        for name in (*PARTS, "total"):
            x, y = getattr(a.memory, name), getattr(b.memory, name)
            rows.append((f"memory: {name}", format_bytes(x), format_bytes(y), _against(x, y)))
        costs = bill_of(left), bill_of(right)
        if costs[0] is not None and costs[1] is not None:
            unit = unit_of(left.setting.graph).name
            x, y = costs[0].usd or 0.0, costs[1].usd or 0.0
            rows.append((f"$ per {unit}", format_usd(costs[0].usd), format_usd(costs[1].usd), _against(x, y)))
            x, y = costs[0].kwh or 0.0, costs[1].kwh or 0.0
            rows.append((f"kWh per {unit}", format_kwh(costs[0].kwh), format_kwh(costs[1].kwh), _against(x, y)))
    rows = [row for row in rows if row[1] or row[2]]
    if left.layout.schedule == right.layout.schedule and left.layout.actions != right.layout.actions:
        rows.append(("schedule", left.layout.schedule, f"another {right.layout.schedule}", ""))
    if left.note or right.note:
        rows.append(("note", left.note, right.note, ""))
    return Table(title, ("", left.name, right.name, "second against first"), tuple(rows), right=(3,))


def record(variant: Variant, base: Variant | None = None) -> dict[str, object]:
    """Return a variant's JSON object, in SI units."""
    p, cost = variant.prediction, bill_of(variant)
    unit = unit_of(variant.setting.graph)
    return {
        "name": variant.name,
        "layout": str(variant.layout),
        "cluster": variant.setting.cluster.name,
        "batch_size": variant.setting.batch_size,
        "fits": variant.fits,
        "note": variant.note,
        **prediction_record(p),
        "throughput_per_s": throughput(variant) or None,
        "speed": throughput(variant) / throughput(base) if base is not None and p is not None and throughput(base) else None,
        "unit": unit.name,
        "usd_per_unit": cost.usd if cost else None,
        "kwh_per_unit": cost.kwh if cost else None,
    }


def _against(first: float, second: float) -> str:
    if not first or abs(second - first) < 5e-4 * abs(first):
        return "" if not first else "same"
    return f"{(second - first) / first:+.1%}"
