"""Start the ranks of one host, given its number and the rendezvous address, and wait for them. A rank that fails ends the others.

A rank that is killed does not end the others: they continue without it (`train/elastic`), or report why they cannot. A launcher
may keep
standard input open (its first line is the run's token); the ranks end when it is closed, as by a lost connection.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from shardwise.cli.launchers.job import LaunchJob
from shardwise.world.guard import TOKEN_VARIABLE
from shardwise.world.launch.started import LAUNCHER_VARIABLE

GRACE_S = 150.0  # for a checkpoint; `shardwise train` asks for 120
SIGNAL_EXIT_CODE = 128  # exit codes above it: a process that a signal ended; ssh returns 255 for a lost connection
_POLL_INTERVAL_S = 0.2


def rank_environment(job: LaunchJob, host: int, local: int, address: str, port: int) -> dict[str, str]:
    """Return a rank's environment variables, as torchrun sets them."""
    rank = host * job.ranks_per_host + local
    variables = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": job.num_ranks,
        "LOCAL_WORLD_SIZE": job.ranks_per_host,
        "MASTER_PORT": port,
    }
    return {key: str(value) for key, value in variables.items()} | {"MASTER_ADDR": address}


def run(job: LaunchJob, host: int, address: str, port: int, lifeline: bool) -> int:
    """Start this host's ranks and wait; return the exit code of the first that failed. `lifeline`: end when standard input closes."""
    command = [job.python, "-m", "shardwise", *job.words]
    base = {
        **os.environ,
        LAUNCHER_VARIABLE: str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(job.threads_per_rank)),
    }
    if lifeline and (token := _read_line()):
        base[TOKEN_VARIABLE] = token
    ranks = [
        subprocess.Popen(command, env=base | rank_environment(job, host, local, address, port), stdin=subprocess.DEVNULL)
        for local in range(job.ranks_per_host)
    ]
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _wait_for_ranks(ranks, asked, lifeline)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def exit_code(code: int) -> int:
    """Return a process's exit code as a shell does: 128 + N where signal N ended it (Python: -N).

    >>> exit_code(3), exit_code(-9)
    (3, 137)
    """
    return code if code >= 0 else 128 - code


def _wait_for_ranks(ranks: list[subprocess.Popen[bytes]], asked: list[int], lifeline: bool) -> int:
    deadline = None
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = next((code for code in codes if code and code > 0), 0)
        if all(code is not None for code in codes):
            return combined_exit_code([exit_code(code or 0) for code in codes])
        if deadline is None and (asked or failed or (lifeline and _is_stdin_at_end())):
            deadline = time.monotonic() + GRACE_S
            for rank in ranks:
                if rank.poll() is None:
                    rank.send_signal(signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            return exit_code(failed or -signal.SIGKILL)
        time.sleep(_POLL_INTERVAL_S)


def combined_exit_code(codes: Sequence[int]) -> int:
    """Return the exit code of all: the first failure that was no signal; a killed process counts only where all were killed.

    >>> combined_exit_code([0, 137]), combined_exit_code([137, 137]), combined_exit_code([0, 137, 4])
    (0, 137, 4)
    """
    failed = [code for code in codes if 0 < code < SIGNAL_EXIT_CODE]
    return failed[0] if failed else min(codes)


def _read_line() -> str:
    """Read the first line of standard input, and nothing beyond it."""
    text = b""
    while (byte := os.read(sys.stdin.fileno(), 1)) not in (b"", b"\n"):
        text += byte
    return text.decode()


def _is_stdin_at_end() -> bool:
    """Return whether standard input is closed."""
    ready, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)
