"""One rank's part of one stage, as a callable: local shapes, redistributions where forms differ, kernels where a cut needs one.

In: a stage, the sharding of the whole graph, and the group of each mesh axis. Out: `LocalStage`, a `torch.fx.GraphModule`
with one positional argument for each variable and each received value.
"""

from __future__ import annotations

import operator as python_operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx

from weft.capture.functions import check_cut
from weft.lower.arrival import Arrival, arrived
from weft.lower.kernels.extremes import extreme
from weft.lower.kernels.functions import function
from weft.lower.kernels.halo import Part, windowed
from weft.lower.kernels.masked import masked_scatter
from weft.lower.kernels.place import Place
from weft.lower.kernels.randomness import Draw, Where, attention, drawn, dropout
from weft.lower.kernels.statistics import Parts, batch_norm, group_norm
from weft.lower.kernels.vocabulary import cross_entropy, embedding
from weft.lower.redistribute import counted, redistribute
from weft.model.drawn import Fold, drawn_shape
from weft.model.graph import Arg, Function, Graph, Operator, Ref, Word, statistics, writes_buffer, written_buffers
from weft.model.pointwise import is_product, read_shapes
from weft.model.sharding import Sharding, move_collectives
from weft.model.stages import Stage
from weft.ops import Rule, draws, record_of, rule_of, windows_of
from weft.ops.rule import HALO
from weft.ops.window import Resample
from weft.plan.axis import axis_of
from weft.plan.placement import D, P, Placement, R, Shard, is_shard, pieces
from weft.plan.transition import allowed
from weft.world.attention import scaled_dot_product_attention
from weft.world.world import Group

Variant = tuple[Placement, ...]  # a value's form along every axis, in the order of `Lowering.axes`
_LAYER = re.compile(r"^(?:[^/]*?\.)?\d+(?=\.|/|$)")


@dataclass(frozen=True)
class LocalStage:
    """`module(*variables, *received)` -> what is sent, stage by stage and in order, then the stage's results.

    `forms[value]`: the local form of every variable, received, sent or resulting value, by axis.
    """

    module: torch.nn.Module
    variables: tuple[str, ...]
    received: tuple[str, ...]
    sent: tuple[str, ...]
    results: tuple[str, ...]
    forms: Mapping[str, Mapping[str, Placement]]


@dataclass(frozen=True)
class Lowering:
    """What every operator is lowered with. `rows`: of the model's outputs, which dimension follows the samples. `shares`: of variables
    whose gradients are summed over ranks that have the same, the part of each that counts. `apart`: what comes from stages that arrange
    their ranks differently: its gradient goes back whole. `folds`: where samples lie in what is drawn, draw by draw. `late`: constants
    that may still be on their way when a stage begins, which `arrival` waits for where they are first read."""

    graph: Graph
    sharding: Sharding
    groups: Mapping[str, Group]
    device: torch.device
    draw: Draw
    rows: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    apart: frozenset[str] = frozenset()
    folds: Sequence[Fold | None] = ()
    late: frozenset[str] = frozenset()
    arrival: Arrival = field(default_factory=Arrival)
    tried: set[object] = field(default_factory=set)  # functions of the user's own on pieces that they have been tried on

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.sharding.sizes)

    @property
    def at(self) -> dict[str, int]:
        """This rank's place along each axis."""
        return {axis: self.groups[axis].index for axis in self.axes}

    def variant(self, forms: Mapping[str, Placement]) -> Variant:
        return tuple(forms[axis] for axis in self.axes)

    def crossing(self, value: str) -> Variant:
        """The form in which a value crosses to another stage: as it is made, summands summed."""
        return tuple(R if form is P else form for form in self.variant(self.sharding.forms[value]))

    def arriving(self, value: str) -> Variant:
        """The form in which a value comes from another stage."""
        crossing = self.crossing(value)
        return tuple(R if form is D else form for form in crossing) if value in self.apart else crossing

    def handed_out(self, value: str) -> Variant:
        """The form in which the user's own code gets an output: this rank's samples, and of those everything."""
        return tuple(Shard(self.rows[value]) if axis_of(axis).cuts_samples and value in self.rows else R for axis in self.axes)


