"""One operator call on one rank: from the operator, its argument nodes and its sharded labels to nodes of the local graph.

`Call` provides what lowering functions (`lower/operator_lowering.py`) need: groups of a sharded label by purpose, this rank's shard of a
label, the site of its draw; and it emits calls under the autocast with which the operator was traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx

from weft.lower.groups import apart, beside
from weft.lower.kernels.halo import Part, windowed
from weft.lower.kernels.randomness import Where
from weft.lower.kernels.sample_positions import Place
from weft.lower.kernels.scaled import fits, scaled_linear
from weft.lower.kernels.statistics import Parts
from weft.lower.lowering import Lowering, Nodes, bind, operator_of
from weft.model.batch.drawn import drawn_shape
from weft.model.graph import Arg, Operator, Ref, Word
from weft.model.graph import Tensor as Spec
from weft.model.sharding.pointwise import is_product, read_shapes
from weft.model.sharding.sharding import exchanged, part_of, passed_round
from weft.ops import Rule, record_of, windows_of
from weft.ops.record import Op
from weft.ops.rule import HALO, QUERIES
from weft.ops.sliding_window import Resample
from weft.plan.axis import axis_of
from weft.plan.placement import Range, Shard, Strided, is_halo, is_piece, is_shard, pieces, positions_of
from weft.world.world import Group


@dataclass(frozen=True)
class Call:
    """`args` and `kwargs` are the operator's own, with nodes for tensors. `cut_labels`: by axis the label that is sharded over it."""

    low: Lowering
    nodes: Nodes
    op: Operator
    cut: dict[str, str]
    args: list[Any]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, low: Lowering, nodes: Nodes, op: Operator, inputs: list[fx.Node]) -> Call:
        values = iter(inputs)
        args = [argument_of(a, values, low.device) for a in op.args]
        kwargs = {k: argument_of(a, values, low.device) for k, a in op.kwargs}
        return cls(low, nodes, op, {axis: label for axis, label in low.sharding.ops[op.name].items() if label}, args, kwargs)

    @property
    def record(self) -> Op:
        return record_of(self.op)

    @property
    def operator(self) -> Callable[..., Any]:
        """The torch operator."""
        return operator_of(self.op.target)

    def read(self, i: int) -> Spec:
        """Return the global spec of input `i`."""
        return self.low.graph.tensors[self.op.inputs[i]]

    @property
    def made(self) -> Spec:
        """Global spec of the first output."""
        return self.low.graph.tensors[self.op.outputs[0]]

    @property
    def shape(self) -> list[int]:
        """Local shape of the first output."""
        return list(self.low.sharding.shape(self.op.outputs[0], self.made.shape, at=self.low.at))

    @property
    def rule(self) -> Rule:
        rule = self.low.graph.fused.rules[self.op.name]
        assert rule is not None, self.op.name  # only an operator with a rule is ever sharded
        return rule

    def add(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call of another function, unchanged."""
        return self.nodes.add(target, args, kwargs)

    def emit(self, target: Callable[..., Any], args: list[Any], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """Emit a call of the operator, or of its replacement, under the autocast with which it was traced."""
        op, low = self.op, self.low
        if low.precision.linears and self.record.product == "linear":
            target = self.scaled() or target
        if low.device.type == "cpu" and not op.autocast and is_product(op, low.graph.tensors, low.sharding):
            return self._product(*args[:3])
        device, _, dtype = op.autocast.partition(":")
        if not device or (dtype and device != low.device.type):
            return self.nodes.add(target, tuple(args), kwargs)
        within = bind(_autocast, device, getattr(torch, dtype)) if dtype else _full_precision
        if isinstance(target, FunctionType) or dtype:  # no operator, so generated code cannot name it
            called = bind(within, target)
            called.__name__ = called.__qualname__ = target.__name__.partition(".")[0]  # recompute matches operators by name
            return self.nodes.add(called, tuple(args), kwargs)
        return self.nodes.add(within, (target, *args), kwargs)

    def scaled(self) -> Callable[..., Any] | None:
        """Return the float8 kernel of a linear layer whose sides fit it; scales agree over the ranks that shard a row."""
        weight = self.low.graph.tensors[self.op.inputs[1]]
        if not fits(weight.shape):
            return None
        kernel = bind(scaled_linear, *self.scaled_over())
        kernel.__name__ = kernel.__qualname__ = "linear"
        return kernel

    def scaled_over(self) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
        """Return the groups that shard the contracted dimension of a linear layer, and those that shard that of its gradient."""
        labels = self.rule.inputs[1] or ()
        outputs = [axis for axis, label in self.cut.items() if labels and label == labels[0]]
        input_groups, output_groups = (tuple(self.low.groups[axis] for axis in axes) for axes in (self.contracted(), outputs))
        return input_groups, output_groups

    def _product(self, x: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> fx.Node:
        """Emit a 1x1 convolution as one product over all samples and positions."""
        reshape, permute, last = torch.ops.aten.reshape.default, torch.ops.aten.permute.default, len(self.read(0).shape) - 1
        (samples, channels, *places), sizes = read_shapes(self.op, self.low.graph.tensors, self.low.sharding, self.low.at)
        rows = self.add(reshape, self.add(permute, x, [0, *range(2, last + 1), 1]), [-1, channels])
        product = self.add(torch.ops.aten.linear.default, rows, self.add(reshape, weight, list(sizes[:2])), bias)
        image = self.add(permute, self.add(reshape, product, [samples, *places, -1]), [0, last, *range(1, last)])
        return self.add(torch.ops.aten.contiguous.default, image)

    def local(self) -> fx.Node:
        """Emit the operator; where windows slide along a sharded dimension, on this rank's shard."""
        return self.emit(self._target(), self.args, self.kwargs)

    def _target(self) -> Callable[..., Any]:
        target, slides, cut_labels = self.operator, self.record.windows, self.cut
        if slides is None or not cut_labels:
            return target
        rule, windows = self.rule, windows_of(self.op, self.low.graph.tensors)
        axes = {label: axis for axis, label in cut_labels.items() if rule.kernels.get(label) == HALO}
        if not axes:
            return target
        source, output = self.read(0).shape, self.made.shape
        parts = []
        for label, window in windows.items():
            if label not in axes and not isinstance(window, Resample):
                continue
            assert rule.inputs[0] is not None
            dim, into = rule.inputs[0].index(label), rule.outputs[0].index(label)
            group = self.low.groups[axes[label]] if label in axes else None
            output_range = (0, output[into]) if group is None else pieces(output[into], group.size)[group.index]
            parts.append(Part(dim, source[dim], window, self._has(dim, axes.get(label)), output_range))
        return bind(windowed, target, slides, tuple(parts))

    def _has(self, dim: int, axis: str | None) -> tuple[int, int]:
        """Return the range of a dimension of the first operand that this rank holds if `axis` shards it; else all."""
        length = self.read(0).shape[dim]
        if axis is None:
            return 0, length
        placement, group = self.low.sharding.needs[self.op.name][0][axis], self.low.groups[axis]
        assert is_shard(placement) or is_halo(placement)
        start, count = part_of(placement, length, group.size, group.index)
        return start, start + count

    def _shares(self, axis: str) -> tuple[float, ...]:
        """Return the fraction of the sharded label's entries that each rank of an axis holds."""
        (form, length), n = self._piece(axis), self.low.groups[axis].size
        if isinstance(form, Strided):
            length, form = form.size, form.run(n)
        return tuple((stop - start) / length for start, stop in form.ranges(length, n)) if form.lengths else (1 / n,) * n

    def _piece(self, axis: str) -> tuple[Shard | Strided, int]:
        """Return (placement, global length) of an operand with the label that an axis shards."""
        for value, row, needed in zip(self.op.inputs, self.rule.inputs, self.low.sharding.needs[self.op.name], strict=True):
            if row is not None and self.cut[axis] in row and is_piece(form := needed[axis]):
                return form, self.low.graph.tensors[value].shape[form.dim]
        raise AssertionError(f"{self.op.site} is sharded over {axis}, but reads no shards")

    def begins(self, kernel: str) -> int:
        """Return the first entry of this rank's shard of the dimension that needs `kernel`."""
        (axis,) = self._cut_for(kernel)
        form, length = self._piece(axis)
        assert is_shard(form)
        return form.part(length, self.low.groups[axis].size, self.low.groups[axis].index)[0]

    def queries(self) -> tuple[Range, ...] | None:
        """Return the positions of this rank's queries of attention with sharded queries."""
        for axis in self._cut_for(QUERIES):
            return self._positions(0, axis)[self.low.groups[axis].index]
        return None

    def round(self) -> tuple[Group, tuple[tuple[Range, ...], ...], tuple[tuple[Range, ...], ...]] | None:
        """Return the group of ring attention, and the positions of queries and of keys of each rank."""
        for axis in self._cut_for(QUERIES):
            if not passed_round(self.low.sharding, self.op, self.rule, axis):
                continue
            return self.low.groups[axis], self._positions(0, axis), self._positions(1, axis)
        return None

    def exchange(self) -> tuple[Group, Group] | None:
        """Return the groups of ring attention with head exchange: ranks that exchange heads (Ulysses), and ranks of the ring."""
        for axis in self._cut_for(QUERIES):
            if (n := exchanged(self.low.sharding, self.op, self.rule, axis, self.read(0).shape)) > 1:
                return self.low.groups[beside(axis, n)], self.low.groups[apart(axis, n)]
        return None

    def _positions(self, i: int, axis: str) -> tuple[tuple[Range, ...], ...]:
        """Return the positions of operand `i`, sharded over an axis, that each rank holds."""
        form, n = self.low.sharding.needs[self.op.name][i][axis], self.low.groups[axis].size
        assert is_piece(form)
        return tuple(positions_of(form, self.read(i).shape[form.dim], n, rank) for rank in range(n))

    def share(self, axis: str) -> float:
        """Return this rank's fraction."""
        return self._shares(axis)[self.low.groups[axis].index]

    def statistics(self) -> Parts:
        """Return the groups over which statistics of sharded dimensions are taken, with each member's fraction."""
        axes = [axis for axis in self._cut_for("statistics") if axis not in self.low.local_statistics]
        return tuple((self.low.groups[axis], self._shares(axis)) for axis in axes)

    def averages(self) -> list[str]:
        """Return axes that shard the dimensions of a mean."""
        return self._cut_for("average")

    def axes_of(self, label: str) -> list[str]:
        """Return the axes that shard a label, each after those whose shards it shards again."""
        return [axis for axis, cut in self.cut.items() if cut == label]

    def _cut_for(self, kernel: str) -> list[str]:
        kernels = self.rule.kernels if self.cut else {}
        return [axis for axis, label in self.cut.items() if kernels.get(label) == kernel]

    def kernels(self) -> dict[str, tuple[Group, ...]]:
        """Return, by required kernel, the groups of the axes that need it."""
        names = self.rule.kernels if self.cut else {}
        groups: dict[str, tuple[Group, ...]] = {}
        for axis, label in self.cut.items():
            if kernel := names.get(label):
                groups[kernel] = (*groups.get(kernel, ()), self.low.groups[axis])
        return groups

    def contracted(self) -> list[str]:
        """Return axes that shard a contracted label, which is in no output."""
        outputs = self.rule.outputs if self.cut else ()
        return [axis for axis, label in self.cut.items() if all(label not in out for out in outputs)]

    def where(self) -> Where:
        """Return the site of an operator's draw: which draw, and this rank's shard of it."""
        output, low, number = self.made, self.low, self.low.drawing[self.op.name]
        labels = self.rule.outputs[0] if self.cut else ()
        cuts: list[tuple[int, int, int]] = []
        strided_cuts: list[tuple[int, int, int, int]] = []
        lengths, forms = list(output.shape), low.sharding.forms[self.op.outputs[0]]
        # Heads sharded over two axes are tensor ranks' shards, sharded again over a context axis (`weft.lower.local`).
        for axis, label in sorted(self.cut.items(), key=lambda cut: axis_of(cut[0]).cuts_sequences):
            form, group = forms[axis], low.groups[axis]
            if label in labels and isinstance(form, Strided):
                start, count = form.run(group.size).part(form.size, group.size, group.index)
                strided_cuts.append((form.dim, form.size * form.inner, start * form.inner, count * form.inner))
            elif label in labels and (is_shard(form) or is_halo(form)):
                start, lengths[form.dim] = part_of(form, lengths[form.dim], group.size, group.index)
                cuts.append((form.dim, start, lengths[form.dim]))
        place = Place(output.shape, tuple(cuts), low.folds[number] if number < len(low.folds) else None, tuple(strided_cuts))
        place = place.over(drawn_shape(self.op, low.graph.tensors))
        part = 0  # index of this rank's shard of the operator
        for axis in self.cut:
            part = part * low.groups[axis].size + low.groups[axis].index
        return Where(low.ordinal[self.op.name], part, number, place, getattr(torch, output.dtype))


def argument_of(arg: Arg, nodes: Iterator[Any], device: torch.device) -> Any:
    """Return an argument of an operator for torch. `nodes`: nodes of its input tensors, in order."""
    if isinstance(arg, Ref):
        return next(nodes)
    if isinstance(arg, tuple):
        return [argument_of(a, nodes, device) for a in arg]
    if isinstance(arg, Word):
        return device if arg.kind == "device" else getattr(torch, arg.name)
    return arg


def _autocast(device: str, dtype: torch.dtype, target: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device, dtype):
        return target(*args, **kwargs)


def _full_precision(target: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        return target(*args, **kwargs)
