"""Seconds of one operator's kernels on one GPU. In: its local sizes, an efficiency set, a device. Out: forward and backward.

A matrix product takes its FLOPs at the fraction of peak that large products reach, plus a fraction of its operand traffic time: so
efficiency falls smoothly with the smallest of its local m, n and k (for k = n -> infinity it is that fraction; the roofline's ridge,
Williams et al. 2009, sets where it halves). Memory-bound operators run at the fraction of bandwidth that such kernels reach. Attention
either saves its scores (written and read by each kernel of the softmax) or is one fused kernel, whose rate rises with positions and head
size, and which skips what a causal mask hides. The host launches kernels ahead of the device: a layer takes the longer of the two, and
slightly more if they are close (`overlap_launches`). Not modelled: waves of tiles, and cache hits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster.cluster import Device
from shardwise.cost.calibration.efficiency import EfficiencySet
from shardwise.cost.devices.compute import Seconds
from shardwise.cost.devices.convolutions import NEVER, NO_PADDING, ChannelPadding, TorchKernel
from shardwise.model.work import MATMUL_KINDS
from shardwise.plan.ir.precision import PRECISIONS

# Kernels that a framework launches for an operator, forward and backward (biases, dropout and casts included or fused).
LAUNCHES: dict[str, tuple[int, int]] = {
    "linear": (2, 4), "attention": (8, 12), "convolution": (2, 4), "recurrent": (4, 8), "norm": (1, 2), "batch_norm": (1, 2),
    "activation": (1, 1),
    "elementwise": (2, 2), "softmax": (12, 6), "gather": (2, 4), "make": (1, 0),
}  # fmt: skip
FUSED_ATTENTION = (2, 3)
# The same in eager mode under autocast, with casts of operands and of weights' gradients: 2,500 kernels of a step of 24 blocks of a
# transformer, 990 of ResNet-50 (torch 2.11, `scripts/bench gpu`).
EAGER_LAUNCHES: dict[str, tuple[int, int]] = {
    "linear": (5, 11), "attention": (8, 12), "convolution": (4, 7), "recurrent": (4, 8), "norm": (2, 4), "batch_norm": (1, 2),
    "activation": (1, 2), "elementwise": (2, 2), "softmax": (3, 3), "gather": (2, 4), "make": (1, 0),
}  # fmt: skip
EAGER_LAUNCH_FACTOR = 3.0  # launch time of each over that of one addition, from Python and through autograd; as measured there
UNFUSED_SOFTMAX = (10, 6)  # additional kernels if the fused softmax does not apply
OVERLAP_EXPONENT = 3.0  # exponent of the mean of host and device; fitted with stack."a100-megatron-deepspeed"
ALIGNED = 8  # sides of 16-bit products that fill the matrix units: NVIDIA's deep learning performance guide, "matrix multiplication"
ALIGNED_FLOAT8 = 16  # sides of 8-bit products are multiples of it
LAYOUT_COPY_BYTES = 2.0  # bytes moved per byte that a convolution reads or writes, for a copy in another layout: read and written
ELEMENT_BYTES = {  # bytes moved per element
    "float64": 8.0, "float32": 4.0, "tf32": 4.0, "bfloat16": 2.0, "bfloat16-mixed": 2.0, "float16": 2.0, "float8": 2.0, "float8-rows": 2.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelTraffic:
    """Bytes that an operator moves, forward and backward, and those of its casts."""

    bytes: float = 0.0
    backward_bytes: float = 0.0
    cast_bytes: float = 0.0
    backward_cast_bytes: float = 0.0


NO_TRAFFIC = KernelTraffic()


@dataclass(frozen=True, slots=True)
class LocalKernel:
    """One operator at its local sizes. `flops`, `backward_flops`: of products. `bytes`, `backward_bytes`: moved, in float32.

    `m`, `n`, `k`: of a product, n including its siblings (products of one input run as one), of which `share` is this operator's. `scores`,
    `heads`: of attention, numbers of scores and of heads times samples; `visible_fraction`: fraction of scores that a causal mask leaves;
    `head_size`: size of a head. `weight_bytes`: of operands without a batch dimension, in float32. On CPUs, `channel_padding`: channel
    padding; `torch_kernel`: when torch's own kernel replaces oneDNN's; `cast_bytes`, `backward_cast_bytes`: moved to cast operands and
    their gradients; `steps`: unfused steps of a recurrence; `taps`, `backward_taps`: window entries that are read one by one.
    `batch_independent`: traffic of weights and their gradients, which does not depend on the number of rows.
    """

    kind: str
    flops: float = 0.0
    backward_flops: float = 0.0
    bytes: float = 0.0
    backward_bytes: float = 0.0
    m: float = 0.0
    n: float = 0.0
    k: float = 0.0
    share: float = 1.0
    scores: float = 0.0
    heads: float = 0.0
    weight_bytes: float = 0.0
    channel_padding: ChannelPadding = NO_PADDING
    torch_kernel: TorchKernel = NEVER
    cast_bytes: float = 0.0
    backward_cast_bytes: float = 0.0
    steps: float = 0.0
    visible_fraction: float = 1.0
    head_size: float = 0.0
    batch_independent: KernelTraffic = NO_TRAFFIC
    taps: float = 0.0
    backward_taps: float = 0.0

    def seconds(self, device: Device, stack: EfficiencySet, precision: str, eager: bool = False) -> tuple[Seconds, Seconds]:
        """Return (host seconds of launching it, device seconds of running it), forward and backward each. `eager`: eager mode, with
        `bytes` counted in the dtypes of autocast.

        Raises:
            Infeasible: the device lacks the precision.
        """
        if self.kind == "view":
            return Seconds(), Seconds()
        precision = PRECISIONS[precision].kernel_precision
        launches, launch_s = (EAGER_LAUNCHES, EAGER_LAUNCH_FACTOR * stack.launch_s) if eager else (LAUNCHES, stack.launch_s)
        forward, backward = launches.get(self.kind, launches["elementwise"])
        if self.kind == "attention":
            busy, fused_launches = self._attention_seconds(device, stack, precision, eager)
            forward, backward = (forward, backward) if eager else fused_launches
        elif self.kind in MATMUL_KINDS:
            busy = self._product_seconds(device, stack, precision)
        elif eager:
            busy = self._memory_seconds(device, stack, precision, self.kind)
        else:
            busy = self._traffic_seconds(device, stack, precision)
        if eager:
            busy += self._cast_seconds(device, stack, precision)
        has_backward = self.backward_bytes > 0
        host = Seconds(forward * self.share * launch_s, backward * self.share * launch_s * has_backward)
        return host, Seconds(busy.forward, busy.backward * has_backward)

    def _memory_seconds(self, device: Device, stack: EfficiencySet, precision: str, kind: str, times: float = 1.0) -> Seconds:
        """Seconds of moving `times` its bytes at the rate of torch's eager kernels of `kind`."""
        each = times * _width_factor(precision, True) / (device.memory_bandwidth_bytes_per_s * stack.bandwidth_fraction(kind))
        return Seconds(self.bytes * each, self.backward_bytes * each)

    def _cast_seconds(self, device: Device, stack: EfficiencySet, precision: str) -> Seconds:
        """Seconds of an eager operator's other kernels: casts (a loss reads 16 bits itself), and a convolution's copies into and out of its
        kernels' layout."""
        if self.kind == "convolution" and precision not in dict(stack.convolution):
            return self._memory_seconds(device, stack, precision, "convolution", LAYOUT_COPY_BYTES)
        if self.kind == "softmax":
            return Seconds()
        rate = device.memory_bandwidth_bytes_per_s * stack.bandwidth_fraction("cast")
        return Seconds(self.cast_bytes / rate, self.backward_cast_bytes / rate)

    def _product_seconds(self, device: Device, stack: EfficiencySet, precision: str) -> Seconds:
        if PRECISIONS[precision].linear_dtype:
            return self._float8_seconds(device, stack, precision)
        if self.kind == "convolution" and (rate := dict(stack.convolution).get(precision)):
            return Seconds(self.flops / rate, self.backward_flops / rate)
        peak = device.peak(precision) * stack.matmul * stack.sustained
        width = ELEMENT_BYTES[precision]
        if not self.n:
            operands = Seconds(self.bytes * width / 4, self.backward_bytes * width / 4)
        else:
            if width == 2.0 and any(side % ALIGNED for side in (int(self.m), int(self.n), int(self.k))):
                peak *= stack.unaligned
            traffic_bytes = width * (self.m * self.k + self.k * self.n + self.m * self.n) * self.share
            operands = Seconds(traffic_bytes, traffic_bytes * self.backward_flops / self.flops)
        through = stack.operands / device.memory_bandwidth_bytes_per_s
        begin = stack.product_s * self.share
        products = self.backward_flops / self.flops if self.flops else 0.0  # one per operand with a gradient
        return Seconds(
            self.flops / peak + operands.forward * through + begin,
            self.backward_flops / peak + operands.backward * through + products * begin,
        )

    def _float8_seconds(self, device: Device, stack: EfficiencySet, precision: str) -> Seconds:
        """Seconds of a float8 product: of a linear layer's three products two (`lower/kernels/scaled`), or all, run on 8-bit operands, cast
        from 16: input and weight for forward, gradient and weight once more for backward, and the input once more where the weight's
        gradient is 8-bit too. Other products are 16-bit."""
        num_narrow = 3 if PRECISIONS[precision].scales_tensors else stack.float8_products
        wide = self._product_seconds(device, stack, PRECISIONS[precision].product_dtype)
        if not (self.kind == "linear" and self.n and self.flops) or any(int(side) % ALIGNED_FLOAT8 for side in (self.n, self.k)):
            return wide
        gain = 1 / device.peak(PRECISIONS[precision].product_dtype) - 1 / device.peak(precision)
        saved = self.flops * gain / (stack.matmul * stack.sustained)
        through = stack.float8_cast_bytes / (device.memory_bandwidth_bytes_per_s * stack.bandwidth)
        input_size, weight_size, output_size = (side * self.share for side in (self.m * self.k, self.k * self.n, self.m * self.n))
        return Seconds(
            wide.forward - saved + (input_size + weight_size) * through,
            wide.backward - saved * (num_narrow - 1) + (output_size + weight_size + input_size * (num_narrow == 3)) * through,
        )

    def _traffic_seconds(self, device: Device, stack: EfficiencySet, precision: str) -> Seconds:
        width, factor, fraction = _width_factor(precision, False), stack.traffic, stack.bandwidth
        if self.kind == "softmax":
            width, factor = 1.0, stack.loss_traffic  # losses are float32
        elif stack.moves and not stack.autocast:
            factor, fraction = 1.0, stack.bandwidth_fraction(self.kind)
        rate = factor * width / (device.memory_bandwidth_bytes_per_s * fraction)
        return Seconds(self.bytes * rate, self.backward_bytes * rate)

    def _attention_rate(self, stack: EfficiencySet) -> float:
        """Fraction of the peak that fused attention reaches in forward, on the scores that it forms."""
        positions = self.scores / self.heads if self.heads else 0.0  # query positions times key positions
        slower = 1 + stack.attention_positions / positions**0.5 if positions else 1.0
        return stack.attention_peak / slower / (1 + stack.attention_head / self.head_size if self.head_size else 1.0)

    def _attention_seconds(self, device: Device, stack: EfficiencySet, precision: str, eager: bool) -> tuple[Seconds, tuple[int, int]]:
        bandwidth = device.memory_bandwidth_bytes_per_s * stack.bandwidth
        width = _width_factor(precision, eager)
        moved = Seconds(self.bytes * width / bandwidth, self.backward_bytes * width / bandwidth)
        if stack.attention == "fused":
            forward = (
                self.visible_fraction * self.flops / (device.peak(PRECISIONS[precision].product_precision) * self._attention_rate(stack))
            )
            backward = self.backward_flops / self.flops / stack.attention_backward if self.flops else 0.0
            return Seconds(forward, backward * forward) + moved, FUSED_ATTENTION
        peak = device.peak(PRECISIONS[precision].product_precision) * stack.matmul * stack.sustained
        launches = LAUNCHES["attention"]
        factor = stack.score_traffic
        if stack.softmax_batches and self.heads % stack.softmax_batches:
            launches = (launches[0] + UNFUSED_SOFTMAX[0], launches[1] + UNFUSED_SOFTMAX[1])
            factor *= 2
        scores = factor * self.scores * ELEMENT_BYTES[precision] / 2 / bandwidth
        # Saved scores are not recomputed in backward: two products for each of forward's.
        return Seconds(self.flops / peak + SCORE_BYTES[0] * scores, 2 * self.flops / peak + SCORE_BYTES[1] * scores) + moved, launches