def lower(stage: Stage, lowering: Lowering) -> LocalStage:
    """Lower one stage. Raises LayoutError where two forms cannot be brought together."""
    builder = _Builder(stage, lowering)
    return builder.build()


class _Builder:
    def __init__(self, stage: Stage, lowering: Lowering) -> None:
        self.stage, self.low = stage, lowering
        self.fx = fx.Graph()
        self.env: dict[str, dict[Variant, fx.Node]] = {}
        self.placed = {v.value: v for v in (*lowering.graph.parameters, *lowering.graph.buffers)}
        self.ordinal = {op.name: i for i, op in enumerate(lowering.graph.operators)}
        self.drawing = {op.name: i for i, op in enumerate(op for op in lowering.graph.operators if draws(op))}
        self.tensors = lowering.graph.tensors
        self.written = written_buffers(lowering.graph)
        self.part = (0, False)  # number of the run of operators of one layer, and whether it is a repeated layer
        self.layer = ""  # the layer itself
        self.arrived: set[str] = set()

    def build(self) -> LocalStage:
        low, stage = self.low, self.stage
        forms: dict[str, Mapping[str, Placement]] = {}
        for value in stage.variables:
            self.env[value] = {low.variant(low.sharding.forms[value]): self.fx.placeholder(_identifier(value))}
            forms[value] = low.sharding.forms[value]
        for value in stage.variables:
            if low.shares.get(value, 1.0) != 1.0:
                ((variant, node),) = self.env[value].items()
                self.env[value] = {variant: self._node(_bind(counted, share=low.shares[value]), (node,))}
        received = tuple(dict.fromkeys(v for _, values in stage.receives for v in values))
        for value in received:
            self.env[value] = {low.arriving(value): self.fx.placeholder(_identifier(value))}
            forms[value] = dict(zip(low.axes, low.arriving(value), strict=True))
        layer: str | None = None
        for op in stage.operators:
            here = layer_of(op.site)
            if here != layer:
                layer, self.layer, self.part = here, here, (self.part[0] + 1, bool(here))
            self._operator(op)
        sent = tuple(dict.fromkeys(v for _, values in stage.sends for v in values))
        out = []
        for value in sent:
            out.append(self.get(value, low.crossing(value)))
            forms[value] = dict(zip(low.axes, low.crossing(value), strict=True))
        for value in stage.results:
            # A loss stays a summand: its gradient is 1 on every rank, and the sum is only asked for to be shown.
            want = low.handed_out(value) if low.graph.outputs else low.variant(low.sharding.forms[value])
            out.append(self.get(value, want))
            forms[value] = dict(zip(low.axes, want, strict=True))
        self.fx.output(tuple(out))
        self.fx.lint()
        module = fx.GraphModule(torch.nn.Module(), self.fx, class_name=f"Stage{stage.index}")
        return LocalStage(module, stage.variables, received, sent, stage.results, forms)

    def _node(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        node = self.fx.call_function(target, args, kwargs)
        node.meta["part"], node.meta["layer"] = self.part, self.layer
        return node

    def get(self, value: str, want: tuple[Placement | None, ...]) -> fx.Node:
        """The node of `value` in form `want` (None: any), moving it where no earlier move did."""
        have = self.env[value]
        for variant, node in have.items():
            if all(w is None or w == v for w, v in zip(want, variant, strict=True)):
                return node
        source = min(have, key=lambda variant: self._moves(variant, want))
        node, at = have[source], list(source)
        # Summands are summed before anything else, so that later moves carry whole tensors.
        order = sorted(range(len(at)), key=lambda i: at[i] is not P)
        for i in order:
            target = want[i]
            if target is None or target == at[i]:
                continue
            axis = self.low.axes[i]
            node = self._move(node, axis, at[i], target, self._length(value, at, i))
            at[i] = target
            have[tuple(at)] = node
        return node

    def _length(self, value: str, at: Sequence[Placement], i: int) -> int | None:
        """The length, before axis `i` cuts it, of the dimension that it cuts; None where its pieces are equal."""
        placement, n = at[i], self.low.groups[self.low.axes[i]].size
        if not is_shard(placement):
            return None
        others = prod(self.low.groups[axis].size for axis, p in zip(self.low.axes, at, strict=True) if p is placement) // n
        length = self.tensors[value].shape[placement.dim] // others
        return length if length % n else None

    def _move(self, node: fx.Node, axis: str, source: Placement, target: Placement, length: int | None = None) -> fx.Node:
        # Groups are bound, since generated code can only name numbers and text.
        return self._node(_bind(redistribute, source=source, target=target, group=self.low.groups[axis], length=length), (node,))

    def _moves(self, variant: Variant, want: tuple[Placement | None, ...]) -> tuple[int, int]:
        """(collectives, moves) from one variant to another: fewest first."""
        collectives = moves = 0
        for a, b in zip(variant, want, strict=True):
            if b is None or a == b:
                continue
            if not allowed(a, b):
                return 1000, 0
            forward, backward = move_collectives(a, b)
            collectives += (forward not in ("", "slice")) + (backward not in ("", "slice", "pad"))
            moves += 1
        return collectives, moves

    def _operator(self, op: Operator) -> None:
        low = self.low
        rows = low.sharding.needs[op.name]
        for value in low.late.intersection(op.inputs) - self.arrived:
            self.arrived.add(value)
            self.env[value] = {variant: self._node(_bind(arrived, low.arrival), (node,)) for variant, node in self.env[value].items()}
        inputs = [self.get(value, tuple(row[axis] for axis in low.axes)) for value, row in zip(op.inputs, rows, strict=True)]
        if not writes_buffer(op, self.placed):
            # Backward may need what was read, whatever later microbatches write; running statistics are written where they are read.
            kept = self.written - statistics(op)
            inputs = [self._node(snapshot, (x,)) if v in kept else x for v, x in zip(op.inputs, inputs, strict=True)]
        node = self._call(op, inputs)
        if writes_buffer(op, self.placed):  # pieces that were taken from it are of what it held before
            stored = low.variant(low.sharding.forms[op.inputs[0]])
            self.env[op.inputs[0]] = {stored: self.env[op.inputs[0]][stored]}
        made = [low.variant(low.sharding.forms[value]) for value in op.outputs]
        if op.multiple:
            for i, (value, variant) in enumerate(zip(op.outputs, made, strict=True)):
                self.env[value] = {variant: self._node(python_operator.getitem, (node, i))}
        else:
            self.env[op.outputs[0]] = {made[0]: node}

    def _function(self, op: Operator, captured: Function, cut: dict[str, str], tensors: list[Any]) -> fx.Node:
        """A function with a backward of the user's own, which is first tried on pieces as large as this rank's."""
        low, rows = self.low, self.low.sharding.needs[op.name]
        places = {axis: {i: form.dim for i, row in enumerate(rows) if is_shard(form := row[axis])} for axis in cut}
        cuts = [(axis, low.sharding.sizes[axis], places[axis]) for axis in cut]
        specs = tuple(self.tensors[v] for v in op.inputs)
        key = (captured, specs, str(cuts))
        if cuts and key not in low.tried:
            check_cut(captured, specs, cuts, op.site)
            low.tried.add(key)
        scale = prod(self._share(op, axis, cut[axis]) for axis, averages in self._averages(op, cut).items() if averages)
        call = function(captured, low.device, scale)
        if captured.draws:
            call = _bind(drawn, call, low.draw, self._where(op, cut))
        return self._emit(op, call, tensors, {})

    def _shape(self, value: str) -> tuple[int, ...]:
        return self.low.sharding.shape(value, self.tensors[value].shape, at=self.low.at)

    def _call(self, op: Operator, inputs: list[fx.Node]) -> fx.Node:
        given = iter(inputs)
        args = [self._arg(a, given) for a in op.args]
        kwargs = {k: self._arg(a, given) for k, a in op.kwargs}
        cut = {axis: label for axis, label in self.low.sharding.ops[op.name].items() if label}
        if op.function is not None:
            return self._function(op, op.function, cut, args[1:])
        special = self._special(op, cut, args, kwargs)
        if special is not None:
            return special
        if record_of(op).moves == "reshape":
            return self._emit(op, torch.ops.aten.reshape.default, [args[0], list(self._shape(op.outputs[0]))], {})
        if record_of(op).moves == "expand":
            return self._emit(op, torch.ops.aten.expand.default, [args[0], list(self._shape(op.outputs[0]))], {})
        return self._emit(op, self._target(op, cut), args, kwargs)

    def _target(self, op: Operator, cut: Mapping[str, str]) -> Callable[..., Any]:
        """The operator; where windows slide along what is cut, on this rank's part."""
        target, slides = operator_of(op.target), record_of(op).windows
        if slides is None or not cut:
            return target
        rule, windows = self._rule(op), windows_of(op, self.tensors)
        axes = {label: axis for axis, label in cut.items() if rule.kernels.get(label) == HALO}
        if not axes:
            return target
        source, made = self.tensors[op.inputs[0]].shape, self.tensors[op.outputs[0]].shape
        parts = []
        for label, window in windows.items():
            if label not in axes and not isinstance(window, Resample):
                continue
            assert rule.inputs[0] is not None
            dim, into = rule.inputs[0].index(label), rule.outputs[0].index(label)
            group = self.low.groups[axes[label]] if label in axes else None
            here = (0, made[into]) if group is None else pieces(made[into], group.size)[group.index]
            low, high = window.needs(*here, source[dim])
            parts.append(Part(dim, source[dim], window, (min(max(low, 0), source[dim]), max(min(high, source[dim]), 0)), here))
        return _bind(windowed, target, slides, tuple(parts))

    def _shares(self, op: Operator, axis: str, label: str) -> tuple[float, ...]:
        """The part of a label's entries that each rank along an axis has."""
        value, row = next((v, row) for v, row in zip(op.inputs, self._rule(op).inputs, strict=True) if row is not None and label in row)
        length, n = self.tensors[value].shape[row.index(label)], self.low.groups[axis].size
        return tuple((stop - start) / length for start, stop in pieces(length, n)) if length % n else (1 / n,) * n

    def _share(self, op: Operator, axis: str, label: str) -> float:
        """The part of a label's entries that this rank has."""
        return self._shares(op, axis, label)[self.low.groups[axis].index]

    def _emit(self, op: Operator, target: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        if self.low.device.type == "cpu" and not op.autocast and is_product(op, self.tensors, self.low.sharding):
            return self._product(op, *args[:3])
        device, _, dtype = op.autocast.partition(":")
        if not device or (dtype and device != self.low.device.type):
            return self._node(target, tuple(args), kwargs)
        within = _bind(_autocast, device, getattr(torch, dtype)) if dtype else _full_precision
        if isinstance(target, FunctionType) or dtype:  # no operator, so that generated code cannot name it
            called = _bind(within, target)
            called.__name__ = called.__qualname__ = target.__name__.partition(".")[0]  # recomputation knows operators by their names
            return self._node(called, tuple(args), kwargs)
        return self._node(within, (target, *args), kwargs)

    def _product(self, op: Operator, x: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> fx.Node:
        """A convolution whose windows are single elements, as one product over all samples and places."""
        reshape, permute, last = torch.ops.aten.reshape.default, torch.ops.aten.permute.default, len(self.tensors[op.inputs[0]].shape) - 1
        (samples, channels, *places), sizes = read_shapes(op, self.tensors, self.low.sharding, self.low.at)
        rows = self._node(reshape, (self._node(permute, (x, [0, *range(2, last + 1), 1])), [-1, channels]))
        made = self._node(torch.ops.aten.linear.default, (rows, self._node(reshape, (weight, list(sizes[:2]))), bias))
        maps = self._node(permute, (self._node(reshape, (made, [samples, *places, -1])), [0, last, *range(1, last)]))
        return self._node(torch.ops.aten.contiguous.default, (maps,))

    def _arg(self, arg: Arg, given: Any) -> Any:
        if isinstance(arg, Ref):
            return next(given)
        if isinstance(arg, tuple):
            return [self._arg(a, given) for a in arg]
        if isinstance(arg, Word):
            return self.low.device if arg.kind == "device" else getattr(torch, arg.name)
        return arg

    def _special(self, op: Operator, cut: dict[str, str], args: list[Any], kwargs: dict[str, Any]) -> fx.Node | None:
        """Operators that are more than themselves: where a cut needs a kernel, where they are random, where they write a buffer."""
        low = self.low
        if writes_buffer(op, self.placed):
            return self._node(_bind(_write_buffer, operator_of(op.target), low.draw), tuple(args), kwargs)
        record = record_of(op)
        how = record.lowering
        if how == "drop":
            if not (args[2] if len(args) > 2 else True) or args[1] == 0.0:
                return args[0]  # type: ignore[no-any-return]
            if args[1] == 1.0:
                return self._node(torch.ops.aten.mul.Tensor, (args[0], 0.0))
            return self._node(_bind(dropout, draw=low.draw, where=self._where(op, cut)), (args[0], args[1]))
        if how == "attention" and len(args) > 4 and args[4] > 0.0:
            q, k, v, mask, p, causal = (*args, False)[:6]
            call = _bind(attention, draw=low.draw, where=self._where(op, cut))
            return self._node(call, (q, k, v, mask, p, causal, kwargs.get("scale"), kwargs.get("enable_gqa", False)))
        if how == "attention" and low.device.type == "cpu":
            return self._emit(op, _bind(scaled_dot_product_attention, operator_of(op.target)), args, kwargs)
        if draws(op):
            call = _bind(drawn, operator_of(op.target), low.draw, self._where(op, cut))
            return self._node(call, tuple(args), kwargs)
        if how == "batch" and len(args) > 5 and args[5]:
            return self._node(_bind(_batch_norm, low.draw, self._statistics(op, cut)), tuple(args))
        if how in ("groups", "instances") and (parts := self._statistics(op, cut)):
            num_groups, weight, bias = args[1:4] if how == "groups" else (self.tensors[op.inputs[0]].shape[1], *args[1:3])
            eps = args[4] if how == "groups" and len(args) > 4 else args[7] if how == "instances" else 1e-5
            return self._emit(op, _bind(group_norm, num_groups=num_groups, eps=eps, parts=parts), [args[0], weight, bias], {})
        if how == "instances" and len(args) > 5 and args[5] and args[3] is not None:
            return self._node(_bind(_instance_norm, low.draw), tuple(args))
        if how == "memory":
            # It reads memory, and what stands here lies in memory as it was traced: in rows.
            return self._emit(op, operator_of(op.target), [self._node(torch.ops.aten.contiguous.default, (args[0],)), *args[1:]], kwargs)
        if record.sparse_at is not None and len(args) > record.sparse_at:
            args[record.sparse_at] = False  # gradients lie in buffers with others, which are dense
        if how == "pairs":
            # A parameter may begin anywhere in the buffer that it lies in with others, and a complex number only at every second place.
            return self._emit(op, operator_of(op.target), [self._node(torch.ops.aten.clone.default, (args[0],))], kwargs)
        if how == "scatter" and self.tensors[op.outputs[0]].dtype.startswith("complex"):
            return self._node(_bind(_complex_scatter, operator_of(op.target)), tuple(args), kwargs)
        kernels = self._kernels(op, cut)
        if "counted" in kernels:
            return self._node(_bind(masked_scatter, *kernels["counted"]), tuple(args))
        if "extreme" in kernels:
            return self._emit(op, _bind(extreme, kernels["extreme"], record.extreme == "largest"), args, kwargs)
        if record.looks_up and "vocabulary" in kernels:
            rows = self.tensors[op.inputs[0]].shape[0]
            call = _bind(embedding, group=kernels["vocabulary"][0])
            return self._node(call, (args[0], args[1], args[2] if len(args) > 2 else -1, rows))
        soft = how == "classes" and self.tensors[op.inputs[0]].shape == self.tensors[op.inputs[1]].shape
        if how == "classes" and kernels and not soft:
            weight, reduction, ignore, smoothing = (*args, *(None, 1, -100, 0.0)[len(args) - 2 :])[2:6]
            smoothing = kwargs.get("label_smoothing", smoothing)
            classes = self.tensors[op.inputs[0]].shape[1]
            call = _bind(
                cross_entropy,
                rows=kernels.get("average", ()),
                classes=kernels["vocabulary"][0] if "vocabulary" in kernels else None,
                smoothing=smoothing,
                mean=kwargs.get("reduction", reduction) == 1,
            )
            return self._node(call, (args[0], args[1], ignore, classes), {"weight": weight})
        if how == "targets" and "average" in kernels:
            return self._node(_bind(_nll, kernels["average"]), tuple(args))
        average = [axis for axis, averages in self._averages(op, cut).items() if averages]
        if average:
            scale = prod(self._share(op, axis, cut[axis]) for axis in average)
            whole = self._emit(op, self._target(op, cut), args, kwargs)
            return self._node(torch.ops.aten.mul.Tensor, (whole, scale))
        position = record.bias
        if position is not None and len(args) > position and args[position] is not None and self._contracted(op, cut):
            bias, args[position] = args[position], None
            partial_sum = self._emit(op, self._target(op, cut), args, kwargs)
            made = low.sharding.forms[op.outputs[0]]
            for axis in self._contracted(op, cut):
                if made[axis] is P:  # summed later, with the rest: every rank adds its share of the bias
                    bias = self._node(torch.ops.aten.div.Tensor, (bias, low.sharding.sizes[axis]))
                else:
                    partial_sum = self._move(partial_sum, axis, P, R)
            shape = [-1] + [1] * (len(self.tensors[op.outputs[0]].shape) - 2) if record.kind == "convolution" else [-1]
            bias = self._node(torch.ops.aten.reshape.default, (bias, shape)) if len(shape) > 1 else bias
            return self._node(_add_bias, (partial_sum, bias))
        return None

    def _rule(self, op: Operator) -> Rule:
        rule = rule_of(op, self.tensors)
        assert rule is not None, op.name  # only an operator with a rule is ever cut
        return rule

    def _statistics(self, op: Operator, cut: Mapping[str, str]) -> Parts:
        """The groups over which statistics of what is cut are taken, with each member's share."""
        kernels = self._rule(op).kernels if cut else {}
        axes = {axis: label for axis, label in cut.items() if kernels.get(label) == "statistics"}
        return tuple((self.low.groups[axis], self._shares(op, axis, label)) for axis, label in axes.items())

    def _kernels(self, op: Operator, cut: dict[str, str]) -> dict[str, tuple[Group, ...]]:
        """By kernel that a cut needs, the groups of the axes that need it."""
        if not cut:
            return {}
        rule = self._rule(op)
        found: dict[str, tuple[Group, ...]] = {}
        for axis, label in cut.items():
            if kernel := rule.kernels.get(label):
                found[kernel] = (*found.get(kernel, ()), self.low.groups[axis])
        return found

    def _averages(self, op: Operator, cut: dict[str, str]) -> dict[str, bool]:
        if not cut:
            return {}
        rule = self._rule(op)
        return {axis: rule.kernels.get(label) == "average" for axis, label in cut.items()}

    def _contracted(self, op: Operator, cut: dict[str, str]) -> list[str]:
        if not cut:
            return []
        rule = self._rule(op)
        return [axis for axis, label in cut.items() if all(label not in out for out in rule.outputs)]

    def _part(self, cut: dict[str, str]) -> int:
        """Which piece of a cut operator this rank has."""
        part = 0
        for axis in cut:
            part = part * self.low.groups[axis].size + self.low.groups[axis].index
        return part

    def _where(self, op: Operator, cut: dict[str, str]) -> Where:
        """Which draw an operator makes, and where this rank's piece of it lies."""
        made, number = self.tensors[op.outputs[0]], self.drawing[op.name]
        labels = self._rule(op).outputs[0] if cut else ()
        groups = ((labels.index(label), self.low.groups[axis]) for axis, label in cut.items() if label in labels)
        fold = self.low.folds[number] if number < len(self.low.folds) else None
        place = Place(made.shape, tuple((dim, group.index, group.size) for dim, group in groups), fold)
        place = place.over(drawn_shape(op, self.tensors))
        return Where(self.ordinal[op.name], self._part(cut), number, place, getattr(torch, made.dtype))


def layer_of(site: str) -> str:
    """The repeated layer that a site stands in: its path up to the first number; empty outside of layers.

    >>> layer_of("encoder.layers.3.mlp/linear"), layer_of("head/linear")
    ('encoder.layers.3', '')
    """
    found = _LAYER.match(site)
    return found.group(0) if found else ""


def operator_of(target: str) -> Callable[..., Any]:
    namespace, packet, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)  # type: ignore[no-any-return]


def _bind(function: Callable[..., Any], *first: Any, **named: Any) -> Callable[..., Any]:
    """`functools.partial`, with the name that fx writes into the code it generates."""

    def bound(*args: Any, **kwargs: Any) -> Any:
        return function(*first, *args, **named, **kwargs)

    bound.__name__ = bound.__qualname__ = function.__name__.lstrip("_")
    bound.__module__ = function.__module__
    return bound


def _identifier(value: str) -> str:
    return value.replace(".", "_")


def _autocast(device: str, dtype: torch.dtype, target: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device, dtype):
        return target(*args, **kwargs)


def _full_precision(target: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        return target(*args, **kwargs)


def snapshot(buffer: Tensor) -> Tensor:
    """What a buffer or a parameter holds now, for an operator that reads it."""
    return buffer.clone()


def _write_buffer(target: Callable[..., Any], draw: Draw, buffer: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if draw.recomputing:
        return buffer
    later = draw.later.get(id(buffer))
    if later is not None:
        later.writes.setdefault(draw.microbatch, []).append(lambda: target(buffer, *args, **kwargs))
        return buffer
    with torch.no_grad():
        target(_apart(buffer) if buffer.requires_grad else buffer, *args, **kwargs)
    return buffer


def _apart(parameter: Tensor) -> Tensor:
    """The memory of a parameter as a tensor of its own: parameters lie in one buffer, and autograd takes a write to one as one to all."""
    made = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return made.set_(parameter.untyped_storage(), parameter.storage_offset(), parameter.shape, parameter.stride())


def _batch_norm(
    draw: Draw, parts: Parts, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None,
    training: bool, momentum: float, eps: float, *rest: Any,
) -> Tensor:  # fmt: skip
    if mean is not None and var is not None:
        if draw.recomputing:
            mean, var = mean.clone(), var.clone()  # written the first time; left out, torch would keep other tensors for backward
        elif id(mean) in draw.later:
            found = torch.zeros_like(mean), torch.zeros_like(var)
            for buffer, value in zip((mean, var), found, strict=True):
                draw.later[id(buffer)].statistics.setdefault(draw.microbatch, []).append((momentum, value))
            (mean, var), momentum = found, 1.0  # what this microbatch finds, alone
    if not parts:
        return torch.ops.aten.batch_norm.default(x, weight, bias, mean, var, training, momentum, eps, False)  # type: ignore[no-any-return]
    return batch_norm(x, weight, bias, mean, var, momentum, eps, parts)


def _instance_norm(
    draw: Draw, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, training: bool, momentum: float,
    eps: float, *rest: Any,
) -> Tensor:  # fmt: skip
    if draw.recomputing:
        mean, var = mean.clone(), var.clone()
    return torch.ops.aten.instance_norm.default(x, weight, bias, mean, var, training, momentum, eps, False)  # type: ignore[no-any-return]


def _nll(
    rows: tuple[Group, ...], log_probabilities: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore: int = -100
) -> Tensor:
    loss = torch.nn.functional.nll_loss(log_probabilities, target, weight, ignore_index=ignore, reduction="sum")
    count = (target != ignore).sum().to(loss.dtype)
    for group in rows:
        group.all_reduce(count)
    return loss / count


def _complex_scatter(target: Callable[..., Tensor], x: Tensor, source: Tensor, dim: int = 0, *rest: Any, **kwargs: Any) -> Tensor:
    """`slice_scatter` and `select_scatter` of complex numbers, which have no derivative in torch: those of their two parts."""
    parts = target(torch.view_as_real(x), torch.view_as_real(source.to(x.dtype)), dim % x.dim(), *rest, **kwargs)
    return torch.view_as_complex(parts.contiguous())


def _add_bias(x: Tensor, bias: Tensor) -> Tensor:
    return x + bias.to(x.dtype)
