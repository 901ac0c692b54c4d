"""What convolutions take on processors besides the gradients of their operands, and how far they fill its vectors.

In: an operator and its tensors. Out: bytes, found by watching; FLOPs made for each that counts.

oneDNN has images in layouts of its own, of blocks of channels, unless their channels are innermost already. torch decides who computes
(`use_mkldnn` in aten/src/ATen/native/Convolution.cpp): oneDNN, but in float64, and in float32 for small maps of one sample and for thin
windows over few samples in one thread (`TorchKernel`). Those are products, of columns where the window is more than one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from fractions import Fraction
from math import prod, sqrt
from typing import Any

from weft.cost.calibration.efficiency import onednn
from weft.cost.pieces import shared_by_data, work_ways
from weft.model.graph import Operator, Tensor
from weft.model.sharding.pointwise import ONEDNN_SAMPLES, read_shapes
from weft.model.sharding.sharding import Sharding
from weft.ops.windows import is_transposed
from weft.plan.axis import DATA


@dataclass(frozen=True, slots=True)
class Filling:
    """How a convolution fills blocks of channels: FLOPs made for each that counts, `forward` and `backward`. `channels`: of one of its
    groups, where those are narrower than a block and compute at a rate of their own; 0 elsewhere."""

    forward: float = 1.0
    backward: float = 1.0
    channels: float = 0.0


FULL = Filling()


@dataclass(frozen=True, slots=True)
class TorchKernel:
    """When torch itself makes a convolution in float32. `alone`: where there is one sample; `thin`: where there are few in one thread.
    `samples`: a rank's, of the graph's batch; `columns_bytes`: of theirs, counted as moved each way."""

    samples: float = 0.0
    alone: bool = False
    thin: bool = False
    columns_bytes: float = 0.0

    def takes(self, scale: Fraction, threads: int) -> bool:
        """Whether it does so at `scale` times the graph's batch.

        >>> one = Fraction(1)
        >>> alone, thin = TorchKernel(samples=8, alone=True), TorchKernel(samples=8, thin=True)
        >>> alone.takes(one / 8, 2), thin.takes(one, 1), thin.takes(one, 2)
        (True, True, False)
        """
        return bool(takes(self.samples * scale.numerator / scale.denominator, self.alone, self.thin, threads))


NEVER = TorchKernel()


def takes(samples: Any, alone: Any, thin: Any, threads: int) -> Any:
    """As `TorchKernel.takes`, of one operator, or by operator as arrays."""
    return (alone & (samples <= 1)) | (thin & (samples < ONEDNN_SAMPLES) & (threads == 1))


def torch_kernel(op: Operator, tensors: Mapping[str, Tensor], sharding: Sharding | None) -> TorchKernel:
    """By a rank's maps: channels or places may be cut, and samples by tensor ranks; those of data replicas are counted together."""
    x, window = read_shapes(op, tensors, sharding)[0], _window(op, tensors)
    if not window or tensors[op.inputs[0]].dtype != "float32":
        return NEVER
    replicas = sharding.sizes.get(DATA, 1) if sharding is not None and shared_by_data(sharding, op.inputs[0]) else 1
    thin = max(window[-2:]) == 1 and not _is_strided(op) and not _is_dilated(op)
    wide = len(window) > 1 and min(window[-2:]) > onednn().wide
    (groups,) = _given(op, "groups", 6)
    moved = columns_bytes(op, tensors) / work_ways(sharding, op) * (onednn().moved_3d if len(window) == 3 else onednn().moved)
    return TorchKernel(x[0] * replicas, prod(x[1:4]) <= onednn().small and not wide and groups == 1, thin, moved)


