"""Device model of GPUs and TPUs, one rank each: an efficiency set, in mixed precision as in Megatron-LM or under autocast.

A GPU that was measured here (`shardwise.cluster.probe`) has the rates of its `Speed` in place of its set's. Its peak and bandwidth are the
rates that products and additions reached, so that fractions of them are 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import log, sqrt

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster.cluster import Device, Speed
from shardwise.cost.calibration.efficiency import EfficiencySet
from shardwise.cost.devices.compute import Seconds
from shardwise.cost.devices.devices import (
    HOST_BYTES_PER_S,
    Array,
    Devices,
    HostCopies,
    LayerCollectives,
    LayerSaving,
    Widths,
    gradient_bytes,
)
from shardwise.cost.devices.kernel_memory import KernelMemory
from shardwise.cost.devices.kernels import LocalKernel, optimizer_s, overlap_launches, scale_rows
from shardwise.model.strides.autocast_dtypes import CAST
from shardwise.plan.ir.precision import PRECISIONS
from shardwise.plan.layout import Layout
from shardwise.plan.residency import CHEAP
from shardwise.schedules import schedule_of

AUTOCAST = "bfloat16"
WEIGHT_CAST_BYTES = 6.0  # of a parameter: read in 32 bits and written in 16, and its gradient the other way
OPTIMIZER_BYTES = 28.0  # a float32 weight, its gradient and two states are read, all but the gradient written
CONVOLUTION = "convolution."
MEASURED = ("activation", "norm", "batch_norm", "softmax", "cast")
HOST_ADAM_S = 2.0e-9  # Adam step of one parameter on the host's CPUs, of which a GPU has an eighth; assumed


class AutocastMemory(KernelMemory):
    """Memory of torch's GPU kernels under autocast: redistributed operands are saved as read, float32 values stay float32."""

    saves_as_read = True
    is_half = False


@dataclass(frozen=True)
class Gpus(Devices):
    """GPUs with 16-bit weights and activations, or by shardwise's own set autocast over float32 weights. `stack`: their efficiency set."""

    stack: EfficiencySet

    kernel_memory = KernelMemory
    cast_memory = AutocastMemory
    uses_autocast = False
    has_even_stages = True
    overlaps_tied_reduction = True
    recomputes_by_operator = False
    has_persistent_gradients = True
    num_layers_loaded = 2  # copies overlap with compute: the next layer is loaded meanwhile

    def is_eager(self, layout: Layout) -> bool:
        """Return whether operators run in eager mode; other frameworks' sets were measured with their own fused kernels."""
        return False

    def casts_weights(self, layout: Layout) -> bool:
        """Return whether weights are float32 and cast by autocast: `precision=bfloat16` as shardwise runs it.

        Other software, which has sets of its own, has 16-bit weights under that name.
        """
        return layout.precision == AUTOCAST and self.stack.is_own

    def cast_mode(self, layout: Layout) -> str:
        return CAST if self.casts_weights(layout) else super().cast_mode(layout)

    def times_casts(self, layout: Layout) -> bool:
        return not self.casts_weights(layout) and super().times_casts(layout)

    def widths(self, layout: Layout) -> Widths:
        """Return the widths: 16-bit weights have float32 copies, bfloat16 gradients accumulate in float32, as in Megatron-LM."""
        if self.casts_weights(layout) or not PRECISIONS[layout.precision].product_dtype:
            return super().widths(layout)
        width = self.stack.gradient_bytes if layout.precision == "float16" else min(gradient_bytes(layout), self.stack.main_gradient_bytes)
        return Widths(2.0, width, 4.0)

    def operator_seconds(
        self, layout: Layout, kernels: Sequence[tuple[LocalKernel, Fraction]], index: NDArray[np.intp], repeated: NDArray[np.bool_]
    ) -> tuple[Array, Array]:
        """Price numbered blocks and the operators around them as two streams of kernels each way: the host waits for the loss."""
        eager, device = self.is_eager(layout), self.cluster.device
        seconds = [scale_rows(kernel, by).seconds(device, self.stack, layout.precision, eager) for kernel, by in kernels]
        by_pass = []
        for way in ("forward", "backward"):
            host, busy = (np.array([getattr(pair[i], way) for pair in seconds])[index] for i in (0, 1))
            total = np.empty(len(host))
            for stream in (repeated, ~repeated):
                total[stream] = overlap_launches(host[stream], busy[stream])
            by_pass.append(total)
        return by_pass[0], by_pass[1]

    def with_microbatch_overhead(self, layout: Layout, busy: Seconds, num_trained: float) -> tuple[Seconds, float]:
        stack, device = self.stack, self.cluster.device
        # Wider gradients move more bytes.
        moved = stack.accumulate_bytes + 2 * max(0.0, self.widths(layout).gradient - stack.gradient_bytes)
        rate = device.memory_bandwidth_bytes_per_s * stack.bandwidth
        adding = moved * num_trained / rate * (layout.microbatches > 1)
        casting = WEIGHT_CAST_BYTES * num_trained / rate * self.casts_weights(layout)
        return busy + Seconds(stack.microbatch_s / 2 + casting, stack.microbatch_s / 2 + casting + adding), adding

    def optimizer_s(self, layout: Layout, num_updated: float, states: int) -> float:
        if not layout.offloads_optimizer:
            return optimizer_s(self.cluster.device, self.stack, num_updated, states)
        widths = self.widths(layout)
        return num_updated * (widths.gradient + widths.weight) / HOST_BYTES_PER_S + num_updated * HOST_ADAM_S

    def copies(self, layout: Layout) -> HostCopies:
        return HostCopies(1 / HOST_BYTES_PER_S, overlap_compute=True)

    def layer_collectives(self, layout: Layout) -> LayerCollectives:
        stack, share = self.stack, self.stack.fused_share if self.fuses_products(layout) else 1.0
        copy_s = 2 / (self.cluster.device.memory_bandwidth_bytes_per_s * stack.bandwidth) * stack.copies_pieces
        has_float8_products = bool(PRECISIONS[layout.precision].linear_dtype)
        return LayerCollectives(
            stack.tensor, 1.0 - stack.tensor_overlap, ring_overlap=1.0, fused_share=share, gathers_again=self.gathers_again(layout),
            product_overlap=self.zero_overlap, contention=self.contention, has_float8_products=has_float8_products, copy_s_per_byte=copy_s,
            scatters_alone=stack.scatters_alone, gather_width=0.5 if has_float8_products and stack.gathers_float8 else 1.0,
            gathers_keys=stack.gathers_keys,
        )  # fmt: skip

    def gathers_again(self, layout: Layout) -> bool:
        """Return whether they do: as shardwise runs an undivided backward. Other software's sets have their own `tensor_overlap`."""
        return self.stack.is_own and not schedule_of(layout).splits_backward

    def fuses_products(self, layout: Layout) -> bool:
        """Return whether they run fused: with pieces of positions, on ranks of one host, in 16 bits or more, in an undivided backward."""
        if self.stack.fused_share == 1.0 or layout.tensor == 1 or layout.grid or layout.inner or layout.sequence_parallel != "on":
            return False
        is_narrow = bool(PRECISIONS[layout.precision].linear_dtype)
        return not is_narrow and self.cluster.node_size % layout.tensor == 0 and not schedule_of(layout).splits_backward

    def overlap(self, layout: Layout) -> float:
        return self.stack.overlap

    def overhead_s(self, layout: Layout, pipeline_s: float) -> float:
        return self.stack.step_s + straggler_slowdown(layout.num_ranks, self.stack.spread) * pipeline_s

    @property
    def uses_buckets(self) -> bool:
        return self.stack.overlap > 0

    @property
    def contention(self) -> float:
        return self.stack.contention

    @property
    def zero_overlap(self) -> float:
        return max(self.stack.overlap, self.stack.zero_overlap)

    def exposed_send_fraction(self, layout: Layout) -> float:
        return 0.0 if layout.chunks > 1 and self.stack.hides_chunk_sends else self.stack.exposed_sends

    @property
    def gathers_once(self) -> bool:
        return self.stack.gathers_once

    def defers_sums(self, layout: Layout) -> bool:
        return self.stack.defers_sums and layout.pipeline > 1 and layout.scatters_last

    def layer_saving(self, layout: Layout) -> LayerSaving:
        stack, is_narrow = self.stack, bool(PRECISIONS[layout.precision].linear_dtype)
        return LayerSaving(
            stack.saved_float8_products if is_narrow else stack.saved_products, stack.stops_early, stack.fuses_activations,
            stack.fuses_layers and not layout.recompute.startswith(CHEAP), is_narrow and stack.saves_float8, stack.has_loss_in_place,
            stack.has_float32_loss,
        )  # fmt: skip

    @property
    def scatters_sends(self) -> bool:
        return self.stack.scatters_sends

    @property
    def all_reduces(self) -> bool:
        return self.stack.all_reduces

    @property
    def saves_scores(self) -> bool:
        return self.stack.attention == "scores"

    def describe_efficiency(self, precision: str) -> str:
        return self.stack.describe_source(self.cluster.device, precision)


