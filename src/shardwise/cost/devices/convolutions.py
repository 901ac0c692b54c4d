"""Convolution kernels on CPUs: workspace of backward (measured bytes) and channel padding (FLOPs computed per useful FLOP).

oneDNN stores images in blocked layouts (nChw16c) unless they are channels-last. torch decides which library computes (`use_mkldnn` in
aten/src/ATen/native/Convolution.cpp): oneDNN, except in float64, and in float32 for small maps of one sample and for thin windows over
few samples in one thread (`TorchKernel`). torch's own kernels are matrix products, over im2col columns if the window is larger than one
position.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from fractions import Fraction
from math import prod, sqrt
from typing import Any

from shardwise.cost.calibration.efficiency import onednn_library
from shardwise.cost.shard_counts import is_sharded_over_data, num_work_shards
from shardwise.model.graph import Operator, Tensor
from shardwise.model.sharding.convolution_as_product import ONEDNN_SAMPLES, local_operand_shapes
from shardwise.model.sharding.sharding import Sharding
from shardwise.ops.windows import is_transposed
from shardwise.plan.ir.axis import DATA


@dataclass(frozen=True, slots=True)
class ChannelPadding:
    """Padding of channels to blocks: FLOPs computed per useful FLOP, `forward` and `backward`. `channels`: channels of a group if groups
    are narrower than a block and run at a separate rate; else 0."""

    forward: float = 1.0
    backward: float = 1.0
    channels: float = 0.0


NO_PADDING = ChannelPadding()


@dataclass(frozen=True, slots=True)
class TorchKernel:
    """Conditions under which torch's own kernel computes a float32 convolution. `alone`: for one sample; `thin`: for few samples in one
    thread. `samples`: a rank's, of the graph's batch; `columns_bytes`: im2col bytes moved for them each way."""

    samples: float = 0.0
    alone: bool = False
    thin: bool = False
    columns_bytes: float = 0.0

    def applies(self, scale: Fraction, threads: int) -> bool:
        """Return whether torch's kernel is used at `scale` times the graph's batch.

        >>> one = Fraction(1)
        >>> alone, thin = TorchKernel(samples=8, alone=True), TorchKernel(samples=8, thin=True)
        >>> alone.applies(one / 8, 2), thin.applies(one, 1), thin.applies(one, 2)
        (True, True, False)
        """
        return bool(uses_torch_kernel(self.samples * scale.numerator / scale.denominator, self.alone, self.thin, threads))


NEVER = TorchKernel()


def uses_torch_kernel(samples: Any, alone: Any, thin: Any, threads: int) -> Any:
    """Return whether torch's kernel is used (see `TorchKernel`), for one operator or elementwise for arrays."""
    return (alone & (samples <= 1)) | (thin & (samples < ONEDNN_SAMPLES) & (threads == 1))


def torch_kernel(op: Operator, tensors: Mapping[str, Tensor], sharding: Sharding | None) -> TorchKernel:
    """Return the conditions for a rank's shapes: channels, positions and samples may be sharded; samples count over all data replicas."""
    x, window = local_operand_shapes(op, tensors, sharding)[0], _window_of(op, tensors)
    if not window or tensors[op.inputs[0]].dtype != "float32":
        return NEVER
    replicas = sharding.sizes.get(DATA, 1) if sharding is not None and is_sharded_over_data(sharding, op.inputs[0]) else 1
    thin = max(window[-2:]) == 1 and not _is_strided(op) and not _is_dilated(op)
    wide = len(window) > 1 and min(window[-2:]) > onednn_library().wide
    (groups,) = _setting_of(op, "groups", 6)
    moved = (
        columns_bytes(op, tensors)
        / num_work_shards(sharding, op)
        * (onednn_library().moved_3d if len(window) == 3 else onednn_library().moved)
    )
    return TorchKernel(x[0] * replicas, prod(x[1:4]) <= onednn_library().small and not wide and groups == 1, thin, moved)


