"""A torch.distributed process group (gloo or NCCL) with the interface of a shared-memory channel. In: tensors. Out: its works."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.world import private

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8)


def _transferable_view(x: Tensor) -> Tensor:
    """Return contiguous `x` for collectives that only move it: as bytes, if gloo does not support its type."""
    return x if x.dtype in _DTYPES else x.as_strided((x.numel(),), (1,)).view(torch.uint8)


class ProcessGroup:
    """The methods of `shared_memory.native.NativeChannel`, which start operations and never wait.

    `open_directed`: of NCCL, opens the connection of one (sender, receiver), members by their indices; None: gloo, which needs none.
    """

    def __init__(self, inner: Any, size: int, index: int, open_directed: Callable[[tuple[int, int]], Any] | None) -> None:
        self._inner, self._size, self._index = inner, size, index
        self._open_directed, self._nccl = open_directed, open_directed is not None
        self._directed: dict[tuple[int, int], Any] = {}

    def abandon(self) -> None:
        """Abort this member's waits; only gloo's do not end by themselves."""
        if not self._nccl:
            private.abandon_gloo_group(self._inner, self._size, self._index)

    def widens(self, dtype: torch.dtype) -> bool:
        """Return whether sums of a narrow type are supported and rounded only once; neither library has int16."""
        return dtype is not torch.int16 and (self._nccl or self._size == 2)

    def all_reduce(self, x: Tensor, op: str, wait: bool) -> Any:
        return private.all_reduce(self._inner, x, _OPS[op])

    def broadcast(self, x: Tensor, source: int, wait: bool) -> Any:
        return private.broadcast(self._inner, _transferable_view(x), source)

    def all_gather(self, out: Tensor, x: Tensor, sizes: Sequence[int], wait: bool) -> Any:
        return private.all_gather(self._inner, _transferable_view(out), _transferable_view(x))

    def reduce_scatter(self, out: Tensor, x: Tensor, sizes: Sequence[int], wait: bool) -> Any:
        """Start a reduce-scatter of equal shards; only NCCL's sends a shard to each member (`scatters`)."""
        return private.reduce_scatter(self._inner, out, x, _OPS["sum"])

    def scatters(self, dtype: torch.dtype, sizes: Sequence[int]) -> bool:
        """Return whether a reduce-scatter of these shards is the library's own.

        NCCL has equal shards only, and rounds narrow types in every member, where an exchange with local sums rounds once. Gloo's is an
        all-reduce of a copy: twice the bytes, and room for all shards.
        """
        return self._nccl and dtype in (torch.float32, torch.float64, torch.int32, torch.int64) and len(set(sizes)) == 1

    def exchange(self, out: Tensor, x: Tensor, arriving: Sequence[int], sizes: Sequence[int], wait: bool) -> Any:
        unit = 1 if x.dtype in _DTYPES else x.element_size()
        return private.all_to_all(
            self._inner, _transferable_view(out), _transferable_view(x), [n * unit for n in arriving], [n * unit for n in sizes]
        )

    def send(self, x: Tensor, to: int, tag: int) -> Any:
        if self._nccl:
            return private.send(self._connection(self._index, to), x, 1, tag)
        return private.send(self._inner, x, to, tag)

    def receive(self, x: Tensor, source: int, tag: int) -> Any:
        if self._nccl:
            return private.receive(self._connection(source, self._index), x, 0, tag)
        return private.receive(self._inner, x, source, tag)

    def connect_pairs(self, pairs: Iterable[tuple[int, int]], device: torch.device) -> None:
        """Exchange the first message of each of `pairs` of (sender, receiver) that is not connected yet."""
        for source, target in sorted(set(pairs) - self._directed.keys()):  # in one order everywhere
            if self._index in (source, target):
                x = torch.zeros(1, device=device)
                (self.send(x, target, 0) if self._index == source else self.receive(x, source, 0)).wait()

    def _connection(self, source: int, target: int) -> Any:
        # NCCL runs the messages of a communicator in sequence: without one for each direction, two ranks that both send first deadlock.
        if (source, target) not in self._directed:
            assert self._open_directed is not None
            self._directed[source, target] = self._open_directed((source, target))
        return self._directed[source, target]
