"""The launcher's supervision of running ranks. In: the ranks' processes and their record. Out: their results, or the first cause as error.

A peer loss is never the first cause if another rank failed by its own error. `world/launch/hangs` detects ranks that hang.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from shardwise import errors
from shardwise.errors import RankError, RunError, ShardwiseError
from shardwise.world.comm import encoding
from shardwise.world.launch.children import LostForkServer
from shardwise.world.launch.hangs import HangWatch, Limits, describe_ranks
from shardwise.world.launch.prepared_rank import UNREPORTED_FAILURE, log_file
from shardwise.world.launch.recovery_machine import (
    Event,
    FailRun,
    ForkRank,
    KillRank,
    PublishGeneration,
    RankEnded,
    RankHung,
    RankJoined,
    RecoveryStage,
    RecoveryState,
    RejoinOverdue,
    ReportText,
    advance_recovery,
)
from shardwise.world.launch.stuck import format_ranks
from shardwise.world.launch.wait_notices import CollectiveNotices
from shardwise.world.recorder import RankStatus, RecordReader
from shardwise.world.terminal import STOP_SIGNALS

COLLECTIVE_TIMEOUT_S = 900.0  # limit of a collective, or of a gap between heartbeats, without an announced limit
HANG_AFTER_S = 5.0
SETTLE_S = 0.05  # time for other ranks that failed by their own errors at the same moment
LOST_S = 1.5  # time for the first cause of a peer loss
POLL_S = 0.1
STARTED_S = 300.0  # from its fork to its function a rank takes tenths of a second, beyond the import of the user's module
DUMP_S = 1.0  # for a rank to dump its stack
LOG_LINES = 15


class RankProcesses(Protocol):
    """The ranks' processes. `support_processes`: other processes that they need, id -> description."""

    pids: list[int]
    support_processes: dict[int, str]

    def events(self, wait_s: float) -> list[tuple[int, int]]:
        """Return (rank, exit code) of ranks that ended, after at most `wait_s`; a negative code is a signal's number."""
        ...

    def kill(self) -> None:
        """Kill every living rank by SIGKILL."""
        ...

    def fork(self, rank: int, generation: int) -> None:
        """Start a new process as a rank that has ended."""
        ...


@dataclass(slots=True)
class StopRequests:
    """Number of stop requests to the launcher, and the first signal. A closed terminal may send two."""

    count: int = 0
    first: int = 0

    def __call__(self, number: int, frame: object) -> None:
        self.count += not self.first or number not in STOP_SIGNALS
        self.first = self.first or number


