"""Starts contenders' ranks, lets one contender at a time run a few steps, and takes their times.

In: a case and contenders. Out: seconds, processor time and losses of every block. Ranks that wait are blocked on a socket.
A contender that fails to start raises ContenderFailed with the reason; its processes are gone by then.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common.case import Case, Contender, to_text

ROOT = Path(__file__).parents[2]
START_S = 240.0  # importing, tracing and the first collective of the slowest peer on two busy cores
BLOCK_S = 900.0
EXTRA_PATH = ""  # where a rank also looks for its contender's module


class ContenderFailed(Exception):
    """A contender that does not start or stops half-way; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Block:
    """A few steps of one contender: seconds of the slowest rank, processor seconds of all ranks, mean loss of each step."""

    seconds: float
    cpu_seconds: float
    losses: tuple[float, ...]
    memory_bytes: int


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Running:
    """The processes of one contender, and a socket to each rank."""

    def __init__(self, case: Case, contender: Contender, python: str) -> None:
        self.case, self.contender = case, contender
        self.about: dict[str, Any] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-bench-")
        folder = Path(self._folder.name)
        self._log = folder / "log"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "s"))
        self._listener.listen()
        self._ranks: dict[int, tuple[socket.socket, Any]] = {}
        self._num_ranks = contender.num_ranks
        self._processes: list[subprocess.Popen[bytes]] = []
        port = free_port()
        for rank in range(1 if contender.launcher else contender.num_ranks):
            self._start(python, rank, port, str(folder / "s"))

    def _start(self, python: str, rank: int, port: int, path: str) -> None:
        base = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "OMP_", "KMP_", "SHARDWISE_"))}
        joined = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": self.contender.num_ranks,
            "LOCAL_WORLD_SIZE": self.contender.num_ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        given: Mapping[str, Any] = {
            **base,
            **({} if self.contender.launcher else joined),
            **self.contender.environment(),
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "src"), EXTRA_PATH))),  # this checkout, also beside another
            "PYTHONWARNINGS": "ignore",
        }
        with self._log.open("ab") as log:
            command = [python, "-m", "bench.common.rank", path, to_text(self.case, self.contender)]
            if self.contender.launcher:
                command[2] = self.contender.module
            env = {k: str(v) for k, v in given.items()}
            self._processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def wait_ready(self) -> None:
        """Return when all ranks have built their part. Raises ContenderFailed."""
        end = time.monotonic() + START_S
        self._listener.settimeout(0.5)
        while len(self._ranks) < self._num_ranks:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                self._complain(end)
                continue
            connection.settimeout(START_S)
            reader = connection.makefile("r")
            hello = reader.readline()
            if not hello:
                raise ContenderFailed(self._last_words("a rank ended"))
            told = json.loads(hello)
            self._num_ranks = told.get("num_ranks", self._num_ranks)  # a plan that was chosen says itself how many it needs
            self._ranks[told["rank"]] = (connection, reader)
        for message in self._receive(START_S):
            self.about |= message

    def _complain(self, end: float) -> None:
        died = [p.returncode for p in self._processes if p.poll() not in (None, 0)]
        if died or time.monotonic() > end:
            raise ContenderFailed(self._last_words(f"ended with {died[0]}" if died else f"not ready within {START_S:.0f} s"))

    def _last_words(self, what: str) -> str:
        lines = [x for x in self._log.read_text(errors="replace").splitlines() if x.strip()]
        told = next((x for x in reversed(lines) if "Error" in x), lines[-1] if lines else "")
        return f"{what}: {told}" if told else what

    def _receive(self, timeout: float) -> list[dict[str, Any]]:
        """One message of every rank; whichever comes first is read first, so that a failed rank is heard at once."""
        heard: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, (connection, _) in self._ranks.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            end = time.monotonic() + timeout
            while len(heard) < len(self._ranks):
                ready = selector.select(max(0.0, end - time.monotonic()))
                if not ready:
                    raise ContenderFailed(f"ranks {sorted(set(self._ranks) - set(heard))} did not answer within {timeout:.0f} s")
                for key, _ in ready:
                    line = self._ranks[key.data][1].readline()
                    message = json.loads(line) if line else {"error": self._last_words("a rank ended")}
                    if "error" in message:
                        raise ContenderFailed(f"rank {key.data}: {message['error']}")
                    heard[key.data] = message
                    selector.unregister(key.fileobj)
        return [heard[rank] for rank in sorted(heard)]

    def run(self, steps: int, profile: str = "") -> Block:
        """A block of steps on all ranks together. Raises ContenderFailed."""
        order = json.dumps({"do": "run", "steps": steps, "profile": profile}) + "\n"
        for connection, _ in self._ranks.values():
            connection.sendall(order.encode())
        heard = self._receive(BLOCK_S)
        losses = []
        for step in range(steps):
            told = [m["losses"][step] for m in heard if m["losses"][step] is not None]
            losses.append(sum(told) / len(told))
        return Block(
            max(m["seconds"] for m in heard),
            sum(m["cpu_seconds"] for m in heard),
            tuple(losses),
            max(m["memory_bytes"] for m in heard),
        )

    def close(self) -> None:
        """Tell the ranks to stop; whoever has not after a few seconds is ended."""
        for connection, _ in self._ranks.values():
            with contextlib.suppress(OSError):
                connection.sendall(b'{"do": "stop"}\n')
                connection.close()
        end(self._processes)
        self._listener.close()
        self._folder.cleanup()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for processes that have been told to stop, a few seconds each; whoever has not by then is ended."""
    for process in processes:
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def missing(python: str, packages: tuple[str, ...]) -> str:
    """Why the packages cannot be imported, or nothing."""
    for package in packages:
        done = subprocess.run([python, "-c", f"import {package}"], capture_output=True, text=True, cwd=ROOT, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            return lines[-1] if lines else f"import {package} ended with {done.returncode}"
    return ""


def peers_python() -> str:
    """The interpreter that has the peers' packages, where `--install-peers` made one; otherwise this one."""
    own = ROOT / ".venv-peers" / "bin" / "python"
    return str(own) if own.exists() else sys.executable
