"""Arithmetic of sliding windows along one dimension: the input range that a range of the output reads, and thus the halo of a rank. No
torch.

Input ranges may extend beyond the input where padding is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

Range = tuple[int, int]  # start, stop


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Windows of a convolution or a pool, or padding (`kernel` 1): output o reads inputs o * stride - padding_before + tap * dilation."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding_before: int = 0

    def input_range(self, start: int, stop: int, size: int) -> Range:
        """Return the input range that outputs [start, stop) read.

        >>> SlidingWindow(3, stride=2, padding_before=1).input_range(2, 4, 8)
        (3, 8)
        """
        first = start * self.stride - self.padding_before
        return first, first + (stop - 1 - start) * self.stride + self.dilation * (self.kernel - 1) + 1

    def num_taps_inside(self, entry: int, size: int) -> int:
        """Return the number of taps of output `entry` that fall on the input rather than on padding."""
        first, _ = self.input_range(entry, entry + 1, size)
        return sum(0 <= first + tap * self.dilation < size for tap in range(self.kernel))


@dataclass(frozen=True, slots=True)
class TransposedWindow:
    """Windows of a transposed convolution: input i contributes to outputs i * stride - padding_before + tap * dilation."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding_before: int = 0

    def input_range(self, start: int, stop: int, size: int) -> Range:
        """Return the input range that contributes to outputs [start, stop).

        >>> TransposedWindow(2, stride=2).input_range(4, 8, 8), TransposedWindow(3, stride=2, padding_before=1).input_range(4, 8, 8)
        ((2, 4), (2, 5))
        """
        reach = self.dilation * (self.kernel - 1)
        first, last = -(-(start + self.padding_before - reach) // self.stride), (stop - 1 + self.padding_before) // self.stride
        low = min(max(first, 0), size - 1)  # at least one entry, so that the operand is not empty
        return low, max(low + 1, min(last + 1, size))

    def first_output(self, start: int) -> int:
        """Return the first output entry to which inputs from `start` on contribute."""
        return start * self.stride - self.padding_before


@dataclass(frozen=True, slots=True)
class ResamplingWindow:
    """Interpolation: output o is at input `scale` * (o + 1/2) - 1/2, or `scale` * o with aligned corners; nearest neighbor (`order` 0)
    reads input floor(scale * (o + `shift`))."""

    order: int
    scale: float
    aligns_corners: bool = False
    shift: float = 0.0

    def taps(self, entry: int, size: int) -> tuple[int, int, float]:
        """Return both neighbors of output `entry`, and the weight of the second."""
        if self.order == 0:
            low = min(floor((entry + self.shift) * self.scale), size - 1)
            return low, low, 0.0
        at = entry * self.scale if self.aligns_corners else max((entry + 0.5) * self.scale - 0.5, 0.0)
        low = min(floor(at), size - 1)
        return low, min(low + 1, size - 1), min(max(at - low, 0.0), 1.0)

    def input_range(self, start: int, stop: int, size: int) -> Range:
        """Return the input range that outputs [start, stop) read.

        >>> ResamplingWindow(1, 0.5).input_range(4, 8, 4)
        (1, 4)
        """
        return self.taps(start, size)[0], self.taps(stop - 1, size)[1] + 1


Window = SlidingWindow | TransposedWindow | ResamplingWindow
