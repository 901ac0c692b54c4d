"""Copies of state that one host alone has, in the memory of another. In: who holds which pieces, by host. Out: the pieces of a lost host.

Hosts form a ring, and each rank sends what no other host has to a rank of the next host: after the step, behind the one after it, every so
many steps that it would cost `SHARE` of the time even if nothing went on meanwhile. A round ends on a rank once it has ended on all:

    take c, send -> (step c + 1) -> round of c is over everywhere -> take c + 1, in place of what was there before c

so at any moment there is a step whose snapshot all ranks have and whose copies are whole: c, or, while c is under way, the one before.
Not modelled: two neighbouring hosts that are lost at once, unless replicas make up for it.
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

SHARE = 0.02  # of the time, at most
RARE_S = 3600.0  # copies that would be farther apart are not made: checkpoints are written more often
RECENT = 3  # rounds that tell what one takes
TICK_S = 0.02
MICROSECONDS = 1e-6


def mark(piece: Piece) -> str:
    """What pieces have in common that hold the same elements."""
    return hashlib.sha256(repr((piece.key, piece.region)).encode()).hexdigest()[:24]


def buddies(boxes: Sequence[Sequence[int]]) -> dict[int, int]:
    """To whom each rank sends: the rank of its own place on the next host, counted around where that has fewer.

    >>> buddies([(0, 1, 2), (3, 4)]), buddies([(0, 1)])
    ({0: 3, 1: 4, 2: 3, 3: 0, 4: 1}, {})
    """
    following = zip(boxes, [*boxes[1:], boxes[0]], strict=True) if len(boxes) > 1 else ()
    return {rank: there[i % len(there)] for box, there in following for i, rank in enumerate(box)}


def sent(held: Sequence[Mapping[str, int]], boxes: Sequence[Sequence[int]]) -> dict[int, list[str]]:
    """What each rank sends: of the pieces that one host alone has, each once, those that several of its ranks have in turn.

    >>> sent([{"a": 8, "b": 8}, {"a": 8, "c": 8}, {"b": 8}], [(0, 1), (2,)])
    {0: ['a'], 1: ['c']}
    """
    mine: dict[int, list[str]] = {}
    holders: dict[str, dict[int, list[int]]] = {}
    for number, box in enumerate(boxes):
        for rank in box:
            for name in held[rank]:
                holders.setdefault(name, {}).setdefault(number, []).append(rank)
    for i, (name, hosts) in enumerate(sorted(holders.items())):
        if len(hosts) == 1:
            (ranks,) = hosts.values()
            mine.setdefault(ranks[i % len(ranks)], []).append(name)
    return dict(sorted(mine.items()))


def every_steps(copy_s: float, step_s: float) -> int:
    """Steps from one copy to the next.

    >>> every_steps(0.001, 0.1), every_steps(0.05, 0.1)
    (1, 25)
    """
    return max(1, ceil(copy_s / (SHARE * step_s))) if step_s > 0 else 1


@dataclass
class Copy:
    """What was received of one rank: the state after `step` steps; None while it is written. `note`: what that step told."""

    step: int | None = None
    note: Mapping[str, Any] = field(default_factory=dict)
    pieces: Sequence[Piece] = ()
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def room(self, size: int) -> Tensor:
        if self.memory.numel() != size:
            self.memory = torch.empty(size, dtype=torch.uint8)
        return self.memory

    def unpack(self, length: int) -> None:
        """It is whole: `length` bytes of the memory say what it is."""
        told = json.loads(bytes(self.memory[:length].numpy()))
        at, pieces = padded(length), []
        for one in told["pieces"]:
            shape, dtype = one.pop("shape"), DTYPES[one.pop("dtype")]
            size = torch.Size(shape).numel() * dtype.itemsize
            facts: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in one.items()}
            pieces.append(Piece(tensor=self.memory[at : at + size].view(dtype).view(shape), **facts))
            at += padded(size)
        self.step, self.note, self.pieces = told["step"], told["note"], pieces


@dataclass(frozen=True)
class State:
    """Who holds what of the state, as all ranks know it. `needed`: marks of all pieces without which it is not whole; `sends`: by rank,
    what it copies to another host; `why`: why nothing is copied, though something should be."""

    needed: frozenset[str] = frozenset()
    sends: Mapping[int, Sequence[str]] = field(default_factory=dict)
    bytes_of: Mapping[int, int] = field(default_factory=dict)
    why: str = ""


def state_of(world: World, boxes: Sequence[Sequence[int]], pieces: Sequence[Piece]) -> State:
    """What all ranks of `world` hold; every rank calls it, spares without pieces."""
    mine = {mark(piece): [piece.tensor.nbytes, int(piece.kind not in OPTIONAL)] for piece in pieces}
    told = [json.loads(text) for text in world.gathered(json.dumps({"pieces": mine, "free": min(available_bytes(), 2.0**60)}))]
    held = [{name: size for name, (size, _) in one["pieces"].items()} for one in told]
    needed = frozenset(name for one in told for name, (_, is_needed) in one["pieces"].items() if is_needed)
    sends, to = sent(held, boxes), buddies(boxes)
    if not to:
        return State(needed)
    bytes_of = {rank: sum(held[rank][name] for name in names) for rank, names in sends.items()}
    for box in boxes:
        copies = sum(size * ((rank in box) + 2 * (to[rank] in box)) for rank, size in bytes_of.items())
        need, free = copies + 2 * sum(sum(held[rank].values()) for rank in box), min(told[rank]["free"] for rank in box)
        if copies and need >= ROOM * free:
            why = f"with copies of other hosts' shards a host's state needs {format_bytes(need)} of the {format_bytes(free)} that are free"
            return State(needed, why=f"{why}; where a host is lost, its shards are those of the last checkpoint")
    return State(needed, sends, bytes_of)


class Copies:
    """The rounds of one attempt on one rank of `world`, which has connections of its own. `every`: steps from one to the next; None: as
    many as keep it cheap. `say` is called on all ranks alike."""

    def __init__(self, world: World, boxes: Sequence[Sequence[int]], state: State, every: int | None, say: Callable[[str], None]) -> None:
        self._world, self._say, self._fixed = world, say, every
        to = buddies(boxes)
        self._mine = frozenset(state.sends.get(world.rank, ()))
        self._to = to[world.rank] if self._mine else -1
        self._sides: list[dict[int, Copy]] = [
            {rank: Copy() for rank in state.sends if to[rank] == world.rank} for _ in range(2)
        ]  # fmt: skip
        self.bytes = max(state.bytes_of.values())
        self.every = every or 1
        self.waited_s = 0.0
        self.is_off = False
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._thread: threading.Thread | None = None
        self._step: int | None = None  # of the round under way
        self._next: int | None = None
        self._head, self._body = torch.zeros(2, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
        self._lost: Exception | None = None
        self._took = (0.0, 0.0)

    def of(self, step: int) -> list[Copy]:
        """Those of the state after `step` steps."""
        return [one for side in self._sides for one in side.values() if one.step == step]

    @property
    def steps(self) -> set[int]:
        """After which the copies that are here are whole."""
        return {one.step for side in self._sides for one in side.values() if one.step is not None}

    def told(self) -> dict[str, Any]:
        """What the summary says: of the rank that sends most its bytes, and for how long this one waited for copies to end; it
        waits for the last one."""
        self.settle()
        return {"copies": {"every": self.every, "bytes": self.bytes, "waited_s": self.waited_s}}

    def begin(self, step: int, note: Mapping[str, Any], pieces: Callable[[], Sequence[Piece]], step_s: float) -> None:
        """The state after `step` steps is copied from here on, where that is due; `settle` was called since the last time."""
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
        """The step that was copied last, on all ranks; waits for the round under way. Raises what ended it, as a LostPeer the loss of a
        rank."""
        if self._thread is None:
            return None
        began = time.perf_counter()
        while self._thread.is_alive():
            self._thread.join(TICK_S)
            if self._world.lost_why:
                raise LostPeer(f"rank {self._world.rank} copies its state, and another rank is lost: {self._world.lost_why}")
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
                f"a copy of the shards that one host alone has takes {copy_s:.1f} s, and so could be made once in "
                f"{self.every * step_s:.0f} s; none is made any more, and where a host is lost, they are those of the last checkpoint"
            )
        return self._step

    def receive(self) -> None:
        """Take part in round after round without state of one's own, until a rank is lost or the world is closed: on a spare."""

        def rounds() -> None:
            while self._lost is None:
                self._try(0.0, 0.0)

        threading.Thread(target=rounds, daemon=True, name="weft-copies").start()

    def close(self) -> None:
        """No round follows."""
        self._world.abandon("the run is done")

    def _pack(self, step: int, note: Mapping[str, Any], pieces: Sequence[Piece]) -> None:
        """What the pieces are, and their elements, in memory that the next step does not write."""
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
        for source, copy in min(self._sides, key=_newest).items():
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
    """Snapshots of which every so many are copied to another host; of these the last stays until the next one is there."""

    def __init__(self, copies: Copies, pieces: Callable[[], Sequence[Piece]], last: int, world: World, state: RankState) -> None:
        super().__init__(world, state)
        self._copies, self._pieces, self._last = copies, pieces, last
        self._ended_s: float | None = None
        self._step_times: deque[float] = deque(maxlen=20)

    def take(self, step: int, note: Mapping[str, Any]) -> None:
        """As `Snapshots.take`. The state after the last step is not copied: it is saved."""
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
    return max((one.step for one in side.values() if one.step is not None), default=-1)


def _described(piece: Piece) -> dict[str, Any]:
    told = {name: getattr(piece, name) for name in ("name", "kind", "global_shape", "offsets", "slot", "block", "flat")}
    return {**told, "shape": tuple(piece.tensor.shape), "dtype": DTYPE_NAMES[piece.tensor.dtype]}
