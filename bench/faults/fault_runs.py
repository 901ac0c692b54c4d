"""Runs that come to harm. In: a layout and cases. Out: of each, when it was noticed, when the next step came, what was lost, how it ended.

What is seen comes from outside the run: lines of its output with the time at which each came, rank 0's record of steps, the marks that
harmed ranks left, exit codes, and which processes of its session still live.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.common.processes import ROOT
from bench.faults.fault_cases import EVALUATE_EVERY, EVERYONE, FORKER, PREPARED, RANDOM, SAVE_EVERY, Fault, Placed
from bench.faults.fault_host import Host, end, members
from bench.faults.fault_rank import BEGAN, ENTRY, ORDERS, STEPS, TOLD
from shardwise.train.metrics import read_metrics

SOLO_STEPS = 120  # of a run with one case
HANG_S = 60.0  # without a step, and the run counts as hanging
LOOK_S = 0.005
ORPHANS_S = 1.0  # after the end of the launcher
CONFIG = """
[model]
name = "gpt:vocabulary=256,hidden=32,layers=2,heads=2"
[data]
sequence = 16
[train]
batch = 8
learning_rate = 0.001
[run]
sample = 0
"""
TEXT_BYTES = 200_000


@dataclass(frozen=True, slots=True)
class Felt:
    """One case in one layout; times in seconds, not a number where there is none. `lost`: finished steps that were made again. `same`: the
    losses, after resuming where the run ended, are those of the calm run. `outcome`: see `judged`."""

    name: str
    layout: str
    noticed_s: float
    next_step_s: float
    lost: int
    same: bool
    outcome: str
    kill: bool = False
    said: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """What `judged` goes by. `told`: all that must be said was said; `hung`: it had to be killed; `code` and `wanted`: how it ended and was
    to; `whole`: the losses at the end, after following the remedy, are those of the calm run (True where there can be none)."""

    told: bool
    hung: bool
    orphans: int
    code: int | None
    wanted: int
    whole: bool


BAD = ("silent", "orphans", "hang", "unclear", "lost", "not reached")


def judged(seen: Seen) -> str:
    """How a case came out: one of BAD, or `went on`, `ended`.

    >>> judged(Seen(True, False, 0, 0, 0, True)), judged(Seen(False, False, 0, 0, 0, False)), judged(Seen(True, False, 0, 4, 4, False))
    ('went on', 'silent', 'lost')
    """
    if seen.hung:
        return "hang"
    if seen.orphans:
        return "orphans"
    if not seen.whole:
        return "lost" if seen.told or seen.code != 0 else "silent"
    if not seen.told or seen.code != seen.wanted:
        return "unclear"
    return "went on" if seen.wanted == 0 else "ended"


class Running:
    """One command, watched. `parent`: the folder that its run folder lies in."""

    def __init__(self, host: Host, words: Sequence[str], parent: Path, plan: Path | None) -> None:
        self.parent, self.said = parent, list[tuple[float, str]]()
        source, out = os.pipe()
        self.began_s = time.monotonic()
        self._steps_before = self._read_until = self._size()
        self._told = 0
        self.pid = host.start(list(words), plan, out)
        os.close(out)
        self._host = host
        self._reader = threading.Thread(target=self._read, args=(source,), daemon=True)
        self._reader.start()

    def _read(self, source: int) -> None:
        rest = b""
        while data := os.read(source, 1 << 16):
            now = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            self.said += [(now, line.decode(errors="replace")) for line in lines]
        os.close(source)

    def _size(self) -> int:
        path = self.parent / STEPS
        return path.stat().st_size if path.exists() else 0

    @property
    def entries(self) -> list[tuple[float, int, int]]:
        """(when, step, began or told) of this command."""
        return _entries(self.parent / STEPS, self._steps_before)

    @property
    def told(self) -> int:
        """How many steps have been told; the file is read on from where it was read last, since this is asked a thousand times a second."""
        new = _entries(self.parent / STEPS, self._read_until)
        self._read_until += ENTRY.size * len(new)
        self._told = max([self._told, *(step + 1 for _, step, what in new if what == TOLD)])
        return self._told

    @property
    def code(self) -> int | None:
        """The command's exit code; None while it runs."""
        return self._host.code(self.pid)

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.said)

    def wait(self, look: Callable[[], None] = lambda: None) -> bool:
        """Until it ends, calling `look` again and again; whether it hung and was killed."""
        size, since = -1, time.monotonic()
        while self.code is None:
            look()
            now = time.monotonic()
            if self._size() != size:
                size, since = self._size(), now
            elif now - since > HANG_S:
                end(self.pid)
                self._wait_end()
                return True
            time.sleep(LOOK_S)
        return False

    def _wait_end(self) -> None:
        while self.code is None:
            time.sleep(0.01)

    def orphans(self) -> int:
        """How many of its processes live so long after its end; they are killed."""
        until = time.monotonic() + ORPHANS_S
        while members(self.pid) and time.monotonic() < until:
            time.sleep(0.05)
        left = len(members(self.pid))
        end(self.pid)
        self._reader.join(2)
        return left


