"""Lend views of buckets as the `.grad` of parameters in a plain loop, so that averaged gradients need not be copied out of them.

A lent gradient lies in its bucket, which the next backward overwrites. In one process a gradient that a loop holds (`kept = p.grad`, a view
of it, its `numpy()`) stays as it is, so a bucket whose memory anything but `.grad` holds gets new memory before it is written. Memory that
ranks share cannot be replaced by one of them: gradients there are copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardwise.run.state.parameters import FlatGroup
from shardwise.world import private


@dataclass
class _LendingGroup:
    """The lent gradients of one group, by name. `num_own_users`: of its memory, besides lent tensors and their holders."""

    group: FlatGroup
    num_own_users: int = 0
    lent: dict[str, Tensor] = field(default_factory=dict)

    def begin(self) -> None:
        """Lend from the group's memory from now on."""
        self.lent.clear()
        self.num_own_users = private.storage_users(self.group.grad)

    def replace_memory(self) -> None:
        """Leave the memory to those who hold it."""
        self.group.step_buffers = [torch.zeros_like(self.group.grad)]
        self.group.use_gradient_buffer(self.group.step_buffers[0])
        self.begin()


class LentGradients:
    """Gradients of `groups` that parameters have as views of their buckets. Callers are in `private.as_base_tensor`."""

    def __init__(self, groups: Sequence[FlatGroup], parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._groups = [_LendingGroup(group) for group in groups]
        self._group_of = {name: lending for lending in self._groups for name in lending.group.views}
        for lending in self._groups:
            lending.begin()

    def protect_holders(self) -> None:
        """Replace memory of which the loop holds a gradient other than as a parameter's; before a backward writes to it."""
        for lending in self._groups:
            for name in [name for name, x in lending.lent.items() if self._parameters[name].grad is not x]:
                del lending.lent[name]
            if private.storage_users(lending.group.grad) > lending.num_own_users + len(lending.lent):
                lending.replace_memory()

    def lends(self, name: str) -> bool:
        """Return whether a parameter's gradient may be lent: its bucket is this rank's own memory."""
        return name in self._group_of

    def lend(self, name: str) -> Tensor:
        """Return a view of the bucket as a parameter's gradient, with no autograd and no version in common with others."""
        lending = self._group_of[name]
        x = lending.lent[name] = lending.group.views[name].data
        return x

    def is_lent(self, name: str) -> bool:
        """Return whether a parameter's gradient is in its bucket."""
        if not self._groups:
            return False
        lending = self._group_of.get(name)
        x = None if lending is None else lending.lent.get(name)
        return x is not None and self._parameters[name].grad is x

    def take_back(self, name: str) -> None:
        """Copy a lent gradient, which the bucket is to be written over, to memory of its own."""
        p = self._parameters[name]
        if self.is_lent(name) and p.grad is not None:
            p.grad = p.grad.clone()
            del self._group_of[name].lent[name]
