"""Peak bytes of live tensors while a function runs, without those that existed before.

Every tensor that an operator creates is counted once by its storage until that is freed. Not counted: workspace inside kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from shardwise.capture.fakes import DispatchMode


class _LiveBytesCounter(DispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes, self.peak_bytes = 0, 0
        self._counted: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage().data_ptr() for t in _iter_tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for t in _iter_tensors(result):
            self._count(t.untyped_storage(), inputs)
        return result

    def _count(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if not size or key in inputs or key in self._counted:
            return
        self._counted.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._on_free, key, size)

    def _on_free(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.live_bytes -= size


def peak_live_bytes(run: Callable[[], object]) -> int:
    """Return the peak bytes of live tensors that `run` created.

    >>> peak_live_bytes(lambda: torch.zeros(100).add_(1))
    400
    """
    with _LiveBytesCounter() as alive:
        run()
    return int(alive.peak_bytes)


def _iter_tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from _iter_tensors(value)
    elif isinstance(item, tuple | list):
        for value in item:
            yield from _iter_tensors(value)
