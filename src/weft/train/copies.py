"""Buddy copies: shards of the state that only one host has are copied into the memory of the next host, against the failure of a host.

Hosts form a ring, and each rank sends its unique shards to a rank of the next host, overlapped with the following step, so rarely that it
would cost at most `MAX_TIME_SHARE` of the time even without overlap. A round ends on a rank once it has ended on all:

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
from math import ceil
from statistics import median
from typing import Any

import torch
from torch import Tensor

from weft.run.state.checkpoint.piece import DTYPE_NAMES, DTYPES, OPTIONAL, Piece
from weft.run.state.snapshots import Snapshots
from weft.run.state.snapshots import State as RankState
from weft.train.doubts import ROOM
from weft.units import format_bytes
from weft.world.kept import available_bytes, padded
from weft.world.pending import LostPeer
from weft.world.world import World

SHARE = 0.02  # largest share of the time that copying may take
RARE_S = 3600.0  # if copies would be farther apart they are disabled: checkpoints are written more often
RECENT = 3  # last rounds whose median is the time of a round
TICK_S = 0.02
MICROSECONDS = 1e-6


def mark(piece: Piece) -> str:
    """Return an id that is equal for shards with the same elements."""
    return hashlib.sha256(repr((piece.key, piece.region)).encode()).hexdigest()[:24]


def buddies(boxes: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return each rank's buddy: the rank at the same position on the next host, modulo the number of ranks there.

    >>> buddies([(0, 1, 2), (3, 4)]), buddies([(0, 1)])
    ({0: 3, 1: 4, 2: 3, 3: 0, 4: 1}, {})
    """
    following = zip(boxes, [*boxes[1:], boxes[0]], strict=True) if len(boxes) > 1 else ()
    return {rank: next_box[i % len(next_box)] for box, next_box in following for i, rank in enumerate(box)}


def sent(held: Sequence[Mapping[str, int]], boxes: Sequence[Sequence[int]]) -> dict[int, list[str]]:
    """Assign each shard that only one host has to one of the ranks that have it, round-robin; return shard ids by sending rank.

    >>> sent([{"a": 8, "b": 8}, {"a": 8, "c": 8}, {"b": 8}], [(0, 1), (2,)])
    {0: ['a'], 1: ['c']}
    """
    assigned: dict[int, list[str]] = {}
    holders: dict[str, dict[int, list[int]]] = {}
    for number, box in enumerate(boxes):
        for rank in box:
            for name in held[rank]:
                holders.setdefault(name, {}).setdefault(number, []).append(rank)
    for i, (name, hosts) in enumerate(sorted(holders.items())):
        if len(hosts) == 1:
            (ranks,) = hosts.values()
            assigned.setdefault(ranks[i % len(ranks)], []).append(name)
    return dict(sorted(assigned.items()))


def every_steps(copy_s: float, step_s: float) -> int:
    """Number of steps from one copy to the next.

    >>> every_steps(0.001, 0.1), every_steps(0.05, 0.1)
    (1, 25)
    """
    return max(1, ceil(copy_s / (SHARE * step_s))) if step_s > 0 else 1


@dataclass
class Copy:
    """State received from one rank, after `step` steps; None while it is written. `note`: the metrics row of that step."""

    step: int | None = None
    note: Mapping[str, Any] = field(default_factory=dict)
    pieces: Sequence[Piece] = ()
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def room(self, size: int) -> Tensor:
        if self.memory.numel() != size:
            self.memory = torch.empty(size, dtype=torch.uint8)
        return self.memory

    def unpack(self, length: int) -> None:
        """Parse the received buffer: a JSON header of `length` bytes, then the shards' elements."""
        header = json.loads(bytes(self.memory[:length].numpy()))
        at, pieces = padded(length), []
        for entry in header["pieces"]:
            shape, dtype = entry.pop("shape"), DTYPES[entry.pop("dtype")]
            size = torch.Size(shape).numel() * dtype.itemsize
            facts: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
            pieces.append(Piece(tensor=self.memory[at : at + size].view(dtype).view(shape), **facts))
            at += padded(size)
        self.step, self.note, self.pieces = header["step"], header["note"], pieces


@dataclass(frozen=True)
class State:
    """Which rank copies which shards, the same on all ranks. `required`: ids of all shards of a complete state; `shards_by_sender`: ids
    that each rank copies to another host; `reason`: why nothing is copied although something should be."""

    needed: frozenset[str] = frozenset()
    sends: Mapping[int, Sequence[str]] = field(default_factory=dict)
    bytes_of: Mapping[int, int] = field(default_factory=dict)
    why: str = ""


