"""The same faults under torchrun with DDP and torch.distributed.checkpoint, and under torchft.

In: nothing. Out: `Felt`s whose layout is the contender's name, and why one that is missing was left out. torchrun restarts all workers of a
host when one fails; torchft lets the replicas that are left go on. Both get what a careful user sets; what that is stands in SETTINGS.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common.document import left_out
from bench.common.processes import ROOT, free_port, missing
from bench.faults.fault_runs import BAD, Felt, Seen, judged, next_step_after, send, text_bytes, when
from bench.peers.elastic_ddp import ENTRY, SAVE_EVERY, TIMEOUT_S

TORCHRUN, TORCHFT = "torchrun, DDP + DCP", "torchft"
STEPS, APART, WAIT_S, HANG_S, ORPHANS_S = 60, 12, 60.0, 30.0, 1.0
RESTARTS = 100
SETTINGS = f"""torchrun: `--standalone --nproc-per-node 2 --max-restarts {RESTARTS} --monitor-interval 0.1`, DDP over a gloo group
with a time-out of {TIMEOUT_S:g} s, which is made once all are there (by default 30 minutes, in which nobody learns of what hangs), a
checkpoint every {SAVE_EVERY} steps by torch.distributed.checkpoint, into a new folder that a rename commits, and resuming from the
newest that loads. Its workers meet under a prefix of each attempt: left to torchrun's default, 3 of 4 restarts read the addresses of
the dead and never came up (`Gloo connectFullMesh failed`, again and again). Two ranks, the same GPT. torchft: a lighthouse whose
heartbeats time out after 1 s, two replicas of one process each with the same time-out, DDP over its gloo; its next step is the other
replica's, which goes on with half of the batch, so that losses differ by design."""


@dataclass(frozen=True, slots=True)
class Case:
    """As `fault_cases.Ending`; `code` None: the run is to go on. `says`: whether anything names what happened."""

    name: str
    how: str
    rank: int = 1
    where: str = "before its step"
    says: str = ""


KILLS = (
    "at its start", "while data is taken", "before its step", "in forward", "in backward", "in a collective",
    "between gradients and update", "in the update", "after its step", "before a checkpoint's commit", "after a checkpoint's commit",
    "at the end",
)  # fmt: skip
FOLLOWING = (
    *(
        Case(f"kill -9 of rank {n % 2} {where}", "SIGKILL", n % 2, where, "Signal 9|SIGKILL|exitcode *: -9")
        for n, where in enumerate(KILLS)
    ),
    Case("SIGSEGV of a rank", "SIGSEGV", says="Signal 11|SIGSEGV"),
    Case("a rank ends with code 3", "exit:3", says="exitcode *: 3"),
    Case("an exception on rank 1", "raise", says="7 labels for 8 samples"),
    Case("the disk is full at a save", "full", 0, "at a save", "No space left"),
)
ALONE = (
    Case("SIGSTOP of rank 1", "SIGSTOP", says="Timed out|imeout"),
    Case("rank 1 sleeps for ever", "sleep", says="Timed out|imeout"),
    Case("rank 1 holds the interpreter", "hold", says="Timed out|imeout"),
    Case("a bit of a weight is flipped on one of two replicas", "flip", says="bit was flipped|differ"),
    Case("a loss that is not a number, once", "nan", says=r"\bnan\b|not finite"),
    Case("SIGTERM of the launcher", "launcher:SIGTERM", says="saving|saved"),
    Case("kill -9 of the launcher", "launcher:SIGKILL"),
    Case("a third of the text is replaced between two runs", "between:text", says="text"),
    Case("a bit of the newest checkpoint is flipped between two runs", "between:flip", says="does not load"),
)