def filling(op: Operator, tensors: Mapping[str, Tensor], sharding: Sharding | None, grads: Set[str]) -> Filling:
    """Of a rank's channels, which lie in blocks of 16 each way, the last one filled up; the layer that reads few channels (an image's)
    takes them as they are, but for their gradient. One that is transposed runs the other's passes.

    Measured on one core, 3 x 3 windows over 64 channels to 3, 8 to 8, 20 to 20, 40 to 40: without it 0.35, 0.75, 0.48 and 0.71 of the time.
    Depthwise windows up to 3 have kernels that fill what they use.
    """
    if len(tensors[op.inputs[1]].shape) < 3 or _of_single_places(op, tensors):
        return FULL
    x, (out, into, *window) = read_shapes(op, tensors, sharding)
    transposed = is_transposed(op)
    groups = 1 if transposed else max(1, tensors[op.inputs[0]].shape[-1 - len(window)] // tensors[op.inputs[1]].shape[1])
    out = max(1, out // max(1, x[-1 - len(window)] // into)) if groups > 1 else out
    if groups > 1 and max(into, out) < onednn().block:
        return FULL if into == 1 and out == 1 and max(window) <= 3 else Filling(channels=sqrt(into * out))
    both = _filled(out) * _filled(into)
    of_output = both if into > onednn().first else _filled(out)
    forward, through = (both, of_output) if transposed else (of_output, both)
    passes = [filled for value, filled in zip(op.inputs[:2], (through, of_output), strict=True) if value in grads]
    return Filling(forward, sum(passes) / len(passes) if passes else 1.0)


def _filled(channels: int) -> float:
    """Channels that are computed for each: whole blocks.

    >>> _filled(64), _filled(3), _filled(20)
    (1.0, 5.333333333333333, 1.6)
    """
    return -(-channels // onednn().block) * onednn().block / max(1, channels)


def _window(op: Operator, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    return tensors[op.inputs[1]].shape[2:]


def _is_strided(op: Operator) -> bool:
    return any(n != 1 for n in _given(op, "stride", 3))


def _is_dilated(op: Operator) -> bool:
    return any(n != 1 for n in _given(op, "dilation", 7 if is_transposed(op) else 5))


def _given(op: Operator, name: str, at: int) -> tuple[Any, ...]:
    """One of a convolution's settings, by its place; they are 1 by default."""
    value = op.args[at] if len(op.args) > at else dict(op.kwargs).get(name, 1)
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _is_depthwise(op: Operator, tensors: Mapping[str, Tensor]) -> bool:
    x, weight = tensors[op.inputs[0]].shape, tensors[op.inputs[1]].shape
    return len(x) > 1 and x[1] > 1 and weight[:2] == (x[1], 1)


def _of_single_places(op: Operator, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a convolution is one product: of each place by itself."""
    return max(_window(op, tensors), default=1) == 1 and not _is_strided(op)


def relaid_bytes(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str], channels_last: bool) -> float:
    """The output's gradient and the input's (with strides, its values too) in oneDNN's layout."""
    x, out = tensors[op.inputs[0]], tensors[op.outputs[0]]
    if channels_last:
        return 0.0
    if _of_single_places(op, tensors):
        return float(x.size_bytes + out.size_bytes)
    if op.inputs[0] not in grads:
        # Few channels are not laid anew.
        return float(out.size_bytes + (x.size_bytes if x.shape[1] >= onednn().block else 0))
    depthwise = _is_depthwise(op, tensors) and x.dtype == "float32"
    if depthwise and max(_window(op, tensors)) > 3:
        return float(out.size_bytes)
    if not _is_strided(op) or is_transposed(op) or depthwise:
        return float(x.size_bytes + out.size_bytes)
    return float(x.size_bytes + max(x.size_bytes, out.size_bytes))


def workspace_bytes(op: Operator, tensors: Mapping[str, Tensor]) -> float:
    """Of a depthwise convolution with channels innermost whose window is larger than 3: every group is filled up to a block of channels
    each way, its weights' gradient in float32; in bfloat16 the weights besides, and one sample's places of two blocks."""
    x, window = tensors[op.inputs[0]], _window(op, tensors)
    if not _is_depthwise(op, tensors) or max(window, default=1) <= 3:
        return 0.0
    padded = 4.0 * x.shape[1] * prod(window) * onednn().block**2
    return padded if x.dtype != "bfloat16" else 1.5 * padded + 4.0 * onednn().block * prod(x.shape[1:])


def columns_bytes(op: Operator, tensors: Mapping[str, Tensor]) -> float:
    """Bytes, as float32, of one group's columns, by which a convolution is a product where torch makes it itself."""
    out, weight = tensors[op.outputs[0]], tensors[op.inputs[1]]
    window = prod(weight.shape[2:])
    if window == 1 or is_transposed(op):
        return 0.0
    return out.size_bytes / out.shape[1] * weight.shape[1] * window
