"""A process with torch in memory from which `shardwise train` is forked, so that each of a hundred runs starts in a second.

In: requests over a socket (words of the command line, descriptors for output). Out: process ids and exit codes. A run is the command line's
own, with two differences: its prepared process is forked from it rather than begun anew, and its ranks follow the orders beside their run
folder (`bench/faults/fault_rank`). Each run is a session of its own, by which its processes are found when their parents are gone.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from bench.common.processes import ROOT
from shardwise.world.launch import launch as launching
from shardwise.world.launch.launch import ALLOCATOR, PASSIVE_WAIT, Launcher

_PR_SET_CHILD_SUBREAPER = 36
LARGEST = 1 << 16
SINGLE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Host:
    """The process, as the benchmark sees it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {**os.environ, **ALLOCATOR, **PASSIVE_WAIT, **SINGLE, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
        code = f"from bench.faults.fault_host import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen([sys.executable, "-c", code], env=env, pass_fds=(theirs.fileno(),), cwd=ROOT)
        theirs.close()
        self._socket, self._codes, self._lock = ours, dict[int, int](), threading.Lock()
        if ours.recv(LARGEST) != b"ready":
            raise RuntimeError("the process that runs are forked from did not come up")

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait(10)

    def start(self, words: list[str], plan: Path | None, out: int) -> int:
        """Runs `shardwise WORDS`, with a plan that is known already; its output goes to descriptor `out`. Returns its process id."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps({"words": words, "plan": str(plan or "")}).encode()], [out])
            while True:
                told = json.loads(self._socket.recv(LARGEST))
                if "started" in told:
                    return int(told["started"])
                self._codes[told["ended"]] = told["code"]

    def code(self, pid: int) -> int | None:
        """How a run ended; None where it has not."""
        with self._lock:
            while select.select([self._socket], [], [], 0)[0]:
                told = json.loads(self._socket.recv(LARGEST))
                self._codes[told["ended"]] = told["code"]
            return self._codes.get(pid)


def members(session: int) -> list[int]:
    """The processes of a session that live."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                state, _, _, sid = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(sid) == session and state != "Z":
                    found.append(int(entry.name))
    return found


def end(session: int) -> None:
    """Kills what lives of a session."""
    for pid in members(session):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def serve(descriptor: int) -> NoReturn:
    """Forks runs until the socket closes."""
    for module in (
        *launching.ENGINE,
        "shardwise.cli.train",
        "shardwise.cli.report",
        "shardwise.api",
        "shardwise.train.flow",
        "shardwise.world.launch.fork_server",
        "bench.faults.fault_rank",
    ):
        __import__(module)
    import torch

    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # whose parent is gone stays here
    requests = socket.socket(fileno=descriptor)
    requests.send(b"ready")
    while True:
        if select.select([requests], [], [], 0.01)[0]:
            data, descriptors, _, _ = socket.recv_fds(requests, LARGEST, 1)
            if not data:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                requests.close()
                _run(json.loads(data), descriptors[0])
            os.close(descriptors[0])
            requests.send(json.dumps({"started": pid}).encode())
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                told = {"ended": ended[0], "code": os.waitstatus_to_exitcode(ended[1])}
                requests.send(json.dumps(told).encode())


def _run(request: dict[str, Any], out: int) -> NoReturn:
    """The command line, in a fork."""
    code = 70
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null), (1, out), (2, out)):
            os.dup2(source, target)
        os.close(out)
        code = _trained(request)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _trained(request: dict[str, Any]) -> int:
    from bench.faults.fault_rank import harmed
    from shardwise.api import plan
    from shardwise.cli import run
    from shardwise.cli import train as verb
    from shardwise.plan.plan_file import read_plan
    from shardwise.train import flow

    def plan_of(config: Any) -> Any:
        made = plan(config.model.name, config.train.batch, cluster="2xcpu-2", layout=config.plan.layout)
        return replace(made, batch_size=config.train.batch)

    def planner(config: Any, ready: Any, *_: Any) -> Any:  # more ranks than this machine has cores are wanted, too
        if ready is None:
            ready = read_plan(request["plan"]) if request["plan"] else plan_of(config)
        return flow.PlannedRun(ready, 0.0, "cpu")

    verb.make_plan = planner  # type: ignore[assignment]
    flow.rank_main = harmed
    Launcher._start = _forked  # type: ignore[method-assign]
    return run(request["words"])


class _Forked:
    """The prepared process, as `Launcher` uses it."""

    def __init__(self, pid: int) -> None:
        self.pid, self._code = pid, None

    def poll(self) -> int | None:
        """Its exit code; None while it lives."""
        return self._code if self._code is not None else self._wait(os.WNOHANG)

    def _wait(self, options: int) -> int | None:
        with suppress(ChildProcessError):
            pid, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None  # type: ignore[assignment]
        return self._code

    def wait(self, timeout: float = 10.0) -> int:
        """Raises TimeoutExpired."""
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("prepared", timeout)
            time.sleep(0.002)
        return self._code or 0

    def kill(self) -> None:
        """SIGKILL."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _close_but(*kept: int) -> None:
    """What a new program would not have: another end of a socket here would hide the death of whoever has it."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))


def _forked(self: Launcher) -> None:
    """In place of `Launcher._start`: the prepared process has its modules already."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lifeline, held = os.pipe()
    self._errors = errors = tempfile.TemporaryFile()  # noqa: SIM115
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            _close_but(errors.fileno(), theirs.fileno(), lifeline)
            null = os.open(os.devnull, os.O_RDONLY)
            for target, source in ((0, null), (1, errors.fileno()), (2, errors.fileno())):
                os.dup2(source, target)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            from shardwise.world.launch.fork_server import main

            sys.argv = ["prepared", str(theirs.fileno()), str(lifeline), *self._preload]
            main()
        finally:
            os._exit(70)
    theirs.close()
    os.close(lifeline)
    process = _Forked(pid)
    self._process, self._control = process, ours  # type: ignore[assignment]
    self._close = weakref.finalize(self, launching._end_process, process, ours, held)  # type: ignore[arg-type]
    if ours.recv(LARGEST) != b"ready":
        raise RuntimeError("the prepared process did not come up")
