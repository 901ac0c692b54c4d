"""Name the ranks that others wait for. In: each rank's last collective. Out: one line on stderr: who waits, for whom, since when, and why.

A notice ends nothing; it comes after three seconds, where a time limit is minutes. Ranks that torchrun, srun or mpirun started publish
their state in the ranks' store, over another connection (`watch_waits`); those of `shardwise.launch` have a record that the launcher reads
(`CollectiveNotices`). Not modelled: waits outside of shardwise's collectives.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from shardwise.world.launch.started import LAUNCHERS, SRUN, TORCHRUN, launcher_of
from shardwise.world.launch.stuck import awaited_ranks, format_ranks
from shardwise.world.recorder import CollectiveRecord, RankStatus, process_state
from shardwise.world.world import World

NOTICE_S = 3.0
REPEAT_S = 60.0
POLL_S = 0.5
SILENT_S = 2.0  # a rank that publishes nothing for so long gives no sign
_STEPS_DIFFER = (
    "all ranks must make the same steps: look for a loader that is longer on one rank, for `break`, `if` or `except` on one rank only, and "
    "for work that one rank does alone"
)


def likely_cause(environment: Mapping[str, str]) -> str:
    """Return why ranks of this process's launcher may never start, with the remedy.

    >>> likely_cause({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    'the script was started without srun, as one process of a SLURM job of 4 tasks: `srun python train.py`'
    """
    launcher, name = launcher_of(environment), LAUNCHERS
    if launcher is SRUN:
        tasks = environment.get(SRUN.size, "several")
        return f"the script was started without srun, as one process of a SLURM job of {tasks} tasks: `srun python train.py`"
    size = environment.get(launcher.size, "?") if launcher in name and launcher is not None else "?"
    if launcher is TORCHRUN and "TORCHELASTIC_RUN_ID" in environment:
        return (
            f"torchrun does not run on another host, or its worker ended, or does not use shardwise ({size} ranks in all): see its output"
        )
    if launcher is TORCHRUN:
        return (
            f"RANK and WORLD_SIZE={size} were set by hand, or are left over, and not all processes were started, or it is too large: "
            f"`torchrun --nproc-per-node={size} train.py` starts all, `unset RANK WORLD_SIZE` runs one"
        )
    return f"not all of the {size} processes of mpirun came to shardwise: see their output"


def notice_text(rank: int, num_ranks: int, since_s: float, missing: Sequence[str], what: str, cause: str) -> str:
    """Return the line that names the `missing` ranks. `since_s`: how long `rank` has waited."""
    began = time.strftime("%H:%M:%S", time.localtime(time.time() - since_s))
    here = f"rank {rank} of {num_ranks} (process {os.getpid()} on {socket.gethostname()})" if what == "" else f"rank {rank} of {num_ranks}"
    return f"shardwise: {here} has waited since {began} ({since_s:.0f} s){what} for {'; '.join(missing)}. Likely: {cause}"


def describe_absent(ranks: Sequence[int]) -> str:
    """Return ranks that have not started, as text."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}, which {'has' if len(ranks) == 1 else 'have'} not started"


def _describe_late(status: RankStatus) -> str:
    if status.last is None:
        return f"rank {status.rank}, which has been in no collective yet"
    if status.last.is_running:
        return f"rank {status.rank}, which is in {status.last}"
    return f"rank {status.rank}, which last did {status.last}, {time.monotonic() - status.last.end_s:.0f} s ago"


class CollectiveNotices:
    """Notices of the waits in collectives: those of the same late ranks are given once in a minute."""

    def __init__(self) -> None:
        self._given: dict[tuple[int, ...], float] = {}

    def is_due(self, key: tuple[int, ...], now: float) -> bool:
        """Return whether a notice of `key` has not been given in the last minute, and record that it is given now."""
        if now - self._given.get(key, -REPEAT_S) < REPEAT_S:
            return False
        self._given = {kept: given for kept, given in self._given.items() if now - given < REPEAT_S} | {key: now}
        return True

    def find_notice(self, statuses: Sequence[RankStatus], now: float, causes: Mapping[int, str] | None = None) -> str:
        """Return the notice that is due; empty: none. `causes`: by rank, what is known of its process."""
        for status in statuses:
            last = status.last
            if last is None or not last.is_running or now - last.start_s < NOTICE_S or status.phase in ("done", "failed", "absent"):
                continue
            late = [rank for rank in awaited_ranks(status, statuses) if awaited_ranks(statuses[rank], statuses) == []]
            if late and self.is_due(tuple(late), now):  # one notice, however many ranks wait for them
                known = [causes[rank] for rank in late if causes and rank in causes]
                missing = [_describe_late(statuses[rank]) for rank in late[:4]]
                return notice_text(
                    status.rank, len(statuses), now - last.start_s, missing, f" in {last}", "; ".join(known) or _STEPS_DIFFER
                )
        return ""


def await_server(address: str, port: int, rank: int, num_ranks: int, cause: str, wait_s: float) -> None:
    """Return when something listens at `address`:`port`, after at most `wait_s`; name rank 0 meanwhile, in place of torch's warnings."""
    began, is_reported = time.monotonic(), False
    while time.monotonic() - began < wait_s:
        try:
            socket.create_connection((address, port), POLL_S).close()
            return
        except OSError:
            time.sleep(POLL_S / 5)
        waited_s = time.monotonic() - began
        if waited_s > NOTICE_S and not is_reported:
            is_reported = True
            missing = [f"rank 0, which does not answer at {address}:{port}"]
            print(notice_text(rank, num_ranks, waited_s, missing, "", cause), file=sys.stderr, flush=True)


def watch_waits(world: World, connect: Callable[[], Any], endpoint: tuple[str, int], environment: Mapping[str, str]) -> None:
    """Start the thread that publishes this rank's state for the others, and names those that it waits for. `endpoint`: of the store."""
    with suppress(OSError):
        canary = socket.create_connection(endpoint, NOTICE_S)  # sends nothing: its end tells that of the store, without torch's warnings
        work = _PublishedWaits(world, connect, canary, likely_cause(environment)).run
        threading.Thread(target=work, daemon=True, name="shardwise-waits").start()


class _PublishedWaits:
    """The state that this rank publishes, and what it reads of the others while it waits."""

    def __init__(self, world: World, connect: Callable[[], Any], canary: socket.socket, cause: str) -> None:
        self._world, self._connect, self._canary, self._cause = world, connect, canary, cause
        self._notices = CollectiveNotices()
        self._beats: dict[int, tuple[int, float]] = {}  # the newest heartbeat of each rank, and when it came
        self._started_s = time.monotonic()
        self._present: set[int] = set()

    def run(self) -> None:
        with suppress(RuntimeError, OSError):
            store, beat = self._connect(), 0
            while not self._world.failure_reason and not select.select([self._canary], [], [], 0)[0]:
                beat += 1
                store.set(self._key(self._world.rank), self._local_state(beat))
                if text := self._find_notice(store, time.monotonic()):
                    print(text, file=sys.stderr, flush=True)
                time.sleep(POLL_S)

    def _key(self, rank: int) -> str:
        return f"waits/{self._world.generation}/{rank}"

    def _local_state(self, beat: int) -> str:
        status, now = self._world.recorder.status(), time.monotonic()
        last = None if status.last is None else {**asdict(status.last), "start_s": now - status.last.start_s}
        if last is not None and status.last is not None:
            last["end_s"] = now - status.last.end_s if status.last.end_s else 0.0
        return json.dumps([beat, socket.gethostname(), os.getpid(), dict(status.num_started_by_group), last])

    def _find_notice(self, store: Any, now: float) -> str:
        world = self._world
        last, store_wait_s = world.recorder.last(), now - (world.store_wait_since_s or now)
        is_starting = len(self._present) < world.num_ranks
        waits_s = max(store_wait_s, now - last.start_s if last is not None and last.is_running else 0.0)
        if is_starting and now - self._started_s >= 1.0:
            self._present |= {rank for rank in range(world.num_ranks) if rank not in self._present and store.check([self._key(rank)])}
            if absent := [rank for rank in range(world.num_ranks) if rank not in self._present]:
                waited_s = now - self._started_s
                if waited_s < NOTICE_S or min(self._present) != world.rank or not self._notices.is_due((-1, *absent), now):
                    return ""
                return notice_text(world.rank, world.num_ranks, waited_s, [describe_absent(absent)], "", self._cause)
        if is_starting or waits_s < NOTICE_S - SILENT_S or not world.names_waits:
            return ""
        statuses, causes = self._read_statuses(store, now)
        if store_wait_s >= NOTICE_S:
            awaited = world.store_wait_rank
            if awaited != world.rank and self._notices.is_due((-2, awaited, world.rank), now):
                cause = causes.get(awaited, _STEPS_DIFFER)
                return notice_text(world.rank, world.num_ranks, store_wait_s, [_describe_late(statuses[awaited])], " for a message", cause)
            return ""
        text = self._notices.find_notice(statuses, now, causes)
        return text if text.startswith(f"shardwise: rank {world.rank} ") else ""  # the first rank that waits reports it

    def _read_statuses(self, store: Any, now: float) -> tuple[list[RankStatus], dict[int, str]]:
        statuses, causes = [], {}
        for rank, text in enumerate(store.multi_get([self._key(rank) for rank in range(self._world.num_ranks)])):
            beat, host, pid, counts, last = json.loads(text)
            if self._beats.get(rank, (0, 0.0))[0] != beat:
                self._beats[rank] = beat, now
            state = process_state(pid) if host == socket.gethostname() else "?"
            if state in ("", "Z"):
                causes[rank] = f"process {pid} of rank {rank} has ended: see its own error above"
            elif state == "T":
                causes[rank] = f"process {pid} of rank {rank} is stopped: continue it with `kill -CONT {pid}`"
            elif now - self._beats[rank][1] > SILENT_S:
                causes[rank] = (
                    f"process {pid} of rank {rank} on {host} gives no sign: it ended, its host is cut off, or native code holds it"
                )
            if last is not None:
                ended_s = now - last["end_s"] if last["end_s"] else 0.0
                last = CollectiveRecord(**{**last, "shape": tuple(last["shape"]), "start_s": now - last["start_s"], "end_s": ended_s})
            statuses.append(RankStatus(rank, pid, "running", now, 0, last, counts))
        return statuses, causes