def _width_factor(precision: str, eager: bool) -> float:
    """Return bytes moved per byte counted: relative to float32, or in `eager` mode relative to autocast's dtypes."""
    return ELEMENT_BYTES[precision] / 4 if not eager or precision == "float64" else 1.0


# Bytes of one 16-bit score through memory: products write and read them (2 + 2), softmax and dropout read and write (2 + 2 each) with
# a mask (1); backward: 2 + 2 + 2 for the products, 2 + 2 + 2 for softmax, 2 + 2 + 1 for dropout (Korthikanti et al. 2022, section 4).
SCORE_BYTES = (13.0, 17.0)


def overlap_launches(host: NDArray[np.float64], device: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds of each operator if the host launches all of them ahead of the device.

    Their sum is (host^q + device^q)^(1/q) of the sums, q = `OVERLAP_EXPONENT`, divided in proportion to host and device times.

    >>> import numpy as np
    >>> overlap_launches(np.array([1.0, 1.0]), np.array([0.01, 0.02])).round(3)
    array([1., 1.])
    """
    launch, busy = float(host.sum()), float(device.sum())
    longest = max(launch, busy)
    if longest <= 0:
        return device
    a, b = (launch / longest) ** OVERLAP_EXPONENT, (busy / longest) ** OVERLAP_EXPONENT
    part = a / (a + b)
    shares = part * host / max(launch, 1e-30) + (1 - part) * device / max(busy, 1e-30)
    return np.asarray(longest * (a + b) ** (1 / OVERLAP_EXPONENT) * shares, dtype=np.float64)


def scale_rows(kernel: LocalKernel, by: Fraction) -> LocalKernel:
    """Return the kernel at `by` times the rows: exact, since divisibility of numbers of rows or heads matters.

    >>> scale_rows(LocalKernel("linear", m=1474560.0), Fraction(1, 720)).m
    2048.0
    """
    k, up, down = kernel, by.numerator, by.denominator

    def moved(name: str) -> float:
        scaling, fixed = float(getattr(k, name)), float(getattr(k.batch_independent, name))
        return max(0.0, scaling - fixed) * up / down + fixed

    return replace(
        k, flops=k.flops * up / down, backward_flops=k.backward_flops * up / down, m=k.m * up / down, scores=k.scores * up / down,
        heads=k.heads * up / down, bytes=moved("bytes"), backward_bytes=moved("backward_bytes"), cast_bytes=moved("cast_bytes"),
        backward_cast_bytes=moved("backward_cast_bytes"), taps=k.taps * up / down, backward_taps=k.backward_taps * up / down,
    )  # fmt: skip


def optimizer_s(device: Device, stack: EfficiencySet, num_parameters: float, states: int = 2) -> float:
    """Seconds of an optimizer step in mixed precision, `stack.optimizer_bytes` a parameter with Adam's two states.

    Read: a 16-bit gradient, float32 weight and states; written: the last three and the 16-bit weight.
    """
    moved = stack.optimizer_bytes - 8.0 * (2 - states)
    return num_parameters * moved / (device.memory_bandwidth_bytes_per_s * stack.bandwidth)
