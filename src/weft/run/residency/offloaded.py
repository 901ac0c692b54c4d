"""Layers whose activations are offloaded to the host between forward and backward (`offload=activations`, `offload=activations:2`).

The saved activations of a chosen layer are offloaded as soon as it has run, and loaded when its backward reads them. If copies overlap
compute, they are prefetched: each time a layer's backward has finished and freed its memory, the next offloaded layer is loaded.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from weft.run.residency.host import HostStore, Moved
from weft.run.residency.layer_modules import Layered
from weft.run.residency.recompute import Recomputed


def offload_layers(layered: Layered, host: HostStore, moved: Collection[int]) -> None:
    """Wrap these layers of a stage so that they offload saved activations; recomputed layers are wrapped already."""
    chain, numbers = _Chain(), sorted(layered.names)
    children = {number: getattr(layered.local.module, layered.names[number]) for number in numbers}
    not_offloaded = {n for n in layered.repeated - set(moved) if not isinstance(children[n], Recomputed)}
    next_number = dict(pairwise(numbers))  # empty in a stage that only forwards its inputs
    for number in numbers:
        wrapped = children[number]
        if number in moved:
            wrapped = OffloadedLayer(wrapped, host, chain, number == min(moved))
        elif host.overlaps and next_number.get(number) in not_offloaded and number > min(moved, default=number):
            wrapped = Calling(wrapped, host, chain)
        setattr(layered.local.module, layered.names[number], wrapped)


class _Chain:
    """The last offloaded layer that has run."""

    last: Moved | None = None


class OffloadedLayer(nn.Module):
    """`inner`, whose saved activations are offloaded after it has run."""

    def __init__(self, inner: nn.Module, host: HostStore, chain: _Chain, is_first: bool) -> None:
        super().__init__()
        self.inner, self._host, self._chain, self._is_first = inner, host, chain, is_first

    def forward(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args)
        with self._host.recording() as activations:
            out = self.inner(*args)
        activations.before = None if self._is_first else self._chain.last
        self._chain.last = activations
        self._host.out(activations)
        return out


class Calling(nn.Module):
    """`inner`, followed by a layer that is not offloaded: after that layer's backward the next offloaded activations are loaded."""

    def __init__(self, inner: nn.Module, host: HostStore, chain: _Chain) -> None:
        super().__init__()
        self.inner, self._host, self._chain = inner, host, chain

    def forward(self, *args: Any) -> Any:
        out = self.inner(*args)
        offloaded = self._chain.last  # of this microbatch, whose previous layers have just run
        differentiable = next((x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor) and x.requires_grad), None)
        if differentiable is not None:
            differentiable.register_hook(lambda gradient: self._host.call(offloaded))  # type: ignore[no-untyped-call]
        return out