def state_of(world: World, boxes: Sequence[Sequence[int]], pieces: Sequence[Piece]) -> State:
    """Assign buddy copies by the shards that each rank has; every rank of `world` calls it, spares without shards."""
    local_shards = {mark(piece): [piece.tensor.nbytes, int(piece.kind not in OPTIONAL)] for piece in pieces}
    facts = json.dumps({"pieces": local_shards, "free": min(available_bytes(), 2.0**60)})
    replies = [json.loads(text) for text in world.gathered(facts)]
    shard_bytes = [{name: size for name, (size, _) in reply["pieces"].items()} for reply in replies]
    required = frozenset(name for reply in replies for name, (_, is_required) in reply["pieces"].items() if is_required)
    sends, buddy_of = sent(shard_bytes, boxes), buddies(boxes)
    if not buddy_of:
        return State(required)
    bytes_of = {rank: sum(shard_bytes[rank][name] for name in names) for rank, names in sends.items()}
    for box in boxes:
        copies = sum(size * ((rank in box) + 2 * (buddy_of[rank] in box)) for rank, size in bytes_of.items())
        need = copies + 2 * sum(sum(shard_bytes[rank].values()) for rank in box)
        free = min(replies[rank]["free"] for rank in box)
        if copies and need >= ROOM * free:
            why = f"with buddy copies a host's state needs {format_bytes(need)} of {format_bytes(free)} free memory, so none are made"
            return State(required, why=f"{why}; if a host fails, its shards are those of the last checkpoint")
    return State(required, sends, bytes_of)


