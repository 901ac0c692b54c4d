"""Nesting of tensor-parallel axes: which dimensions an axis may shard again, and which it must leave to others.

Axes are searched one after another. Only the last may shard another's shards again, and then they are always sharded together: gathered
along one axis while the other still shards them, they would be out of order. Not modeled: an axis that looks ahead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeGuard

from shardwise.errors import LayoutError
from shardwise.model.graph import Graph, Variable
from shardwise.ops.attention import heads_label
from shardwise.ops.rule import MULTI_AXIS
from shardwise.plan.ir.axis import Axis, axis_of
from shardwise.plan.ir.grid import NESTED
from shardwise.plan.ir.placement import Placement, Shard, Strided, is_fully_replicated, is_shard


class AxisDecisions(Protocol):
    """Decisions of earlier axes, as in `Sharding`."""

    graph: Graph
    labels: dict[str, dict[str, str]]
    placements: dict[str, dict[str, Placement]]
    input_placements: dict[str, list[dict[str, Placement | None]]]


def nested_dims(
    decided: AxisDecisions, sizes: Mapping[str, int], outer_axes: Collection[str], axis_record: Axis
) -> tuple[dict[str, dict[int, int]], frozenset[tuple[str, str]], frozenset[str]]:
    """Return what an axis may shard again of what those in `under` shard: [value][dim] -> number of shards; the (operator, label) that it
    may not; and the values that are sliced twice.

    A value must have the same equal shards of another axis in every placement; for samples it may also be computed in full, to be sliced
    twice. Outputs are sharded by samples only, and most kernels that communicate do so along one axis.
    """
    graph = decided.graph
    placements_of: dict[str, dict[str, set[Placement]]] = {
        value: {axis: {form} for axis, form in by_axis.items() if axis in outer_axes} for value, by_axis in decided.placements.items()
    }
    kernels = set()
    for op in graph.operators:
        rule = graph.rules[op.name]
        cut_labels = [label for axis, label in decided.labels[op.name].items() if axis in outer_axes]
        communicating = (
            {} if rule is None else {x: k for x, k in rule.kernels.items() if not (axis_record.shards_samples and k in MULTI_AXIS)}
        )
        kernels |= {(op.name, label) for label in cut_labels if label in communicating}
        for value, needs in zip(op.inputs, decided.input_placements[op.name], strict=True):
            for axis, form in needs.items():
                if axis in outer_axes and form is not None:
                    placements_of[value][axis].add(form)
    replicated = set() if axis_record.shards_samples else {graph.loss, *graph.outputs}
    dims: dict[str, dict[int, int]] = {}
    sliced = set()
    for value, by in placements_of.items():
        for axis, forms in by.items():
            if axis_record.shards_samples and len(forms) > 1 and is_fully_replicated(decided.placements[value][axis]):
                forms = forms - {decided.placements[value][axis]}
                sliced.add(value)
            (form, *other_forms) = forms
            if _has_equal_shards(form, graph.tensors[value].shape, axis, sizes[axis]) and not other_forms and value not in replicated:
                num_shards = dims.setdefault(value, {})
                num_shards[form.dim] = num_shards.get(form.dim, 1) * sizes[axis]
    return dims, frozenset(kernels), frozenset(sliced)


def _has_equal_shards(form: Placement, shape: Sequence[int], axis: str, n: int) -> TypeGuard[Shard | Strided]:
    """Return whether the n ranks have equal shards of a dimension, each of adjacent entries or of the positions of one run.

    Of a context axis only the latter: its plain shards may be of heads, which tensor ranks shard first.
    """
    if isinstance(form, Strided):
        return form.size * form.inner == shape[form.dim] and form.size % (2 * n if form.zigzag else n) == 0
    return is_shard(form) and not (form.lengths or form.runs or axis_of(axis).shards_sequences)


def heads_sharded_by_sequence(decided: AxisDecisions, sizes: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """Return [value][dim] -> number of shards of attention heads along a context axis, which tensor ranks may shard as well: attention
    alone reads and computes them so, from and to shards of positions (`shardwise.lower.local` slices the shards of tensor ranks)."""
    pieces: dict[str, dict[int, int]] = {}
    for op in decided.graph.operators if any(axis_of(axis).shards_sequences for axis in sizes) else ():
        read = [*zip(op.inputs, decided.input_placements[op.name], strict=True)] if heads_label(decided.graph.rules[op.name]) else []
        for axis in (axis for axis in sizes if axis_of(axis).shards_sequences and read):
            placements = [(value, row[axis]) for value, row in read] + [(value, decided.placements[value][axis]) for value in op.outputs]
            for value, form in placements:
                if is_shard(form) and not form.lengths:
                    pieces.setdefault(value, {})[form.dim] = sizes[axis]
    return pieces


def reserve_for_later_axes(
    later: Sequence[str], planned: Mapping[str, Mapping[str, int] | None], fixed: Mapping[str, int]
) -> tuple[dict[str, set[int]], dict[str, Placement]]:
    """Return what an axis leaves to `later` ones, of variables that a plan shards: dimensions that it must not shard, and placements that
    it must read, since the last axis shards them again. `fixed`: its own dimensions.

    >>> reserved, pinned = reserve_for_later_axes(["columns", "depth"], {"columns": {"w": 1}, "depth": {"w": 0}}, {"w": 0})
    >>> reserved, str(pinned["w"])
    ({'w': {1}}, 'S0')
    """
    reserved: dict[str, set[int]] = {}
    pinned: dict[str, Placement] = {}
    for axis in later:
        for value, dim in (planned.get(axis) or {}).items():
            if axis_of(axis).may_reshard and fixed.get(value) == dim:
                pinned[value] = Shard(dim)
            elif fixed.get(value) != dim:
                reserved.setdefault(value, set()).add(dim)
    return reserved, pinned


def already_sharded_error(variable: Variable, dim: int, axis: str, ranks: int) -> LayoutError:
    """Return the error for a dimension that a plan shards over an axis where another one shards it already."""
    return LayoutError(
        f"the plan cuts dimension {dim} of {variable.name} {list(variable.tensor.shape)} over {axis}={ranks}, and another axis cuts it "
        f"already; only {NESTED} cuts pieces once more, where all that reads them is cut alike and they divide"
    )
