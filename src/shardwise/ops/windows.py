"""Sliding-window operators: convolutions, pools, interpolation, padding and pixel rearrangement."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from shardwise.ops.operator import Operator
from shardwise.ops.record import (
    SAVES_INTEGERS,
    Backward,
    Op,
    Product,
    RuleOfShapes,
    RuleOfTensors,
    Shape,
    Tensors,
    View,
    WeightGradient,
    Windows,
)
from shardwise.ops.rule import BLOCKED, HALO, Labels, Rule, restrict_rule
from shardwise.ops.saved_tensors import product_operands, window_indices, window_mean_input
from shardwise.ops.sliding_window import ResamplingWindow, SlidingWindow, TransposedWindow, Window
from shardwise.ops.vocabulary import AutocastPolicy, CostKind, LoweringKind, Reduction


def is_transposed(op: Operator) -> bool:
    """Return whether a convolution is transposed."""
    name = op.target.split(".")[1]
    return "transpose" in name or (name in ("convolution", "_convolution") and len(op.args) > 6 and op.args[6] is True)


def _convolution_flops(op: Operator, tensors: Tensors) -> float:
    """FLOPs: 2 x outputs (inputs if transposed) x window x channels of a group."""
    num_positions = prod(tensors[op.inputs[0]].shape) if is_transposed(op) else tensors[op.outputs[0]].size
    return 2.0 * num_positions * prod(tensors[op.inputs[1]].shape[1:])


POSITIONS = ("z~", "h~", "w~")  # labels of an image's dimensions: depth, height, width
LABELS = tuple(word[0] for word in POSITIONS)


MEAN_TAP_COST, MAX_TAP_COST = (1.0, 1.0), (4.0, 0.0)  # a maximum compares, and has a gradient at one tap only


def _spatial_labels(dims: int) -> tuple[str, ...]:
    return LABELS[-dims:]


def per_dim_ints(op: Operator, position: int, dims: int, default: int = 0) -> tuple[int, ...] | None:
    """Return an argument with one number per dimension, or one for all; None where it is neither."""
    value = op.args[position] if len(op.args) > position else default
    values = value if isinstance(value, tuple) else (value,)
    if value is None or value == () or not all(isinstance(n, int) for n in values):
        return None
    return tuple(int(n) for n in values) * (dims if len(values) == 1 else 1)


def _windows_by_label(make: type[SlidingWindow | TransposedWindow], kernel: Shape, *others: Shape) -> Mapping[str, Window]:
    """Return windows of a kernel and its stride, dilation and padding, by label."""
    rows = zip(_spatial_labels(len(kernel)), kernel, *others, strict=True)
    return {label: make(size, stride, dilation, before) for label, size, stride, dilation, before in rows}


def _convolution_windows(dims: int) -> Windows:
    """Return windows of a convolution: (x, weight, bias, stride, padding, dilation, groups); padding may be "same" or "valid"."""

    def of(op: Operator, tensors: Tensors) -> Mapping[str, Window]:
        kernel = tensors[op.inputs[1]].shape[2:]
        stride, dilation = per_dim_ints(op, 3, dims, 1), per_dim_ints(op, 5, dims, 1)
        word = op.args[4] if len(op.args) > 4 else 0
        if stride is None or dilation is None or len(tensors[op.inputs[0]].shape) != dims + 2:
            return {}
        before = tuple(d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True)) if word == "same" else (0,) * dims
        before = before if isinstance(word, str) else per_dim_ints(op, 4, dims) or before
        return _windows_by_label(SlidingWindow, kernel, stride, dilation, before)

    return Windows(of, padding=4)


def _transposed_windows(dims: int) -> Windows:
    """Return windows of a transposed convolution: (x, weight, bias, stride, padding, output padding, groups, dilation)."""

    def of(op: Operator, tensors: Tensors) -> Mapping[str, Window]:
        stride, dilation, before = per_dim_ints(op, 3, dims, 1), per_dim_ints(op, 7, dims, 1), per_dim_ints(op, 4, dims)
        if stride is None or dilation is None or before is None or len(tensors[op.inputs[0]].shape) != dims + 2:
            return {}
        return _windows_by_label(TransposedWindow, tensors[op.inputs[1]].shape[2:], stride, dilation, before)

    return Windows(of, padding=4)


def _pool_windows(dims: int, average: bool) -> Windows:
    """Return windows of pools: (x, kernel, stride, padding, dilation, ceil) of a maximum, (x, kernel, stride, padding, ceil, counts) of an
    average. With `ceil` an average has none: the divisor of its last window does not follow from a shard."""

    def of(op: Operator, tensors: Tensors) -> Mapping[str, Window]:
        kernel, ceil = per_dim_ints(op, 1, dims), 4 if average else 5
        stride = (per_dim_ints(op, 2, dims) if len(op.args) > 2 else None) or kernel
        dilation, before = (1,) * dims if average else per_dim_ints(op, 4, dims, 1), per_dim_ints(op, 3, dims)
        if kernel is None or stride is None or dilation is None or before is None:
            return {}
        if len(tensors[op.inputs[0]].shape) != dims + 2 or (average and len(op.args) > ceil and op.args[ceil]):
            return {}
        return _windows_by_label(SlidingWindow, kernel, stride, dilation, before)

    if average:
        return Windows(of, padding=3, counts_padding_at=5, tap_cost=MEAN_TAP_COST)
    return Windows(of, padding=3, fill=float("-inf"), tap_cost=MAX_TAP_COST)


def _adaptive_windows(dims: int) -> Windows:
    """Return windows of an adaptive pool with equal bins."""

    def of(op: Operator, tensors: Tensors) -> Mapping[str, Window]:
        source, target = tensors[op.inputs[0]].shape, tensors[op.outputs[0]].shape
        if len(source) != dims + 2:
            return {}
        rows = zip(_spatial_labels(dims), source[2:], target[2:], strict=True)
        return {label: SlidingWindow(n // m, n // m) for label, n, m in rows if n % m == 0}

    return Windows(of, tap_cost=MEAN_TAP_COST)


def _resize_windows(dims: int, order: int, shift: float = 0.0) -> Windows:
    """Return windows of interpolation: (x, size, [aligned], factors) or (x, size, [aligned], factor of each dimension)."""

    def of(op: Operator, tensors: Tensors) -> Mapping[str, Window]:
        source, target = tensors[op.inputs[0]].shape[2:], tensors[op.outputs[0]].shape[2:]
        aligned = order > 0 and op.args[2] is True
        options = op.args[3 if order else 2 :]
        factors = options[0] if op.target.endswith(".vec") and options else options
        scales = []
        for i, (n, m) in enumerate(zip(source, target, strict=True)):
            factor = factors[i] if isinstance(factors, tuple) and len(factors) > i else None
            exact = 1.0 / factor if isinstance(factor, float) and factor > 0 else n / m
            scales.append(((n - 1) / (m - 1) if m > 1 else 0.0) if aligned else exact)
        return {label: ResamplingWindow(order, scale, aligned, shift) for label, scale in zip(_spatial_labels(dims), scales, strict=True)}

    return Windows(of)


def _grouped_rule(op: Operator, rule: Rule, ins: list[Shape]) -> Rule:
    """Return the rule of a grouped convolution: whole groups are sharded, with their input and output channels."""
    groups = op.args[6] if len(op.args) > 6 else 1
    if groups == 1 or not isinstance(groups, int):
        return rule

    def with_groups(row: Labels, dim: int) -> Labels:
        return (*row[:dim], "o", *row[dim + 1 :])

    ungrouped = restrict_rule(rule, {"n", *LABELS})
    x, weight, *bias = (row or () for row in ungrouped.inputs)
    inputs = (with_groups(x, 1), with_groups(weight, 0), *(("o",) for _ in bias))
    return Rule(inputs, (with_groups(ungrouped.outputs[0], 1),), {**ungrouped.kernels, "o": "groups"}, {"o": groups})


def _pad_windows(op: Operator, tensors: Tensors) -> Mapping[str, Window]:
    """Return windows of constant padding by label: (x, pads, value), or (x, pads, mode, value)."""
    pads, rank = op.args[1], len(tensors[op.inputs[0]].shape)
    if op.target.split(".")[1] == "pad" and len(op.args) > 2 and op.args[2] != "constant":
        return {}
    assert isinstance(pads, tuple)
    before = {rank - 1 - i // 2: int(p) for i, p in enumerate(pads) if i % 2 == 0}
    padded_dims = {rank - 1 - i // 2 for i, p in enumerate(pads) if p}
    return {f"d{dim}": SlidingWindow(1, padding_before=before[dim]) for dim in padded_dims}


def _pad_autocast(op: Operator, tensors: Tensors) -> AutocastPolicy:
    """Return the policy of float32 for the modes whose kernels torch calls in it."""
    mode = op.args[2] if len(op.args) > 2 else "constant"
    return AutocastPolicy.FLOAT32 if mode in ("reflect", "replicate") else AutocastPolicy.NONE


def _pad_rule(op: Operator, tensors: Tensors) -> Rule:
    """Return the rule of padding: padded dimensions are read from the argument, since (+1, -1) keeps the size."""
    shape, target = tensors[op.inputs[0]].shape, tensors[op.outputs[0]].shape
    slides = _pad_windows(op, tensors)
    padded = {len(shape) - 1 - i // 2 for i, p in enumerate(op.args[1]) if p}  # type: ignore[arg-type,var-annotated]
    labels = tuple(f"d{i}" if n > 1 and target[i] > 1 and (i not in padded or f"d{i}" in slides) else BLOCKED for i, n in enumerate(shape))
    return Rule((labels,), (labels,), {x: HALO for x in labels if x in slides})


def _convolution_record(name: str, rule: str, dims: int, transposed: bool = False) -> Op:
    words = (
        {"input" if dims > 1 else "default": "transposed"} if transposed else {"default": "convolution", "padding": "convolution_padded"}
    )
    return Op(
        name, rule, _grouped_rule, reduction=Reduction.NONE if transposed else Reduction.SUM, kind=CostKind.CONVOLUTION,
        product=Product(_convolution_flops, weight=WeightGradient(1, 0, dims + 2, words), bias=None if transposed else 2),
        windows=_transposed_windows(dims) if transposed else _convolution_windows(dims), backward=Backward(product_operands),
        lowering=LoweringKind.GROUPED_CONVOLUTION, autocast=AutocastPolicy.LOW_PRECISION,
    )  # fmt: skip


def _adaptive_rule(dims: int) -> RuleOfShapes:
    """Return the rule of an adaptive average: over bins, or over an entire dimension."""

    def rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
        if len(ins[0]) != dims + 2:
            return None
        source = tuple(x if n > 1 else BLOCKED for x, n in zip(("n", "c", *_spatial_labels(dims)), ins[0], strict=True))
        out = tuple(x if n > 1 else BLOCKED for x, n in zip(source, outs[0], strict=True))
        return Rule((source,), (out,), {x: HALO if x in out else "average" for x in source[2:] if x})

    return rule


OPS = (
    _convolution_record("conv1d", "n i w~, o i !x, o -> n o w~", 1),
    _convolution_record("conv2d", "n i h~ w~, o i !x !y, o -> n o h~ w~", 2),
    _convolution_record("conv3d", "n i z~ h~ w~, o i !x !y !u, o -> n o z~ h~ w~", 3),
    _convolution_record("conv_transpose1d", "n i w~, i o !x, o -> n o w~", 1, transposed=True),
    _convolution_record("conv_transpose2d", "n i h~ w~, i o !x !y, o -> n o h~ w~", 2, transposed=True),
    _convolution_record("conv_transpose3d", "n i z~ h~ w~, i o !x !y !u, o -> n o z~ h~ w~", 3, transposed=True),
    Op("convolution", kind=CostKind.CONVOLUTION, product=Product(_convolution_flops), backward=Backward(product_operands)),
    Op(
        "_convolution", kind=CostKind.CONVOLUTION, product=Product(_convolution_flops), backward=Backward(product_operands),
        autocast=AutocastPolicy.LOW_PRECISION,
    ),
    Op("conv_tbc", autocast=AutocastPolicy.LOW_PRECISION),
    Op("max_pool1d", "n c w~ -> n c w~", windows=_pool_windows(1, average=False), backward=Backward(window_indices)),
    Op("max_pool2d", "n c h~ w~ -> n c h~ w~", windows=_pool_windows(2, average=False), backward=Backward(window_indices)),
    Op(
        "max_pool3d", "n c z~ h~ w~ -> n c z~ h~ w~", windows=_pool_windows(3, average=False), backward=Backward(window_indices),
        autocast=AutocastPolicy.FLOAT32,
    ),
    Op("max_pool2d_with_indices", "n c !h !w -> n c !h !w, n c !h !w", backward=Backward(window_indices)),
    Op("adaptive_max_pool1d", "n c !w -> n c !w, n c !w", backward=Backward(window_indices)),
    Op("adaptive_max_pool2d", "n c !h !w -> n c !h !w, n c !h !w", backward=Backward(window_indices)),
    Op(
        "adaptive_max_pool3d", "n c !z !h !w -> n c !z !h !w, n c !z !h !w", backward=Backward(window_indices),
        autocast=AutocastPolicy.FLOAT32,
    ),
    Op("fractional_max_pool2d fractional_max_pool3d", backward=Backward(window_indices), autocast=AutocastPolicy.FLOAT32),
    Op("max_unpool2d", "n c !h !w, n c !x !y -> n c !z !u", autocast=AutocastPolicy.FLOAT32),
    Op("max_unpool3d", autocast=AutocastPolicy.FLOAT32),
    Op("avg_pool1d", "n c w~ -> n c w~", windows=_pool_windows(1, average=True)),
    Op("avg_pool2d", "n c h~ w~ -> n c h~ w~", windows=_pool_windows(2, average=True)),
    Op("avg_pool3d", "n c z~ h~ w~ -> n c z~ h~ w~", windows=_pool_windows(3, average=True), autocast=AutocastPolicy.FLOAT32),
    Op("adaptive_avg_pool1d", _adaptive_rule(1), windows=_adaptive_windows(1), backward=Backward(window_mean_input)),
    Op("adaptive_avg_pool2d", _adaptive_rule(2), windows=_adaptive_windows(2), backward=Backward(window_mean_input)),
    Op(
        "adaptive_avg_pool3d", _adaptive_rule(3), windows=_adaptive_windows(3), backward=Backward(window_mean_input),
        autocast=AutocastPolicy.FLOAT32,
    ),
    Op("upsample_nearest1d", "n c w~ -> n c w~", windows=_resize_windows(1, 0), backward=SAVES_INTEGERS),
    Op("upsample_nearest2d", "n c h~ w~ -> n c h~ w~", windows=_resize_windows(2, 0), backward=SAVES_INTEGERS),
    Op("upsample_bilinear2d", "n c h~ w~ -> n c h~ w~", windows=_resize_windows(2, 1), backward=SAVES_INTEGERS),
    Op("_upsample_nearest_exact1d", "n c w~ -> n c w~", windows=_resize_windows(1, 0, 0.5)),
    Op("upsample_linear1d", "n c w~ -> n c w~", windows=_resize_windows(1, 1)),
    Op("_upsample_bilinear2d_aa _upsample_bicubic2d_aa upsample_bicubic2d", "n c !h !w -> n c !h !w"),
    Op("_upsample_nearest_exact2d", "n c h~ w~ -> n c h~ w~", windows=_resize_windows(2, 0, 0.5)),
    Op("_upsample_nearest_exact3d", "n c z~ h~ w~ -> n c z~ h~ w~", windows=_resize_windows(3, 0, 0.5)),
    Op("upsample_nearest3d", "n c z~ h~ w~ -> n c z~ h~ w~", windows=_resize_windows(3, 0)),
    Op("upsample_trilinear3d", "n c z~ h~ w~ -> n c z~ h~ w~", windows=_resize_windows(3, 1)),
    Op(
        "grid_sampler", ("n c !h !w, n !x !y !z -> n c !x !y", "n c !z !h !w, n !x !y !t !u -> n c !x !y !t"),
        autocast=AutocastPolicy.FLOAT32,
    ),
    Op("grid_sampler_2d grid_sampler_3d", autocast=AutocastPolicy.FLOAT32),
    Op(
        "pad", RuleOfTensors(_pad_rule), view=View(mixes_positions=True), windows=Windows(_pad_windows, padding=1, fill_at=3),
        backward=SAVES_INTEGERS, autocast=_pad_autocast,
    ),
    Op(
        "constant_pad_nd", RuleOfTensors(_pad_rule), view=View(mixes_positions=True), windows=Windows(_pad_windows, padding=1, fill_at=2),
        backward=SAVES_INTEGERS,
    ),
    Op("reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d", autocast=AutocastPolicy.FLOAT32),
    Op("pixel_shuffle", "n !c !h !w -> n !c !h !w", backward=SAVES_INTEGERS),
    Op("pixel_unshuffle channel_shuffle", "n !c !h !w -> n !c !h !w"),
    Op("im2col", "n !c !h !w -> n !c !l", backward=SAVES_INTEGERS),
    Op("col2im", "n !c !l -> n !c !h !w", backward=SAVES_INTEGERS),
)  # fmt: skip
