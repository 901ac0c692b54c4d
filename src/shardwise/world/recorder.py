"""Flight recorder: a ring buffer of each rank's collectives and its heartbeat, in a memory-mapped file that survives the rank.

In: the start and the end of every collective. Out: `CollectiveRecord`s, read by the launcher (or a person) while a rank hangs or after
    its failure.
Not modelled: the contents of tensors. The writer takes no lock, so that the newest record may be read half written; it is for people.

The file: a header, then per rank a status, a table of group names and the ring. Times are CLOCK_MONOTONIC seconds, one clock per host.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median

from shardwise.plan.ir import choice

MAGIC = b"shrdrec1"
HEADER = struct.Struct("<8sIIII")  # magic, ranks, capacity, group slots, generation
HEADER_BYTES = 64
STOPPING = 32  # offset in the header: 1 once the launcher has been asked to stop
NOW = 40  # offset in the header: the generation that ranks must join
STATUS = struct.Struct("<dQIB3xdd")  # heartbeat, collectives started, pid, phase, patience, since
STATUS_BYTES = 80
PHASE = 20
NAMES_WAITS = 21
PATIENCE = 24
JOINED, SIDES = 40, 48  # the rank's generation; the steps in its two snapshot buffers, plus one, 0 for none
MARKS = 64  # of the gradients in its two buffers (`run/recovery/gradient_snapshots`), 0 for none
NUM_SLOTS = 32
SLOT_BYTES = 64
NAME_BYTES = 60  # of a slot; then the number of the group's started collectives, without messages
# Sequence, start, end, bytes, generation, slot, op, dtype, dims, algorithm, peer, tag, shape, count in its group.
RECORD = struct.Struct("<QddQIHBBBBhi4qI")
START_AT, DONE_AT, SLOT_AT, ALGORITHM_AT, STEP_AT = 8, 16, 36, 41, 42
RECORD_BYTES = 96
CAPACITY = 128

PHASES = ("absent", "starting", "running", "done", "failed")
ABSENT, STARTING, RUNNING, DONE, FAILED = range(5)
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "receive", "connect")
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, SEND, RECEIVE, CONNECT = range(8)
ALGORITHMS = ("", *choice.ALGORITHMS, "halving", "doubling", "direct", "two_level", "halo", "a program")  # "": the transport's own
DTYPES = ("other", "float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool", "int16", "int8")

UNNAMED = "?"  # name of a slot that several groups share

_PUT_RECORD = RECORD.pack_into
_PUT_STEP = struct.Struct("<hi").pack_into
_PUT_DONE = struct.Struct("<d").pack_into
_PUT_PATIENCE = struct.Struct("<dd").pack_into
_GET_START = struct.Struct("<d").unpack_from
_GET_SLOT = struct.Struct("<H").unpack_from
_PUT_SEQUENCE = struct.Struct("<Q").pack_into
_COUNT = struct.Struct("<I")
_SIDES = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """The record of one collective; `end_s` is 0 while it runs.

    `algorithm`: set if it is run from a program; then `peer` is the last rank waited for, in step `tag`. `index_in_group`: its index
    among the group's collectives, from 1; 0 for messages.
    """

    generation: int
    sequence: int
    group: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    peer: int
    tag: int
    start_s: float
    end_s: float
    algorithm: str = ""
    index_in_group: int = 0

    @property
    def is_running(self) -> bool:
        return self.end_s == 0.0

    def __str__(self) -> str:
        to = {"send": f" to rank {self.peer}, tag {self.tag}", "receive": f" from rank {self.peer}, tag {self.tag}"}.get(self.op, "")
        what = "" if self.op == "connect" else f" {self.dtype} {list(self.shape)}"
        if self.algorithm:
            to = f" by {self.algorithm}" + (f", step {self.tag}" if self.tag else "")
            to += f" with rank {self.peer}" if self.peer >= 0 else ""
        return f"{self.op} #{self.sequence}{what}{to} (ranks {self.group})"


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank's state: `set_phase` is one of PHASES, `last` its newest collective, `num_started_by_group` counts its started collectives.

    `announced_limit_s`: the announced time limit of its current work, from `announced_at_s` on; infinite if it has announced none.
    """

    rank: int
    pid: int
    phase: str
    heartbeat_s: float
    num_started: int
    last: CollectiveRecord | None
    num_started_by_group: Mapping[str, int] = field(default_factory=dict)
    announced_limit_s: float = inf
    announced_at_s: float = 0.0


