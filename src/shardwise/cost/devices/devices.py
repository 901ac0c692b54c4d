"""Device interface of the cost model. In: a cluster, a layout. Out: seconds and bytes of a rank's operators and overheads.

CPU cores (`processors`) and accelerators (`gpus`) implement it; no other module distinguishes the two.

On GPUs host copies of offloaded activations have a stream in each direction: offload during forward, load during backward, so that a pass
takes as long as the longer of its compute and its copies (KARMA: Wahib et al., SC 2020; vDNN: Rhu et al. 2016). On CPUs they add to the
compute's time. Not modelled: the first copy, which waits for the first layer, and the last, for which backward may wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster.cluster import Cluster, Speed
from shardwise.cost.devices.compute import Seconds
from shardwise.cost.devices.kernel_memory import KernelMemory
from shardwise.cost.devices.kernels import LocalKernel
from shardwise.model.strides.autocast_dtypes import CAST, HELD
from shardwise.plan.ir.precision import PRECISIONS
from shardwise.plan.layout import Layout

HOST_BYTES_PER_S = 12e9  # host copies of one GPU: half of PCIe 4 x16, shared by two; assumed
HOST_SLOWS = 0.1  # slowdown of compute as a fraction of the seconds of concurrent host copies; assumed
COPY_MOVES = 3.0  # bytes moved per byte that a CPU copies into new memory: read, written, and cleared by the system before
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes per parameter: weight, gradient, the optimizer's float32 copy of the weight, one moment, and a weight that is not trained."""

    weight: float
    gradient: float
    copies: float
    moment: float = 4.0
    frozen: float = 4.0


def gradient_bytes(layout: Layout) -> float:
    """Return the bytes of an element of the accumulated gradients of 16-bit weights."""
    return 2.0 if layout.gradients == "bfloat16" else 4.0


@dataclass(frozen=True, slots=True)
class LayerCollectives:
    """Collectives inside layers: their time relative to the library's own, the exposed fraction of those of backward, the added time until
    all ranks arrive, the fraction by which compute grows from waiting, the fraction of ring traffic that may overlap with compute, and the
    fraction that shows of what runs fused with products: gathers of forward and scatters of backward over tensor ranks.

    `copy_s_per_byte`: of copying a tensor whose positions are gathered or scattered, behind its samples. `scatters_alone`: `slowdown` is of
    collectives in products, and those that scatter sums of products' results in backward are not. `gather_width`: of what forward gathers,
    relative to what it computes with. `gathers_keys`: keys and values are repeated for all query heads, and forward gathers them.
    `gathers_again`: linear layers keep their rank's piece of what is gathered for them, and communicate in backward beside their products,
    for at most `product_overlap` of these; what does takes `contention` of its time from compute. `has_float8_products`: those of the
    layers with sides that fit are 8-bit.
    """

    slowdown: float = 1.0
    exposed_backward: float = 1.0
    rendezvous_s: float = 0.0
    wait_fraction: float = 0.0
    ring_overlap: float = 0.0  # none on CPUs, where it takes the cores that compute
    fused_share: float = 1.0
    gathers_again: bool = False
    product_overlap: float = 0.0
    contention: float = 0.0
    has_float8_products: bool = False
    copy_s_per_byte: float = 0.0
    scatters_alone: bool = False
    gather_width: float = 1.0
    gathers_keys: bool = False


@dataclass(frozen=True, slots=True)
class LayerSaving:
    """What layers save and run again where it is not what the graph's operators do (`cost.operators.layer_saving`).

    `saved_products`: fraction of a layer's products whose results `recompute=cheap` saves; the others run again, and so do the gathers of
    all products' inputs. `stops_early`: recomputation of a layer ends before products whose results backward does not need.
    `fuses_activations`: one kernel makes activations and multiplies them, and saves only what it reads. `fuses_layers`: so does a compiler
    with all that is made from what is saved anyway, norms too. `narrows_operands`: products save 8-bit copies of their operands in place of
    these. `has_loss_in_place`: the loss saves its 16-bit logits and writes their gradient over them; `has_float32_loss`: backward has its
    gradients in 32 bits.
    """

    saved_products: float = 1.0
    stops_early: bool = False
    fuses_activations: bool = False
    fuses_layers: bool = False
    narrows_operands: bool = False
    has_loss_in_place: bool = False
    has_float32_loss: bool = False


