"""How the members of a group agree on shared memory and map the same segments. In: a store they share. Out: a channel, or why not.

All members come to the same answer: each says what it can do, reads what all said, and says whether it could map; one that cannot
turns all of them to the other transport.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.world.shared_memory import library, segment
from weft.world.shared_memory.native import NativeChannel, NativeEngine, NativeWork
from weft.world.shared_memory.portable.channel import PortableChannel, PortableEngine, PortableWork

__all__ = ["Channel", "SharedMemory"]

Channel = NativeChannel | PortableChannel
Work = NativeWork | PortableWork
_ENDED = (FileNotFoundError, ProcessLookupError)  # what opening a process, or what it keeps, says once it is gone


class Store(Protocol):
    """Where ranks meet: texts by key. `get` waits."""

    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> bytes: ...


class SharedMemory:
    """The transport in one process. `crowded`: more ranks than cores. `native`: the C library where it can be built.

    `open` is collective over the members of the group.
    """

    def __init__(self, crowded: bool, timeout_s: float, native: bool = True) -> None:
        self._timeout_s = timeout_s
        loaded = library.load() if native else "not asked for"
        self.portable = PortableEngine()
        self.native = None if isinstance(loaded, str) else NativeEngine(loaded, crowded)
        self.why_portable = loaded if isinstance(loaded, str) else ""

    def open(self, store: Store, index: int, ranks: Sequence[int]) -> Channel | str:
        """The channel of `ranks`, of which this is member `index`; or the reason why they cannot share memory."""
        size = len(ranks)
        kind = "native" if self.native is not None else "portable"
        created: tuple[mmap.mmap, segment.Place] | None = None
        all_said = _told(store, "can", index, size, {"host": segment.host(), "kind": kind, "pid": os.getpid()})
        reason = next((one["host"] for one in all_said if one["host"].startswith(segment.CANNOT)), "")
        if not reason and len({one["host"] for one in all_said}) > 1:
            reason = "the ranks are not processes of one user on one host"
        if reason:
            return reason
        engine = self.native if self.native is not None and all(one["kind"] == "native" for one in all_said) else self.portable
        pids, place = [one["pid"] for one in all_said], ""
        if index == 0:
            try:
                created = segment.create(engine.segment_bytes(size))
                place = str(created[1])
            except (OSError, AttributeError) as error:
                reason = f"no segment: {error}"
            store.set("place", json.dumps([place, reason]))
        try:
            return self._mapped(store, engine, index, ranks, pids, created[0] if created is not None else None)
        finally:
            if created is not None:
                segment.close_place(created[1])

    def _mapped(
        self, store: Store, engine: NativeEngine | PortableEngine, index: int, ranks: Sequence[int], pids: list[int], mine: mmap.mmap | None
    ) -> Channel | str:
        """As `open`, once the segment is made: `mine` on the member that made it."""
        place, reason = json.loads(store.get("place"))
        channel: Channel | None = None
        if not reason:
            try:
                mapping = mine if mine is not None else segment.attach(segment.Place.parse(place))
                channel = engine.open(mapping, index, ranks, pids, self._timeout_s)
            except _ENDED as error:
                raise _lost(error) from error
            except (OSError, MemoryError) as error:
                reason = f"rank {ranks[index]} cannot map memory of rank {ranks[0]}: {error}"
        failed = [one for one in _told(store, "mapped", index, len(ranks), reason) if one]
        if failed or channel is None:
            return str(failed[0])
        channel.shared_buffer = _Buffers(channel, store)
        return channel


class _Buffers:
    """Makes the shared buffers of one group."""

    def __init__(self, channel: Channel, store: Store) -> None:
        self._channel, self._store = channel, store
        self._count = 0

    def __call__(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed flat tensor of `numel` elements in memory that all members map; every member gets its own."""
        channel, key = self._channel, f"buffer/{self._count}"
        self._count += 1
        mapping, place = segment.create(max(1, numel * dtype.itemsize))
        try:
            places = [segment.Place.parse(one) for one in _told(self._store, key, channel.index, channel.size, str(place))]
            mappings = [mapping if i == channel.index else segment.attach(one) for i, one in enumerate(places)]
            _told(self._store, f"{key}/mapped", channel.index, channel.size, True)
        except _ENDED as error:
            raise _lost(error) from error
        finally:
            segment.close_place(place)
        sizes = {one.size for one in places}
        if len(sizes) > 1:
            raise RuntimeError(f"members ask for shared buffers of {sorted(sizes)} bytes")
        channel.add_buffer(mapping, mappings)
        return torch.frombuffer(mapping, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)


def _told(store: Store, key: str, index: int, size: int, value: Any) -> list[Any]:
    """What every member says under `key`, in their order."""
    store.set(f"{key}/{index}", json.dumps(value))
    return [json.loads(store.get(f"{key}/{i}")) for i in range(size)]


def _lost(error: OSError) -> RuntimeError:
    """What a transport says of a member that is gone: it is no reason to take another transport, over which it would not come either."""
    return RuntimeError(f"remote process exited before its memory was mapped: {error}")
