"""A torch.distributed process group (gloo or NCCL) with the interface of a shared-memory channel. In: tensors. Out: its works."""

from __future__ import annotations

from collections.abc import Sequence
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
    """The methods of `shared_memory.native.NativeChannel`, which start operations and never wait."""

    def __init__(self, inner: Any, nccl: bool, size: int) -> None:
        self._inner = inner
        self._nccl = nccl
        self._size = size

    def abandon(self, index: int) -> None:
        """Abort the waits of member `index`; only gloo's do not end by themselves."""
        if not self._nccl:
            private.abandon_gloo_group(self._inner, self._size, index)

    def widens(self, dtype: torch.dtype) -> bool:
        """Return whether sums of a narrow type are supported and rounded only once; neither library has int16."""
        return dtype is not torch.int16 and (self._nccl or self._size == 2)

    def all_reduce(self, x: Tensor, op: str, wait: bool) -> Any:
        return private.all_reduce(self._inner, x, _OPS[op])

    def broadcast(self, x: Tensor, source: int, wait: bool) -> Any:
        return private.broadcast(self._inner, _transferable_view(x), source)

    def all_gather(self, out: Tensor, x: Tensor, sizes: Sequence[int], wait: bool) -> Any:
        return private.all_gather(self._inner, _transferable_view(out), _transferable_view(x))

    def exchange(self, out: Tensor, x: Tensor, arriving: Sequence[int], sizes: Sequence[int], wait: bool) -> Any:
        unit = 1 if x.dtype in _DTYPES else x.element_size()
        return private.all_to_all(
            self._inner, _transferable_view(out), _transferable_view(x), [n * unit for n in arriving], [n * unit for n in sizes]
        )

    def send(self, x: Tensor, to: int, tag: int) -> Any:
        return private.send(self._inner, x, to, tag)

    def receive(self, x: Tensor, source: int, tag: int) -> Any:
        return private.receive(self._inner, x, source, tag)
