"""Offloading of saved activations to host memory between forward and backward: `HostStore`.

Forwards run inside `record_saved`, which returns `OffloadedActivations`; these are offloaded with `offload` and loaded with `load`, or on
demand when backward reads them. Each storage is copied once, however many views of it are saved, and its device memory is freed when
nothing else refers to it. Parameters, buffers, the batch, and storages smaller than a page are not offloaded.

On CPUs the host memory is a second account without the device's limit, and copies are synchronous. On GPUs it is pinned memory, and copies
run on their own stream, overlapping compute (Rhu et al. 2016).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from weft.world.memory import HOST, Accounts

_LEAST_BYTES = 4096


@dataclass(eq=False)
class _Block:
    """A saved storage: on the device, on the host, or (while it is copied) on both."""

    storage: torch.UntypedStorage | None
    size_bytes: int
    device: torch.device
    users: int = 0
    host: Tensor | None = None
    arrived: Any = None  # the copy's event, after which the storage may be read


@dataclass(eq=False)
class _View:
    """A saved tensor without its memory."""

    block: _Block
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    moved: Moved | None = None


@dataclass(eq=False)
class Moved:
    """Saved activations of one forward, while autograd refers to them. `previous`: those whose backward follows this one's."""

    blocks: WeakSet[_Block] = field(default_factory=WeakSet)
    is_out: bool = False
    is_read: bool = False  # its backward has begun
    before: Moved | None = None

    @property
    def size_bytes(self) -> int:
        return sum(block.size_bytes for block in self.blocks)


class HostStore:
    """Offloads and loads saved activations."""

    def __init__(self, device: torch.device, memory: Accounts, stays: Iterable[Tensor]) -> None:
        self._device, self._memory = device, memory
        self._stays = {id(s): s for s in (x.untyped_storage() for x in stays)}
        self._inputs: dict[int, torch.UntypedStorage] = {}
        # By the id of the storage, while it is on the device and a backward will read it.
        self._resident: WeakValueDictionary[int, _Block] = WeakValueDictionary()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.moved_bytes = 0

    @property
    def overlaps(self) -> bool:
        """Return whether copies overlap compute, so that prefetching pays."""
        return self._stream is not None

    def begin(self, inputs: Iterable[Tensor]) -> None:
        """Set the batch's tensors, which are not offloaded, before a step."""
        self._inputs = {id(s): s for s in (x.untyped_storage() for x in inputs)}

    @contextmanager
    def recording(self) -> Iterator[Moved]:
        """Collect the tensors that autograd saves within a block."""
        activations = Moved()

        def pack(x: Tensor) -> object:
            block = self._block(x, activations)
            return x if block is None else _view(x, block, activations)

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield activations

    def _block(self, x: Tensor, moved: Moved) -> _Block | None:
        storage = x.untyped_storage()  # one object per storage while it is referenced
        key = id(storage)
        if key in self._stays or key in self._inputs or storage.nbytes() < _LEAST_BYTES or x.layout is not torch.strided:
            return None
        if x.device.type != self._device.type:  # on the host already
            return None
        block = self._resident.get(key)
        if block is None:
            block = self._resident[key] = _Block(storage, storage.nbytes(), x.device)
        if block not in moved.blocks:
            moved.blocks.add(block)
            block.users += 1
        return block

    def out(self, moved: Moved) -> None:
        """Offload to the host. A storage saved by two forwards is copied when both are offloaded."""
        if moved.is_out:
            return
        moved.is_out = True
        for block in list(moved.blocks):
            block.users -= 1
            if block.users == 0 and block.storage is not None:
                self._copy_out(block)

    def back(self, moved: Moved) -> None:
        """Load what is not on the device; a prefetch for the backward that reads it, which otherwise loads on demand."""
        if not moved.is_out:
            return
        moved.is_out = False
        for block in list(moved.blocks):
            block.users += 1
            self._copy_back(block)

    def call(self, moved: Moved | None) -> None:
        """Load the first offloaded activations, of these and those whose backward follows."""
        while moved is not None and not moved.is_out:
            moved = moved.before
        if moved is not None:
            self.back(moved)

    def _unpack(self, packed: object) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        assert isinstance(packed, _View)
        if self.overlaps and packed.moved is not None and not packed.moved.is_read:
            packed.moved.is_read = True
            self.back(packed.moved)
            self.call(packed.moved.before)  # prefetched while this one's backward runs
        return self._tensor(packed)

    def _tensor(self, view: _View) -> Tensor:
        block = view.block
        self._copy_back(block)
        if block.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(block.arrived)
            block.arrived = None
        tensor = torch.empty(0, dtype=view.dtype, device=block.device)
        assert block.storage is not None
        return tensor.set_(block.storage, view.offset, view.shape, view.stride)

    def _copy_out(self, block: _Block) -> None:
        assert block.storage is not None
        self._resident.pop(id(block.storage), None)
        source = torch.empty(0, dtype=torch.uint8, device=block.device).set_(block.storage)
        if block.host is None:  # else an earlier copy is still valid
            with self._memory.counting(HOST):
                block.host = torch.empty(block.size_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)
            self.moved_bytes += block.size_bytes
            if self._stream is None:
                block.host.copy_(source)
            else:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                with torch.cuda.stream(self._stream):
                    block.host.copy_(source, non_blocking=True)
                source.record_stream(self._stream)
        block.storage = None

    def _copy_back(self, block: _Block) -> None:
        if block.storage is not None:
            return
        assert block.host is not None
        with self._memory.counting("activations"):
            device_copy = torch.empty(block.size_bytes, dtype=torch.uint8, device=block.device)
        if self._stream is None:
            device_copy.copy_(block.host)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # the memory may have had another use until now
            with torch.cuda.stream(self._stream):
                device_copy.copy_(block.host, non_blocking=True)
                block.arrived = self._stream.record_event()
            device_copy.record_stream(self._stream)
        self.moved_bytes += block.size_bytes
        block.storage = device_copy.untyped_storage()
        self._resident[id(block.storage)] = block


def _view(x: Tensor, block: _Block, moved: Moved | None) -> _View:
    return _View(block, x.dtype, tuple(x.shape), tuple(x.stride()), int(x.storage_offset()), moved)
