"""`scripts/bench start`: seconds from `python train.py` to the end of the first step, beside plain PyTorch.

A GPT of 10 M parameters trains one step, in plain PyTorch (on two ranks DistributedDataParallel) and with `shardwise.auto_parallelize`;
scripts
take turns. On two ranks torchrun starts both. `first` is shardwise with an empty cache, `again` with what the first run left there. Out:
medians
in the terminal, in `--json FILE` and in docs/benchmarks/start.md. Not measured: graphics processors, a cold page cache of the file system.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from bench.common.document import command, header, lines_of, load, opening, terminal, versions
from bench.common.processes import ROOT, free_port

PAGE = ROOT / "docs" / "benchmarks" / "start.md"
SCRIPTS = Path(__file__).parent / "start_scripts"
ALLOWED_S = {1: 2.0, 2: 4.0}
LONGEST_S = 300.0
CACHES = ("SHARDWISE_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")  # environment variables of folders

INTRO = """Seconds from the start of the command to the line that all ranks print behind their first step; medians of rounds, in which
the scripts take turns. `above`: shardwise less plain PyTorch, the median of rounds. Processor seconds are of all processes, to their
end."""


@dataclass(frozen=True, slots=True)
class Started:
    """One run: seconds to the end of its first step, processor seconds of all of it, the loss of each rank."""

    seconds: float
    cpu_seconds: float
    losses: tuple[float, ...]


def start(script: str, ranks: int, cache: Path) -> Started:
    """Run a script on so many ranks. Raises RuntimeError where it fails."""
    words = [str(SCRIPTS / script)]
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}", "--master-addr=127.0.0.1"]
        words = [*torchrun, *words]
    # Each rank has its share of the cores: torchrun's own choice, for both.
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    caches = {name: str(cache / name.lower()) for name in CACHES}  # all are empty in the first run of a round
    env = {**os.environ, "OMP_NUM_THREADS": threads, **caches, "PYTHONPATH": str(ROOT / "src")}
    before, began = os.times(), time.perf_counter()
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    assert process.stderr is not None
    losses: list[float] = []
    seconds = 0.0
    for line in process.stdout:
        if line.startswith("step "):
            losses.append(float(line.split()[1]))
            seconds = time.perf_counter() - began
    said = process.stderr.read()
    process.wait(LONGEST_S)
    after = os.times()
    if process.returncode or len(losses) != ranks:
        raise RuntimeError(f"{script} on {ranks} ranks ended with {process.returncode}: {said.strip()[-500:]}")
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return Started(seconds, used, tuple(losses))


@dataclass(frozen=True, slots=True)
class Case:
    """What was measured on so many ranks, in every round."""

    ranks: int
    plain: list[Started]
    first: list[Started]
    again: list[Started]

    def above_s(self, which: str) -> float:
        """Seconds that shardwise takes more."""
        return median(b.seconds - a.seconds for a, b in zip(self.plain, getattr(self, which), strict=True))

    @property
    def losses_differ(self) -> float:
        """The mean loss of a run less that of plain PyTorch, at most."""
        mean = [[sum(run.losses) / self.ranks for run in runs] for runs in (self.plain, self.first, self.again)]
        return max(abs(loss - mean[0][0]) for runs in mean for loss in runs)


def measure(ranks: int, rounds: int) -> Case:
    """Rounds of plain PyTorch, shardwise with an empty cache, shardwise again."""
    case = Case(ranks, [], [], [])
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="shardwise-start-") as folder:
            for runs, script in ((case.plain, "plain.py"), (case.first, "shardwise_loop.py"), (case.again, "shardwise_loop.py")):
                runs.append(start(script, ranks, Path(folder)))
    return case


def table(cases: Sequence[Case]) -> Table:
    """Medians."""
    made = Table(title="To the end of the first step", title_justify="left")
    for name in ("ranks", "", "seconds", "above plain", "allowed", "processor s", "loss differs"):
        made.add_column(name, justify="left" if name == "" else "right")
    for case in cases:
        for which, words in (("plain", "plain PyTorch"), ("first", "shardwise, cache empty"), ("again", "shardwise, again")):
            runs: list[Started] = getattr(case, which)
            above = "" if which == "plain" else f"{case.above_s(which):+.2f}"
            allowed = "" if which == "plain" else f"{ALLOWED_S.get(case.ranks, 0.0):.0f}"
            cells = (f"{median(r.seconds for r in runs):.2f}", above, allowed, f"{median(r.cpu_seconds for r in runs):.2f}")
            made.add_row(str(case.ranks), words, *cells, "" if which == "plain" else f"{case.losses_differ:.0e}")
    return made


def rows(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """As `--json` has them."""
    return [
        {
            "case": f"{case.ranks} ranks, {'cache empty' if which == 'first' else 'again'}",
            "shardwise": median(r.seconds for r in getattr(case, which)),
            "peer": median(r.seconds for r in case.plain),
            "peer_name": "plain PyTorch",
            "ratio": median(a.seconds / b.seconds for a, b in zip(case.plain, getattr(case, which), strict=True)),
            "unit": "s",
            "above_s": case.above_s(which),
            "allowed_s": ALLOWED_S.get(case.ranks),
        }
        for case in cases
        for which in ("first", "again")
    ]


def main(arguments: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="scripts/bench start", description="seconds to the end of the first step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--no-page", action="store_true", help="leave docs/benchmarks as it is")
    asked = parser.parse_args(arguments)
    about = header(command("start", arguments), versions(["torch"]), load=load(), rounds=asked.rounds)
    cases = [measure(ranks, asked.rounds) for ranks in asked.ranks]
    shown = table(cases)
    terminal().print(shown)
    if asked.json:
        asked.json.write_text(json.dumps({"header": about, "rows": rows(cases), "runs": [asdict(case) for case in cases]}, indent=1))
    if not asked.no_page:
        PAGE.write_text("\n".join([*opening("start-up", about, INTRO), *lines_of(shown)]))
    return 0
