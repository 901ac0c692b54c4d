"""Peak bytes of live tensors while a function runs, without those that existed before.

Every tensor that an operator creates is counted once by its storage until that is freed. Not counted: workspace inside kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from weft.capture.fakes import DispatchMode


class _Alive(DispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.most = 0, 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for t in _tensors(result):
            self._count(t.untyped_storage(), inputs)
        return result

    def _count(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if not size or key in inputs or key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def most_alive_bytes(run: Callable[[], object]) -> int:
    """Return the peak bytes of live tensors that `run` created.

    >>> most_alive_bytes(lambda: torch.zeros(100).add_(1))
    400
    """
    with _Alive() as alive:
        run()
    return int(alive.most)


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from _tensors(value)
    elif isinstance(item, tuple | list):
        for value in item:
            yield from _tensors(value)
