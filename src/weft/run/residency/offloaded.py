"""Layers whose activations lie on the host between forward and backward (`offload=activations`, `offload=activations:2`).

In: a stage cut into layers, and which of them. Out: the stage, in which what such a layer keeps goes to the host as soon as it has run,
and comes back when its backward asks for it. Where copies run beside the compute they begin before that: each time a layer's backward is
over and has given its memory back, the next of those that are away is called.
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
    """Let these runs of operators of a stage move what they keep; those that are repeated are under checkpointing already."""
    chain, numbers = _Chain(), sorted(layered.names)
    children = {number: getattr(layered.local.module, layered.names[number]) for number in numbers}
    stays = {n for n in layered.repeated - set(moved) if not isinstance(children[n], Recomputed)}
    behind = dict(pairwise(numbers))  # none at all in a stage that only hands on what it gets
    for number in numbers:
        wrapped = children[number]
        if number in moved:
            wrapped = OffloadedLayer(wrapped, host, chain, number == min(moved))
        elif host.overlaps and behind.get(number) in stays and number > min(moved, default=number):
            wrapped = Calling(wrapped, host, chain)
        setattr(layered.local.module, layered.names[number], wrapped)


class _Chain:
    """The layer that has run before, of those that move."""

    last: Moved | None = None


class OffloadedLayer(nn.Module):
    """`inner`, and then what it keeps goes to the host."""

    def __init__(self, inner: nn.Module, host: HostStore, chain: _Chain, is_first: bool) -> None:
        super().__init__()
        self.inner, self._host, self._chain, self._is_first = inner, host, chain, is_first

    def forward(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args)
        with self._host.recording() as moved:
            out = self.inner(*args)
        moved.before = None if self._is_first else self._chain.last
        self._chain.last = moved
        self._host.out(moved)
        return out


class Calling(nn.Module):
    """`inner`, whose backward begins when that of a layer that stays is over: the next that is away is called back into its memory."""

    def __init__(self, inner: nn.Module, host: HostStore, chain: _Chain) -> None:
        super().__init__()
        self.inner, self._host, self._chain = inner, host, chain

    def forward(self, *args: Any) -> Any:
        out = self.inner(*args)
        away = self._chain.last  # of this microbatch, whose layers before this one have just run
        learned = next((x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor) and x.requires_grad), None)
        if learned is not None:
            learned.register_hook(lambda gradient: self._host.call(away))  # type: ignore[no-untyped-call]
        return out
