"""The ranks of one host. In: which host of how many, where ranks meet. Out: the exit code; one rank that fails ends the others.

One that is killed does not: the others go on without it (`train/elastic`), or say why they cannot. Whoever starts it may hold its standard
input open, whose first line is the run's token: when that ends (a connection that is lost), so do the ranks.
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

from weft.cli.elsewhere.job import Job
from weft.world.guard import TOKEN
from weft.world.started import STARTER

GRACE_S = 150.0  # for a checkpoint; `weft train` asks for 120
LOST = 128  # what a shell says of a process that a signal ended is more; ssh says 255 of a connection that is lost
_LOOK_S = 0.2


def environment(job: Job, host: int, local: int, address: str, port: int) -> dict[str, str]:
    """What tells a rank who it is, as torchrun does."""
    rank = host * job.ranks + local
    named = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": job.num_ranks, "LOCAL_WORLD_SIZE": job.ranks, "MASTER_PORT": port}
    return {key: str(value) for key, value in named.items()} | {"MASTER_ADDR": address}


def run(job: Job, host: int, address: str, port: int, lifeline: bool) -> int:
    """Start this host's ranks and wait for them; the exit code of the first that failed. `lifeline`: standard input is held open."""
    command = [job.python, "-m", "weft", *job.words]
    base = {**os.environ, STARTER: str(os.getpid()), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(job.threads))}
    if lifeline and (token := _line()):
        base[TOKEN] = token
    ranks = [
        subprocess.Popen(command, env=base | environment(job, host, local, address, port), stdin=subprocess.DEVNULL)
        for local in range(job.ranks)
    ]
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _wait(ranks, asked, lifeline)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(code: int) -> int:
    """What a shell says of a process: of one that a signal N ended, which Python calls -N, 128 + N.

    >>> exit_code(3), exit_code(-9)
    (3, 137)
    """
    return code if code >= 0 else 128 - code


def _wait(ranks: list[subprocess.Popen[bytes]], asked: list[int], lifeline: bool) -> int:
    until = None
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = next((code for code in codes if code and code > 0), 0)
        if all(code is not None for code in codes):
            return outcome([exit_code(code or 0) for code in codes])
        if until is None and (asked or failed or (lifeline and _ended())):
            until = time.monotonic() + GRACE_S
            for rank in ranks:
                if rank.poll() is None:
                    rank.send_signal(signal.SIGTERM)
        if until is not None and time.monotonic() > until:
            return exit_code(failed or -signal.SIGKILL)
        time.sleep(_LOOK_S)


def outcome(codes: Sequence[int]) -> int:
    """The exit code of all: that of the first that failed by itself; of what was killed none, where others have done without.

    >>> outcome([0, 137]), outcome([137, 137]), outcome([0, 137, 4])
    (0, 137, 4)
    """
    failed = [code for code in codes if 0 < code < LOST]
    return failed[0] if failed else min(codes)


def _line() -> str:
    """The first line of standard input, of which nothing more is taken."""
    text = b""
    while (byte := os.read(sys.stdin.fileno(), 1)) not in (b"", b"\n"):
        text += byte
    return text.decode()


def _ended() -> bool:
    """Whether standard input is at its end."""
    ready, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)
