"""One operator call on one rank: from the operator, its argument nodes and its sharded labels to nodes of the local graph.

`OperatorCall` provides what lowering functions (`lower/operator_lowering.py`) need: groups of a sharded label by purpose, this rank's
shard of a
label, the site of its draw; and it emits calls under the autocast with which the operator was traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import fx

from shardwise.lower.kernels.halo import WindowShard, apply_windows
from shardwise.lower.kernels.randomness import DrawSite
from shardwise.lower.kernels.sample_positions import DrawnShard
from shardwise.lower.kernels.scaled import scaled_linear, supports_scaled_product
from shardwise.lower.kernels.statistics import StatisticsGroups
from shardwise.lower.lowering import Lowering, Nodes, bind_named, inner_group_name, outer_group_name
from shardwise.lower.torch_calls import (
    call_in_full_precision,
    call_in_operand_dtype,
    call_under_autocast,
    called_function,
    lower_arguments,
    torch_operator,
)
from shardwise.model.batch.random_draws import drawn_shape
from shardwise.model.dims.fused_dims import find_fused_dims
from shardwise.model.graph import Operator
from shardwise.model.graph import Tensor as Spec
from shardwise.model.sharding.convolution_as_product import is_run_as_product, local_operand_shapes
from shardwise.model.sharding.sharding import num_exchanging_ranks, ring_operands, shard_range
from shardwise.ops import Rule, record_of, windows_of
from shardwise.ops.record import Op
from shardwise.ops.rule import HALO, QUERIES, FusedLabel
from shardwise.ops.sliding_window import ResamplingWindow
from shardwise.ops.vocabulary import MatmulKind
from shardwise.plan.ir.axis import axis_of
from shardwise.plan.ir.placement import Range, Shard, Strided, even_shard_ranges, is_disjoint_shard, is_halo, is_shard, position_ranges
from shardwise.world import private
from shardwise.world.attention_backend import scaled_dot_product_attention
from shardwise.world.world import Group


@dataclass(frozen=True)
class OperatorCall:
    """`args` and `kwargs` are the operator's own, with nodes for tensors. `cut_labels`: by axis the label that is sharded over it."""

    lowering: Lowering
    nodes: Nodes
    op: Operator
    cut_labels: dict[str, str]
    args: list[Any]
    kwargs: dict[str, Any]

    @classmethod
    def from_operator(cls, low: Lowering, nodes: Nodes, op: Operator, inputs: list[fx.Node]) -> OperatorCall:
        args, kwargs = lower_arguments(op, inputs, low.device)
        return cls(low, nodes, op, {axis: label for axis, label in low.sharding.labels[op.name].items() if label}, args, kwargs)

    @property
    def record(self) -> Op:
        return record_of(self.op)

    @property
    def torch_operator(self) -> Callable[..., Any]:
        """The torch operator."""
        return torch_operator(self.op.target)

    def input_spec(self, i: int) -> Spec:
        """Return the global spec of input `i`."""
        return self.lowering.graph.tensors[self.op.inputs[i]]

    @property
    def output_spec(self) -> Spec:
        """Global spec of the first output."""
        return self.lowering.graph.tensors[self.op.outputs[0]]

    @property
    def local_shape(self) -> list[int]:
        """Local shape of the first output."""
        return list(self.lowering.sharding.local_shape(self.op.outputs[0], self.output_spec.shape, coordinates=self.lowering.coordinates))

    @property
    def rule(self) -> Rule:
        rule, own = find_fused_dims(self.lowering.graph).rules[self.op.name], self.lowering.graph.rules[self.op.name]
        assert rule is not None, self.op.name  # only an operator with a rule is ever sharded
        assert own is not None, self.op.name
        for label in set(self.cut_labels.values()).difference(rule.labels):  # sharded by an axis without runs, where the operator has it
            rows = enumerate((*own.inputs, *own.outputs))
            dims = tuple((number, dim, ()) for number, row in rows for dim, x in enumerate(row or ()) if x == label)
            rule = FusedLabel(label, dims).apply_to(rule)
        return rule

    def add_call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call of another function, unchanged."""
        return self.nodes.add(target, args, kwargs)

    def emit(self, target: Callable[..., Any], args: list[Any], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """Emit a call of the operator, or of its replacement, under the autocast with which it was traced."""
        op, low = self.op, self.lowering
        if low.precision.linear_dtype and self.record.product.kind == MatmulKind.LINEAR:
            target = self.scaled_kernel() or target
        if low.device.type == "cpu" and not op.autocast and is_run_as_product(op, low.graph.tensors, low.sharding):
            return self._as_product(*args[:3])
        device, _, dtype = op.autocast.partition(":")
        if op.name in low.kept_operators:
            within: Callable[..., Any] = call_in_operand_dtype
        elif not device or (dtype and device != low.device.type):
            return self.nodes.add(target, tuple(args), kwargs)
        else:
            within = bind_named(call_under_autocast, device, getattr(torch, dtype)) if dtype else call_in_full_precision
        if isinstance(target, FunctionType) or dtype:  # no operator, so generated code cannot name it
            called = bind_named(within, target)
            called.__name__ = called.__qualname__ = target.__name__.partition(".")[0]  # recompute matches operators by name
            called.__dict__["called"] = called_function(target)
            return self.nodes.add(called, tuple(args), kwargs)
        return self.nodes.add(within, (target, *args), kwargs)

    def scaled_kernel(self) -> Callable[..., Any] | None:
        """Return the float8 kernel of a linear layer whose sides fit it; scales agree over the ranks that shard a row."""
        weight = self.lowering.graph.tensors[self.op.inputs[1]]
        if not supports_scaled_product(weight.shape):
            return None
        kernel = bind_named(scaled_linear, *self.scale_groups(), scales_tensors=self.lowering.precision.scales_tensors)
        kernel.__name__ = kernel.__qualname__ = "linear"
        return kernel

    def scale_groups(self) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
        """Return the groups that shard the contracted dimension of a linear layer, and those that shard that of its gradient."""
        labels = self.rule.inputs[1] or ()
        outputs = [axis for axis, label in self.cut_labels.items() if labels and label == labels[0]]
        input_groups, output_groups = (tuple(self.lowering.groups[axis] for axis in axes) for axes in (self.contracted_axes(), outputs))
        return input_groups, output_groups

    def _as_product(self, x: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> fx.Node:
        """Emit a 1x1 convolution as one product over all samples and positions."""
        reshape, permute, last = torch.ops.aten.reshape.default, torch.ops.aten.permute.default, len(self.input_spec(0).shape) - 1
        (samples, channels, *places), sizes = local_operand_shapes(
            self.op, self.lowering.graph.tensors, self.lowering.sharding, self.lowering.coordinates
        )
        rows = self.add_call(reshape, self.add_call(permute, x, [0, *range(2, last + 1), 1]), [-1, channels])
        product = self.add_call(torch.ops.aten.linear.default, rows, self.add_call(reshape, weight, list(sizes[:2])), bias)
        image = self.add_call(permute, self.add_call(reshape, product, [samples, *places, -1]), [0, last, *range(1, last)])
        return self.add_call(torch.ops.aten.contiguous.default, image)

    def call_operator(self) -> fx.Node:
        """Emit the operator; where windows slide along a sharded dimension, on this rank's shard."""
        return self.emit(self._local_target(), self.args, self.kwargs)

    def _local_target(self) -> Callable[..., Any]:
        target, slides, cut_labels = self.torch_operator, self.record.windows, self.cut_labels
        if slides is None or not cut_labels:
            return target
        rule, windows = self.rule, windows_of(self.op, self.lowering.graph.tensors)
        axes = {label: axis for axis, label in cut_labels.items() if rule.kernels.get(label) == HALO}
        if not axes:
            return target
        source, output = self.input_spec(0).shape, self.output_spec.shape
        parts = []
        for label, window in windows.items():
            if label not in axes and not isinstance(window, ResamplingWindow):
                continue
            assert rule.inputs[0] is not None
            dim, into = rule.inputs[0].index(label), rule.outputs[0].index(label)
            group = self.lowering.groups[axes[label]] if label in axes else None
            output_range = (0, output[into]) if group is None else even_shard_ranges(output[into], group.size)[group.index]
            parts.append(WindowShard(dim, source[dim], window, self._held_range(dim, axes.get(label)), output_range))
        return bind_named(apply_windows, target, slides, tuple(parts))

    def _held_range(self, dim: int, axis: str | None) -> tuple[int, int]:
        """Return the range of a dimension of the first operand that this rank holds if `axis` shards it; else all."""
        length = self.input_spec(0).shape[dim]
        if axis is None:
            return 0, length
        placement, group = self.lowering.sharding.input_placements[self.op.name][0][axis], self.lowering.groups[axis]
        assert is_shard(placement) or is_halo(placement)
        start, count = shard_range(placement, length, group.size, group.index)
        return start, start + count

    def _shard_fractions(self, axis: str) -> tuple[float, ...]:
        """Return the fraction of the sharded label's entries that each rank of an axis holds."""
        (form, length), n = self._sharded_operand(axis), self.lowering.groups[axis].size
        if isinstance(form, Strided):
            length, form = form.size, form.run_shard(n)
        return tuple((stop - start) / length for start, stop in form.ranges(length, n)) if form.lengths else (1 / n,) * n

    def _sharded_operand(self, axis: str) -> tuple[Shard | Strided, int]:
        """Return (placement, global length) of an operand with the label that an axis shards."""
        for value, row, needed in zip(self.op.inputs, self.rule.inputs, self.lowering.sharding.input_placements[self.op.name], strict=True):
            if row is not None and self.cut_labels[axis] in row and is_disjoint_shard(form := needed[axis]):
                return form, self.lowering.graph.tensors[value].shape[form.dim]
        raise AssertionError(f"{self.op.site} is sharded over {axis}, but reads no shards")

    def shard_offset(self, kernel: str) -> int:
        """Return the first entry of this rank's shard of the dimension that needs `kernel`."""
        (axis,) = self._axes_for(kernel)
        form, length = self._sharded_operand(axis)
        assert is_shard(form)
        return form.local_range(length, self.lowering.groups[axis].size, self.lowering.groups[axis].index)[0]

    def query_positions(self) -> tuple[Range, ...] | None:
        """Return the positions of this rank's queries of attention with sharded queries."""
        for axis in self._axes_for(QUERIES):
            return self._positions(0, axis)[self.lowering.groups[axis].index]
        return None

    def ring_groups(self) -> tuple[Group, tuple[tuple[Range, ...], ...], tuple[tuple[Range, ...], ...]] | None:
        """Return the group of ring attention, and the positions of queries and of keys of each rank."""
        for axis in self._axes_for(QUERIES):
            if not ring_operands(self.lowering.sharding, self.op, self.rule, axis):
                continue
            return self.lowering.groups[axis], self._positions(0, axis), self._positions(1, axis)
        return None

    def ulysses_groups(self) -> tuple[Group, Group] | None:
        """Return the groups of ring attention with head exchange: ranks that exchange heads (Ulysses), and ranks of the ring."""
        for axis in self._axes_for(QUERIES):
            if (n := num_exchanging_ranks(self.lowering.sharding, self.op, self.rule, axis, self.input_spec(0).shape)) > 1:
                return self.lowering.groups[inner_group_name(axis, n)], self.lowering.groups[outer_group_name(axis, n)]
        return None

    def _positions(self, i: int, axis: str) -> tuple[tuple[Range, ...], ...]:
        """Return the positions of operand `i`, sharded over an axis, that each rank holds."""
        form, n = self.lowering.sharding.input_placements[self.op.name][i][axis], self.lowering.groups[axis].size
        assert is_disjoint_shard(form)
        return tuple(position_ranges(form, self.input_spec(i).shape[form.dim], n, rank) for rank in range(n))

    def sample_share(self, axis: str) -> float:
        """Return this rank's fraction."""
        return self._shard_fractions(axis)[self.lowering.groups[axis].index]

    def statistics_groups(self) -> StatisticsGroups:
        """Return the groups over which statistics of sharded dimensions are taken, with each member's fraction."""
        axes = [axis for axis in self._axes_for("statistics") if axis not in self.lowering.local_statistics]
        return tuple((self.lowering.groups[axis], self._shard_fractions(axis)) for axis in axes)

    def mean_axes(self) -> list[str]:
        """Return axes that shard the dimensions of a mean."""
        return self._axes_for("average")

    def axes_of(self, label: str) -> list[str]:
        """Return the axes that shard a label, each after those whose shards it shards again."""
        return [axis for axis, cut in self.cut_labels.items() if cut == label]

    def _axes_for(self, kernel: str) -> list[str]:
        kernels = self.rule.kernels if self.cut_labels else {}
        return [axis for axis, label in self.cut_labels.items() if kernels.get(label) == kernel]

    def kernel_groups(self) -> dict[str, tuple[Group, ...]]:
        """Return, by required kernel, the groups of the axes that need it."""
        names = self.rule.kernels if self.cut_labels else {}
        groups: dict[str, tuple[Group, ...]] = {}
        for axis, label in self.cut_labels.items():
            if kernel := names.get(label):
                groups[kernel] = (*groups.get(kernel, ()), self.lowering.groups[axis])
        return groups

    def contracted_axes(self) -> list[str]:
        """Return axes that shard a contracted label, which is in no output."""
        outputs = self.rule.outputs if self.cut_labels else ()
        return [axis for axis, label in self.cut_labels.items() if all(label not in out for out in outputs)]

    def draw_site(self) -> DrawSite:
        """Return the site of an operator's draw: which draw, and this rank's shard of it."""
        output, low, number = self.output_spec, self.lowering, self.lowering.draw_index[self.op.name]
        labels = self.rule.outputs[0] if self.cut_labels else ()
        cuts: list[tuple[int, int, int]] = []
        strided_cuts: list[tuple[int, int, int, int]] = []
        lengths, forms = list(output.shape), low.sharding.placements[self.op.outputs[0]]
        # Heads sharded over two axes are tensor ranks' shards, sharded again over a context axis (`shardwise.lower.local`).
        for axis, label in sorted(self.cut_labels.items(), key=lambda cut: axis_of(cut[0]).shards_sequences):
            form, group = forms[axis], low.groups[axis]
            if label in labels and isinstance(form, Strided):
                start, count = form.run_shard(group.size).local_range(form.size, group.size, group.index)
                strided_cuts.append((form.dim, form.size * form.inner, start * form.inner, count * form.inner))
            elif label in labels and (is_shard(form) or is_halo(form)):
                start, lengths[form.dim] = shard_range(form, lengths[form.dim], group.size, group.index)
                cuts.append((form.dim, start, lengths[form.dim]))
        place = DrawnShard(
            output.shape, tuple(cuts), low.sample_folds[number] if number < len(low.sample_folds) else None, tuple(strided_cuts)
        )
        place = place.with_shape(drawn_shape(self.op, low.graph.tensors))
        part = 0  # index of this rank's shard of the operator
        for axis in self.cut_labels:
            part = part * low.groups[axis].size + low.groups[axis].index
        return DrawSite(low.operator_index[self.op.name], part, number, place, getattr(torch, output.dtype))


def runs_under_ambient_autocast(node: fx.Node) -> bool:
    """Return whether a node calls an operator of torch's under the autocast of its stage, and not under one of its own."""
    target: Any = node.target
    return target is not call_in_full_precision and (private.is_operator(target) or called_function(target) is scaled_dot_product_attention)
