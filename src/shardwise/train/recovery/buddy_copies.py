"""Buddy copies: shards of the state that only one host has are copied into the memory of the next host, against the failure of a host.

Hosts form a ring, and each rank sends its unique shards to a rank of the next host, overlapped with the following step, so rarely that it
would cost at most `MAX_TIME_SHARE` of the time even without overlap (`run.recovery.snapshots`). A round ends on a rank once it has ended on
all:

    snapshot c, send -> (step c + 1) -> round of c has ended everywhere -> snapshot c + 1, replacing the one before c

so at any moment there is a step that all ranks have a snapshot and complete copies of: c, or, during the round of c, the one before.
Not modelled: two neighbouring hosts that fail at once, unless replicas make up for it.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from shardwise.run.checkpoint.state_shard import DTYPE_NAMES, DTYPES, OPTIONAL, StateShard
from shardwise.run.recovery.fingerprints import fingerprint_of
from shardwise.run.recovery.snapshots import MAX_INTERVAL_S, MICROSECONDS, RankState, Snapshots, copy_interval_steps
from shardwise.train.recovery.anomalies import MAX_MEMORY_SHARE
from shardwise.units import format_bytes
from shardwise.world.comm.pending import LostPeer
from shardwise.world.persistent_memory import available_bytes, padded_size
from shardwise.world.world import World

NUM_RECENT_ROUNDS = 3  # last rounds whose median is the time of a round
POLL_S = 0.02


def shard_id(shard: StateShard) -> str:
    """Return an id that is equal for shards with the same elements."""
    return hashlib.sha256(repr((shard.key, shard.region)).encode()).hexdigest()[:24]


def assign_buddies(ranks_by_host: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return each rank's buddy: the rank at the same position on the next host, modulo the number of ranks there.

    >>> assign_buddies([(0, 1, 2), (3, 4)]), assign_buddies([(0, 1)])
    ({0: 3, 1: 4, 2: 3, 3: 0, 4: 1}, {})
    """
    following = zip(ranks_by_host, [*ranks_by_host[1:], ranks_by_host[0]], strict=True) if len(ranks_by_host) > 1 else ()
    return {rank: next_box[i % len(next_box)] for box, next_box in following for i, rank in enumerate(box)}


def assign_senders(shard_bytes_by_rank: Sequence[Mapping[str, int]], ranks_by_host: Sequence[Sequence[int]]) -> dict[int, list[str]]:
    """Assign each shard that only one host has to one of the ranks that have it, round-robin; return shard ids by sending rank.

    >>> assign_senders([{"a": 8, "b": 8}, {"a": 8, "c": 8}, {"b": 8}], [(0, 1), (2,)])
    {0: ['a'], 1: ['c']}
    """
    assigned: dict[int, list[str]] = {}
    holders: dict[str, dict[int, list[int]]] = {}
    for number, box in enumerate(ranks_by_host):
        for rank in box:
            for name in shard_bytes_by_rank[rank]:
                holders.setdefault(name, {}).setdefault(number, []).append(rank)
    for i, (name, hosts) in enumerate(sorted(holders.items())):
        if len(hosts) == 1:
            (ranks,) = hosts.values()
            assigned.setdefault(ranks[i % len(ranks)], []).append(name)
    return dict(sorted(assigned.items()))


@dataclass
class BuddyCopy:
    """State received from one rank, after `step` steps; None while it is written. `note`: the metrics row of that step."""

    step: int | None = None
    note: Mapping[str, Any] = field(default_factory=dict)
    shards: Sequence[StateShard] = ()
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    digest: int = 0

    @property
    def is_intact(self) -> bool:
        """True if the memory is as it was received."""
        return int(fingerprint_of(self.memory)) == self.digest

    def buffer_of(self, size: int) -> Tensor:
        if self.memory.numel() != size:
            self.memory = torch.empty(size, dtype=torch.uint8)
        return self.memory

    def unpack(self, length: int) -> None:
        """Parse the received buffer: a JSON header of `length` bytes, then the shards' elements."""
        header = json.loads(bytes(self.memory[:length].numpy()))
        at, pieces = padded_size(length), []
        for entry in header["pieces"]:
            shape, dtype = entry.pop("shape"), DTYPES[entry.pop("dtype")]
            size = torch.Size(shape).numel() * dtype.itemsize
            facts: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
            pieces.append(StateShard(tensor=self.memory[at : at + size].view(dtype).view(shape), **facts))
            at += padded_size(size)
        self.step, self.note, self.shards, self.digest = header["step"], header["note"], pieces, int(fingerprint_of(self.memory))


@dataclass(frozen=True)
class CopyAssignment:
    """Which rank copies which shards, the same on all ranks. `required`: ids of all shards of a complete state; `shards_by_sender`: ids
    that each rank copies to another host; `reason`: why nothing is copied although something should be."""

    required: frozenset[str] = frozenset()
    shards_by_sender: Mapping[int, Sequence[str]] = field(default_factory=dict)
    bytes_by_sender: Mapping[int, int] = field(default_factory=dict)
    reason: str = ""