def _rank_bytes(capacity: int) -> int:
    return STATUS_BYTES + NUM_SLOTS * SLOT_BYTES + capacity * RECORD_BYTES


def create_record_file(path: Path, num_ranks: int, generation: int = 0, capacity: int = CAPACITY) -> None:
    """Create the run's file for `num_ranks` ranks, each with the newest `capacity` collectives."""
    with open(path, "xb") as file:
        file.write(HEADER.pack(MAGIC, num_ranks, capacity, NUM_SLOTS, generation).ljust(NOW, b"\0") + _COUNT.pack(generation))
        file.truncate(HEADER_BYTES + num_ranks * _rank_bytes(capacity))


def group_name(ranks: tuple[int, ...]) -> str:
    """Return `0,1,2`, or `0-14 by 2` for ranges; truncated to what a slot holds."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 0
    if len(ranks) > 3 and ranks == tuple(range(ranks[0], ranks[-1] + (1 if step > 0 else -1), step or 1)):
        return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step != 1 else "")
    name = ",".join(map(str, ranks))
    return name if len(name) < NAME_BYTES else f"{name[: NAME_BYTES - 20]}... ({len(ranks)})"


def parse_group_name(name: str) -> tuple[int, ...]:
    """Return the ranks of a group from its name; none if the name is truncated or shared.

    >>> parse_group_name("0-6 by 2"), parse_group_name(group_name((3, 1))), parse_group_name("?")
    ((0, 2, 4, 6), (3, 1), ())
    """
    if match := re.fullmatch(r"(\d+)-(\d+)(?: by (-?\d+))?", name):
        first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
        return tuple(range(first, last + (1 if step > 0 else -1), step))
    return tuple(map(int, name.split(","))) if re.fullmatch(r"\d+(,\d+)*", name) else ()


class CollectiveRecorder:
    """One rank's writer. Without a file it writes to this process's own memory, for worlds without a shardwise launcher.

    `start` costs about a microsecond and returns the record's offset, which `finish` takes.
    """

    def __init__(self, path: Path | None = None, rank: int = 0, generation: int = 0) -> None:
        if path is None:
            self._map = mmap.mmap(-1, HEADER_BYTES + _rank_bytes(CAPACITY))
            self._map[: HEADER.size] = HEADER.pack(MAGIC, 1, CAPACITY, NUM_SLOTS, generation)
            _COUNT.pack_into(self._map, NOW, generation)
            index = 0
        else:
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
            index = rank
        _, _, self._capacity, _, _ = HEADER.unpack_from(self._map)
        self.index = index
        self.generation = generation
        self._base = HEADER_BYTES + index * _rank_bytes(self._capacity)
        self._ring = self._base + STATUS_BYTES + NUM_SLOTS * SLOT_BYTES
        self._sequence = 0
        self._slots: dict[tuple[int, ...], int] = {}
        self._counts = [0] * NUM_SLOTS
        self.time_by_slot_s = [0.0] * NUM_SLOTS  # by slot, sum of the durations of its collectives
        self.waited_s = 0.0  # time in which this rank was blocked in collectives
        now = time.monotonic()
        self._map[self._base + STATUS_BYTES : self._ring] = bytes(self._ring - self._base - STATUS_BYTES)  # of an earlier generation
        STATUS.pack_into(self._map, self._base, now, 0, os.getpid(), STARTING, inf, now)
        _COUNT.pack_into(self._map, self._base + JOINED, generation)

    def slot(self, ranks: tuple[int, ...]) -> int:
        """Return the slot number of the group of `ranks` in records; all groups past the table's size share the last slot."""
        slot = self._slots.get(ranks)
        if slot is None:
            slot = self._slots[ranks] = min(len(self._slots), NUM_SLOTS - 1)
            text = group_name(ranks).encode() if len(self._slots) <= NUM_SLOTS else UNNAMED.encode()
            at = self._base + STATUS_BYTES + slot * SLOT_BYTES
            self._map[at : at + NAME_BYTES] = text[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
        return slot

    def start(self, op: int, slot: int, dtype: int, shape: tuple[int, ...], size_bytes: int, peer: int = -1, tag: int = 0) -> int:
        """Record the start of a collective; return the record's offset, for `finish`."""
        sequence = self._sequence
        self._sequence = sequence + 1
        at: int = self._ring + sequence % self._capacity * RECORD_BYTES
        a, b, c, d = (*shape[:4], 0, 0, 0, 0)[:4]
        count = 0
        if op != SEND and op != RECEIVE:
            count = self._counts[slot] = self._counts[slot] + 1
            _COUNT.pack_into(self._map, self._base + STATUS_BYTES + slot * SLOT_BYTES + NAME_BYTES, count)
        now, dims, generation = time.monotonic(), len(shape), self.generation
        _PUT_RECORD(self._map, at, sequence, now, 0.0, size_bytes, generation, slot, op, dtype, dims, 0, peer, tag, a, b, c, d, count)
        _PUT_SEQUENCE(self._map, self._base + 8, sequence + 1)
        return at

    def finish(self, at: int, since_s: float = 0.0) -> None:
        """Record the end of the collective at `at`, for which this rank was blocked since `announced_at_s`, or since its start."""
        now, start = time.monotonic(), _GET_START(self._map, at + START_AT)[0]
        _PUT_DONE(self._map, at + DONE_AT, now)
        self.time_by_slot_s[_GET_SLOT(self._map, at + SLOT_AT)[0]] += now - start
        self.waited_s += now - (since_s or start)

    def set_algorithm(self, at: int, algorithm: str) -> None:
        """Record that the collective at `at` is run from the program of an algorithm."""
        known = algorithm if algorithm in ALGORITHMS else ALGORITHMS[-1]
        self._map[at + ALGORITHM_AT] = ALGORITHMS.index(known)

    def set_step(self, at: int, peer: int, step: int) -> None:
        """Record that the collective at `at` waits in its `set_step`, counted from 1, for rank `peer`."""
        _PUT_STEP(self._map, at + STEP_AT, peer, step)

    def write_heartbeat(self) -> None:
        """Write a heartbeat: this process is alive and its interpreter runs."""
        _PUT_DONE(self._map, self._base, time.monotonic())

    def announce_limit(self, seconds: float) -> None:
        """Announce the time limit of the work that begins now, until the next call; infinite: unknown."""
        _PUT_PATIENCE(self._map, self._base + PATIENCE, seconds, time.monotonic())

    def set_phase(self, phase: int) -> None:
        self._map[self._base + PHASE] = phase

    @property
    def target_generation(self) -> int:
        """The generation that ranks must join: differs from this recorder's after a rank has failed."""
        return int(_COUNT.unpack_from(self._map, NOW)[0])

    def publish_snapshot(self, side: int, steps: int | None) -> None:
        """Publish that this rank's snapshot buffer `side` holds the state after so many steps; None: nothing. One store instruction."""
        _PUT_SEQUENCE(self._map, self._base + SIDES + 8 * side, 0 if steps is None else steps + 1)

    def snapshot_steps(self) -> list[tuple[int | None, int | None]]:
        """Return by rank the steps in its two snapshots."""
        return _snapshot_steps(self._map, self._capacity)

    def publish_gradient_mark(self, side: int, mark: int) -> None:
        """Publish the mark of this rank's gradients in buffer `side`; 0: nothing. One store instruction."""
        _PUT_SEQUENCE(self._map, self._base + MARKS + 8 * side, mark)

    def gradient_marks(self) -> list[tuple[int, int]]:
        """Return by rank the marks of its two gradient buffers."""
        starts = range(HEADER_BYTES, len(self._map), _rank_bytes(self._capacity))
        return [_SIDES.unpack_from(self._map, base + MARKS) for base in starts]

    @property
    def stopping(self) -> bool:
        """True if the run was asked to stop."""
        return self._map[STOPPING] == 1

    def request_stop(self) -> None:
        """Ask every rank of the run to stop."""
        self._map[STOPPING] = 1

    def has_ended(self, rank: int) -> bool:
        """Return whether `rank` has returned or failed; False for a rank that is not in the file."""
        at = HEADER_BYTES + rank * _rank_bytes(self._capacity) + PHASE
        return at < len(self._map) and self._map[at] >= DONE

    def all_ended(self) -> bool:
        """Return whether every rank of the file has returned or failed."""
        return all(self.has_ended(rank) for rank in range((len(self._map) - HEADER_BYTES) // _rank_bytes(self._capacity)))

    def status(self) -> RankStatus:
        """Return this rank's state."""
        return _read_status(self._map, self.index, self._base, self._capacity)

    def name_waits(self) -> None:
        """Ask the launcher to name ranks that others wait for in collectives: the plain loop has begun."""
        self._map[self._base + NAMES_WAITS] = 1

    def last(self) -> CollectiveRecord | None:
        """Return this rank's newest collective."""
        return _newest_record(self._map, self._base, self._capacity)


def _read_status(data: mmap.mmap, rank: int, base: int, capacity: int) -> RankStatus:
    heartbeat, started, pid, phase, patience, since = STATUS.unpack_from(data, base)
    last, counts = _newest_record(data, base, capacity), _started_by_group(data, base)
    return RankStatus(rank, pid, PHASES[phase], heartbeat, started, last, counts, patience, since)


def _newest_record(data: mmap.mmap, base: int, capacity: int) -> CollectiveRecord | None:
    _, started, *_ = STATUS.unpack_from(data, base)
    if not started:
        return None
    ring = base + STATUS_BYTES + NUM_SLOTS * SLOT_BYTES
    numbers = range(started - 1, max(-1, started - 1 - capacity), -1)
    rows = [RECORD.unpack_from(data, ring + number % capacity * RECORD_BYTES) for number in numbers]
    # A record that is being overwritten is neither the old nor the new one: all zeros first, then with another number.
    rows = [record for number, record in zip(numbers, rows, strict=True) if record[0] == number and record[1] > 0.0]
    if not rows:
        return None
    # Several may be in flight at once: the oldest that has not ended is the one waited for.
    running = [record for record in rows if record[2] == 0.0]
    sequence, start, end, size, generation, slot, op, dtype, dims, algorithm, peer, tag, *shape, count = (running or rows[:1])[-1]
    group = _slot_name(data, base, slot)
    shown = tuple(shape[: min(dims, 4)])
    return CollectiveRecord(
        generation, sequence, group, OPS[op], DTYPES[dtype], shown, size, peer, tag, start, end, ALGORITHMS[algorithm], count
    )


def _slot_name(data: mmap.mmap, base: int, slot: int) -> str:
    at = base + STATUS_BYTES + slot * SLOT_BYTES
    return data[at : at + NAME_BYTES].rstrip(b"\0").decode(errors="replace")


def _started_by_group(data: mmap.mmap, base: int) -> dict[str, int]:
    """Return by group the number of its started collectives."""
    at = base + STATUS_BYTES + NAME_BYTES
    return {name: _COUNT.unpack_from(data, at + i * SLOT_BYTES)[0] for i in range(NUM_SLOTS) if (name := _slot_name(data, base, i))}


def _snapshot_steps(data: mmap.mmap, capacity: int) -> list[tuple[int | None, int | None]]:
    starts = range(HEADER_BYTES, len(data), _rank_bytes(capacity))
    pairs = (_SIDES.unpack_from(data, base + SIDES) for base in starts)
    return [(a - 1 if a else None, b - 1 if b else None) for a, b in pairs]


class RecordReader:
    """The launcher's view of the whole file."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        magic, self.num_ranks, self._capacity, _, self.generation = HEADER.unpack_from(self._map)
        if magic != MAGIC:
            raise ValueError(f"{path} is not a record of collectives: it starts with {magic!r}, not {MAGIC!r}")

    def status(self, rank: int) -> RankStatus:
        return _read_status(self._map, rank, HEADER_BYTES + rank * _rank_bytes(self._capacity), self._capacity)

    def names_waits(self) -> bool:
        """Return whether rank 0 runs a plain loop, whose waits are named."""
        return bool(self._map[HEADER_BYTES + NAMES_WAITS])

    def statuses(self) -> list[RankStatus]:
        return [self.status(rank) for rank in range(self.num_ranks)]

    def request_stop(self) -> None:
        """Ask every rank to stop."""
        self._map[STOPPING] = 1

    def publish_generation(self, generation: int) -> None:
        """Ask every rank to unwind, and to join `generation`."""
        _COUNT.pack_into(self._map, NOW, generation)

    def mark_absent(self, rank: int) -> None:
        """Mark `rank` as absent, since its process has ended, until the next one writes."""
        self._map[HEADER_BYTES + rank * _rank_bytes(self._capacity) + PHASE] = ABSENT

    def generations(self) -> list[int]:
        """Return by rank its generation."""
        starts = range(HEADER_BYTES, len(self._map), _rank_bytes(self._capacity))
        return [int(_COUNT.unpack_from(self._map, base + JOINED)[0]) for base in starts]

    def snapshot_steps(self) -> list[tuple[int | None, int | None]]:
        """Return by rank the steps in its two snapshots."""
        return _snapshot_steps(self._map, self._capacity)

    def close(self) -> None:
        self._map.close()


def process_state(pid: int) -> str:
    """Return the kernel's letter for a process's state: R, S, D, T (stopped), Z; empty if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


LIMIT_IN_STEPS = 10.0
LEAST, KEPT = 3, 50
MEDIAN_STEPS = 8  # between two medians of so many
LEAST_PHASE_LIMIT_S = 120.0  # a file system may stall for so long


class StepPace:
    """The steps of one kind (an engine's, as two engines need not be alike), and the time limit of the next one; a context of each.

    A step may last ten times the median of the last ones; before three of its kind, and if some are compiled (`is_regular` is False), as
    long as it likes.

    >>> steps = StepPace(WorkPace(CollectiveRecorder()))
    >>> [steps.next_limit_s(s) for s in (0.5, 0.1, 0.1, 0.1)]
    [inf, inf, 1.0, 1.0]
    """

    __slots__ = ("__weakref__", "_began_s", "_num_steps", "_pace", "_seconds", "is_regular", "limit_s")

    def __init__(self, pace: WorkPace, is_regular: bool = True) -> None:
        self._pace, self.is_regular, self.limit_s = pace, is_regular, inf
        self._seconds: deque[float] = deque(maxlen=KEPT)
        self._num_steps, self._began_s = 0, 0.0

    def next_limit_s(self, seconds: float) -> float:
        """Return the time limit of the next step in seconds, after one of `seconds`."""
        self._seconds.append(seconds)
        self._num_steps += 1
        is_due = self._num_steps < KEPT or self._num_steps % MEDIAN_STEPS == 0 or self.limit_s == inf
        if is_due and len(self._seconds) >= LEAST and self.is_regular:
            self.limit_s = LIMIT_IN_STEPS * median(self._seconds)
        return self.limit_s

    def __enter__(self) -> None:
        self._pace.announce(self.limit_s)
        self._began_s = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.next_limit_s(time.monotonic() - self._began_s)
            self._pace.announce_gap()


class WorkPace:
    """The time limits of one rank's work, which it announces to the launcher through its recorder.

    Steps are limited by their kind (`StepPace`), an evaluation or a save to ten times the longest of its kind, at least two minutes. Before
    three of a kind, while a model is captured, and in other work no limit is announced.
    """

    def __init__(self, recorder: CollectiveRecorder) -> None:
        self._recorder, self._includes_gaps = recorder, False
        self._steps: weakref.WeakSet[StepPace] = weakref.WeakSet()
        self._phase_limits_s: list[float] = []  # of the enclosing `untimed` contexts
        self._phases: dict[str, tuple[int, float]] = {}  # by kind: number, and the longest in seconds

    def time_steps(self, is_regular: bool = True) -> StepPace:
        """Return the context of every step of a new kind."""
        steps = StepPace(self, is_regular)
        self._steps.add(steps)
        return steps

    def include_gaps(self) -> None:
        """Apply the limit to the time between steps too from now on, for loops that mark all other work by `untimed`."""
        self._includes_gaps = True

    @contextmanager
    def untimed(self, kind: str = "") -> Iterator[None]:
        """Context of work that is not a step; may be nested. Work of a `kind` is limited by the earlier ones of its kind."""
        times, longest_s = self._phases.get(kind, (0, 0.0))
        self._phase_limits_s.append(inf if not kind or times < LEAST else max(LIMIT_IN_STEPS * longest_s, LEAST_PHASE_LIMIT_S))
        self._recorder.announce_limit(max(self._phase_limits_s))
        began = time.monotonic()
        try:
            yield
            self._phases[kind] = times + 1, max(longest_s, time.monotonic() - began)
        finally:
            self._phase_limits_s.pop()
        self.announce_gap()

    def announce_gap(self) -> None:
        """Announce the limit of what comes between steps: the longest of any kind of step, if gaps are included."""
        self.announce(max((steps.limit_s for steps in self._steps), default=inf) if self._includes_gaps else inf)

    def announce(self, seconds: float) -> None:
        """Announce the limit of work that begins now; inside of `untimed` that context's."""
        self._recorder.announce_limit(max(self._phase_limits_s) if self._phase_limits_s else seconds)
