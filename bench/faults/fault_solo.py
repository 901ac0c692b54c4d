"""Cases that take a run of their own: it ends by design, or its files come to harm between two commands.

In: an `Ending`. Out: a `Felt`: the command's exit code and sentences are compared with those that the case names, its processes are counted
a second after its end, the remedy is followed, and the same command must then end with the losses of the run that nothing touched.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.faults.fault_cases import EVERYONE, Ending
from bench.faults.fault_host import Host
from bench.faults.fault_rank import ORDERS, TOLD
from bench.faults.fault_runs import (
    BAD,
    SOLO_STEPS,
    Calm,
    Felt,
    Running,
    Seen,
    differs,
    judged,
    losses,
    next_step_after,
    send,
    when,
    words_of,
)

STEPS, HARM = SOLO_STEPS, 30
STOPPED_S = 3.0


class Launcher:
    """What is done to a launcher or to its files while it trains, once step HARM has been told. `second`: another command's text."""

    def __init__(self, running: Running, how: str, host: Host, words: list[str], plan: Path | None) -> None:
        self._running, self._how, self._host, self._words, self._plan = running, how, host, words, plan
        self.at_s, self._again_s, self.second = math.nan, math.inf, ""

    def look(self) -> None:
        """Called again and again."""
        if math.isnan(self.at_s) and self._running.told >= HARM:
            self.at_s = time.monotonic()
            getattr(self, self._how)()
        if time.monotonic() > self._again_s:
            self._again_s = math.inf
            send(self._running.pid, signal.SIGCONT if self._how == "stop_launcher" else signal.SIGINT)

    def terminate(self) -> None:
        send(self._running.pid, signal.SIGTERM)

    def hang_up(self) -> None:
        send(self._running.pid, signal.SIGHUP)

    def interrupt(self) -> None:
        send(self._running.pid, signal.SIGINT)

    def interrupt_twice(self) -> None:
        self.interrupt()
        self._again_s = self.at_s + 0.05

    def kill_launcher(self) -> None:
        send(self._running.pid, signal.SIGKILL)

    def stop_launcher(self) -> None:
        send(self._running.pid, signal.SIGSTOP)
        self._again_s = self.at_s + STOPPED_S

    def second_launcher(self) -> None:
        parent = self._running.parent
        other = Running(self._host, self._words, parent, self._plan)
        until = time.monotonic() + 10
        while other.code is None and time.monotonic() < until:
            time.sleep(0.01)
        other.orphans()
        self._running.said += [(time.monotonic(), line) for _, line in other.said]

    def text_over(self) -> None:
        path = self._running.parent / "text.txt"
        with path.open("r+b") as file:
            file.write(b"x" * (path.stat().st_size // 3))

    def text_cut(self) -> None:
        os.truncate(self._running.parent / "text.txt", 10_000)

    def remove_folder(self) -> None:
        shutil.rmtree(self._running.parent / "run", ignore_errors=True)

    def remove_checkpoints(self) -> None:
        shutil.rmtree(self._running.parent / "run" / "checkpoints", ignore_errors=True)


def _newest(parent: Path, pattern: str) -> Path:
    return max(max((parent / "run" / "checkpoints").glob("step-*")).glob(pattern), key=lambda path: path.stat().st_size)


def _flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data) // 4, len(data))] ^= 1 << draw.randrange(7)
    path.write_bytes(data)


def _text_third(parent: Path, draw: random.Random) -> None:
    path = parent / "text.txt"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 3] + data[len(data) // 3 : 2 * len(data) // 3][::-1] + data[2 * len(data) // 3 :])


def _flip_keeping(name: str) -> Callable[[Path, random.Random], None]:
    def flip(parent: Path, draw: random.Random) -> None:
        path = parent / "run" / name
        shutil.copy(path, parent / name)
        _flip(path, draw)

    return flip


BETWEEN_RUNS: dict[str, Callable[[Path, random.Random], None]] = {
    "text_third": _text_third,
    "flip_plan": _flip_keeping("plan.toml"),
    "flip_corpus": _flip_keeping("corpus.json"),
    "flip_checkpoint": lambda parent, draw: _flip(_newest(parent, "*.safetensors"), draw),
    "cut_checkpoint": lambda parent, draw: os.truncate(_newest(parent, "*.safetensors"), 5000),
    "lose_file": lambda parent, draw: _newest(parent, "*.safetensors").unlink(),
    "flip_manifest": lambda parent, draw: _flip(_newest(parent, "manifest.json"), draw),
}
MENDS: dict[str, Callable[[Path], object]] = {
    "": lambda parent: None,
    "restore_text": lambda parent: shutil.copy2(parent / "text.kept", parent / "text.txt"),
    "restore_plan": lambda parent: shutil.copy(parent / "plan.toml", parent / "run" / "plan.toml"),
    "restore_corpus": lambda parent: shutil.copy(parent / "corpus.json", parent / "run" / "corpus.json"),
}


def alone(host: Host, layout: str, num_ranks: int, case: Ending, parent: Path, quiet: Calm) -> Felt:
    """One case, from its first command to the end of its last."""
    words = words_of(parent, layout, STEPS)
    shutil.copy2(parent / "text.txt", parent / "text.kept")
    kind, _, name = case.how.partition(":")
    orders: list[dict[str, Any]] = []
    at = math.nan
    if kind == "between":
        first = Running(host, words, parent, quiet.plan)
        first.wait(Launcher(first, "terminate", host, words, quiet.plan).look)
        first.orphans()
        BETWEEN_RUNS[name](parent, random.Random(0))
        at = time.monotonic()
    elif not hasattr(Launcher, kind):
        orders = [_order(case, num_ranks)]
    (parent / ORDERS).write_text(json.dumps(orders))
    running = Running(host, words, parent, quiet.plan)
    harm = Launcher(running, kind, host, words, quiet.plan)
    hung = running.wait(harm.look if hasattr(Launcher, kind) else lambda: None)
    orphans = running.orphans()
    at = at if kind == "between" else harm.at_s if hasattr(Launcher, kind) else when(parent, 0)
    text = running.text
    told = all(re.search(pattern, text) for pattern in case.says)
    noticed, line = next(((t, x) for t, x in running.said if case.says and re.search(case.says[0], x)), (math.nan, ""))
    if not case.says:  # killed, it cannot speak: its end is what is seen
        noticed = at
    following, lost, whole = _resumed(host, words, case, running, quiet, at) if not hung else (math.nan, 0, False)
    code = running.code
    wanted = code if code is not None and code == case.also else case.code
    seen = Seen(told and not math.isnan(at), hung, orphans, code, wanted, whole)
    outcome = judged(seen)
    words_said = f"{line}; {differs(losses(parent), quiet.losses)}; ended with {code}: {text[-500:]}" if outcome in BAD else line
    return Felt(case.name, layout, noticed - at, following - at, lost, whole if case.resumes else True, outcome, said=words_said)


def _order(case: Ending, num_ranks: int) -> dict[str, Any]:
    ranks = list(range(num_ranks)) if case.rank == EVERYONE else [case.rank]
    return {
        "key": 0,
        "step": case.step,
        "until": 1 << 40,
        "how": case.how,
        "where": case.where,
        "ranks": ranks,
        "every": case.every,
        "after": "",
    }


def _resumed(host: Host, words: list[str], case: Ending, before: Running, quiet: Calm, at: float) -> tuple[float, int, bool]:
    """When the next step was told, how many were made again, and whether all losses are those of the calm run, after the remedy."""
    if before.code == 0 or not case.resumes:
        following, lost = next_step_after(before.entries, at)
        return following, lost, losses(before.parent) == quiet.losses if case.resumes else True
    done = max((step + 1 for _, step, what in before.entries if what == TOLD), default=0)
    MENDS[case.mend](before.parent)
    (before.parent / ORDERS).unlink()
    again = Running(host, words, before.parent, quiet.plan)
    again.wait()
    again.orphans()
    entries = again.entries
    first = min((step for _, step, _ in entries), default=done)
    end_s = next((t for t, _, what in entries if what == TOLD), math.nan)
    return at + end_s - again.began_s, max(0, done - first), again.code == 0 and losses(before.parent) == quiet.losses
