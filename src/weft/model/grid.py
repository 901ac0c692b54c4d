"""What the axes of a grid of tensor ranks leave to one another. In: what earlier axes decided, what a plan gives to later ones. Out: the
dimensions that an axis may cut once more, and those that it must leave alone.

Axes are searched one after another. Only the last may cut pieces of another once more, and then these are always cut together: put
together along one axis while the other still cuts them, pieces would come out of order. Not modelled: an axis that looks ahead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from weft.errors import LayoutError
from weft.model.graph import Graph, Variable
from weft.plan.axis import axis_of
from weft.plan.grid import NESTED
from weft.plan.placement import Placement, Shard, is_shard


def nested(
    graph: Graph,
    ops: Mapping[str, Mapping[str, str]],
    forms: Mapping[str, Mapping[str, Placement]],
    needs: Mapping[str, Sequence[Mapping[str, Placement | None]]],
    sizes: Mapping[str, int],
    under: Collection[str],
) -> tuple[dict[str, dict[int, int]], frozenset[tuple[str, str]]]:
    """What an axis may cut once more of what those in `under` cut: [value][dim] -> pieces that there are; and the (operator, label) that it
    may not.

    A value must lie in the same pieces of another axis in whatever form it is made or read. Outputs are handed out whole, and kernels
    that talk do so along one axis.
    """
    lies: dict[str, dict[str, set[Placement]]] = {
        value: {axis: {form} for axis, form in by_axis.items() if axis in under} for value, by_axis in forms.items()
    }
    kernels = set()
    for op in graph.operators:
        rule = graph.rules[op.name]
        cut = [label for axis, label in ops[op.name].items() if axis in under]
        kernels |= {(op.name, label) for label in cut if rule is not None and label in rule.kernels}
        for value, row in zip(op.inputs, needs[op.name], strict=True):
            for axis, form in row.items():
                if axis in under and form is not None:
                    lies[value][axis].add(form)
    whole = {graph.loss, *graph.outputs}
    found: dict[str, dict[int, int]] = {}
    for value, by in lies.items():
        for axis, those in by.items():
            (form, *others) = those
            if is_shard(form) and not others and value not in whole:
                found.setdefault(value, {})[form.dim] = sizes[axis]
    return found, frozenset(kernels)


def kept_for(
    later: Sequence[str], given: Mapping[str, Mapping[str, int] | None], fixed: Mapping[str, int]
) -> tuple[dict[str, set[int]], dict[str, Placement]]:
    """What an axis leaves to `later` ones, of variables whose cuts a plan gives: dimensions that it must not cut, and forms that it must
    read them in, since the last axis cuts those pieces once more. `fixed`: its own cuts.

    >>> kept_for(["columns", "depth"], {"columns": {"w": 1}, "depth": {"w": 0}}, {"w": 0})
    ({'w': {1}}, {'w': 'S0'})
    """
    reserved: dict[str, set[int]] = {}
    pinned: dict[str, Placement] = {}
    for axis in later:
        for value, dim in (given.get(axis) or {}).items():
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
