"""Gradients of which a rank keeps its own pieces only: from stage 2 of ZeRO on (Rajbhandari et al. 2020).

In: a flat group whose `grad` is this rank's pieces, and gradients as they come. Out: sums in the pieces. A bucket has memory from its first
gradient until it is reduced and scattered, which happens when each of its parameters has had one, or at the end of the step. All
ranks of a group run the same layers in the same order, so they scatter the same buckets in the same order.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.run.state.parameters import FlatGroup
from weft.world.world import Group, Work

_WIDE = 4  # bytes of an element that a sum of squares has room in
_UNDER_WAY = 1  # buckets whose memory is held while they are scattered


def norm_of(x: Tensor) -> Tensor:
    """The 2-norm [] of all elements."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=None if x.dtype.itemsize >= _WIDE else torch.float32)
    return norm


@dataclass
class _Open:
    """A bucket that is being filled: its memory, and the parameters that have not come."""

    full: Tensor
    missing: set[str]


class Scattered:
    """Collects the gradients of one group, backward after backward, and adds their sums into its pieces.

    Without `by_itself` nothing is scattered before `flush`: a program says when.
    """

    def __init__(self, group: FlatGroup, over: Group, by_itself: bool = True) -> None:
        self._group, self._over, self._by_itself = group, over, by_itself
        self._bucket = {name: k for k, bucket in enumerate(group.buckets) for name in bucket.names}
        self._pieces = [group.grad[at : at + length] for _, at, length in group.pieces()]
        self._open: dict[int, _Open] = {}
        self._has_norms, self.norms = False, list[Tensor]()
        self._works: list[tuple[Work, Tensor, Tensor]] = []
        read = {member.name for member in group.members if member.units} or set(self._bucket)
        self._expected = [read.intersection(bucket.names) for bucket in group.buckets]
        self._places: dict[str, slice] = {}
        for member, start in zip(group.members, group.starts, strict=True):
            begin = start - group.buckets[self._bucket[member.name]].start
            self._places[member.name] = slice(begin, begin + member.size)

    def add(self, name: str, grad: Tensor) -> None:
        """Add a gradient to a parameter's."""
        number = self._bucket[name]
        opened = self._open.get(number)
        if opened is None:
            bucket = self._group.buckets[number]
            opened = self._open[number] = _Open(self._group.grad.new_zeros(bucket.stop - bucket.start), set(self._expected[number]))
        opened.full[self._places[name]].add_(grad.reshape(-1))
        opened.missing.discard(name)
        if not opened.missing and self._by_itself:
            self._scatter(number)

    def number_of(self, name: str) -> int:
        """The bucket that a parameter's gradient is scattered with."""
        return self._bucket[name]

    def piece(self, name: str) -> Tensor:
        """This rank's piece of that bucket."""
        return self._pieces[self._bucket[name]]

    def settled(self, name: str) -> Tensor:
        """The piece with all that has come. Raises ValueError where some of it is still to be scattered."""
        if self._bucket[name] in self._open:
            raise ValueError(f"the gradients beside that of {name} are still to come")
        self._finish(0)
        return self.piece(name)

    def start(self, has_norms: bool = False) -> None:
        """Begin a step: the pieces are zero. `has_norms`: whether those of what is scattered are kept."""
        self._group.grad.zero_()
        self._has_norms = has_norms
        self.norms.clear()

    def flush(self, names: Collection[str] | None = None) -> None:
        """Scatter buckets (those of `names`) of which not all gradients came; the others count as zero."""
        for number in sorted(self._open):
            if names is None or not self._expected[number].isdisjoint(names):
                self._scatter(number)

    def wait(self) -> None:
        """Wait for all sums."""
        self._finish(0)

    def _scatter(self, number: int) -> None:
        full = self._open.pop(number).full
        if self._has_norms:
            self.norms.append(norm_of(full))
        arrived = torch.empty_like(self._pieces[number])
        self._works.append((self._over.reduce_scatter_into(arrived, full, wait=False), arrived, self._pieces[number]))
        self._finish(_UNDER_WAY)

    def _finish(self, left: int) -> None:
        while len(self._works) > left:
            work, arrived, piece = self._works.pop(0)
            work.wait()
            piece.add_(arrived)
