"""Operators that slide windows over positions: convolutions, pools, and what resizes, pads and rearranges images."""

from __future__ import annotations

from math import prod

from weft.ops.keeps import largest, mean_of_windows, operands, others
from weft.ops.operator import Operator
from weft.ops.record import Op, Shape, Tensors, WeightGradient
from weft.ops.rule import Rule, named, only


def is_transposed(op: Operator) -> bool:
    """Whether a convolution is the transposed one, which spreads each place of its input over a window."""
    name = op.target.split(".")[1]
    return "transpose" in name or (name in ("convolution", "_convolution") and len(op.args) > 6 and op.args[6] is True)


def _flops(op: Operator, tensors: Tensors) -> float:
    """2 x outputs (of the transposed: inputs) x (window x channels of a group)."""
    places = prod(tensors[op.inputs[0]].shape) if is_transposed(op) else tensors[op.outputs[0]].size
    return 2.0 * places * prod(tensors[op.inputs[1]].shape[1:])


def _grouped(op: Operator, rule: Rule, ins: list[Shape]) -> Rule:
    """In groups samples alone are cut; a depthwise convolution could be cut by channel, with its own number of groups."""
    groups = op.args[6] if len(op.args) > 6 else 1
    return rule if groups == 1 else only(rule, {"n"})


def _padded(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    """A dimension padded by (+1, -1) keeps its size but not its rows: what is padded is read from the argument."""
    pads = op.args[1]
    rank = len(ins[0])
    touched = {rank - 1 - i // 2 for i, p in enumerate(pads) if p}  # type: ignore[arg-type,var-annotated]
    labels = named(ins[0], touched)
    return Rule((labels,), (labels,))


def _convolution(name: str, rule: str, dims: int, transposed: bool = False) -> Op:
    words = (
        {"input" if dims > 1 else "default": "transposed"} if transposed else {"default": "convolution", "padding": "convolution_padded"}
    )
    return Op(
        name, rule, _grouped, contracts=not transposed, bias=None if transposed else 2, many_ways=not transposed,
        weight=WeightGradient(1, 0, dims + 2, words), kind="convolution", flops=_flops, keeps=operands, autocast="lower",
    )  # fmt: skip


OPS = (
    _convolution("conv1d", "n i !w, o i !x, o -> n o !w", 1),
    _convolution("conv2d", "n i !h !w, o i !x !y, o -> n o !h !w", 2),
    _convolution("conv3d", "n i !z !h !w, o i !x !y !u, o -> n o !z !h !w", 3),
    _convolution("conv_transpose1d", "n i !w, i o !x, o -> n o !w", 1, transposed=True),
    _convolution("conv_transpose2d", "n i !h !w, i o !x !y, o -> n o !h !w", 2, transposed=True),
    _convolution("conv_transpose3d", "n i !z !h !w, i o !x !y !u, o -> n o !z !h !w", 3, transposed=True),
    Op("convolution", kind="convolution", flops=_flops, keeps=operands),
    Op("_convolution", kind="convolution", flops=_flops, keeps=operands, autocast="lower"),
    Op("conv_tbc", autocast="lower"),
    Op("max_pool1d", "n c !w -> n c !w", keeps=largest),
    Op("max_pool2d", "n c !h !w -> n c !h !w", keeps=largest, follows=True),
    Op("max_pool3d", "n c !z !h !w -> n c !z !h !w", keeps=largest, autocast="wider"),
    Op("max_pool2d_with_indices", "n c !h !w -> n c !h !w, n c !h !w", keeps=largest, follows=True),
    Op("adaptive_max_pool1d", "n c !w -> n c !w, n c !w", keeps=largest),
    Op("adaptive_max_pool2d", "n c !h !w -> n c !h !w, n c !h !w", keeps=largest),
    Op("adaptive_max_pool3d", "n c !z !h !w -> n c !z !h !w, n c !z !h !w", keeps=largest, autocast="wider"),
    Op("fractional_max_pool2d fractional_max_pool3d", keeps=largest, autocast="wider"),
    Op("max_unpool2d", "n c !h !w, n c !x !y -> n c !z !u", autocast="wider"),
    Op("max_unpool3d", autocast="wider"),
    Op("avg_pool1d", "n c !w -> n c !w"),
    Op("avg_pool2d", "n c !h !w -> n c !h !w", follows=True),
    Op("avg_pool3d", "n c !z !h !w -> n c !z !h !w", autocast="wider"),
    Op("adaptive_avg_pool1d", "n c !w -> n c !w", keeps=mean_of_windows),
    Op("adaptive_avg_pool2d", "n c !h !w -> n c !h !w", keeps=mean_of_windows, follows=True),
    Op("adaptive_avg_pool3d", "n c !z !h !w -> n c !z !h !w", keeps=mean_of_windows, autocast="wider"),
    Op("upsample_nearest1d", "n c !w -> n c !w", keeps=others),
    Op("upsample_nearest2d upsample_bilinear2d", "n c !h !w -> n c !h !w", keeps=others, follows=True),
    Op("_upsample_nearest_exact1d upsample_linear1d", "n c !w -> n c !w"),
    Op(
        "_upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa upsample_bicubic2d",
        "n c !h !w -> n c !h !w",
    ),
    Op("_upsample_nearest_exact3d upsample_nearest3d upsample_trilinear3d", "n c !z !h !w -> n c !z !h !w"),
    Op("grid_sampler", ("n c !h !w, n !x !y !z -> n c !x !y", "n c !z !h !w, n !x !y !t !u -> n c !x !y !t"), autocast="wider"),
    Op("grid_sampler_2d grid_sampler_3d", autocast="wider"),
    Op("pad constant_pad_nd", _padded, shifts=True, keeps=others, follows=True),
    Op("reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d", autocast="wider"),
    Op("pixel_shuffle", "n !c !h !w -> n !c !h !w", keeps=others),
    Op("pixel_unshuffle channel_shuffle", "n !c !h !w -> n !c !h !w"),
    Op("im2col", "n !c !h !w -> n !c !l", keeps=others),
    Op("col2im", "n !c !l -> n !c !h !w", keeps=others),
)
