"""The launcher's watch over running ranks. In: the ranks' processes and their record. Out: their results, or one error: the first cause.

A rank that lost its peer is never the first cause while another rank failed by itself. Ranks that hang are those that `world/hangs` names.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from weft import errors
from weft.errors import RankError, RunError, WeftError
from weft.world import encoding
from weft.world.hangs import HangWatch, Limits, each
from weft.world.prepared_rank import log_file
from weft.world.recorder import Reader, Status
from weft.world.stuck import listed

SETTLE_S = 0.05  # others that failed by themselves at the same moment come within this
LOST_S = 1.5  # the first cause of a lost connection comes within this
POLL_S = 0.1
STARTED_S = 300.0  # from its fork to its function a rank takes tenths of a second, beyond the import of the user's module
DUMP_S = 1.0  # for a rank to write down where it stands
LOG_LINES = 15


class Children(Protocol):
    """The ranks' processes. `keepers`: other processes that they need, by id."""

    pids: list[int]
    keepers: dict[int, str]

    def events(self, wait_s: float) -> list[tuple[int, int]]:
        """(rank, exit code) of ranks that ended, after at most `wait_s`; a negative code is a signal's number."""
        ...

    def kill(self) -> None:
        """SIGKILL for every rank that lives."""
        ...


@dataclass(slots=True)
class Stops:
    """How often the launcher was told to stop, and by which signal first."""

    count: int = 0
    first: int = 0

    def __call__(self, number: int, frame: object) -> None:
        self.first = self.first or number
        self.count += 1


