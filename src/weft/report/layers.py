"""What each layer costs under each way of cutting it, as a table. In: `Layer`s, what a plan cuts. Out: a `Table`, records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from weft.cost.operators.layers import Layer, Way
from weft.report.tables import Table
from weft.units import format_bytes, format_flops, format_seconds

NOTE = (
    "Of one rank; the first row of a layer is all of it on every rank. keeps: for backward, what none before it does. sends: results and "
    "operands' gradients, where its neighbours lie as it does. sums: gradients of weights. if whole: more where its neighbours are whole. "
    "plan: the axis by which the plan cuts so."
)


def layers_table(title: str, layers: Sequence[Layer], taken: Mapping[str, Mapping[str, str]]) -> Table:
    """`taken`: by operator, the axes of a plan with the label that each cuts."""
    rows: list[tuple[str, ...]] = []
    marked = []
    names = [one.site.partition("/")[0] if one.ways[0].parameter_bytes else one.site for one in layers]
    for one, name in zip(layers, names, strict=True):
        shape = f" {'x'.join(map(str, one.shape))}" if names.count(name) > 1 else ""
        for way in one.ways:
            axes = _axes(way, taken.get(one.first, {}))
            marked += [len(rows)] if axes else []
            rows.append((f"  {way.kind}" if way.label else f"{name}{shape} x{one.count}", *_cells(way), axes))
    columns = ("layer, its cuts", "FLOP", "keeps", "weights", "sends", "sums", "compute", "network", "if whole", "plan")
    return Table(title, columns, tuple(rows), right=(1, 2, 3, 4, 5, 6, 7, 8), marked=tuple(marked), note=NOTE)


def layers_record(layers: Sequence[Layer], taken: Mapping[str, Mapping[str, str]]) -> list[dict[str, object]]:
    """The same for programs, in SI units."""
    return [
        {
            "site": one.site, "count": one.count, "operator": one.operator, "shape": list(one.shape),
            "ways": [asdict(way) | {"total_s": way.total_s, "plan": _axes(way, taken.get(one.first, {})) or None} for way in one.ways],
        }
        for one in layers
    ]  # fmt: skip


def _axes(way: Way, taken: Mapping[str, str]) -> str:
    """The axes of a plan that cut so; of the whole layer none do."""
    return " ".join(axis for axis, label in taken.items() if label and label == way.label)


def _cells(way: Way) -> tuple[str, ...]:
    sizes = (way.kept_bytes, way.parameter_bytes, way.forward_bytes + way.backward_bytes, way.gradient_bytes)
    seconds = (way.compute_s, way.communication_s + way.gradient_s, way.moved_s)
    return (
        format_flops(way.flops) if way.flops else "",
        *(format_bytes(size) if size else "" for size in sizes),
        *(format_seconds(s) if s else "" for s in seconds),
    )