def channel_padding(op: Operator, tensors: Mapping[str, Tensor], sharding: Sharding | None, grads: Set[str]) -> ChannelPadding:
    """Return the padding of a rank's channels to blocks of 16 on each side; a layer of few input channels (an image's) has those unpadded,
    except for their gradient. A transposed convolution swaps the passes.

    Measured on one core, 3 x 3 windows over 64 channels to 3, 8 to 8, 20 to 20, 40 to 40: without it 0.35, 0.75, 0.48 and 0.71 of the time.
    Depthwise windows up to 3 have kernels without padding.
    """
    if len(tensors[op.inputs[1]].shape) < 3 or _is_pointwise(op, tensors):
        return NO_PADDING
    x, (out, into, *window) = local_operand_shapes(op, tensors, sharding)
    transposed = is_transposed(op)
    groups = 1 if transposed else max(1, tensors[op.inputs[0]].shape[-1 - len(window)] // tensors[op.inputs[1]].shape[1])
    out = max(1, out // max(1, x[-1 - len(window)] // into)) if groups > 1 else out
    if groups > 1 and max(into, out) < onednn_library().block:
        return NO_PADDING if into == 1 and out == 1 and max(window) <= 3 else ChannelPadding(channels=sqrt(into * out))
    both_sides = _padding_factor(out) * _padding_factor(into)
    by_output = both_sides if into > onednn_library().first else _padding_factor(out)
    forward, input_gradient = (both_sides, by_output) if transposed else (by_output, both_sides)
    passes = [filled for value, filled in zip(op.inputs[:2], (input_gradient, by_output), strict=True) if value in grads]
    return ChannelPadding(forward, sum(passes) / len(passes) if passes else 1.0)


def _padding_factor(channels: int) -> float:
    """Return channels computed per useful channel: whole blocks.

    >>> _padding_factor(64), _padding_factor(3), _padding_factor(20)
    (1.0, 5.333333333333333, 1.6)
    """
    return -(-channels // onednn_library().block) * onednn_library().block / max(1, channels)


def _window_of(op: Operator, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    return tensors[op.inputs[1]].shape[2:]


def _is_strided(op: Operator) -> bool:
    return any(n != 1 for n in _setting_of(op, "stride", 3))


def _is_dilated(op: Operator) -> bool:
    return any(n != 1 for n in _setting_of(op, "dilation", 7 if is_transposed(op) else 5))


def _setting_of(op: Operator, name: str, at: int) -> tuple[Any, ...]:
    """Return one of a convolution's settings by name and argument index, as a tuple; the default is 1."""
    value = op.args[at] if len(op.args) > at else dict(op.kwargs).get(name, 1)
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _is_depthwise(op: Operator, tensors: Mapping[str, Tensor]) -> bool:
    x, weight = tensors[op.inputs[0]].shape, tensors[op.inputs[1]].shape
    return len(x) > 1 and x[1] > 1 and weight[:2] == (x[1], 1)


def _is_pointwise(op: Operator, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a convolution is a matrix product over positions: window and stride of one."""
    return max(_window_of(op, tensors), default=1) == 1 and not _is_strided(op)


@dataclass(frozen=True, slots=True)
class _Image:
    """An image on a rank, with the samples of all data replicas."""

    size_bytes: float
    num_channels: int

    @property
    def blocked_bytes(self) -> float:
        """Bytes in oneDNN's layout."""
        return self.size_bytes * _padding_factor(self.num_channels)


def _local_images(op: Operator, tensors: Mapping[str, Tensor], sharding: Sharding | None) -> tuple[_Image, _Image]:
    """Return a rank's input and output of a convolution."""
    x, out = tensors[op.inputs[0]], tensors[op.outputs[0]]
    local_x, local_weight = local_operand_shapes(op, tensors, sharding)
    replicas = sharding.sizes.get(DATA, 1) if sharding is not None and is_sharded_over_data(sharding, op.inputs[0]) else 1
    at = 1 if is_transposed(op) else 0
    share = local_weight[at] / tensors[op.inputs[1]].shape[at]
    rows = replicas * prod((local_x[0], *local_x[2:])) / prod((x.shape[0], *x.shape[2:]))
    return (
        _Image(x.size_bytes * rows * local_x[1] / x.shape[1], local_x[1]),
        _Image(out.size_bytes * rows * share, max(1, round(out.shape[1] * share))),
    )


def layout_copy_bytes(
    op: Operator, tensors: Mapping[str, Tensor], grads: Set[str], channels_last: bool, sharding: Sharding | None = None
) -> float:
    """Return the bytes of copies in oneDNN's layout: of the output's and the input's gradients (with strides also of the input).

    Channels are padded to blocks. The gradient of an input of few channels is there in blocks, or as it is returned. Groups narrower than a
    block have one copy at a time.
    """
    if channels_last:
        return 0.0
    x, out = _local_images(op, tensors, sharding)
    groups = _num_groups(op, tensors)
    depthwise, block = _is_depthwise(op, tensors), onednn_library().block
    if groups > 1 and not depthwise and max(tensors[v].shape[1] for v in (op.inputs[0], op.outputs[0])) < groups * block:
        return max(x.size_bytes, out.size_bytes)
    if is_transposed(op):
        return x.size_bytes + out.size_bytes
    if _is_pointwise(op, tensors):
        return x.blocked_bytes + out.blocked_bytes
    is_narrow = x.num_channels < block
    if op.inputs[0] not in grads:
        # Inputs of few channels are not copied.
        return out.blocked_bytes + (0.0 if is_narrow else x.blocked_bytes)
    depthwise = depthwise and tensors[op.inputs[0]].dtype == "float32"
    if depthwise and max(_window_of(op, tensors)) > 3:
        return out.size_bytes
    if not _is_strided(op) or depthwise:
        return x.blocked_bytes + out.blocked_bytes - (x.size_bytes if is_narrow and not depthwise else 0.0)
    if is_narrow:
        return x.size_bytes + max(x.size_bytes, out.size_bytes)
    return x.blocked_bytes + max(x.blocked_bytes, out.blocked_bytes)


def _num_groups(op: Operator, tensors: Mapping[str, Tensor]) -> int:
    """Return the number of groups."""
    return 1 if is_transposed(op) else max(1, tensors[op.inputs[0]].shape[1] // tensors[op.inputs[1]].shape[1])


def workspace_bytes(op: Operator, tensors: Mapping[str, Tensor]) -> float:
    """Return the workspace of a channels-last depthwise convolution with a window above 3: every group padded to a block of channels on
    each side, its weights' gradient in float32; in bfloat16 also the weights, and one sample's positions of two blocks."""
    x, window = tensors[op.inputs[0]], _window_of(op, tensors)
    if not _is_depthwise(op, tensors) or max(window, default=1) <= 3:
        return 0.0
    padded = 4.0 * x.shape[1] * prod(window) * onednn_library().block ** 2
    return padded if x.dtype != "bfloat16" else 1.5 * padded + 4.0 * onednn_library().block * prod(x.shape[1:])


def columns_bytes(op: Operator, tensors: Mapping[str, Tensor]) -> float:
    """Return the bytes, as float32, of one group's im2col columns in torch's own kernel."""
    out, weight = tensors[op.outputs[0]], tensors[op.inputs[1]]
    window = prod(weight.shape[2:])
    if window == 1 or is_transposed(op):
        return 0.0
    return out.size_bytes / out.shape[1] * weight.shape[1] * window
