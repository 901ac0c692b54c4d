"""`scripts/bench hosts`: two emulated hosts, one of which is lost, or the line between them harmed, in running trainings. Needs root.

In: layouts. Every layout trains once undisturbed and once with each fault, its ranks started as by torchrun, each in a network of its own.
Out, by fault and layout: seconds to the roll call of those left and to the next step, steps that were made again, and how far any loss is
off those of the undisturbed run; in the terminal, in `--json FILE` and in docs/benchmarks/hosts.md. Not measured: other launchers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.common.document import command, header, lines_of, load, opening, terminal, versions
from bench.common.processes import ROOT
from bench.common.relay import Relayed
from tests.support.networks import NoNetworks

PAGE = ROOT / "docs" / "benchmarks" / "hosts.md"
LAYOUTS = ("data=2", "pipeline=2 microbatches=2", "data=2 zero=3")
STEPS, AT = 40, 12
SHORT_S = 2.0  # less than `run.hang_after_s`
MOST_S = 180.0
INTRO = f"""A small GPT trains on text over two emulated hosts, network namespaces with a line between them, a rank on each; after step
{AT} of {STEPS} something happens. There are no checkpoints to go back to: what one host alone has is copied to the other as often as
`run.copy_every = "auto"` has it. `noticed`: from the fault to the first signature of those left; `next step`: to the next step that is
told; `made again`: steps that had been told before and were made once more; `off`: the largest relative difference between a loss and that
of the run without a fault, 0 where all are the same bit for bit; on one rank sums have another order. `run.hang_after_s` is 5 s."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`lost`: the ranks that are to end, other than with 0; `either`: one of the two does, whichever is later."""

    name: str
    lost: tuple[int, ...] = ()
    either: bool = False


def _dies(host: int) -> Callable[[Run], None]:
    def harm(run: Run) -> None:
        run.hosts.line.cut = (True, True)
        run.send(host, signal.SIGKILL)

    return harm


def _line(**what: Any) -> Callable[[Run], None]:
    def harm(run: Run) -> None:
        run.hosts.line = replace(run.hosts.line, **what)

    return harm


def _short(run: Run) -> None:
    run.hosts.line.cut = (True, True)
    time.sleep(SHORT_S)
    run.hosts.line.cut = (False, False)


FAULTS: dict[Fault, Callable[[Any], None]] = {
    Fault("host 1 dies, and no reset comes", (1,)): _dies(1),
    Fault("host 0, which has the store, dies, and no reset comes", (0,)): _dies(0),
    Fault("kill -9 of rank 0", (0,)): lambda run: run.send(0, signal.SIGKILL),
    Fault("kill -9 of rank 1", (1,)): lambda run: run.send(1, signal.SIGKILL),
    Fault("SIGSTOP of rank 1", (1,)): lambda run: run.send(1, signal.SIGSTOP),
    Fault("nothing passes any more", (1,), either=True): _line(cut=(True, True)),
    Fault("nothing passes from host 0", (1,), either=True): _line(cut=(True, False)),
    Fault("nothing passes from host 1", (1,), either=True): _line(cut=(False, True)),
    Fault(f"nothing passes for {SHORT_S:g} s"): _short,
    Fault("50 ms later each way"): _line(delay_s=0.05),
    Fault("5 % of packets are lost"): _line(lost=0.05),
    Fault("10 Mbit/s"): _line(bits_per_s=1e7),
}


@dataclass(frozen=True, slots=True)
class Felt:
    """One fault in one layout; seconds, NaN where nobody was lost. `ended`: as expected, or what was said."""

    name: str
    layout: str
    noticed_s: float
    next_step_s: float
    again: int
    off: float
    ended: str