def assign_copies(world: World, ranks_by_host: Sequence[Sequence[int]], shards: Sequence[StateShard]) -> CopyAssignment:
    """Assign buddy copies by the shards that each rank has; every rank of `world` calls it, spares without shards."""
    local_shards = {shard_id(piece): [piece.tensor.nbytes, int(piece.kind not in OPTIONAL)] for piece in shards}
    facts = json.dumps({"pieces": local_shards, "free": min(available_bytes(), 2.0**60)})
    replies = [json.loads(text) for text in world.all_gather_text(facts)]
    shard_bytes = [{name: size for name, (size, _) in reply["pieces"].items()} for reply in replies]
    required = frozenset(name for reply in replies for name, (_, is_required) in reply["pieces"].items() if is_required)
    sends, buddy_of = assign_senders(shard_bytes, ranks_by_host), assign_buddies(ranks_by_host)
    if not buddy_of:
        return CopyAssignment(required)
    bytes_of = {rank: sum(shard_bytes[rank][name] for name in names) for rank, names in sends.items()}
    for box in ranks_by_host:
        copies = sum(size * ((rank in box) + 2 * (buddy_of[rank] in box)) for rank, size in bytes_of.items())
        need = copies + 2 * sum(sum(shard_bytes[rank].values()) for rank in box)
        free = min(replies[rank]["free"] for rank in box)
        if copies and need >= MAX_MEMORY_SHARE * free:
            why = f"with buddy copies a host's state needs {format_bytes(need)} of {format_bytes(free)} free memory, so none are made"
            return CopyAssignment(required, reason=f"{why}; if a host fails, its shards are those of the last checkpoint")
    return CopyAssignment(required, sends, bytes_of)


