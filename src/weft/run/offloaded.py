"""Layers whose activations lie on the host between forward and backward (`offload=activations`).

In: a stage cut into layers. Out: the stage, in which what a layer keeps goes to the host as soon as it has run, and comes back when its
backward asks for it. The last one's backward follows at once where there is no pipeline, so it stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft.run.host import HostStore, Moved
from weft.run.layers import Layered


def offload_layers(layered: Layered, host: HostStore, keeps_last: bool) -> None:
    """Let every run of operators of a stage move what it keeps, but for the last where `keeps_last`."""
    chain = _Chain()
    numbers = sorted(layered.names)
    for number in numbers[: len(numbers) - keeps_last]:
        child = getattr(layered.local.module, layered.names[number])
        setattr(layered.local.module, layered.names[number], OffloadedLayer(child, host, chain, number == numbers[0]))


class _Chain:
    """The layer that has run before."""

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