class Run:
    """Two ranks, started as torchrun starts them. A context manager."""

    def __init__(self, folder: Path, layout: str, hosts: Relayed) -> None:
        self.folder, self.hosts = folder, hosts
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MASTER", "TORCHELASTIC", "PMI", "OMPI"))}
        env |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29512", "OMP_NUM_THREADS": "1"}
        env |= {
            "SHARDWISE_TRANSPORT": "gloo",
            "SHARDWISE_TOKEN": "of this benchmark",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        words = [sys.executable, "-m", "bench.faults.hosts", "--rank", str(folder), layout]
        self.outputs = [Path(f"{folder}-{rank}.txt") for rank in range(2)]
        self.processes = []
        for rank, output in enumerate(self.outputs):
            with output.open("w") as file:
                self.processes.append(
                    subprocess.Popen(hosts.command(rank, words), env={**env, "RANK": str(rank)}, stdout=file, stderr=file, cwd=ROOT)
                )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.processes:
            one.kill()
            one.wait()

    def send(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)

    def rows(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def losses(self) -> list[float]:
        from shardwise.train.metrics import read_metrics

        return [float(row["loss"] or 0.0) for row in read_metrics(self.folder / "metrics.jsonl")]

    def said(self) -> str:
        return "\n".join(output.read_text() for output in self.outputs)

    def until(self, done: Callable[[], bool], stops: bool = True) -> float:
        """When it was, NaN where it was not in time, or a rank ended before."""
        until = time.monotonic() + MOST_S
        while not done():
            if time.monotonic() > until or (stops and all(one.poll() is not None for one in self.processes)):
                return math.nan
            time.sleep(0.002)
        return time.monotonic()


def measure(fault: Fault, harm: Callable[[Run], None], layout: str, calm: Sequence[float], parent: Path) -> Felt:
    """One fault in one run."""
    with Relayed() as hosts, Run(parent / "harmed", layout, hosts) as run:
        run.until(lambda: run.rows() >= AT)
        at, before = time.monotonic(), run.rows()
        harm(run)
        noticed = later = math.nan
        if fault.lost:
            noticed = run.until(lambda: bool(list(run.folder.glob(".regroup/*/*")) or run.rows() >= STEPS))
            run.until(lambda: "go on after step" in run.said())
            went_on = re.findall(r"go on after step (\d+)", run.said())
            first = int(went_on[0]) + 1 if went_on else STEPS
            # Its rows are cut back to what is gone on from, and grow again.
            size = run.rows()
            later = run.until(lambda: run.rows() >= max(first, size if size > before else first))
            before = max(before, size)
        run.until(lambda: all(one.poll() is not None for i, one in enumerate(run.processes) if i not in fault.lost or fault.either))
        codes = [one.poll() for one in run.processes]
        losses, said = run.losses(), run.said()
    went_on = re.findall(r"go on after step (\d+)", said)
    again = max(0, before - int(went_on[0])) if went_on else 0
    off = max((abs(a - b) / abs(b) for a, b in zip(losses, calm, strict=False)), default=math.inf)
    fine = codes.count(0) == 1 if fault.either else all(codes[i] == 0 for i in range(2) if i not in fault.lost)
    whole = fine and len(losses) == STEPS and bool(went_on) == bool(fault.lost)
    ended = "as it should" if whole else f"{codes}, {len(losses)} steps: {' '.join(re.findall(r'(?:shardwise: |Error: )(.*)', said)[-2:])}"
    return Felt(fault.name, layout, noticed - at, later - at, again, off, ended)


def undisturbed(layout: str, parent: Path) -> list[float]:
    """The losses of a run that nothing happens to."""
    with Relayed() as hosts, Run(parent / "calm", layout, hosts) as run:
        run.until(lambda: all(one.poll() is not None for one in run.processes), stops=False)
        losses = run.losses()
        if len(losses) != STEPS:
            raise RuntimeError(run.said())
        return losses


def rank_main(folder: Path, layout: str) -> None:
    """What a rank runs."""
    from bench.faults.fault_runs import CONFIG
    from shardwise.api import plan as make_plan
    from shardwise.plan.plan import Plan
    from shardwise.train import flow
    from shardwise.train.config import TrainingConfig
    from shardwise.world.launch.current import current_world

    def planner(config: TrainingConfig, known: Plan | None) -> flow.PlannedRun:
        words = list(config.plan.constrain)
        plan = known or make_plan(
            config.model.name, config.train.batch, cluster="2xcpu-2", layout=config.plan.layout or None, constraints=words
        )
        return flow.PlannedRun(replace(plan, batch_size=config.train.batch), 0.0, "cpu")

    text = folder.parent / "text.txt"
    changes = [f"data.text={text}", f"run.folder={folder}", f"train.steps={STEPS}", f"plan.layout={layout} threads=1"]
    flow.train(TrainingConfig.parse(CONFIG, changes=[*changes, "train.checkpoint_every=0"]), planner, current_world("cpu"))


def table(found: Sequence[Felt]) -> Table:
    """A row a fault and layout."""
    out = Table(title="Faults of hosts and of the network between them", title_justify="left")
    for name in ("fault", "layout", "noticed, s", "next step, s", "made again", "off", "ended"):
        out.add_column(name, justify="left" if name in ("fault", "layout", "ended") else "right")
    for one in found:
        times = ["" if math.isnan(s) else f"{s:.2f}" for s in (one.noticed_s, one.next_step_s)]
        out.add_row(one.name, one.layout, *times, str(one.again), f"{one.off:.1g}" if one.off else "0", one.ended)
    return out


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench hosts", description="hosts that are lost, in running trainings", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header and every fault to FILE")
    p.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    p.add_argument("--faults", metavar="WORD", default="", help="only those whose name has it; does not write the page")
    given = p.parse_args(list(arguments))
    about = header(command("hosts", arguments), versions(("torch",)), load=load(), measured="one run a fault and layout")
    console, found = terminal(), list[Felt]()
    chosen = {fault: harm for fault, harm in FAULTS.items() if given.faults in fault.name}
    for layout in given.layouts:
        with ExitStack() as stack:
            parent = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (parent / "text.txt").write_bytes(b"\n".join(page.read_bytes() for page in sorted((ROOT / "docs").glob("*.md"))))
            try:
                calm = undisturbed(layout, parent)
            except NoNetworks as error:
                console.print(str(error))
                return 1
            for number, (fault, harm) in enumerate(chosen.items()):
                folder = parent / str(number)
                folder.mkdir()
                (folder / "text.txt").symlink_to(parent / "text.txt")
                found.append(measure(fault, harm, layout, calm, folder))
                console.print(f"{layout}, {fault.name}: {found[-1].ended}, {found[-1].next_step_s:.2f} s")
    made = table(found)
    console.print(made)
    none = {"peer": None, "peer_name": "", "ratio": None, "unit": "s"}
    rows = [{"case": f"{one.name}, {one.layout}", "shardwise": one.next_step_s, **none} for one in found]
    if given.json:
        given.json.write_text(json.dumps({"about": about, "rows": rows, "found": [asdict(f) for f in found]}, indent=1) + "\n")
    if not given.faults:
        PAGE.write_text("\n".join([*opening("hosts", about, INTRO), *lines_of(made)]))
        console.print(f"wrote {PAGE.relative_to(ROOT)}")
    return int(any(one.ended != "as it should" for one in found))


if __name__ == "__main__":
    rank_main(Path(sys.argv[2]), sys.argv[3])