@contextmanager
def caught_signals() -> Iterator[Stops]:
    """Counts SIGTERM and SIGINT instead of obeying them; in a thread, where that is impossible, counts none."""
    stops = Stops()
    if threading.current_thread() is not threading.main_thread():
        yield stops
        return
    before = {number: signal.signal(number, stops) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@dataclass(frozen=True, slots=True)
class _Failure:
    rank: int
    time_s: float
    message: str
    kept: str = ""
    lost: bool = False
    native: bool = False  # the process ended without a word
    frames: tuple[str, ...] = ()
    traceback: str = ""


def supervise(
    children: Children, folder: Path, num_ranks: int, limits: Limits | None, stop_grace_s: float, stops: Stops, shown: bool
) -> list[Any]:
    """Waits for all ranks and returns their results in order. `limits`: how long what may last (None: for ever).

    Raises RankError (which is also of the failed rank's own class, where that is a WeftError) for the first cause, RunError or
    KeyboardInterrupt where it was stopped. No rank lives afterwards. `shown`: rank 0's output went to the terminal already.
    """
    record = Reader(folder / "record")
    try:
        return _supervise(children, folder, num_ranks, limits, stop_grace_s, stops, shown, record)
    finally:
        children.kill()
        record.close()


def _supervise(
    children: Children,
    folder: Path,
    num_ranks: int,
    limits: Limits | None,
    stop_grace_s: float,
    stops: Stops,
    shown: bool,
    record: Reader,
) -> list[Any]:
    ended: dict[int, int] = {}
    failures: list[_Failure] = []
    decide_s = stop_s = math.inf
    forked_s = time.monotonic()
    watch = HangWatch(limits or Limits(math.inf), children.keepers, forked_s)
    while len(ended) < num_ranks:
        for rank, code in children.events(POLL_S if not failures else SETTLE_S / 5):
            ended[rank] = code
            found = _failure(folder, rank, code)
            if found is not None:
                failures.append(found)
                decide_s = min(decide_s, time.monotonic() + (LOST_S if found.lost else SETTLE_S))
        now = time.monotonic()
        if now >= decide_s:
            break
        if stops.count:
            record.stop()
            stop_s = min(stop_s, now + stop_grace_s)
            if now >= stop_s or stops.count > 1:
                raise _stopped(stops, stop_grace_s)
        if not failures:
            statuses = record.statuses()
            hang = watch.look(statuses, ended, children.pids, now) if limits is not None else None
            if now - max(forked_s, watch.awake_s) > STARTED_S:
                _check_started(statuses, ended, children.pids, folder)
            if hang is not None:
                raise RankError("\n".join([hang.why, *each(statuses, ended)]), hang.rank)
    if failures:
        raise _first_cause(failures, ended, record.statuses(), folder, shown)
    return [encoding.load((folder / f"result-{rank}").read_bytes()) for rank in range(num_ranks)]


def _stopped(stops: Stops, grace_s: float) -> BaseException:
    if stops.first == signal.SIGINT:
        return KeyboardInterrupt()
    return RunError(f"stopped by SIGTERM before the ranks returned (they had {grace_s:g} s)")


def _failure(folder: Path, rank: int, code: int) -> _Failure | None:
    """Why `rank`, which ended with `code`, failed; None where it returned."""
    told = folder / f"failure-{rank}"
    if told.exists():
        data = json.loads(told.read_text())
        text = data["message"] if data["kept"] else f"{data['type']}: {data['message']}"
        return _Failure(rank, data["time"], text, data["kept"], data["lost"], False, tuple(data["frames"]), data["traceback"])
    if code == 0 and (folder / f"result-{rank}").exists():
        return None
    if code >= 0:
        text = f"exited with code {code} before its function returned; return from the function instead of ending the process"
    else:
        name = signal.Signals(-code).name
        remedy = {
            signal.SIGKILL: "if nobody killed it, the kernel did for want of memory: use fewer ranks, smaller microbatches or recompute",
            signal.SIGTERM: "somebody ended it",
        }.get(
            signal.Signals(-code),
            "a fault in native code; a collective that ranks call with different shapes ends so too, so compare what each was in",
        )
        text = f"was killed by {name}; {remedy}"
    return _Failure(rank, time.monotonic(), text, native=True)


def _first_cause(failures: list[_Failure], ended: dict[int, int], statuses: list[Status], folder: Path, shown: bool) -> RankError:
    first = min(failures, key=lambda failure: (failure.lost, failure.time_s))
    lines = [f"rank {first.rank} {first.message}" if first.native else f"rank {first.rank} failed: {first.message}"]
    if first.lost:
        gone = [rank for rank, code in ended.items() if code == 0]
        if gone:
            lines[0] += f"; rank {listed(gone)} had returned: every member of a group must take part in each of its collectives"
    if not first.kept or first.lost:
        lines += [f"  at {frame}" for frame in first.frames]
    if first.native or first.lost:
        lines += each(statuses, ended)
    if (first.native or not first.kept) and (first.rank > 0 or not shown):
        lines += _output(folder, first.rank)
    error = (_class(first.kept) if first.kept else RankError)("\n".join(lines), first.rank)
    if first.traceback:
        error.add_note(f"On rank {first.rank}:\n{first.traceback}")
    return error


def _check_started(statuses: list[Status], ended: dict[int, int], pids: list[int], folder: Path) -> None:
    """Raises RankError, with where it stands, for a rank that has not come to its function: a lock that was held when it was forked."""
    late = [s for s in statuses if s.rank not in ended and s.phase in ("absent", "starting")]
    if not late:
        return
    first = late[0].rank
    with suppress(ProcessLookupError):
        os.kill(pids[first], signal.SIGABRT)  # faulthandler writes its stack into the rank's output
    time.sleep(DUMP_S)
    raise RankError(
        "\n".join(
            [
                f"rank {first} did not start within {STARTED_S:g} s (it is {late[0].phase}); a library's thread in the process that forked "
                "it may have held a lock: start again with OMP_NUM_THREADS=1 and OPENBLAS_NUM_THREADS=1",
                *each(statuses, ended),
                *_stack(folder, first),
            ]
        ),
        first,
    )


def _output(folder: Path, rank: int) -> list[str]:
    path = log_file(str(folder), rank)
    lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:] if path.exists() else []
    return [f"  output of rank {rank} ended with:", *(f"    {line}" for line in lines)] if lines else []


def _stack(folder: Path, rank: int) -> list[str]:
    """Where a rank that faulthandler has ended stood, the innermost first."""
    path = log_file(str(folder), rank)
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    at = next((i for i, line in enumerate(lines) if "most recent call first" in line), None)
    return [f"  rank {rank} stood in:", *(f"    {line.strip()}" for line in lines[at + 1 : at + 9])] if at is not None else []


@cache
def _class(name: str) -> type[RankError]:
    """RankError that is also the errors' class `name`, with its exit code: `except` finds it under either."""
    kept: type[WeftError] = getattr(errors, name)
    if issubclass(kept, RankError) or kept in (WeftError, RunError):
        return RankError
    return type(name, (RankError, kept), {"exit_code": kept.exit_code, "__doc__": kept.__doc__})