@dataclass(frozen=True)
class AutocastGpus(Gpus):
    """GPUs as shardwise uses them: autocast over float32 parameters, operator by operator; every microbatch casts the weights anew.

    Compiled models save about as much as frameworks with 16-bit activations: the compiler recomputes casts, norms and activations.
    """

    kernel_memory = AutocastMemory
    uses_autocast = True
    has_persistent_gradients = False

    def is_eager(self, layout: Layout) -> bool:
        return layout.compile != "on"

    def cast_mode(self, layout: Layout) -> str:
        return Devices.cast_mode(self, layout) if self.is_eager(layout) else ""

    def casts_weights(self, layout: Layout) -> bool:
        return False  # operator by operator, where each is timed with its casts

    def widths(self, layout: Layout) -> Widths:
        return Devices.widths(self, layout)


def straggler_slowdown(num_ranks: int, spread: float) -> float:
    """Return the expected delay of the slowest of `num_ranks` ranks relative to the mean time.

    The expected largest of n normal deviates is about sqrt(2 ln n) standard deviations (Gumbel 1958) of `spread` each.

    >>> round(straggler_slowdown(3072, 0.01), 3)
    0.04
    """
    return spread * sqrt(2 * log(num_ranks)) if num_ranks > 1 else 0.0


def with_measured_rates(stack: EfficiencySet, device: Device, speed: Speed) -> EfficiencySet:
    """Return `stack` with the rates that were measured on this GPU."""
    rates, bandwidth = dict(speed.rates), speed.memory_bandwidth_bytes_per_s
    moves = {"elementwise": 1.0, **{kind: rates[kind] / bandwidth for kind in MEASURED if kind in rates}}
    convolutions = {key.removeprefix(CONVOLUTION): rate for key, rate in rates.items() if key.startswith(CONVOLUTION)}
    return replace(
        stack, device=device.name, source="measured here", matmul=1.0, sustained=1.0, bandwidth=1.0, moves=tuple(moves.items()),
        convolution=tuple(convolutions.items()), optimizer_bytes=OPTIMIZER_BYTES, launch_s=speed.launch_s,
    )  # fmt: skip
