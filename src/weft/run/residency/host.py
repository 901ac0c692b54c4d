"""What backward keeps, on the host while nobody needs it: `HostStore`.

In: forwards that run inside `recording`. Out: `Moved`, which can go to the host (`out`) and come back (`back`); what backward asks for
and is not there comes back by itself. Each storage is moved once, whatever views of it are kept, and its memory on the device is given
back when nothing else holds it. Parameters, buffers and the batch stay where they are, and so does what is smaller than a page.

On processors the host's memory is a second account that no limit of the device binds, and copies take their time. On GPUs it is pinned
memory, and copies run on a stream of their own beside the compute (Rhu et al. 2016).
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
    """One storage: on the device, on the host, or (while it is copied) on both."""

    storage: torch.UntypedStorage | None
    size_bytes: int
    device: torch.device
    users: int = 0
    host: Tensor | None = None
    arrived: Any = None  # the event after which the storage may be read


@dataclass(eq=False)
class _View:
    """A tensor without its memory."""

    block: _Block
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    moved: Moved | None = None


@dataclass(eq=False)
class Moved:
    """What one forward kept, as long as autograd keeps it. `before`: the one whose backward comes after this one's."""

    blocks: WeakSet[_Block] = field(default_factory=WeakSet)
    is_out: bool = False
    is_read: bool = False  # its backward has begun
    before: Moved | None = None

    @property
    def size_bytes(self) -> int:
        return sum(block.size_bytes for block in self.blocks)


class HostStore:
    """Moves what forwards keep between the device and the host."""

    def __init__(self, device: torch.device, memory: Accounts, stays: Iterable[Tensor]) -> None:
        self._device, self._memory = device, memory
        self._stays = {id(s): s for s in (x.untyped_storage() for x in stays)}
        self._inputs: dict[int, torch.UntypedStorage] = {}
        # By the storage's identity, while it is on the device and a backward will read it.
        self._resident: WeakValueDictionary[int, _Block] = WeakValueDictionary()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.moved_bytes = 0

    @property
    def overlaps(self) -> bool:
        """Whether copies run beside the compute, so that it pays to begin one before it is needed."""
        return self._stream is not None

    def begin(self, inputs: Iterable[Tensor]) -> None:
        """Before a step: the batch's tensors, which stay."""
        self._inputs = {id(s): s for s in (x.untyped_storage() for x in inputs)}

    @contextmanager
    def recording(self) -> Iterator[Moved]:
        """Collect what autograd keeps inside."""
        moved = Moved()

        def pack(x: Tensor) -> object:
            block = self._block(x, moved)
            return x if block is None else _view(x, block, moved)

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield moved

    def _block(self, x: Tensor, moved: Moved) -> _Block | None:
        storage = x.untyped_storage()  # one object for each storage as long as someone holds it
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
        """Copy to the host. What two forwards have kept goes when both do."""
        if moved.is_out:
            return
        moved.is_out = True
        for block in list(moved.blocks):
            block.users -= 1
            if block.users == 0 and block.storage is not None:
                self._copy_out(block)

    def back(self, moved: Moved) -> None:
        """Copy back what is not on the device; to be called ahead of the backward that reads it, or not at all."""
        if not moved.is_out:
            return
        moved.is_out = False
        for block in list(moved.blocks):
            block.users += 1
            self._copy_back(block)

    def call(self, moved: Moved | None) -> None:
        """Bring back the first that is away, of this one and those whose backward comes after it."""
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
            self.call(packed.moved.before)  # on its way while this one's backward runs
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
        if block.host is None:  # what was there before has not changed
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
            room = torch.empty(block.size_bytes, dtype=torch.uint8, device=block.device)
        if self._stream is None:
            room.copy_(block.host)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # the memory may have been someone else's until now
            with torch.cuda.stream(self._stream):
                room.copy_(block.host, non_blocking=True)
                block.arrived = self._stream.record_event()
            room.record_stream(self._stream)
        self.moved_bytes += block.size_bytes
        block.storage = room.untyped_storage()
        self._resident[id(block.storage)] = block


def _view(x: Tensor, block: _Block, moved: Moved | None) -> _View:
    return _View(block, x.dtype, tuple(x.shape), tuple(x.stride()), int(x.storage_offset()), moved)
