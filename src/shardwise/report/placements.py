"""Tables of operators' placements under a sharding, with repeated layers merged into one row, and of layers' costs under each sharding.

A row's pattern is an operator's site in the model with `*` for layer numbers. Listed are operators that read a parameter, multiply
matrices, or communicate; the others take the placements of their inputs without communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from shardwise.cost.operators.layers import Layer, LayerSharding
from shardwise.model.gradients import differentiable_values
from shardwise.model.graph import Graph, Operator
from shardwise.model.sharding.sharding import Sharding
from shardwise.model.work import MATMUL_KINDS, operator_work
from shardwise.plan.ir.patterns import pattern_of
from shardwise.plan.ir.placement import P, Placement, R, has_single_owner, is_fully_replicated, is_shard
from shardwise.report.tables import TextTable
from shardwise.units import format_bytes, format_flops, format_seconds

LAYERS_NOTE = (
    "Per rank; a layer's first row is replicated. saves: activations for backward that no earlier layer saves. sends: collectives of "
    "results and operands' gradients, next to equally sharded layers. reduces: gradients of weights. if replicated: added where its "
    "neighbours are replicated. plan: the axis along which the plan shards the layer so."
)


@dataclass(frozen=True, slots=True)
class PlacementRow:
    """`count` operators at `site` (a pattern): placements of weights and output, and collectives, each in words by axis."""

    site: str
    count: int
    weights: str
    output: str
    forward: str
    backward: str


def placement_rows(graph: Graph, sharding: Sharding) -> tuple[PlacementRow, ...]:
    """Return one entry per pattern and placement, in the order of the model."""
    names = {v.value: v.name for v in (*graph.parameters, *graph.buffers)}
    kinds = {name: done.kind for name, done in operator_work(graph).items()}
    moves: dict[str, list[tuple[str, str, str]]] = {}
    with_gradient = differentiable_values(graph)
    for move in sharding.redistributions:
        if sharding.sizes.get(move.axis, 1) > 1:
            moves.setdefault(move.op, []).append((move.axis, move.forward, move.backward if move.value in with_gradient else ""))
    counts: dict[tuple[str, ...], int] = {}
    for op in graph.operators:
        variables = [value for value in dict.fromkeys(op.inputs) if value in names]
        if not variables and kinds[op.name] not in MATMUL_KINDS and not any(f or b for _, f, b in moves.get(op.name, [])):
            continue
        ahead, back = _collective_words(moves.get(op.name, []))
        inside = _bias_reduction_words(op, kinds[op.name], sharding)
        weights = _weight_words(variables, graph, sharding)
        row = (pattern_of(op.site), weights, _output_words(op, sharding), ", ".join(filter(None, (ahead, inside))), back)
        counts[row] = counts.get(row, 0) + 1
    return tuple(PlacementRow(site, count, weights, out, ahead, back) for (site, weights, out, ahead, back), count in counts.items())


def placements_table(placed: tuple[PlacementRow, ...], sizes: Mapping[str, int]) -> TextTable:
    """Tabulate placements; without rows where nothing is sharded."""
    axes = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
    rows = tuple((p.site, f"{p.count}", p.weights, p.output, p.forward, p.backward) for p in placed)
    columns = ("operator", "count", "weights", "output", "communicates, forward", "backward")
    return TextTable(f"How operators are placed over {' and '.join(axes)}", columns, rows if axes else (), right=(1,))


def _weight_words(variables: list[str], graph: Graph, sharding: Sharding) -> str:
    """Describe the placement of the largest of an operator's variables; the others have the same."""
    if not variables:
        return ""
    value = max(variables, key=lambda v: graph.tensors[v].size)
    return _placement_words(sharding.placements.get(value, {}), sharding.sizes, replicated="whole")


def _bias_reduction_words(op: Operator, kind: str, sharding: Sharding) -> str:
    """Describe the all-reduce before the bias of a sharded product with a replicated result, which is not among the moves."""
    if kind not in ("linear", "convolution"):
        return ""
    replicated = [
        axis
        for axis, size in sharding.sizes.items()
        if size > 1 and sharding.labels[op.name].get(axis) and is_fully_replicated(sharding.placements[op.outputs[0]].get(axis, R))
    ]
    return ", ".join(f"all-reduce over {axis}, of its result" for axis in replicated)


def _output_words(op: Operator, sharding: Sharding) -> str:
    return _placement_words(sharding.placements.get(op.outputs[0], {}), sharding.sizes, replicated="whole")


def _placement_words(forms: Mapping[str, Placement], sizes: Mapping[str, int], replicated: str) -> str:
    words = []
    for axis, size in sizes.items():
        form = forms.get(axis, R)
        if size > 1 and is_shard(form):
            words.append(f"dim {form.dim} by {axis}")
        elif size > 1 and has_single_owner(form):
            words.append(f"rank {form.rank} of {axis}")
        elif size > 1 and form is P:
            words.append(f"partial sums over {axis}")
    return ", ".join(words) or replicated


def _collective_words(moves: list[tuple[str, str, str]]) -> tuple[str, str]:
    """Describe the collectives of forward and backward; moves of no bytes are left out."""
    silent = ("", "slice", "pad")
    ahead = dict.fromkeys(f"{f.replace('_', '-')} over {axis}" for axis, f, _ in moves if f not in silent)
    back = dict.fromkeys(f"{b.replace('_', '-')} over {axis}" for axis, _, b in moves if b not in silent)
    return ", ".join(ahead), ", ".join(back)


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
    return TextTable(title, columns, tuple(rows), right=(1, 2, 3, 4, 5, 6, 7, 8), marked=tuple(marked), note=LAYERS_NOTE)


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
