"""Which way a group's sums go. In: choices by size, and programs by name. Out: `Work`, or None where the transport's own collective is due.

`hierarchical` is shared memory inside the boxes of the group and the network between them, if there are several; in a group that shares
memory anyhow, or of boxes of one member, it is the transport's own. Not modelled: what is fastest (`weft.cost` chooses).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.plan.choice import NATIVE, SCATTERING, Choices
from weft.plan.program import Program
from weft.world.group import Group
from weft.world.levels import NAME, Levels
from weft.world.pending import Work
from weft.world.running import Programs

ProgramOf = Callable[[str, str, int], Program]  # (collective, algorithm, ranks)


class Sums:
    """The sums of one group by `choices`. All members make it, alike. `levels`: ready for sums in two levels, whatever the choices."""

    def __init__(self, group: Group, choices: Choices, program_of: ProgramOf, levels: bool = False) -> None:
        self._group, self._choices, self._program_of = group, choices, program_of
        self._built: dict[tuple[str, str], Program] = {}
        self._programs = Programs(group.runner)
        boxes = group.boxes if levels or NAME in choices.names else ()
        nested = max(map(len, boxes), default=0) > 1
        if nested and len(boxes) == 1:  # on one host, but in a run over several, which has gloo there
            group.connect()
            nested = not group.shares_memory
        self.levels = Levels(group.runner) if nested else None

    def connect(self) -> None:
        """Connects now what will be needed; all members must come."""
        if self.levels is not None or any(name != NATIVE for name in self._choices.names):
            self._group.runner.side_group.connect()
        if self.levels is not None:
            self.levels.connect()

    def all_reduce(self, x: Tensor, wait: bool = False) -> Work | None:
        """Replaces `x` by the sum over the members, or starts to."""
        name = self._name(x)
        if name == NAME and self.levels is not None:
            return self.levels.all_reduce(x, wait)
        return None if name in (NATIVE, NAME) else self._programs.all_reduce(self._program("all_reduce", name), x, wait)

    def reduce_scatter_into(self, out: Tensor, x: Tensor) -> Work | None:
        """Starts to put this member's piece of the sum of flat `x` into `out`."""
        name = self._name(x)
        if name == NAME and self.levels is not None and self.levels.even:
            return self.levels.reduce_scatter_into(out, x, wait=False)
        if name not in SCATTERING:
            return None
        return self._programs.reduce_scatter(self._program("reduce_scatter", SCATTERING[name][0]), out, x, wait=False)

    def all_gather_into(self, out: Tensor, x: Tensor) -> Work | None:
        """Starts to gather flat `x` of all members in `out`."""
        name = self._name(out)
        if name == NAME and self.levels is not None and self.levels.even:
            return self.levels.all_gather_into(out, x, wait=False)
        if name not in SCATTERING:
            return None
        return self._programs.all_gather(self._program("all_gather", SCATTERING[name][1]), out, x, wait=False)

    def _name(self, x: Tensor) -> str:
        return NATIVE if x.dtype is torch.bool or x.is_complex() else self._choices.of(x.nbytes)

    def _program(self, collective: str, name: str) -> Program:
        key = (collective, name)
        if key not in self._built:
            self._built[key] = self._program_of(collective, name, self._group.size)
        return self._built[key]
