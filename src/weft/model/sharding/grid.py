"""What the axes of a grid of tensor ranks leave to one another. In: what earlier axes decided, what a plan gives to later ones. Out: the
dimensions that an axis may cut once more, and those that it must leave alone.

Axes are searched one after another. Only the last may cut pieces of another once more, and then these are always cut together: put
together along one axis while the other still cuts them, pieces would come out of order. Not modelled: an axis that looks ahead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from weft.errors import LayoutError
from weft.model.graph import Graph, Variable
from weft.ops.attention import heads_of
from weft.ops.rule import SEVERAL
from weft.plan.axis import Axis, axis_of
from weft.plan.grid import NESTED
from weft.plan.placement import Placement, Shard, is_full, is_shard


class Decided(Protocol):
    """What earlier axes decided, as in `Sharding`."""

    graph: Graph
    ops: dict[str, dict[str, str]]
    forms: dict[str, dict[str, Placement]]
    needs: dict[str, list[dict[str, Placement | None]]]


def nested(
    decided: Decided, sizes: Mapping[str, int], under: Collection[str], row: Axis
) -> tuple[dict[str, dict[int, int]], frozenset[tuple[str, str]], frozenset[str]]:
    """What an axis may cut once more of what those in `under` cut: [value][dim] -> pieces that there are; and the (operator, label) that it
    may not.

    A value must lie in the same equal pieces of another axis in whatever form it is made or read; for samples it may also be made whole,
    to be sliced twice (`sliced`). Outputs are handed out whole but for their samples, and most kernels that talk do so along one axis.
    """
    graph = decided.graph
    lies: dict[str, dict[str, set[Placement]]] = {
        value: {axis: {form} for axis, form in by_axis.items() if axis in under} for value, by_axis in decided.forms.items()
    }
    kernels = set()
    for op in graph.operators:
        rule = graph.rules[op.name]
        cut = [label for axis, label in decided.ops[op.name].items() if axis in under]
        talk = {} if rule is None else {x: k for x, k in rule.kernels.items() if not (row.cuts_samples and k in SEVERAL)}
        kernels |= {(op.name, label) for label in cut if label in talk}
        for value, needs in zip(op.inputs, decided.needs[op.name], strict=True):
            for axis, form in needs.items():
                if axis in under and form is not None:
                    lies[value][axis].add(form)
    replicated = set() if row.cuts_samples else {graph.loss, *graph.outputs}
    dims: dict[str, dict[int, int]] = {}
    sliced = set()
    for value, by in lies.items():
        for axis, those in by.items():
            if row.cuts_samples and len(those) > 1 and is_full(decided.forms[value][axis]):
                those = those - {decided.forms[value][axis]}
                sliced.add(value)
            (form, *others) = those
            if is_shard(form) and not (form.lengths or form.runs or others) and value not in replicated:
                ways = dims.setdefault(value, {})
                ways[form.dim] = ways.get(form.dim, 1) * sizes[axis]
    return dims, frozenset(kernels), frozenset(sliced)


def heads_in_pieces(decided: Decided, sizes: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """[value][dim] -> pieces of the heads of attention that an axis of sequences cuts, which tensor ranks may cut as well: attention alone
    reads and makes them so, from and to pieces of positions (`weft.lower.local` cuts the pieces of tensor ranks)."""
    pieces: dict[str, dict[int, int]] = {}
    for op in decided.graph.operators if any(axis_of(axis).cuts_sequences for axis in sizes) else ():
        read = [*zip(op.inputs, decided.needs[op.name], strict=True)] if heads_of(decided.graph.rules[op.name]) else []
        for axis in (axis for axis in sizes if axis_of(axis).cuts_sequences and read):
            placed = [(value, row[axis]) for value, row in read] + [(value, decided.forms[value][axis]) for value in op.outputs]
            for value, form in placed:
                if is_shard(form) and not form.lengths:
                    pieces.setdefault(value, {})[form.dim] = sizes[axis]
    return pieces


def kept_for(
    later: Sequence[str], planned: Mapping[str, Mapping[str, int] | None], fixed: Mapping[str, int]
) -> tuple[dict[str, set[int]], dict[str, Placement]]:
    """What an axis leaves to `later` ones, of variables whose cuts a plan gives: dimensions that it must not cut, and forms that it must
    read them in, since the last axis cuts those pieces once more. `fixed`: its own cuts.

    >>> kept_for(["columns", "depth"], {"columns": {"w": 1}, "depth": {"w": 0}}, {"w": 0})
    ({'w': {1}}, {'w': 'S0'})
    """
    reserved: dict[str, set[int]] = {}
    pinned: dict[str, Placement] = {}
    for axis in later:
        for value, dim in (planned.get(axis) or {}).items():
            if axis_of(axis).again and fixed.get(value) == dim:
                pinned[value] = Shard(dim)
            elif fixed.get(value) != dim:
                reserved.setdefault(value, set()).add(dim)
    return reserved, pinned


def twice_cut(variable: Variable, dim: int, axis: str, ranks: int) -> LayoutError:
    """The error for a cut that a plan gives to an axis where another one cuts already."""
    return LayoutError(
        f"the plan cuts dimension {dim} of {variable.name} {list(variable.tensor.shape)} over {axis}={ranks}, and another axis cuts it "
        f"already; only {NESTED} cuts pieces once more, where all that reads them is cut alike and they divide"
    )
