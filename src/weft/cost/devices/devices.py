"""What pricing asks of the kind of device that a rank has. In: a cluster, a layout. Out: seconds and bytes of what its ranks do there.

Ranks of a processor's cores (`processors`) and accelerators (`gpus`) answer each in their own way; nothing else asks which they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from weft.cluster.cluster import Cluster, Speed
from weft.cost.devices.compute import Seconds
from weft.cost.devices.copies import Copies
from weft.cost.devices.kept import KernelMemory
from weft.cost.devices.kernels import Kernel
from weft.plan.layout import Layout
from weft.plan.precision import PRECISIONS

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes a parameter: of its weight, its gradient and each of the optimizer's float32 copies."""

    weight: float
    gradient: float
    copies: float
    moment: float = 4.0


@dataclass(frozen=True, slots=True)
class Talk:
    """Of collectives inside layers: times as long as the library's own they take, the part of backward's that shows, what each takes
    besides until ranks have met, by what part longer those compute, and the part of what goes round that blocks' compute may hide."""

    slower: float = 1.0
    shown: float = 1.0
    meeting_s: float = 0.0
    waits: float = 0.0
    rounds_hide: float = 0.0  # on processors it takes the cores that compute


@dataclass(frozen=True)
class Devices(ABC):
    """`busy`: ranks that work at once, and threads of each; None for what a layout has.

    `kernel_memory`: what kernels keep besides what the graph says. `casts`: in 16 bits operators are autocast over float32 parameters,
    and what moves is narrow only of products; elsewhere everything is. `even_stages`: frameworks give stages equally many layers.
    `scatters_sends`: tensor ranks hand on a part each of what goes to the next stage (Narayanan et al. 2021, section 4.1).
    `ties_hide`: the sum of tied weights hides behind a backward as others do. `tells_attention`: what selective recomputation drops is told
    by operator. `layers_moved`: layers that move to the host and are on the device at once. `keeps_gradients`: from step to step, as
    Megatron-LM does.
    """

    cluster: Cluster
    busy: tuple[int, int] | None

    kernel_memory: ClassVar[type[KernelMemory]]
    casts: ClassVar[bool]
    even_stages: ClassVar[bool]
    scatters_sends: ClassVar[bool]
    ties_hide: ClassVar[bool]
    tells_attention: ClassVar[bool]
    layers_moved: ClassVar[int]
    keeps_gradients: ClassVar[bool]

    def speed(self, layout: Layout) -> Speed:
        """What one of a layout's ranks gets."""
        return self.cluster.speed(*(self.busy or (layout.num_ranks, layout.threads)))

    def is_cast(self, layout: Layout) -> bool:
        """Whether operators are cast by autocast, one by one."""
        return self.casts and bool(PRECISIONS[layout.precision].products)

    def is_half(self, layout: Layout) -> bool:
        """Whether what is kept is all of 16 bits."""
        return bool(PRECISIONS[layout.precision].products) and not self.is_cast(layout)

    def widths(self, precision: str) -> Widths:
        """Of a parameter's state: all of it as wide as what is trained."""
        return Widths(8.0, 8.0, 0.0, 8.0) if precision == "float64" else Widths(4.0, 4.0, 0.0)

    @abstractmethod
    def operator_seconds(
        self, layout: Layout, kernels: Sequence[tuple[Kernel, Fraction]], index: NDArray[np.intp], repeated: NDArray[np.bool_]
    ) -> tuple[Array, Array]:
        """Forward and backward of every operator: `kernels[index[i]]` with how many times its rows, and whether in a numbered block."""

    @abstractmethod
    def microbatch(self, layout: Layout, busy: Seconds, num_trained: float) -> tuple[Seconds, float]:
        """A stage's `busy` seconds with what a microbatch takes besides, and what of that adds up weights' gradients."""

    @abstractmethod
    def optimizer_s(self, layout: Layout, num_updated: float, states: int) -> float:
        """Seconds of an optimizer step."""

    @abstractmethod
    def copies(self, layout: Layout) -> Copies:
        """What copies to the host and back take."""

    @abstractmethod
    def talk(self, layout: Layout) -> Talk:
        """Of collectives inside layers."""

    @abstractmethod
    def overlap(self, layout: Layout) -> float:
        """Part of a backward that sums of gradients hide behind."""

    @abstractmethod
    def overhead_s(self, layout: Layout, pipeline_s: float) -> float:
        """What a step costs besides, with what the slowest rank is behind the others."""

    @property
    def buckets(self) -> bool:
        """Whether gradients are summed in buckets."""
        return True

    @property
    def contention(self) -> float:
        """The part of what hides that is taken from the compute that it hides behind."""
        return 0.0

    @property
    def zero_hides(self) -> float:
        """Part of a microbatch that gathers of ZeRO-3 and scatters of ZeRO-2 hide behind."""
        return 0.0

    @property
    def exposed_sends(self) -> float:
        """Part of a stage's transfers that its rank waits for, beside what the schedule says."""
        return 0.0

    @property
    def keeps_scores(self) -> bool:
        """Whether attention keeps its scores, told by stage."""
        return False

    def words(self, precision: str) -> str:
        """Whose efficiency they are priced with, where it was not measured on them."""
        return ""