class Copies:
    """The rounds of one attempt on one rank of `world`, which has its own connections. `interval_steps`: from one round to the next; None:
    as many as keep copying cheap. `say` is called on all ranks alike."""

    def __init__(self, world: World, boxes: Sequence[Sequence[int]], state: State, every: int | None, say: Callable[[str], None]) -> None:
        self._world, self._say, self._fixed = world, say, every
        buddy_of = buddies(boxes)
        self._mine = frozenset(state.sends.get(world.rank, ()))
        self._to = buddy_of[world.rank] if self._mine else -1
        self._sides: list[dict[int, Copy]] = [
            {rank: Copy() for rank in state.sends if buddy_of[rank] == world.rank} for _ in range(2)
        ]  # fmt: skip
        self.bytes = max(state.bytes_of.values())
        self.every = every or 1
        self.waited_s = 0.0
        self.is_off = False
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._thread: threading.Thread | None = None
        self._step: int | None = None  # of the current round
        self._next: int | None = None
        self._head, self._body = torch.zeros(2, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
        self._lost: Exception | None = None
        self._took = (0.0, 0.0)

    def of(self, step: int) -> list[Copy]:
        """Return the received copies of the state after `step` steps."""
        return [copy for copies in self._sides for copy in copies.values() if copy.step == step]

    @property
    def steps(self) -> set[int]:
        """Steps whose copies on this rank are complete."""
        return {copy.step for copies in self._sides for copy in copies.values() if copy.step is not None}

    def told(self) -> dict[str, Any]:
        """Wait for the last round. Return the summary: bytes of the rank that sends most, and seconds that this rank waited for rounds."""
        self.settle()
        return {"copies": {"every": self.every, "bytes": self.bytes, "waited_s": self.waited_s}}

    def begin(self, step: int, note: Mapping[str, Any], pieces: Callable[[], Sequence[Piece]], step_s: float) -> None:
        """Start copying the state after `step` steps in the background, if that is due; `join_round` was called since the last start."""
        if self.is_off or (self._next is not None and step < self._next):
            return
        began = time.perf_counter()
        if self._mine:
            self._pack(step, note, [piece for piece in pieces() if mark(piece) in self._mine])
        self._step, self._next = step, step + self.every
        packed_s = time.perf_counter() - began
        self._thread = threading.Thread(target=self._try, args=(packed_s, step_s), daemon=True, name="weft-copies")
        self._thread.start()

    def settle(self) -> int | None:
        """Wait for the current round. Return its step, copied on all ranks; None if there was none. Raises the error of the round, LostPeer
        after the failure of a rank."""
        if self._thread is None:
            return None
        began = time.perf_counter()
        while self._thread.is_alive():
            self._thread.join(TICK_S)
            if self._world.lost_why:
                raise LostPeer(f"another rank failed while rank {self._world.rank} copied its state: {self._world.lost_why}")
        self._thread = None
        self.waited_s += time.perf_counter() - began
        if self._lost is not None:
            raise self._lost
        self._recent.append(self._took)
        copy_s, step_s = (median(times) for times in zip(*self._recent, strict=True))
        self.every = self._fixed or every_steps(copy_s, step_s)
        if self._fixed is None and len(self._recent) == RECENT and self.every * step_s > RARE_S:
            self.is_off = True
            self._say(
                f"a buddy copy of the shards that only one host has takes {copy_s:.1f} s, and so could be made once in "
                f"{self.every * step_s:.0f} s; copying is disabled, and if a host fails, its shards are those of the last checkpoint"
            )
        return self._step

    def receive(self) -> None:
        """Receive round after round in the background on a spare, until a rank fails or the world is closed."""

        def rounds() -> None:
            while self._lost is None:
                self._try(0.0, 0.0)

        threading.Thread(target=rounds, daemon=True, name="weft-copies").start()

    def close(self) -> None:
        """End the rounds on all ranks."""
        self._world.abandon("the run is done")

    def _pack(self, step: int, note: Mapping[str, Any], pieces: Sequence[Piece]) -> None:
        """Copy a header and the shards' elements to a send buffer that the next step does not overwrite."""
        data = json.dumps({"step": step, "note": dict(note), "pieces": [_described(piece) for piece in pieces]}).encode()
        size = padded(len(data)) + sum(padded(piece.tensor.nbytes) for piece in pieces)
        if self._body.numel() != size:
            self._body = torch.empty(size, dtype=torch.uint8)
        self._head[:] = torch.tensor([size, len(data)])
        self._body[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        at = padded(len(data))
        for piece in pieces:
            x = piece.tensor.detach()
            self._body[at : at + x.nbytes].view(x.dtype).view(x.shape).copy_(x)
            at += padded(x.nbytes)

    def _try(self, packed_s: float, step_s: float) -> None:
        try:
            self._round(packed_s, step_s)
        except Exception as error:
            self._lost = error

    @torch.no_grad()
    def _round(self, packed_s: float, step_s: float) -> None:
        group, took_s = self._world.everyone, packed_s
        sending = [group.isend(self._head, self._to), group.isend(self._body, self._to, 1)] if self._mine else []
        for source, copy in min(self._sides, key=_newest).items():  # overwrite the older copies
            copy.step = None
            head = torch.zeros(2, dtype=torch.int64)
            group.irecv(head, source).wait()
            began = time.perf_counter()
            size, length = head.tolist()
            group.irecv(copy.room(size), source, 1).wait()
            took_s += time.perf_counter() - began
            copy.unpack(length)
        for work in sending:
            work.wait()
        copy_us, step_us = self._world.maximum([round(took_s / MICROSECONDS), round(step_s / MICROSECONDS)])
        self._took = copy_us * MICROSECONDS, step_us * MICROSECONDS


class Copied(Snapshots):
    """Snapshots that are copied to another host at an interval; a copied one is retained until the next copy is complete."""

    def __init__(self, copies: Copies, pieces: Callable[[], Sequence[Piece]], last: int, world: World, state: RankState) -> None:
        super().__init__(world, state)
        self._copies, self._pieces, self._last = copies, pieces, last
        self._ended_s: float | None = None
        self._step_times: deque[float] = deque(maxlen=20)

    def take(self, step: int, note: Mapping[str, Any]) -> None:
        """Take a snapshot and start a copy if due; the state after the last step is not copied, since it is checkpointed."""
        if self._ended_s is not None:
            self._step_times.append(time.perf_counter() - self._ended_s)
        with self._world.pace.long():
            copied = self._copies.settle()
        self.pinned = None if self._copies.is_off else self.pinned if copied is None else copied
        super().take(step, note)
        if step < self._last:
            self._copies.begin(step, note, self._pieces, median(self._step_times) if self._step_times else 0.0)
        self._ended_s = time.perf_counter()


def _newest(side: Mapping[int, Copy]) -> int:
    return max((copy.step for copy in side.values() if copy.step is not None), default=-1)


def _described(piece: Piece) -> dict[str, Any]:
    fields = {name: getattr(piece, name) for name in ("name", "kind", "global_shape", "offsets", "slot", "block", "flat")}
    return {**fields, "shape": tuple(piece.tensor.shape), "dtype": DTYPE_NAMES[piece.tensor.dtype]}
