"""Setup of a group's shared memory: agree on the transport and map the same segments. In: a shared store. Out: a channel, or why not.

All members reach the same decision: each publishes its capabilities, reads those of all, and publishes whether it could map the segment;
one that cannot makes all of them use gloo.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.world.shared_memory import library, segment
from shardwise.world.shared_memory.native import NativeChannel, NativeEngine

__all__ = ["SharedMemory"]

_PROCESS_EXITED = (FileNotFoundError, ProcessLookupError)  # errors of opening a process, or its descriptors, after it has ended


class TextStore(Protocol):
    """The ranks' store: texts by key. `get` waits."""

    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> bytes: ...


class SharedMemory:
    """The transport in one process. `crowded`: more ranks than cores.

    `open` is collective over the members of the group.
    """

    def __init__(self, crowded: bool, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        loaded = library.load()
        self._engine = loaded if isinstance(loaded, str) else NativeEngine(loaded, crowded)  # or the reason why there is none

    def open(self, store: TextStore, index: int, ranks: Sequence[int]) -> NativeChannel | str:
        """Return the channel of `ranks`, of which this is member `index`; or the reason why they cannot share memory."""
        size = len(ranks)
        engine, failure = (None, self._engine) if isinstance(self._engine, str) else (self._engine, "")
        created: tuple[mmap.mmap, segment.SegmentHandle] | None = None
        members = _all_gather_json(store, "can", index, size, {"host": segment.host_identity(), "failure": failure, "pid": os.getpid()})
        reason = next((member["host"] for member in members if member["host"].startswith(segment.CANNOT)), "")
        if not reason and len({member["host"] for member in members}) > 1:
            reason = "the ranks are not processes of one user on one host"
        failure = next((member["failure"] for member in members if member["failure"]), "")
        if not reason and failure:
            reason = f"{library.UNAVAILABLE}: {failure}"
        if reason or engine is None:
            return reason
        pids, place = [member["pid"] for member in members], ""
        if index == 0:
            try:
                created = segment.create_segment(engine.segment_bytes(size))
                place = str(created[1])
            except (OSError, AttributeError) as error:
                reason = f"no segment: {error}"
            store.set("place", json.dumps([place, reason]))
        try:
            return self._map_segment(store, engine, index, ranks, pids, created[0] if created is not None else None)
        finally:
            if created is not None:
                segment.close_handle(created[1])

    def _map_segment(
        self,
        store: TextStore,
        engine: NativeEngine,
        index: int,
        ranks: Sequence[int],
        pids: list[int],
        own: mmap.mmap | None,
    ) -> NativeChannel | str:
        """Finish `open` once the segment is created: `own` on the member that created it."""
        place, reason = json.loads(store.get("place"))
        channel: NativeChannel | None = None
        if not reason:
            try:
                mapping = own if own is not None else segment.attach_segment(segment.SegmentHandle.parse(place))
                channel = NativeChannel(engine, mapping, index, ranks, pids, self._timeout_s)
            except _PROCESS_EXITED as error:
                raise _exited_peer_error(error) from error
            except (OSError, MemoryError) as error:
                reason = f"rank {ranks[index]} cannot map memory of rank {ranks[0]}: {error}"
        reasons = [member_reason for member_reason in _all_gather_json(store, "mapped", index, len(ranks), reason) if member_reason]
        if reasons or channel is None:
            return str(reasons[0])
        channel.shared_buffer = _SharedBufferFactory(channel, store)
        return channel


class _SharedBufferFactory:
    """Creates the shared buffers of one group."""

    def __init__(self, channel: NativeChannel, store: TextStore) -> None:
        self._channel, self._store = channel, store
        self._count = 0

    def __call__(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed flat tensor of `numel` elements in memory that all members map; every member gets its own."""
        channel, key = self._channel, f"buffer/{self._count}"
        self._count += 1
        mapping, place = segment.create_segment(max(1, numel * dtype.itemsize))
        try:
            handles = [
                segment.SegmentHandle.parse(text) for text in _all_gather_json(self._store, key, channel.index, channel.size, str(place))
            ]
            mappings = [mapping if i == channel.index else segment.attach_segment(handle) for i, handle in enumerate(handles)]
            _all_gather_json(self._store, f"{key}/mapped", channel.index, channel.size, True)
        except _PROCESS_EXITED as error:
            raise _exited_peer_error(error) from error
        finally:
            segment.close_handle(place)
        sizes = {handle.size for handle in handles}
        if len(sizes) > 1:
            raise RuntimeError(f"members ask for shared buffers of {sorted(sizes)} bytes")
        channel.add_buffer(mapping, mappings)
        return torch.frombuffer(mapping, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)


def _all_gather_json(store: TextStore, key: str, index: int, size: int, value: Any) -> list[Any]:
    """Return the values that all members publish under `key`, in their order."""
    store.set(f"{key}/{index}", json.dumps(value))
    return [json.loads(store.get(f"{key}/{i}")) for i in range(size)]


def _exited_peer_error(error: OSError) -> RuntimeError:
    """Return a transport's error for a member that has ended: the group fails instead of using another transport."""
    return RuntimeError(f"remote process exited before its memory was mapped: {error}")