class Command:
    """A command, its output with times, and its processes, which a mark in their environment tells."""

    def __init__(self, words: Sequence[str], parent: Path, log: str = "steps.bin") -> None:
        self.log, self.said, self._mark = parent / log, list[tuple[float, str]](), uuid.uuid4().hex
        path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
        settings = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "PYTHONWARNINGS": "ignore",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        self._before = len(entries_of(self.log))
        self.process = subprocess.Popen(
            list(words), cwd=ROOT, env={**os.environ, **settings, "SHARDWISE_BENCH_MARK": self._mark}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.began_s = time.monotonic()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append((time.monotonic(), line.decode(errors="replace").rstrip()))

    @property
    def entries(self) -> list[tuple[float, int, int]]:
        """(when, step, began or told) of this command."""
        return entries_of(self.log)[self._before :]

    @property
    def told(self) -> int:
        """How many steps have been told."""
        return max((step + 1 for _, step, what in self.entries if what), default=0)

    def members(self) -> list[int]:
        """Its processes that live."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if self._mark.encode() in (entry / "environ").read_bytes() and state != "Z":
                        found.append(int(entry.name))
        return found

    def wait(self, look: Callable[[], None] = lambda: None, limit_s: float = WAIT_S) -> bool:
        """Until it ends; whether it made no step for so long and was killed."""
        count, since = -1, time.monotonic()
        while self.process.poll() is None:
            look()
            now = time.monotonic()
            if len(self.entries) != count:
                count, since = len(self.entries), now
            elif now - since > limit_s:
                self.end()
                return True
            time.sleep(0.005)
        return False

    def orphans(self) -> int:
        """How many of its processes live so long after its end; they are killed."""
        time.sleep(ORPHANS_S)
        left = len(self.members())
        self.end()
        return left

    def end(self) -> None:
        """Kills all."""
        while pids := self.members():
            for pid in pids:
                send(pid, signal.SIGKILL)
            time.sleep(0.05)
        self.process.wait()


def entries_of(path: Path) -> list[tuple[float, int, int]]:
    """As `fault_runs.Running.entries`, of all commands."""
    data = path.read_bytes() if path.exists() else b""
    return [ENTRY.unpack_from(data, at) for at in range(0, len(data) - ENTRY.size + 1, ENTRY.size)]


def torchrun(parent: Path, steps: int) -> Command:
    """Starts the training."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(RESTARTS)]
    return Command([*words, "--monitor-interval", "0.1", "-m", "bench.peers.elastic_ddp", str(parent), str(steps)], parent)


def _prepared(parent: Path) -> Path:
    parent.mkdir(parents=True)
    (parent / "text.txt").write_bytes(text_bytes())
    return parent


def losses(parent: Path) -> list[tuple[int, float]]:
    """(step, loss) of all rows."""
    path = parent / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(row["step"], row["loss"]) for row in map(json.loads, lines)]


def _order(key: int, case: Case, step: int) -> dict[str, Any]:
    return {
        "key": key,
        "step": step,
        "until": 1 << 40,
        "how": case.how,
        "where": case.where,
        "ranks": [0, 1] if case.how == "nan" else [case.rank],
        "every": False,
    }


