"""Table and records of each layer's cost under each choice of sharding it, with the choices of a plan marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from shardwise.cost.operators.layers import Layer, LayerSharding
from shardwise.report.tables import TextTable
from shardwise.units import format_bytes, format_flops, format_seconds

NOTE = (
    "Per rank; a layer's first row is replicated. saves: activations for backward that no earlier layer saves. sends: collectives of "
    "results and operands' gradients, next to equally sharded layers. reduces: gradients of weights. if replicated: added where its "
    "neighbours are replicated. plan: the axis along which the plan shards the layer so."
)


def layers_table(title: str, layers: Sequence[Layer], taken: Mapping[str, Mapping[str, str]]) -> TextTable:
    """Tabulate layers. `taken`: operator -> axis of the plan -> label that the axis shards."""
    rows: list[tuple[str, ...]] = []
    marked = []
    names = [layer.site.partition("/")[0] if layer.shardings[0].parameter_bytes else layer.site for layer in layers]
    for layer, name in zip(layers, names, strict=True):
        shape = f" {'x'.join(map(str, layer.shape))}" if names.count(name) > 1 else ""
        for way in layer.shardings:
            axes = _plan_axes(way, taken.get(layer.first, {}))
            marked += [len(rows)] if axes else []
            rows.append((f"  {way.kind}" if way.label else f"{name}{shape} x{layer.count}", *_format_cells(way), axes))
    columns = ("layer, its shardings", "FLOP", "saves", "weights", "sends", "reduces", "compute", "network", "if replicated", "plan")
    return TextTable(title, columns, tuple(rows), right=(1, 2, 3, 4, 5, 6, 7, 8), marked=tuple(marked), note=NOTE)


def layers_record(layers: Sequence[Layer], taken: Mapping[str, Mapping[str, str]]) -> list[dict[str, object]]:
    """Return the layers' JSON objects, in SI units."""
    return [
        {
            "site": layer.site, "count": layer.count, "operator": layer.operator, "shape": list(layer.shape),
            "ways": [asdict(way) | {"total_s": way.total_s, "plan": _plan_axes(way, taken.get(layer.first,
            {})) or None} for way in layer.shardings],
        }
        for layer in layers
    ]  # fmt: skip


def _plan_axes(way: LayerSharding, taken: Mapping[str, str]) -> str:
    """Return the axes of a plan that shard the layer this way; empty for the replicated layer."""
    return " ".join(axis for axis, label in taken.items() if label and label == way.label)


def _format_cells(way: LayerSharding) -> tuple[str, ...]:
    sizes = (way.kept_bytes, way.parameter_bytes, way.forward_bytes + way.backward_bytes, way.gradient_bytes)
    seconds = (way.compute_s, way.communication_s + way.gradient_s, way.moved_s)
    return (
        format_flops(way.flops) if way.flops else "",
        *(format_bytes(size) if size else "" for size in sizes),
        *(format_seconds(s) if s else "" for s in seconds),
    )
