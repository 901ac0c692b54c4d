"""Select a group's all-reduce algorithm by size. In: choices, programs by name. Out: `CollectiveWork`, or None for the transport's own.

Over gloo between CPUs ZeRO's large reduce-scatters are rings: an exchange needs room for all shards until it is waited for, and gloo's own
reduce-scatter is an all-reduce of a copy. Measured with 32 MiB on one host: 99 ms against 161 for 4 ranks, 50 against 81 for 2; below
`RING_BYTES` the exchange is faster.

`hierarchical` is shared memory inside the group's hosts and the network between them, if there are several; in a group that shares memory
anyway, or with one member a host, it is the transport's own. Not modelled: which is fastest (`shardwise.cost` chooses).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.errors import LayoutError
from shardwise.plan.ir.choice import NATIVE, SCATTER_GATHER_HALVES, AllReduceChoices
from shardwise.plan.ir.custom_collective import custom_all_reduce, refuse_custom_all_reduce
from shardwise.plan.ir.program import Program
from shardwise.world.comm.group import Group
from shardwise.world.comm.levels import HIERARCHICAL, HierarchicalReducer
from shardwise.world.comm.pending import CollectiveWork
from shardwise.world.comm.runner import runner_of
from shardwise.world.comm.running import ProgramRunner

RING_BYTES = 4 << 20  # from which a ring reduce-scatter over gloo is no slower than an exchange

ProgramOf = Callable[[str, str, int], Program]  # (collective, algorithm, ranks)


class CollectiveDispatcher:
    """Reductions of one group by `choices`. All members create it with equal arguments. `levels`: support two levels for any choices.
    `scatters`: reduce-scatters run, of which large ones over gloo are rings."""

    def __init__(
        self, group: Group, choices: AllReduceChoices, program_of: ProgramOf, levels: bool = False, scatters: bool = False
    ) -> None:
        if choices.text and (reason := refuse_custom_all_reduce(choices.default, choices.text, group.size)):
            raise LayoutError(reason)
        self._group, self._choices, self._program_of, self._scatters = group, choices, program_of, scatters
        self._built: dict[tuple[str, str], Program] = {}
        self._programs = ProgramRunner(runner_of(group))
        hosts = group.ranks_by_host if levels or HIERARCHICAL in choices.names else ()
        nested = max(map(len, hosts), default=0) > 1
        if nested and len(hosts) == 1:  # on one host, but in a run over several hosts, which uses gloo there
            group.connect()
            nested = not group.shares_memory
        self.levels = HierarchicalReducer(runner_of(group)) if nested else None

    def connect(self) -> None:
        """Connect now what will be needed; all members must call it."""
        if self.levels is not None or self._scatters_in_ring or any(name != NATIVE for name in self._choices.names):
            runner_of(self._group).side_group.connect()
        if self.levels is not None:
            self.levels.connect()

    def all_reduce(self, x: Tensor, wait: bool = False) -> CollectiveWork | None:
        """Start to replace `x` by the sum over the members; with `wait` finish it."""
        name = self._algorithm_for(x)
        if name == HIERARCHICAL and self.levels is not None:
            return self.levels.all_reduce(x, wait)
        return None if name in (NATIVE, HIERARCHICAL) else self._programs.all_reduce(self._built_program("all_reduce", name), x, wait)

    def reduce_scatter_into(self, out: Tensor, x: Tensor) -> CollectiveWork | None:
        """Start to reduce-scatter flat `x` into `out`, this member's shard of the sum."""
        name = self._algorithm_for(x)
        if name == NATIVE and self._scatters_in_ring and x.nbytes >= RING_BYTES and x.dtype in (torch.float32, torch.float64):
            name = "ring"
        if name == HIERARCHICAL and self.levels is not None and self.levels.has_equal_hosts:
            return self.levels.reduce_scatter_into(out, x, wait=False)
        if name not in SCATTER_GATHER_HALVES:
            return None
        return self._programs.reduce_scatter(self._built_program("reduce_scatter", SCATTER_GATHER_HALVES[name][0]), out, x, wait=False)

    def all_gather_into(self, out: Tensor, x: Tensor) -> CollectiveWork | None:
        """Start to gather flat `x` of all members in `out`."""
        name = self._algorithm_for(out)
        if name == HIERARCHICAL and self.levels is not None and self.levels.has_equal_hosts:
            return self.levels.all_gather_into(out, x, wait=False)
        if name not in SCATTER_GATHER_HALVES:
            return None
        return self._programs.all_gather(self._built_program("all_gather", SCATTER_GATHER_HALVES[name][1]), out, x, wait=False)

    @property
    def _scatters_in_ring(self) -> bool:
        return self._scatters and self._group.is_gloo and self._group.device.type == "cpu"

    def _algorithm_for(self, x: Tensor) -> str:
        return NATIVE if x.dtype is torch.bool or x.is_complex() else self._choices.algorithm_for(x.nbytes)

    def _built_program(self, collective: str, name: str) -> Program:
        key = (collective, name)
        if key not in self._built:
            text = self._choices.text
            self._built[key] = custom_all_reduce(name, text) if text else self._program_of(collective, name, self._group.size)
        return self._built[key]