AS_COUNTED = LayerSaving()


@dataclass(frozen=True)
class Devices(ABC):
    """Properties of a kind of device. `busy`: (concurrent ranks, threads of each); None for those of a layout.

    `kernel_memory`: memory of kernels beyond the graph's tensors, `cast_memory`: under autocast. `uses_autocast`: 16-bit precision means
    autocast, operator by operator, so that over float32 parameters only results of products are communicated in 16 bits; without it
    everything is. `has_even_stages`: frameworks give stages equally many layers.
    `overlaps_tied_reduction`: reduction of tied weights overlaps with backward like others. `recomputes_by_operator`: selective
    recomputation is counted by operator. `num_layers_loaded`: offloaded layers that are on the device at once. `has_persistent_gradients`:
    gradient buffers persist between steps, as in Megatron-LM.
    """

    cluster: Cluster
    busy: tuple[int, int] | None

    kernel_memory: ClassVar[type[KernelMemory]]
    cast_memory: ClassVar[type[KernelMemory]]
    uses_autocast: ClassVar[bool]
    has_even_stages: ClassVar[bool]
    overlaps_tied_reduction: ClassVar[bool]
    recomputes_by_operator: ClassVar[bool]
    num_layers_loaded: ClassVar[int]
    has_persistent_gradients: ClassVar[bool]

    def speed(self, layout: Layout) -> Speed:
        """Return the speed of one of a layout's ranks."""
        return self.cluster.speed(*(self.busy or (layout.num_ranks, layout.threads)))

    def cast_mode(self, layout: Layout) -> str:
        """Return whether autocast casts operators one by one, over weights of 32 bits (`CAST`) or of 16 (`HELD`); else empty."""
        precision = PRECISIONS[layout.precision]
        return (HELD if precision.held_dtype else CAST) if self.uses_autocast and precision.product_dtype else ""

    def times_casts(self, layout: Layout) -> bool:
        """Return whether operators are timed in the dtypes of autocast, cast by cast, and not only their memory counted so."""
        return bool(self.cast_mode(layout))

    def is_half(self, layout: Layout) -> bool:
        """Return whether all saved activations are 16-bit."""
        return bool(PRECISIONS[layout.precision].product_dtype) and not self.cast_mode(layout)

    def widths(self, layout: Layout) -> Widths:
        """Return the widths of a parameter's state: those of the trained dtype, and of 16-bit weights with float32 main weights."""
        if PRECISIONS[layout.precision].held_dtype:
            return Widths(2.0, gradient_bytes(layout), 4.0)
        return Widths(8.0, 8.0, 0.0, 8.0, 8.0) if layout.precision == "float64" else Widths(4.0, 4.0, 0.0)

    @abstractmethod
    def operator_seconds(
        self, layout: Layout, kernels: Sequence[tuple[LocalKernel, Fraction]], index: NDArray[np.intp], repeated: NDArray[np.bool_]
    ) -> tuple[Array, Array]:
        """Return forward and backward seconds by operator. Operator i is `kernels[index[i]]` with the factor of its rows; `repeated[i]`:
        it is in a numbered block."""

    @abstractmethod
    def with_microbatch_overhead(self, layout: Layout, busy: Seconds, num_trained: float) -> tuple[Seconds, float]:
        """Return (a stage's `busy` seconds with the overhead of a microbatch, the seconds of it that accumulate gradients)."""

    @abstractmethod
    def optimizer_s(self, layout: Layout, num_updated: float, states: int) -> float:
        """Seconds of an optimizer step."""

    @abstractmethod
    def copies(self, layout: Layout) -> HostCopies:
        """Return the cost of host copies."""

    @abstractmethod
    def layer_collectives(self, layout: Layout) -> LayerCollectives:
        """Return the properties of collectives inside layers."""

    @abstractmethod
    def overlap(self, layout: Layout) -> float:
        """Return the fraction of a backward that gradient reduction may overlap with."""

    @abstractmethod
    def overhead_s(self, layout: Layout, pipeline_s: float) -> float:
        """Seconds of a step's fixed overhead and of waiting for the slowest rank."""

    @property
    def uses_buckets(self) -> bool:
        """Return whether gradients are reduced in buckets."""
        return True

    @property
    def contention(self) -> float:
        """Fraction of overlapped communication time that is taken from compute."""
        return 0.0

    @property
    def zero_overlap(self) -> float:
        """Fraction of a microbatch that all-gathers of ZeRO-3 and reduce-scatters of ZeRO-2 overlap with."""
        return 0.0

    def exposed_send_fraction(self, layout: Layout) -> float:
        """Fraction of a stage's transfers that its rank waits for, beyond what the schedule shows."""
        return 0.0

    def receives_beside(self, layout: Layout) -> bool:
        """Return whether a rank's shard of a reduce-scatter arrives in a buffer of its own, not in place."""
        return False

    def fuses_products(self, layout: Layout) -> bool:
        """Return whether column-cut linear layers run fused with their collectives (`world/fused_products`)."""
        return False

    def gathers_again(self, layout: Layout) -> bool:
        """Return whether an engine's column-cut linear layers keep pieces of what they read, gather again in backward, and communicate
        there beside their products (`lower/column_linears`). Not on CPUs, where that takes the cores that compute."""
        return False

    @property
    def gathers_once(self) -> bool:
        """Return whether backward gathers a layer's weights once, for its recomputation too."""
        return False

    def defers_sums(self, layout: Layout) -> bool:
        """Return whether gradients are reduced after the last backward, with no compute beside."""
        return False

    def layer_saving(self, layout: Layout) -> LayerSaving:
        """Return what layers save where it is not what the graph's operators save."""
        return AS_COUNTED

    @property
    def all_reduces(self) -> bool:
        """Return whether ZeRO-1 sums whole gradients, in float32."""
        return False

    @property
    def scatters_sends(self) -> bool:
        """Return whether each tensor rank sends one shard to the next stage (Narayanan et al. 2021, section 4.1), not all of it."""
        return False

    @property
    def saves_scores(self) -> bool:
        """Return whether attention saves its scores, counted by stage."""
        return False

    def describe_efficiency(self, precision: str) -> str:
        """Describe the efficiency set in use, if it was not measured on these devices."""
        return ""


@dataclass(frozen=True, slots=True)
class HostCopies:
    """Cost of host copies: `seconds_per_byte`, one way, and whether they run concurrently with compute (`overlap_compute`).

    >>> HostCopies(1.0, overlap_compute=False).with_copies(Seconds(4.0, 8.0), 2.0)
    Seconds(forward=6.0, backward=10.0)
    >>> HostCopies(1.0, overlap_compute=True).with_copies(Seconds(4.0, 8.0), 5.0)
    Seconds(forward=5.0, backward=8.5)
    """

    seconds_per_byte: float
    overlap_compute: bool

    def with_copies(self, compute: Seconds, moved_bytes: float) -> Seconds:
        """Return forward and backward of one microbatch that offloads and loads `moved_bytes`."""
        copy_s = moved_bytes * self.seconds_per_byte
        if not self.overlap_compute:
            return compute + Seconds(copy_s, copy_s)
        return Seconds(max(compute.forward + HOST_SLOWS * copy_s, copy_s), max(compute.backward + HOST_SLOWS * copy_s, copy_s))
