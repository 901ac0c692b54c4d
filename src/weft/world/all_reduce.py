"""Select a group's all-reduce algorithm by size. In: choices, programs by name. Out: `CollectiveWork`, or None for the transport's own.

`hierarchical` is shared memory inside the group's hosts and the network between them, if there are several; in a group that shares memory
anyway, or with one member a host, it is the transport's own. Not modelled: which is fastest (`weft.cost` chooses).
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
    """Reductions of one group by `choices`. All members create it with equal arguments. `levels`: support two levels for any choices."""

    def __init__(self, group: Group, choices: Choices, program_of: ProgramOf, levels: bool = False) -> None:
        self._group, self._choices, self._program_of = group, choices, program_of
        self._built: dict[tuple[str, str], Program] = {}
        self._programs = Programs(group.runner)
        hosts = group.boxes if levels or NAME in choices.names else ()
        nested = max(map(len, hosts), default=0) > 1
        if nested and len(hosts) == 1:  # on one host, but in a run over several hosts, which uses gloo there
            group.connect()
            nested = not group.shares_memory
        self.levels = Levels(group.runner) if nested else None

    def connect(self) -> None:
        """Connect now what will be needed; all members must call it."""
        if self.levels is not None or any(name != NATIVE for name in self._choices.names):
            self._group.runner.side_group.connect()
        if self.levels is not None:
            self.levels.connect()

    def all_reduce(self, x: Tensor, wait: bool = False) -> Work | None:
        """Start to replace `x` by the sum over the members; with `wait` finish it."""
        name = self._name(x)
        if name == NAME and self.levels is not None:
            return self.levels.all_reduce(x, wait)
        return None if name in (NATIVE, NAME) else self._programs.all_reduce(self._program("all_reduce", name), x, wait)

    def reduce_scatter_into(self, out: Tensor, x: Tensor) -> Work | None:
        """Start to reduce-scatter flat `x` into `out`, this member's shard of the sum."""
        name = self._name(x)
        if name == NAME and self.levels is not None and self.levels.even:
            return self.levels.reduce_scatter_into(out, x, wait=False)
        if name not in SCATTERING:
            return None
        return self._programs.reduce_scatter(self._program("reduce_scatter", SCATTERING[name][0]), out, x, wait=False)

    def all_gather_into(self, out: Tensor, x: Tensor) -> Work | None:
        """Start to gather flat `x` of all members in `out`."""
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
