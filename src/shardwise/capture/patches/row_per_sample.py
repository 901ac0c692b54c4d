"""Indexing one entry of every sample: `x[torch.arange(len(x)), i]`.

Torch: an index, by which any sample might read any row, so it has no sharding rule along the indexed dimension.
Wanted: if the first index is the row number, row b reads row b: a gather along the following dimensions, which has a rule. Per-sample
    look-ups of masks, the logit of each target and the last token of each sentence are written like this. Not: such an index that is not
    the first, or whose other indices do not follow it.
Test: tests/torch/capture/test_patches.py::row_per_sample
Until: not known
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from shardwise.capture.patches.patch import Patch
from shardwise.model.graph import Arg, Graph, Operator, Ref, Tensor
from shardwise.ops import record_of
from shardwise.ops.vocabulary import ViewKind

# Operators that preserve the numbers, possibly in another shape.
_VALUE_PRESERVING = (ViewKind.ALIAS, ViewKind.CONTIGUOUS, ViewKind.CAST, ViewKind.COPY, ViewKind.RESHAPE, ViewKind.EXPAND)


def _gather_rows(graph: Graph) -> Graph:
    """Return `graph` with a gather for every such index."""
    rows = _RowIndexRewriter(graph)
    for op in graph.operators:
        rows.add_operator(op)
    return replace(graph, operators=tuple(rows.operators), tensors=rows.tensors) if len(rows.operators) > len(graph.operators) else graph


@dataclass
class _RowIndexRewriter:
    """`row_numbers`: values 0, 1, 2 ... along dimension 0, constant along others. `non_negative`: values that are not negative."""

    graph: Graph
    operators: list[Operator] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(init=False)
    row_numbers: set[str] = field(default_factory=set)
    non_negative: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tensors = dict(self.graph.tensors)

    def add_operator(self, op: Operator) -> None:
        """Append one operator, or its replacement."""
        name, moves = op.target.split(".")[1], record_of(op).view.kind
        first = op.inputs[0] if op.inputs else ""
        if name == "arange" and not op.inputs:
            start, step = _arange_start_and_step(op)
            self.non_negative.update(op.outputs if start >= 0 and step > 0 else ())
            self.row_numbers.update(op.outputs if (start, step) == (0, 1) else ())
        elif name in ("argmax", "argmin"):
            self.non_negative.update(op.outputs)
        elif first and (moves in _VALUE_PRESERVING or (name == "add" and op.args[1:2] == (0,))):
            is_integer = self.tensors[op.outputs[0]].dtype in ("int64", "int32")
            self.non_negative.update(op.outputs if first in self.non_negative and is_integer else ())
            before, after = self.tensors[first], self.tensors[op.outputs[0]]
            per_sample = before.shape[:1] == after.shape[:1] == (before.size,) == (after.size,)
            self.row_numbers.update(op.outputs if first in self.row_numbers and is_integer and per_sample else ())
        operators = self._as_gather(op) if name == "index" else []
        self.operators += operators or [op]

    def _as_gather(self, op: Operator) -> list[Operator]:
        """Return the index as a gather; empty if the first index is not the row number."""
        source, indices = op.args[:2]
        if not isinstance(source, Ref) or not isinstance(indices, tuple) or None in indices or len(indices) < 2:
            return []
        first, *index_values = [i.value for i in indices if isinstance(i, Ref)]
        shape, (out,) = self.tensors[source.value].shape, op.outputs
        wide = self.tensors[out].shape[: len(self.tensors[out].shape) - len(shape) + len(indices)]  # the broadcast shape of the indices
        along, rest = shape[1 : len(indices)], shape[len(indices) :]
        if first not in self.row_numbers or len(self.tensors[first].shape) != len(wide) or wide[:1] != shape[:1] or not prod(shape):
            return []
        if any(self.tensors[v].dtype != "int64" for v in (first, *index_values)):
            return []
        operators: list[Operator] = []

        def call(word: str, target: str, args: tuple[Arg, ...], like: tuple[int, ...], dtype: str = "int64", name: str = "") -> Ref:
            value = name or f"{out}_{word}"
            self.tensors[value] = Tensor(like, dtype)
            operators.append(Operator(f"{op.name}_{word}", f"aten.{target}", args, (), (value,), f"{op.site}_{word}", autocast=op.autocast))
            return Ref(value)

        place: Ref | None = None
        for number, (value, size) in enumerate(zip(index_values, along, strict=True)):
            index, index_shape = Ref(value), self.tensors[value].shape
            if value not in self.non_negative:  # negative indices count from the end
                is_negative = call(f"before{number}", "lt.Scalar", (index, 0), index_shape, "bool")
                offset = call(f"end{number}", "mul.Scalar", (is_negative, size), index_shape)
                index = call(f"place{number}", "add.Tensor", (index, offset), index_shape)
            if place is not None:
                steps = call(f"steps{number}", "mul.Scalar", (place, size), self.tensors[place.value].shape)
                index = call(f"rows{number}", "add.Tensor", (steps, index), _broadcast_shape(self.tensors[steps.value].shape, index_shape))
            place = index
        assert place is not None
        dtype, rows, last = self.tensors[source.value].dtype, prod(wide[1:]), (1,) * len(rest)
        place = call("wide", "expand.default", (place, wide), wide)
        place = call("flat", "reshape.default", (place, (shape[0], rows, *last)), (shape[0], rows, *last))
        if rest:
            place = call("each", "expand.default", (place, (shape[0], rows, *rest)), (shape[0], rows, *rest))
        table = source
        if len(along) > 1:
            merged = (shape[0], prod(along), *rest)
            table = call("table", "reshape.default", (source, merged), merged, dtype)
        gathered = call("taken", "gather.default", (table, 1, place), (shape[0], rows, *rest), dtype)
        call("rows", "reshape.default", (gathered, self.tensors[out].shape), self.tensors[out].shape, dtype, out)
        return operators


def _arange_start_and_step(op: Operator) -> tuple[float, float]:
    """Return start and step of an arange."""
    numbers = [a for a in op.args if isinstance(a, int | float)]
    return (float(numbers[0]) if len(numbers) > 1 else 0.0, float(numbers[2]) if len(numbers) > 2 else 1.0)


def _broadcast_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Return the broadcast shape."""
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    return tuple(max(pair) for pair in pairs)


PATCH = Patch(rewrite_graph=_gather_rows)