def _entries(path: Path, since: int) -> list[tuple[float, int, int]]:
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(since)
        data = file.read()
    return [ENTRY.unpack_from(data, at) for at in range(0, len(data) - ENTRY.size + 1, ENTRY.size)]


def _below(pid: int) -> list[int]:
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").glob("*"):
            found += [int(p) for p in (task / "children").read_text().split()]
    return found


def prepared_of(launcher: int) -> list[int]:
    """The prepared process of a launcher."""
    return _below(launcher)


def forkers_of(launcher: int) -> list[int]:
    """The processes that fork ranks: children of the prepared one."""
    return [nest for prepared in _below(launcher) for nest in _below(prepared)]


def ranks_of(launcher: int) -> list[int]:
    """The ranks' processes, in the order in which they were forked."""
    return sorted(rank for nest in forkers_of(launcher) for rank in _below(nest))


def send(pid: int, number: int) -> None:
    """A signal, to whoever may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


class Outside:
    """Does what is done to a run by another process, at random moments."""

    def __init__(self, running: Running, cases: Sequence[tuple[int, Placed]]) -> None:
        self._running, self._draw = running, random.Random(0)
        self._cases = sorted(((one.step, key, one.fault) for key, one in cases), key=lambda case: case[:2])

    def look(self) -> None:
        """Called again and again."""
        if not self._cases or self._running.told < self._cases[0][0]:
            return
        _, key, fault = self._cases.pop(0)
        time.sleep(self._draw.uniform(0, 0.03))
        launcher = self._running.pid
        ranks = ranks_of(launcher)
        chosen = {EVERYONE: ranks, FORKER: forkers_of(launcher), PREPARED: prepared_of(launcher)}.get(fault.rank)
        pids = chosen if chosen is not None else [pid for pid in ranks if number_of(pid, self._running.parent) == fault.rank]
        (self._running.parent / f"harmed-{key}-x").write_text(repr(time.monotonic()))
        for pid in pids:
            send(pid, getattr(signal, fault.how))


def number_of(pid: int, parent: Path) -> int:
    """Which rank a process is: all but rank 0 write into a log of theirs."""
    with suppress(OSError):
        name = Path(os.readlink(f"/proc/{pid}/fd/1")).name
        if found := re.fullmatch(r"rank-(\d+)\.log", name):
            return int(found[1])
    return 0


@cache
def text_bytes() -> bytes:
    """What is trained on, read once: who edits the pages meanwhile changes no run."""
    return b"\n".join(page.read_bytes() for page in sorted((ROOT / "docs").glob("*.md")))[:TEXT_BYTES]


def words_of(parent: Path, layout: str, steps: int) -> list[str]:
    """The command: `shardwise train` of a small GPT on a text, in `parent`."""
    config, text = parent / "config.toml", parent / "text.txt"
    if not text.exists():
        parent.mkdir(parents=True, exist_ok=True)
        text.write_bytes(text_bytes())
        config.write_text(CONFIG)
    changes = {
        "data.text": text, "run.folder": parent / "run", "train.steps": steps, "train.checkpoint_every": SAVE_EVERY,
        "train.evaluate_every": EVALUATE_EVERY, "plan.layout": f"{layout} threads=1",
    }  # fmt: skip
    return ["train", str(config), *(f"{key}={value}" for key, value in changes.items())]


def losses(parent: Path) -> list[tuple[Any, Any, Any]]:
    """(step, loss, loss of the evaluation) of all rows."""
    path = parent / "run" / "metrics.jsonl"
    return [(row["step"], row["loss"], row.get("eval_loss")) for row in read_metrics(path)] if path.exists() else []


def differs(found: Sequence[Any], wanted: Sequence[Any]) -> str:
    """Where the rows of a run first differ from those of the calm one; nothing where they do not.

    >>> differs([(1, 2.5), (2, 2.0)], [(1, 2.5), (2, 2.25)]), differs([(1, 2.5)], [(1, 2.5)]), differs([], [(1, 2.5)])
    ('(2, 2.0) instead of (2, 2.25)', '', '0 rows instead of 1')
    """
    pairs = zip(found, wanted, strict=False)
    rows = f"{len(found)} rows instead of {len(wanted)}" if len(found) != len(wanted) else ""
    return next((f"{a} instead of {b}" for a, b in pairs if a != b), rows)


@dataclass(frozen=True, slots=True)
class Calm:
    """The run that nothing touched."""

    losses: list[tuple[Any, Any, Any]]
    plan: Path


def calm(host: Host, layout: str, steps: int, parent: Path, plan: Path | None = None) -> Calm:
    """Trains in peace. Raises RuntimeError where even that fails."""
    running = Running(host, words_of(parent, layout, steps), parent, plan)
    running.wait()
    running.orphans()
    if running.code or len(losses(parent)) != steps:
        raise RuntimeError(f"the run without faults ended with {running.code}:\n{running.text}")
    return Calm(losses(parent), parent / "run" / "plan.toml")


def orders_of(key: int, one: Placed, num_ranks: int) -> list[dict[str, Any]]:
    """What `fault_rank` follows."""
    fault = one.fault
    where = "before its step" if fault.where == "before its first step" else fault.where
    ranks = list(range(num_ranks)) if fault.rank == EVERYONE else [fault.rank]
    until = one.step + fault.lasts if fault.lasts else 0 if one.step == 0 and where not in ("at its start",) else 1 << 40
    order = {
        "key": key,
        "step": one.step,
        "until": until,
        "how": fault.how,
        "where": where,
        "ranks": ranks,
        "every": fault.every,
        "after": "",
    }
    if fault.then is None:
        return [order]
    how, where, rank = fault.then
    return [order, {**order, "key": f"{key}b", "step": 0, "until": 1 << 40, "how": how, "where": where, "ranks": [rank], "after": str(key)}]


def measure(host: Host, layout: str, num_ranks: int, cases: Sequence[Placed], steps: int, parent: Path, quiet: Calm) -> list[Felt]:
    """Faults one after another in one run."""
    words = words_of(parent, layout, steps)
    inside = [(key, one) for key, one in enumerate(cases) if one.fault.where != RANDOM]
    (parent / ORDERS).write_text(json.dumps([order for key, one in inside for order in orders_of(key, one, num_ranks)]))
    running = Running(host, words, parent, quiet.plan)
    outside = Outside(running, [(key, one) for key, one in enumerate(cases) if one.fault.where == RANDOM])
    hung = running.wait(outside.look)
    orphans = running.orphans()
    same = losses(parent) == quiet.losses
    marks = [mark_of(parent, key) for key in range(len(cases))]
    later = sorted(t for t, _ in marks if not math.isnan(t))
    found = []
    for one, (at, kept) in zip(cases, marks, strict=True):
        until = next((t for t in later if t > at), math.inf)
        noticed, line = first_said(running.said, one.fault, at, until)
        following, lost = next_step(running.entries, at, noticed, one, kept)
        last = at == max(later, default=at)  # what came last ended the run, where it ended otherwise than it should
        ended = (hung, orphans, running.code, same) if last else (False, 0, 0, same or running.code != 0 or hung)
        seen = Seen(not math.isnan(noticed), ended[0], ended[1], ended[2], 0, ended[3])
        outcome = judged(seen) if not math.isnan(at) else "not reached"
        said = (
            f"{line}; {differs(losses(parent), quiet.losses)}; ended with {running.code}: {running.text[-500:]}" if outcome in BAD else line
        )
        found.append(Felt(one.fault.name, layout, noticed - at, following - at, lost, same, outcome, one.fault.kill, said))
    return found


def mark_of(parent: Path, key: int) -> tuple[float, int]:
    """When a fault happened, the second of it where there are two, and the steps that the harmed rank had kept then; nan where it did not
    happen, -1 where that is not known."""
    marks = [*parent.glob(f"harmed-{key}-*"), *parent.glob(f"harmed-{key}b-*")]
    found = [(float(words[0]), int(words[1]) if words[1:] else -1) for words in (mark.read_text().split() for mark in marks)]
    return max(found, default=(math.nan, -1))


def when(parent: Path, key: int) -> float:
    """The moment of a fault; not a number where it did not happen."""
    return mark_of(parent, key)[0]


def first_said(said: Sequence[tuple[float, str]], fault: Fault, at: float, until: float) -> tuple[float, str]:
    """When what must be said of a fault was first said, and how."""
    pattern = re.compile(fault.says.replace("RANK", str(fault.then[2] if fault.then else fault.rank)))
    return next(((t, line) for t, line in said if at < t < until + 1e9 * fault.every and pattern.search(line)), (math.nan, ""))


def next_step(entries: Sequence[tuple[float, int, int]], at: float, noticed: float, one: Placed, kept: int = -1) -> tuple[float, int]:
    """When the next step was told that began after a fault was noticed, and how many told steps were made again before it."""
    stays = one.fault.how.partition(":")[0] in ("nan", "jump", "disk", "slow", "flip")  # no rank is lost
    return next_step_after(entries, at, at if math.isnan(noticed) or stays else noticed, kept)


def next_step_after(entries: Sequence[tuple[float, int, int]], at: float, after: float = -math.inf, kept: int = -1) -> tuple[float, int]:
    """As `next_step`, of what began `after` a moment. `kept`: a step that the harmed rank had not finished is not counted; -1: not known.

    >>> entries = [(1.0, 0, 0), (2.0, 0, 1), (3.0, 1, 0), (4.0, 1, 1), (6.0, 0, 0), (7.0, 0, 1), (8.0, 1, 0), (9.0, 1, 1)]
    >>> next_step_after(entries, 2.5, 5.0), next_step_after(entries, 2.5, 5.0, kept=0)
    ((9.0, 1), (9.0, 0))
    """
    done = max((step for t, step, what in entries if what == TOLD and t <= at), default=-1)
    after = max(at, after)
    began = [(t, step) for t, step, what in entries if what == BEGAN and t > after]
    first = next((t for t, step in began if step > done), math.inf)
    following = next((t for t, step, what in entries if what == TOLD and t > max(after, first) and step > done), math.nan)
    again = min((step for t, step in began if t <= following), default=done + 1)
    finished = min(done + 1, kept) if kept >= 0 else done + 1
    return following, max(0, finished - again)