@contextmanager
def caught_signals() -> Iterator[StopRequests]:
    """Context that counts signals to stop instead of obeying them; outside the main thread, where that is impossible, it counts none.
    Signals that the process ignores (nohup), or handles itself, are left alone."""
    stops = StopRequests()
    if threading.current_thread() is not threading.main_thread():
        yield stops
        return
    unhandled = [number for number in STOP_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    handlers = {number: signal.signal(number, stops) for number in (signal.SIGTERM, signal.SIGINT, *unhandled)}
    try:
        yield stops
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@dataclass(frozen=True, slots=True)
class _RankFailure:
    rank: int
    time_s: float
    message: str
    error_class: str = ""
    is_peer_loss: bool = False
    second_hand: bool = False
    has_no_report: bool = False  # the process ended without a failure file
    stack: tuple[str, ...] = ()
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """Policy for replacing failed ranks: up to `max_losses` times at one step; `report` receives messages. `num_saved_steps` returns the
    number of steps in the newest checkpoint, -1 without one. `replaces_all`: as of `RecoveryState`."""

    max_losses: int = 5
    report: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
    num_saved_steps: Callable[[], int] = lambda: -1
    replaces_all: bool = False


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Options of a launch; each is the parameter of the same name of `shardwise.launch`."""

    threads: int = 0
    device: str = "cpu"
    timeout_s: float | None = COLLECTIVE_TIMEOUT_S
    hang_after_s: float = HANG_AFTER_S
    env: Mapping[str, str] = field(default_factory=dict)
    generation: int = 0
    folder: Path | None = None
    stop_grace_s: float = 0.0
    show: bool = True
    recovery: RecoveryPolicy | None = None
    prepare: Callable[..., Any] | None = None

    @property
    def limits(self) -> Limits | None:
        """Time limits of hang detection; None: no limits."""
        return None if self.timeout_s is None else Limits(self.timeout_s, self.hang_after_s)

    @property
    def collective_timeout_s(self) -> float:
        """Limit of the transport: longer than the launcher's, which names the rank; the transport's error cannot."""
        return 1800.0 if self.timeout_s is None else 2 * self.timeout_s + 30


def supervise_ranks(children: RankProcesses, folder: Path, num_ranks: int, options: LaunchOptions, stops: StopRequests) -> list[Any]:
    """Wait for all ranks and return their results in order.

    Raises RankError (also of the failed rank's own class, if that is a ShardwiseError) for the first cause, RunError or KeyboardInterrupt
    if it was stopped. No rank lives afterwards.
    """
    record = RecordReader(folder / "record")
    try:
        return _Supervisor(children, folder, record, options, stops).run(num_ranks)
    finally:
        children.kill()
        record.close()


class _Supervisor:
    def __init__(self, children: RankProcesses, folder: Path, record: RecordReader, options: LaunchOptions, stops: StopRequests) -> None:
        self.children, self.folder, self.record, self.stops = children, folder, record, stops
        self.grace_s, self.is_output_shown = options.stop_grace_s, options.show
        self.recovery, self.limits = recovery, limits = options.recovery, options.limits
        self.ended: dict[int, int] = {}
        self.failures: list[_RankFailure] = []
        self.decide_s = self.stop_s = math.inf
        self.forked_s = self.published_s = time.monotonic()
        self.watch = HangWatch(limits or Limits(math.inf), children.support_processes, self.forked_s)
        self.notices = CollectiveNotices()
        self.state = RecoveryState(
            record.num_ranks, recovery.max_losses if recovery else 0, record.generation, bool(recovery and recovery.replaces_all)
        )

    def run(self, num_ranks: int) -> list[Any]:
        """Supervise until all ranks have returned, and return their results."""
        while len(self.ended) < num_ranks:
            for rank, code in self.children.events(self._pause_s):
                self._on_exit(rank, code)
            now = time.monotonic()
            if now >= self.decide_s:
                break
            if self.stops.count:
                self.record.request_stop()
                self.stop_s = min(self.stop_s, now + self.grace_s)
                if now >= self.stop_s or self.stops.count > 1:
                    raise stop_error(self.stops, self.grace_s)
            if not self.failures:
                self._check_living_ranks(now)
        if self.failures:
            if any(self._is_told_to_stop(code) for code in self.ended.values()):
                raise stop_error(self.stops, self.grace_s)
            raise _first_cause(self.failures, self.ended, self.record.statuses(), self.folder, self.is_output_shown)
        return [encoding.load((self.folder / f"result-{rank}").read_bytes()) for rank in range(num_ranks)]

    @property
    def _pause_s(self) -> float:
        return SETTLE_S / 5 if self.failures or (self.state.stage is not RecoveryStage.RUNNING and self.recovery) else POLL_S

    def _on_exit(self, rank: int, code: int) -> None:
        failure = _failure_of_rank(self.folder, rank, code)
        if failure is not None and self.recovery is not None and self._is_replaceable(failure) and not self._is_told_to_stop(code):
            (self.folder / f"failure-{rank}").unlink(missing_ok=True)
            done = [max((side for side in pair if side is not None), default=-1) for pair in self.record.snapshot_steps()]
            self._advance(RankEnded(rank, f"rank {rank} {failure.message}", min(done), self.recovery.num_saved_steps()))
            return
        self.ended[rank] = code
        if failure is not None:
            self.failures.append(failure)
            self.decide_s = min(self.decide_s, time.monotonic() + (LOST_S if failure.is_peer_loss or failure.second_hand else SETTLE_S))

    def _is_replaceable(self, failure: _RankFailure) -> bool:
        """Return whether to replace a rank with this failure: one that was killed, not one that failed by its own error."""
        returned = any(code == 0 for code in self.ended.values())
        return (failure.has_no_report or failure.is_peer_loss) and not (self.failures or returned)

    def _is_told_to_stop(self, code: int) -> bool:
        """Return whether a rank that ended with `code` was ended by a signal to all processes of the run, before it handled it."""
        return self.stops.count > 0 and code == -signal.SIGTERM

    def _check_living_ranks(self, now: float) -> None:
        """Check the living ranks for hangs."""
        statuses = self.record.statuses()
        if self.recovery is not None and self.state.stage is not RecoveryStage.RUNNING:
            self._report_joined(statuses, now)
        ended = {**self.ended, **dict.fromkeys(self.state.to_fork, 0)}
        hang = self.watch.find_hang(statuses, ended, self.children.pids, now) if self.limits is not None else None
        if now - max(self.forked_s, self.watch.awake_s) > STARTED_S:
            _check_started(statuses, self.ended, self.children.pids, self.folder)
        if hang is None:
            if self.record.names_waits() and (text := self.notices.find_notice(statuses, now)):
                print(text, file=sys.stderr, flush=True)
            return
        if hang.rank < 0:
            os.kill(hang.pid, signal.SIGKILL)  # which ends the ranks
            raise LostForkServer(hang.reason)
        if self.recovery is None:
            raise RankError("\n".join([hang.reason, *describe_ranks(statuses, self.ended)]), hang.rank)
        self._advance(RankHung(hang.rank, hang.reason))

    def _report_joined(self, statuses: list[RankStatus], now: float) -> None:
        for rank, generation in enumerate(self.record.generations()):
            if statuses[rank].phase != "absent":
                self._advance(RankJoined(rank, generation))
        patience_s = max((s.announced_limit_s for s in statuses), default=math.inf)
        if self.limits is not None and now - self.published_s > self.limits.limit_for(patience_s if patience_s < math.inf else 0.0):
            self._advance(RejoinOverdue())

    def _advance(self, event: Event) -> None:
        assert self.recovery is not None
        previous = self.state.stage
        self.state, todo = advance_recovery(self.state, event)
        for instruction in todo:
            match instruction:
                case PublishGeneration(generation):
                    self.published_s = self.watch.awake_s = time.monotonic()  # ranks that waited for the failed one do not hang
                    self.record.publish_generation(generation)
                case ForkRank(rank, generation):
                    self.forked_s = time.monotonic()
                    self.record.mark_absent(rank)
                    self.children.fork(rank, generation)
                case KillRank(rank):
                    with suppress(ProcessLookupError):
                        os.kill(self.children.pids[rank], signal.SIGKILL)
                case ReportText(text):
                    self.recovery.report(text)
                case FailRun(rank, why):
                    raise RankError("\n".join([why, *_last_output_lines(self.folder, rank)]), rank)
        if (
            self.state.stage is RecoveryStage.RUNNING
            and previous is not RecoveryStage.RUNNING
            and self.state.generation > self.record.generation
        ):
            self.recovery.report(f"all ranks have rejoined after {time.monotonic() - self.published_s:.2f} s")


def stop_error(stops: StopRequests, grace_s: float) -> BaseException:
    if stops.first == signal.SIGINT:
        return KeyboardInterrupt()
    name = signal.Signals(stops.first).name if stops.first else "SIGTERM"
    return RunError(f"stopped by {name} before the ranks returned (they had {grace_s:g} s)")


def _failure_of_rank(folder: Path, rank: int, code: int) -> _RankFailure | None:
    """Return the failure of `rank`, which ended with `code`; None if it returned."""
    path = folder / f"failure-{rank}"
    if path.exists():
        data = json.loads(path.read_text())
        text = data["message"] if data["kept"] else f"{data['type']}: {data['message']}"
        lost, second_hand, stack = data["lost"], data["second_hand"], tuple(data["frames"])
        return _RankFailure(rank, data["time"], text, data["kept"], lost, second_hand, stack=stack, traceback=data["traceback"])
    if code == 0 and (folder / f"result-{rank}").exists():
        return None
    if code == UNREPORTED_FAILURE:
        text = f"failed and could not write down why in {folder}; is there room on that disk?"
    elif code >= 0:
        text = f"exited with code {code} before its function returned; return from the function instead of ending the process"
    else:
        name = signal.Signals(-code).name
        remedy = {
            signal.SIGKILL: "if nobody killed it, the kernel did for want of memory: use fewer ranks, smaller microbatches or recompute",
            signal.SIGTERM: "somebody ended it",
            signal.SIGBUS: "memory that it mapped is gone: a file that was cut off while it was read (data, a library), or no room in "
            "shared memory (df /dev/shm)",
        }.get(
            signal.Signals(-code),
            "a fault in native code; a collective that ranks call with different shapes ends so too, so compare what each was in",
        )
        text = f"was killed by {name}; {remedy}"
    return _RankFailure(rank, time.monotonic(), text, has_no_report=True)


def _first_cause(failures: list[_RankFailure], ended: dict[int, int], statuses: list[RankStatus], folder: Path, shown: bool) -> RankError:
    first = min(failures, key=lambda failure: (failure.is_peer_loss, failure.second_hand, failure.time_s))
    lines = [f"rank {first.rank} {first.message}" if first.has_no_report else f"rank {first.rank} failed: {first.message}"]
    if first.is_peer_loss:
        returned = [rank for rank, code in ended.items() if code == 0]
        if returned:
            lines[0] += f"; rank {format_ranks(returned)} had returned: every member of a group must take part in each of its collectives"
    if not first.error_class or first.is_peer_loss:
        lines += [f"  at {frame}" for frame in first.stack]
    if first.has_no_report or first.is_peer_loss:
        lines += describe_ranks(statuses, ended)
    if (first.has_no_report or not first.error_class) and (first.rank > 0 or not shown):
        lines += _last_output_lines(folder, first.rank)
    error = (_rank_error_class(first.error_class) if first.error_class else RankError)("\n".join(lines), first.rank)
    if first.traceback:
        error.add_note(f"On rank {first.rank}:\n{first.traceback}")
    return error


def _check_started(statuses: list[RankStatus], ended: dict[int, int], pids: list[int], folder: Path) -> None:
    """Raise RankError with its stack for a rank that has not reached its function, probably for a lock that was held at its fork."""
    waiting = [s for s in statuses if s.rank not in ended and s.phase in ("absent", "starting")]
    if not waiting:
        return
    first = waiting[0].rank
    with suppress(ProcessLookupError):
        os.kill(pids[first], signal.SIGABRT)  # faulthandler writes its stack into the rank's output
    time.sleep(DUMP_S)
    raise RankError(
        "\n".join(
            [
                f"rank {first} did not start within {STARTED_S:g} s (it is {waiting[0].phase}); a library's thread in the process that "
                "forked it may have held a lock: start again with OMP_NUM_THREADS=1 and OPENBLAS_NUM_THREADS=1",
                *describe_ranks(statuses, ended),
                *_stack_lines(folder, first),
            ]
        ),
        first,
    )


def _last_output_lines(folder: Path, rank: int) -> list[str]:
    path = log_file(str(folder), rank)
    lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:] if path.exists() else []
    return [f"  output of rank {rank} ended with:", *(f"    {line}" for line in lines)] if lines else []


def _stack_lines(folder: Path, rank: int) -> list[str]:
    """Return the stack of a rank that faulthandler has dumped, innermost first."""
    path = log_file(str(folder), rank)
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    at = next((i for i, line in enumerate(lines) if "most recent call first" in line), None)
    return [f"  rank {rank} stood in:", *(f"    {line.strip()}" for line in lines[at + 1 : at + 9])] if at is not None else []


@cache
def _rank_error_class(name: str) -> type[RankError]:
    """Return a class that is RankError and also the errors' class `name`, with its exit code, for `except` with either."""
    error: type[ShardwiseError] = getattr(errors, name)
    if issubclass(error, RankError) or error in (ShardwiseError, RunError):
        return RankError
    return type(name, (RankError, error), {"exit_code": error.exit_code, "__doc__": error.__doc__})