class BuddyCopies:
    """The rounds of one attempt on one rank of `world`, which has its own connections. `interval_steps`: from one round to the next; None:
    as many as keep copying cheap. `say` is called on all ranks alike."""

    def __init__(
        self,
        world: World,
        ranks_by_host: Sequence[Sequence[int]],
        assignment: CopyAssignment,
        interval_steps: int | None,
        say: Callable[[str], None],
    ) -> None:
        self._world, self._say, self._fixed_interval = world, say, interval_steps
        buddy_of = assign_buddies(ranks_by_host)
        self._sent_ids = frozenset(assignment.shards_by_sender.get(world.rank, ()))
        self._buddy = buddy_of[world.rank] if self._sent_ids else -1
        self._double_buffer: list[dict[int, BuddyCopy]] = [
            {rank: BuddyCopy() for rank in assignment.shards_by_sender if buddy_of[rank] == world.rank} for _ in range(2)
        ]  # fmt: skip
        self.sent_bytes = max(assignment.bytes_by_sender.values())
        self.interval_steps = interval_steps or 1
        self.waited_s = 0.0
        self.is_disabled = False
        self._recent_times: deque[tuple[float, float]] = deque(maxlen=NUM_RECENT_ROUNDS)
        self._thread: threading.Thread | None = None
        self._round_step: int | None = None  # of the current round
        self._next_step: int | None = None
        self._header, self._payload = torch.zeros(2, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
        self._failure: Exception | None = None
        self._round_times = (0.0, 0.0)

    def copies_at(self, step: int) -> list[BuddyCopy]:
        """Return the received copies of the state after `step` steps."""
        return [copy for copies in self._double_buffer for copy in copies.values() if copy.step == step]

    @property
    def steps(self) -> set[int]:
        """Steps whose copies on this rank are complete."""
        return {copy.step for copies in self._double_buffer for copy in copies.values() if copy.step is not None}

    def summary(self) -> dict[str, Any]:
        """Wait for the last round. Return the summary: bytes of the rank that sends most, and seconds that this rank waited for rounds."""
        self.join_round()
        return {"copies": {"every": self.interval_steps, "bytes": self.sent_bytes, "waited_s": self.waited_s}}

    def start_round(self, step: int, note: Mapping[str, Any], get_shards: Callable[[], Sequence[StateShard]], step_s: float) -> None:
        """Start copying the state after `step` steps in the background, if that is due; `join_round` was called since the last start."""
        if self.is_disabled or (self._next_step is not None and step < self._next_step):
            return
        began = time.perf_counter()
        if self._sent_ids:
            self._pack(step, note, [piece for piece in get_shards() if shard_id(piece) in self._sent_ids])
        self._round_step, self._next_step = step, step + self.interval_steps
        packed_s = time.perf_counter() - began
        self._thread = threading.Thread(target=self._run_round, args=(packed_s, step_s), daemon=True, name="shardwise-copies")
        self._thread.start()

    def join_round(self) -> int | None:
        """Wait for the current round. Return its step, copied on all ranks; None if there was none. Raises the error of the round, LostPeer
        after the failure of a rank."""
        if self._thread is None:
            return None
        began = time.perf_counter()
        while self._thread.is_alive():
            self._thread.join(POLL_S)
            if self._world.failure_reason:
                raise LostPeer(f"another rank failed while rank {self._world.rank} copied its state: {self._world.failure_reason}")
        self._thread = None
        self.waited_s += time.perf_counter() - began
        if self._failure is not None:
            raise self._failure
        self._recent_times.append(self._round_times)
        copy_s, step_s = (median(times) for times in zip(*self._recent_times, strict=True))
        self.interval_steps = self._fixed_interval or copy_interval_steps(copy_s, step_s)
        if self._fixed_interval is None and len(self._recent_times) == NUM_RECENT_ROUNDS and self.interval_steps * step_s > MAX_INTERVAL_S:
            self.is_disabled = True
            self._say(
                f"a buddy copy of the shards that only one host has takes {copy_s:.1f} s, and so could be made once in "
                f"{self.interval_steps * step_s:.0f} s; copying is disabled, and if a host fails, its shards are those of the last "
                f"checkpoint"
            )
        return self._round_step

    def receive(self) -> None:
        """Receive round after round in the background on a spare, until a rank fails or the world is closed."""

        def rounds() -> None:
            while self._failure is None:
                self._run_round(0.0, 0.0)

        threading.Thread(target=rounds, daemon=True, name="shardwise-copies").start()

    def close(self) -> None:
        """End the rounds on all ranks."""
        self._world.abandon("the run is done")

    def _pack(self, step: int, note: Mapping[str, Any], shards: Sequence[StateShard]) -> None:
        """Copy a header and the shards' elements to a send buffer that the next step does not overwrite."""
        data = json.dumps({"step": step, "note": dict(note), "pieces": [_describe_shard(piece) for piece in shards]}).encode()
        size = padded_size(len(data)) + sum(padded_size(piece.tensor.nbytes) for piece in shards)
        if self._payload.numel() != size:
            self._payload = torch.empty(size, dtype=torch.uint8)
        self._header[:] = torch.tensor([size, len(data)])
        self._payload[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        at = padded_size(len(data))
        for piece in shards:
            x = piece.tensor.detach()
            self._payload[at : at + x.nbytes].view(x.dtype).view(x.shape).copy_(x)
            at += padded_size(x.nbytes)

    def _run_round(self, packed_s: float, step_s: float) -> None:
        try:
            self._exchange(packed_s, step_s)
        except Exception as error:
            self._failure = error

    @torch.no_grad()
    def _exchange(self, packed_s: float, step_s: float) -> None:
        group, took_s = self._world.world_group, packed_s
        sending = [group.isend(self._header, self._buddy), group.isend(self._payload, self._buddy, 1)] if self._sent_ids else []
        for source, copy in min(self._double_buffer, key=_newest_step).items():  # overwrite the older copies
            copy.step = None
            head = torch.zeros(2, dtype=torch.int64)
            group.irecv(head, source).wait()
            began = time.perf_counter()
            size, length = head.tolist()
            group.irecv(copy.buffer_of(size), source, 1).wait()
            took_s += time.perf_counter() - began
            copy.unpack(length)
        for work in sending:
            work.wait()
        copy_us, step_us = self._world.all_reduce_max([round(took_s / MICROSECONDS), round(step_s / MICROSECONDS)])
        self._round_times = copy_us * MICROSECONDS, step_us * MICROSECONDS


class BuddySnapshots(Snapshots):
    """Snapshots that are copied to another host at an interval; a copied one is retained until the next copy is complete."""

    def __init__(
        self, copies: BuddyCopies, get_shards: Callable[[], Sequence[StateShard]], last_step: int, world: World, state: RankState
    ) -> None:
        super().__init__(world, state)
        self._copies, self._get_shards, self._last_step = copies, get_shards, last_step
        self._ended_s: float | None = None
        self._step_times: deque[float] = deque(maxlen=20)

    def take(self, step: int, note: Mapping[str, Any]) -> bool:
        """Take a snapshot and start a copy if due; the state after the last step is not copied, since it is checkpointed."""
        if self._ended_s is not None:
            self._step_times.append(time.perf_counter() - self._ended_s)
        with self._world.pace.untimed():
            copied = self._copies.join_round()
        self.pinned_step = None if self._copies.is_disabled else self.pinned_step if copied is None else copied
        is_taken = super().take(step, note)
        if is_taken and step < self._last_step:
            self._copies.start_round(step, note, self._get_shards, median(self._step_times) if self._step_times else 0.0)
        self._ended_s = time.perf_counter()
        return is_taken


def _newest_step(copies: Mapping[int, BuddyCopy]) -> int:
    return max((copy.step for copy in copies.values() if copy.step is not None), default=-1)


def _describe_shard(shard: StateShard) -> dict[str, Any]:
    fields = {name: getattr(shard, name) for name in ("name", "kind", "global_shape", "offsets", "slot", "block", "flat")}
    return {**fields, "shape": tuple(shard.tensor.shape), "dtype": DTYPE_NAMES[shard.tensor.dtype]}
