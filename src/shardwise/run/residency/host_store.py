"""Offloading of saved activations to host memory between forward and backward: `HostStore`.

Forwards run inside `record_saved`, which returns `OffloadedActivations`; these are offloaded with `offload` and loaded with `load`, or on
demand when backward reads them. Each storage is copied once, however many views of it are saved, and its device memory is freed when
nothing else refers to it. Parameters, buffers, the batch, and storages smaller than a page are not offloaded.

On CPUs the host memory is a second account without the device's limit, and copies are synchronous. On GPUs it is pinned memory, and copies
run on their own stream, overlapping compute (Rhu et al. 2016).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from shardwise.world.memory import HOST, Accounts

_MIN_BYTES = 4096


@dataclass(eq=False)
class _OffloadableStorage:
    """A saved storage: on the device, on the host, or (while it is copied) on both."""

    storage: torch.UntypedStorage | None
    size_bytes: int
    device: torch.device
    num_users: int = 0
    host_copy: Tensor | None = None
    copy_event: Any = None  # the copy's event, after which the storage may be read


@dataclass(eq=False)
class _OffloadableView:
    """A saved tensor without its memory."""

    block: _OffloadableStorage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    activations: OffloadedActivations | None = None


@dataclass(eq=False)
class OffloadedActivations:
    """Saved activations of one forward, while autograd refers to them. `previous`: those whose backward follows this one's."""

    blocks: WeakSet[_OffloadableStorage] = field(default_factory=WeakSet)
    is_offloaded: bool = False
    is_in_backward: bool = False  # its backward has begun
    previous: OffloadedActivations | None = None

    @property
    def size_bytes(self) -> int:
        return sum(block.size_bytes for block in self.blocks)


class HostStore:
    """Offloads and loads saved activations."""

    def __init__(self, device: torch.device, memory: Accounts, not_offloaded: Iterable[Tensor]) -> None:
        self._device, self._memory = device, memory
        self._not_offloaded = {id(s): s for s in (x.untyped_storage() for x in not_offloaded)}
        self._inputs: Sequence[Mapping[str, Tensor]] = ()
        self._input_storages: dict[int, torch.UntypedStorage] | None = None
        # By the id of the storage, while it is on the device and a backward will read it.
        self._resident: WeakValueDictionary[int, _OffloadableStorage] = WeakValueDictionary()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.copied_bytes = 0

    @property
    def overlaps(self) -> bool:
        """Return whether copies overlap compute, so that prefetching pays."""
        return self._stream is not None

    def set_inputs(self, inputs: Sequence[Mapping[str, Tensor]]) -> None:
        """Set the batch's tensors by microbatch, which are not offloaded, before a step."""
        self._inputs, self._input_storages = inputs, None

    @contextmanager
    def record_saved(self) -> Iterator[OffloadedActivations]:
        """Collect the tensors that autograd saves within a block."""
        activations = OffloadedActivations()
        if self._input_storages is None:
            self._input_storages = {id(s): s for s in (x.untyped_storage() for tensors in self._inputs for x in tensors.values())}

        def pack(x: Tensor) -> object:
            block = self._storage_of(x, activations)
            return x if block is None else _view_of(x, block, activations)

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield activations

    def _storage_of(self, x: Tensor, activations: OffloadedActivations) -> _OffloadableStorage | None:
        storage = x.untyped_storage()  # one object per storage while it is referenced
        key = id(storage)
        is_input = self._input_storages is not None and key in self._input_storages
        if key in self._not_offloaded or is_input or storage.nbytes() < _MIN_BYTES or x.layout is not torch.strided:
            return None
        if x.device.type != self._device.type:  # on the host already
            return None
        block = self._resident.get(key)
        if block is None:
            block = self._resident[key] = _OffloadableStorage(storage, storage.nbytes(), x.device)
        if block not in activations.blocks:
            activations.blocks.add(block)
            block.num_users += 1
        return block

    def offload(self, activations: OffloadedActivations) -> None:
        """Offload to the host. A storage saved by two forwards is copied when both are offloaded."""
        if activations.is_offloaded:
            return
        activations.is_offloaded = True
        for block in list(activations.blocks):
            block.num_users -= 1
            if block.num_users == 0 and block.storage is not None:
                self._copy_to_host(block)

    def load(self, activations: OffloadedActivations) -> None:
        """Load what is not on the device; a prefetch for the backward that reads it, which otherwise loads on demand."""
        if not activations.is_offloaded:
            return
        activations.is_offloaded = False
        for block in list(activations.blocks):
            block.num_users += 1
            self._copy_to_device(block)

    def prefetch(self, activations: OffloadedActivations | None) -> None:
        """Load the first offloaded activations, of these and those whose backward follows."""
        while activations is not None and not activations.is_offloaded:
            activations = activations.previous
        if activations is not None:
            self.load(activations)

    def _unpack(self, packed: object) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        assert isinstance(packed, _OffloadableView)
        if self.overlaps and packed.activations is not None and not packed.activations.is_in_backward:
            packed.activations.is_in_backward = True
            self.load(packed.activations)
            self.prefetch(packed.activations.previous)  # prefetched while this one's backward runs
        return self._materialize(packed)

    def _materialize(self, view: _OffloadableView) -> Tensor:
        block = view.block
        self._copy_to_device(block)
        if block.copy_event is not None:
            torch.cuda.current_stream(self._device).wait_event(block.copy_event)
            block.copy_event = None
        tensor = torch.empty(0, dtype=view.dtype, device=block.device)
        assert block.storage is not None
        return tensor.set_(block.storage, view.offset, view.shape, view.stride)

    def _copy_to_host(self, block: _OffloadableStorage) -> None:
        assert block.storage is not None
        self._resident.pop(id(block.storage), None)
        source = torch.empty(0, dtype=torch.uint8, device=block.device).set_(block.storage)
        if block.host_copy is None:  # else an earlier copy is still valid
            with self._memory.counting(HOST):
                block.host_copy = torch.empty(block.size_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)
            self.copied_bytes += block.size_bytes
            if self._stream is None:
                block.host_copy.copy_(source)
            else:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                with torch.cuda.stream(self._stream):
                    block.host_copy.copy_(source, non_blocking=True)
                source.record_stream(self._stream)
        block.storage = None

    def _copy_to_device(self, block: _OffloadableStorage) -> None:
        if block.storage is not None:
            return
        assert block.host_copy is not None
        with self._memory.counting("activations"):
            device_copy = torch.empty(block.size_bytes, dtype=torch.uint8, device=block.device)
        if self._stream is None:
            device_copy.copy_(block.host_copy)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # the memory may have had another use until now
            with torch.cuda.stream(self._stream):
                device_copy.copy_(block.host_copy, non_blocking=True)
                block.copy_event = self._stream.record_event()
            device_copy.record_stream(self._stream)
        self.copied_bytes += block.size_bytes
        block.storage = device_copy.untyped_storage()
        self._resident[id(block.storage)] = block


def _view_of(x: Tensor, block: _OffloadableStorage, activations: OffloadedActivations | None) -> _OffloadableView:
    return _OffloadableView(block, x.dtype, tuple(x.shape), tuple(x.stride()), int(x.storage_offset()), activations)
