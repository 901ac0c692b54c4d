"""Device model of CPU ranks: operators cost what `Speed` measured, nothing overlaps within a host, autocast is over float32 parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.devices.compute import RankRates, Seconds, optimizer_s
from shardwise.cost.devices.convolutions import NO_PADDING
from shardwise.cost.devices.devices import COPY_MOVES, Array, Devices, HostCopies, LayerCollectives
from shardwise.cost.devices.kernel_memory import ProcessorMemory
from shardwise.cost.devices.kernels import LocalKernel, scale_rows
from shardwise.model.work import OperatorWork
from shardwise.plan.layout import Layout

# Added cost of a collective inside layers between CPU hosts, since ranks never arrive at once and find their caches used: measured over
# 124 plans of 15 models at 10 Gbit/s, 0.1 to 0.4 ms (`scripts/bench planned`).
RENDEZVOUS_S = 2e-4
MICROBATCH_S = 3e-4  # executor overhead of one microbatch on one pipeline stage
GLOO_OVERLAP = 0.9  # fraction of a backward that gloo's gradient reduction overlaps with; assumed, since copying takes some of the cores
STEP_S = 1e-3  # fixed overhead of a step: the loop, clipping, logging


@dataclass(frozen=True)
class Processors(Devices):
    """CPU cores, shared by the ranks of a host."""

    kernel_memory = ProcessorMemory
    cast_memory = ProcessorMemory
    uses_autocast = True
    has_even_stages = False
    overlaps_tied_reduction = False
    recomputes_by_operator = True
    num_layers_loaded = 1
    has_persistent_gradients = False

    def operator_seconds(
        self, layout: Layout, kernels: Sequence[tuple[LocalKernel, Fraction]], index: NDArray[np.intp], repeated: NDArray[np.bool_]
    ) -> tuple[Array, Array]:
        rates = RankRates.of(self.speed(layout), layout.precision)
        seconds = []
        for kernel, factor in kernels:
            k = scale_rows(kernel, factor)
            uses_torch = layout.precision in ("float32", "tf32") and k.torch_kernel.applies(factor, rates.speed.threads)
            filling, columns = (NO_PADDING, k.torch_kernel.columns_bytes * float(factor)) if uses_torch else (k.channel_padding, 0.0)
            work = OperatorWork(
                k.kind, flops=k.flops * filling.forward, backward_flops=k.backward_flops * filling.backward, bytes=k.bytes + columns,
                backward_bytes=k.backward_bytes and k.backward_bytes + 2 * columns, weight_bytes=k.weight_bytes, scores=k.scores,
                channels=filling.channels, steps=k.steps, cast_bytes=k.cast_bytes, backward_cast_bytes=k.backward_cast_bytes,
                taps=k.taps, backward_taps=k.backward_taps,
            )  # fmt: skip
            seconds.append(rates.seconds(work))
        return np.array([s.forward for s in seconds])[index], np.array([s.backward for s in seconds])[index]

    def with_microbatch_overhead(self, layout: Layout, busy: Seconds, num_trained: float) -> tuple[Seconds, float]:
        if layout.num_ranks * layout.microbatches > 1:
            busy += Seconds(MICROBATCH_S / 2, MICROBATCH_S / 2)
        # The first microbatch copies its gradients to the accumulation buffers; every other reads, adds to and writes those.
        passes = 3 - 1 / layout.microbatches
        adding = passes * self.widths(layout).gradient * num_trained / self.speed(layout).memory_bandwidth_bytes_per_s
        return busy + Seconds(0.0, adding), adding

    def optimizer_s(self, layout: Layout, num_updated: float, states: int) -> float:
        speed, widths = self.speed(layout), self.widths(layout)
        update = optimizer_s(speed, num_updated, states)
        # Offloaded optimizer: gradients are copied there and weights back, read and written, around the same update.
        moved = num_updated * (widths.gradient + widths.weight) if layout.offloads_optimizer else 0.0
        return update + 2 * moved / speed.memory_bandwidth_bytes_per_s

    def copies(self, layout: Layout) -> HostCopies:
        return HostCopies(COPY_MOVES / self.speed(layout).memory_bandwidth_bytes_per_s, overlap_compute=False)

    def layer_collectives(self, layout: Layout) -> LayerCollectives:
        return LayerCollectives(rendezvous_s=RENDEZVOUS_S if self._uses_gloo(layout) else 0.0, wait_fraction=self.speed(layout).waits)

    def overlap(self, layout: Layout) -> float:
        """Return the overlap: none between ranks of one host, whose reductions take compute; gloo's threads overlap over a network."""
        return GLOO_OVERLAP * self._uses_gloo(layout)

    def receives_beside(self, layout: Layout) -> bool:
        return self._uses_gloo(layout)

    def overhead_s(self, layout: Layout, pipeline_s: float) -> float:
        return STEP_S

    def _uses_gloo(self, layout: Layout) -> bool:
        """Return whether ranks are on several hosts, or the host uses gloo."""
        spans_hosts = self.cluster.ranks_per_node(layout.num_ranks) < layout.num_ranks
        return spans_hosts or self.cluster.levels[0].link.protocol == "gloo"