def following(parent: Path) -> list[Felt]:
    """One fault after another in one run, which is begun again where it hangs or ends."""
    at, places = 10, list[int]()
    for case in FOLLOWING:
        if case.where in ("at its start", "at the end"):
            places.append(0)
            continue
        saves = "checkpoint" in case.where or case.where == "at a save"
        at = -(-at // SAVE_EVERY) * SAVE_EVERY if saves else at
        places.append(at)
        at += APART
    places = [at if case.where == "at the end" else place for case, place in zip(FOLLOWING, places, strict=True)]
    quiet, harmed = _prepared(parent / "quiet"), _prepared(parent / "following")
    calm = torchrun(quiet, at)
    calm.wait()
    calm.orphans()
    (harmed / "orders.json").write_text(
        json.dumps([_order(n, case, place) for n, (case, place) in enumerate(zip(FOLLOWING, places, strict=True))])
    )
    commands = list[tuple[Command, bool, int]]()
    while not commands or (commands[-1][0].process.returncode and len(commands) < len(FOLLOWING)):
        running = torchrun(harmed, at)  # the same command again, where it has hung or ended
        hung = running.wait(limit_s=HANG_S)
        commands.append((running, hung, running.orphans()))
    same = losses(harmed) == losses(quiet)
    whens = [when(harmed, n) for n in range(len(FOLLOWING))]
    return [_followed(case, t, [other for other in whens if other > t], commands, same) for case, t in zip(FOLLOWING, whens, strict=True)]


def _followed(case: Case, at: float, later: Sequence[float], commands: Sequence[tuple[Command, bool, int]], same: bool) -> Felt:
    """What came of one fault among others. `later`: when those after it happened; what came last in a command ended it."""
    if math.isnan(at):
        return Felt(case.name, TORCHRUN, math.nan, math.nan, 0, same, "not reached", case.how == "SIGKILL")
    running, hung, orphans = [one for one in commands if one[0].began_s <= at][-1]
    until = min([*later, *(one[0].began_s for one in commands if one[0].began_s > at)], default=math.inf)
    is_last = until not in later
    noticed, line = _said(running, case, at, until)
    following_s, lost = next_step_after(entries_of(running.log), at)
    code = running.process.returncode if is_last and not hung else 0
    outcome = judged(Seen(not math.isnan(noticed), hung and is_last, orphans if is_last else 0, code, 0, same))
    said = f"{line}; ended with: " + " / ".join(x for _, x in running.said[-12:]) if outcome in BAD and is_last else line
    return Felt(case.name, TORCHRUN, noticed - at, following_s - at, lost, same, outcome, case.how == "SIGKILL", said)


def _said(running: Command, case: Case, at: float, until: float = math.inf) -> tuple[float, str]:
    pattern = re.compile(case.says or "(?!)")
    return next(((t, line) for t, line in running.said if at < t < until and pattern.search(line)), (math.nan, ""))


def alone(parent: Path, case: Case, quiet: Path) -> Felt:
    """One fault in a run of its own, which is begun again where it ended."""
    _prepared(parent)
    kind, _, what = case.how.partition(":")
    outside = kind in ("launcher", "between")
    (parent / "orders.json").write_text(json.dumps([] if outside else [_order(0, case, 30)]))
    running = torchrun(parent, STEPS)
    at = math.nan

    def look() -> None:
        nonlocal at
        if math.isnan(at) and running.told >= 30 + 15 * (kind == "between"):
            at = time.monotonic()
            send(running.process.pid, getattr(signal, what) if kind == "launcher" else signal.SIGTERM)

    hung = running.wait(look if outside else lambda: None, HANG_S)
    orphans = running.orphans()
    code, wanted = running.process.returncode, 0
    at = at if outside else when(parent, 0)
    next_s, lost = next_step_after(running.entries, at)
    told, line = _said(running, case, at)
    if outside or code or hung:
        if kind == "between":
            at = time.monotonic()
            _harm_files(parent, what)
        done = max((step + 1 for _, step, now in running.entries if now), default=0)
        (parent / "orders.json").write_text("[]")
        again = torchrun(parent, STEPS)
        again.wait()
        again.orphans()
        first = min((step for _, step, _ in again.entries), default=done)
        next_s = (
            at
            + next((t for t, _, now in again.entries if now), math.nan)
            - again.began_s
            + (0.0 if kind == "between" else running_s(running, at))
        )
        lost = max(0, done - first)
        if kind == "between":
            told, line = _said(again, case, at)
            code = again.process.returncode
        elif kind == "launcher":
            wanted = code or 0
    same = losses(parent) == losses(quiet)
    says = not math.isnan(told) or what == "SIGKILL"
    return Felt(case.name, TORCHRUN, told - at, next_s - at, lost, same, judged(Seen(says, hung, orphans, code, wanted, same)), said=line)


def running_s(command: Command, at: float) -> float:
    """From a fault to the last that was heard of a command."""
    return max(0.0, max((t for t, _ in command.said), default=at) - at)


def _harm_files(parent: Path, what: str) -> None:
    if what == "text":
        path = parent / "text.txt"
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 3] + data[len(data) // 3 : 2 * len(data) // 3][::-1] + data[2 * len(data) // 3 :])
        return
    path = max(max((parent / "checkpoints").glob("step-*")).glob("*.distcp"), key=lambda one: one.stat().st_size)
    bits = bytearray(path.read_bytes())
    bits[random.Random(0).randrange(len(bits) // 4, len(bits))] ^= 1 << 3
    path.write_bytes(bits)


FT_STEP, FT_STEPS, FT_REJOIN_S = 20, 100_000, 30.0
REPLICAS = (
    *(Case(f"kill -9 of replica {n % 2} {where}", "SIGKILL", n % 2, where, "quorum change")
      for n, where in enumerate(("before its step", "in backward", "between gradients and update"))),
    Case("SIGSTOP of replica 1", "SIGSTOP", 1, says="imeout|quorum change"),
    Case("a bit of a weight is flipped on one of two replicas", "flip", 1, says="bit was flipped|differ"),
    Case("a loss that is not a number, once", "nan", 1, says=r"\bnan\b|not finite"),
)  # fmt: skip
LIGHTHOUSE = """
import sys, time
from torchft.coordination import LighthouseServer
settings = dict(min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=50, heartbeat_timeout_ms=1000)
house = LighthouseServer(bind="127.0.0.1:" + sys.argv[1], **settings)
time.sleep(3600)
"""


def replicas(parent: Path, case: Case) -> Felt:
    """One fault of one of two replicas under torchft; a replica that is lost is started again at once."""
    _prepared(parent)
    (parent / "orders.json").write_text(json.dumps([{**_order(0, case, FT_STEP), "ranks": [case.rank]}]))
    port = free_port()

    def replica(number: int) -> Command:
        words = [sys.executable, "-m", "bench.peers.torchft_ddp", str(parent), str(number), f"http://127.0.0.1:{port}", str(FT_STEPS)]
        return Command(words, parent, log=f"steps-{number}.bin")

    house = Command([sys.executable, "-c", LIGHTHOUSE, str(port)], parent)
    running = [replica(0), replica(1)]
    again: Command | None = None
    at, until = math.nan, time.monotonic() + WAIT_S
    while time.monotonic() < until:
        time.sleep(0.005)
        if math.isnan(at) and not math.isnan(at := when(parent, 0)):
            until = time.monotonic() + (FT_REJOIN_S if case.how == "SIGKILL" else 2 * TIMEOUT_S + 5)
        if again is None and not math.isnan(at) and running[case.rank].process.poll() is not None:
            again = replica(case.rank)
        if again is not None and again.told and not math.isnan(next_step_after(running[1 - case.rank].entries, at)[0]):
            break
    other = running[1 - case.rank]
    next_s, lost = next_step_after(other.entries, at)
    heard = sorted(line for one in (house, other) for line in one.said)
    noticed, line = next(((t, x) for t, x in heard if t > at and re.search(case.says, x)), (math.nan, ""))
    back = next((f"{t - at:.1f} s" for t, _, what in again.entries if what), "") if again is not None else ""
    for one in (house, *running, *([again] if again is not None else [])):
        one.end()
    loses = case.how in ("SIGKILL", "SIGSTOP")
    outcome = "silent" if math.isnan(noticed) else "hang" if math.isnan(next_s) else "went on" if loses else "ended"
    outcome += f", replica back after {back}" if back else ""
    return Felt(case.name, TORCHFT, noticed - at, next_s - at, lost, False, outcome, case.how == "SIGKILL", line)


def measure(console: Console) -> tuple[list[Felt], dict[str, str]]:
    """All contenders that are here."""
    found, whys = list[Felt](), dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder)
        found += following(parent)
        quiet = _prepared(parent / "quiet-alone")
        calm = torchrun(quiet, STEPS)
        calm.wait()
        calm.orphans()
        for number, case in enumerate(ALONE):
            found.append(alone(parent / f"alone-{number}", case, quiet))
            shutil.rmtree(parent / f"alone-{number}", ignore_errors=True)
        console.print(f"{TORCHRUN}: {len(found)} cases")
    if why := missing(sys.executable, ("torchft",)):
        whys[TORCHFT] = f"left out: {why}"
    else:
        with tempfile.TemporaryDirectory() as folder:
            found += [replicas(Path(folder) / str(number), case) for number, case in enumerate(REPLICAS)]
        console.print(f"{TORCHFT}: {len(REPLICAS)} cases")
    return found, whys


def tables(found: Sequence[Felt], whys: dict[str, str]) -> list[Table]:
    """A row a case of each contender, and how many came out badly."""
    made = []
    for name in dict.fromkeys(one.layout for one in found):
        table = Table(title=f"Beside it: {name}", title_justify="left")
        for column in ("fault", "noticed, s", "next step, s", "made again", "same losses", "came out"):
            table.add_column(column, justify="left" if column in ("fault", "came out") else "right")
        mine = [one for one in found if one.layout == name]
        for one in mine:
            times = ["" if math.isnan(s) else f"{s:.3f}" for s in (one.noticed_s, one.next_step_s)]
            table.add_row(one.name, *times, str(one.lost), "yes" if one.same else "no", one.outcome)
        bad = ", ".join(f"{kind} {count}" for kind in BAD if (count := sum(one.outcome == kind for one in mine)))
        table.add_row("all", "", "", "", f"{sum(one.same for one in mine)} of {len(mine)}", bad or "none bad")
        made.append(table)
    return [*made, *left_out(whys)]
