"""`scripts/bench plan`: how long planning takes, from a model's name to its plan, in a process of its own.

Out: rows in the terminal, `--json FILE`, and docs/benchmarks/plan.md. Peers' times are those that their authors publish, on their
machines, named with their source. Exit status 0 also where a target is missed, 4 where no plan is found.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common.document import command, header, load, versions
from bench.common.processes import ROOT

PAGE = ROOT / "docs" / "benchmarks" / "plan.md"
SHARDWISE = (sys.executable, "-c", "from shardwise.cli import main; main()")
LIMIT_S = 300
MOST_BYTES = 2e9

ALPA = ("Alpa: 1,583 s of compiling and 804 s of profiling (Zheng et al., OSDI 2022, compilation of GPT-39B: 2,393 s in all)", 2393.0)
AUTOPARALLEL = ("autoparallel: 47 s for an 8 B model on a mesh that the user gives (its repository, 2025)", 47.0)

# A Llama of 8 B parameters as Hugging Face describes it (Grattafiori et al. 2024, table 3).
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Work:
    """One call of the planner. `target_s`: what it should take on two cores; `peer`: (name with source, seconds)."""

    case: str
    model: str
    cluster: str
    batch: int
    sequence: int | None = None
    target_s: float | None = None
    peer: tuple[str, float] | None = None
    sweep: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """shardwise's figure beside a peer's; `ratio` is the peer's over shardwise's, more than 1 means that shardwise is better. None: no
    such peer."""

    case: str
    shardwise: float
    peer: float | None
    peer_name: str
    ratio: float | None
    unit: str
    search_s: float | None = None
    memory_bytes: int = 0
    layout: str = ""
    step_time_s: float | None = None
    mfu: float | None = None
    bound_gap: float | None = None
    target: float | None = None
    met: bool | None = None
    sweep: str = ""
    note: str = ""
    cpu_s: float | None = None


CASES = (
    Work("gpt-39b on 64 V100", "gpt-39b", "8xp3.16xlarge", 1024, target_s=10, peer=ALPA),
    Work("gpt-39b on 64 A100", "gpt-39b", "8xdgx-a100-80", 1024, target_s=10, peer=ALPA),
    Work("megatron-1t on 3,072 A100", "megatron-1t", "384xdgx-a100-80", 3072, target_s=60),
    Work("llama-405b on 16,384 H100", "llama-405b", "2048xdgx-h100", 2048, target_s=60),
    Work("8 B from a Hugging Face configuration on 64 H100", "hf:CONFIG", "8xdgx-h100", 512, 8192, target_s=15, peer=AUTOPARALLEL),
)
SWEEPS = (
    *(Work(f"{n} layers, 64 A100", f"gpt-39b:layers={n}", "8xdgx-a100-80", 1024, sweep="layers") for n in (12, 24, 48, 96)),
    *(Work(f"{8 * n} A100, 24 layers", "gpt-39b:layers=24", f"{n}xdgx-a100-80", 1024, sweep="devices") for n in (8, 32, 128)),
)


@dataclass(frozen=True, slots=True)
class Told:
    """One call: seconds from the start of its process to its end, processor seconds, largest resident set in bytes, the plan's JSON."""

    wall_s: float
    cpu_s: float
    memory_bytes: int
    answer: dict[str, Any]


def run(work: Work, folder: Path) -> Told:
    """Plan once, as `shardwise plan --json` in a process of its own."""
    model = work.model
    if model == "hf:CONFIG":
        config = folder / "config.json"
        config.write_text(json.dumps(LLAMA_8B))
        model = f"hf:{config}"
    words = [*SHARDWISE, "plan", model, "--cluster", work.cluster, "--batch", str(work.batch), "--json"]
    words += ["--sequence", str(work.sequence)] if work.sequence else []
    said, errors = folder / "answer", folder / "errors"
    with said.open("w") as out, errors.open("w") as err:
        began = time.perf_counter()
        process = subprocess.Popen(words, stdout=out, stderr=err, cwd=ROOT)
        clock = threading.Timer(LIMIT_S, process.kill)
        clock.start()
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        clock.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode == -signal.SIGKILL and wall >= LIMIT_S:
        return Told(wall, 0.0, 0, {"error": f"not done after {LIMIT_S} s"})
    try:
        answer = json.loads(said.read_text().strip().splitlines()[-1])
    except (IndexError, ValueError):
        lines = errors.read_text().strip().splitlines()
        answer = {"error": lines[-1] if lines else f"exit {process.returncode}, and nothing said"}
    return Told(wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, answer)


def rows_of(work: Work, told: Sequence[Told], busy: bool = False) -> list[Row]:
    """A row of the time, and one of the memory where it is a case with a target; medians.

    On a `busy` machine the target is held against processor time: the planner has one thread, so a quiet one takes about as long.
    """
    wall, memory, answer = median(t.wall_s for t in told), max(t.memory_bytes for t in told), told[-1].answer
    peer_name, peer_s = work.peer if work.peer else ("", None)
    time_row = Row(
        work.case,
        wall,
        peer_s,
        peer_name,
        peer_s / wall if peer_s else None,
        "s",
        answer.get("planning_time_s"),
        memory,
        str(answer.get("layout") or ""),
        answer.get("step_time_s"),
        answer.get("mfu"),
        answer.get("bound_gap"),
        work.target_s,
        None if not work.target_s else "error" not in answer and (median(t.cpu_s for t in told) if busy else wall) <= work.target_s,
        work.sweep,
        str(answer.get("error", "")),
        median(t.cpu_s for t in told),
    )
    if work.sweep:
        return [time_row]
    return [time_row, Row(f"{work.case}, memory", float(memory), None, "", None, "bytes", target=MOST_BYTES, met=memory <= MOST_BYTES)]


def show(console: Console, rows: Sequence[Row]) -> None:
    """Cases and sweeps as tables."""
    for title, mine in parts(rows):
        table = Table(title=title, title_justify="left")
        for name in COLUMNS:
            table.add_column(name, justify="left" if name in ("case", "layout") else "right")
        for row in mine:
            table.add_row(*cells(row))
        console.print(table)


COLUMNS = ("case", "planning", "processor", "of it search", "memory", "target", "peer's", "ratio", "layout")


def cells(row: Row) -> tuple[str, ...]:
    """One row in words."""
    met = "" if row.met is None else " met" if row.met else " missed"
    return (
        row.case,
        f"{row.shardwise:.1f} s",
        f"{row.cpu_s:.1f} s" if row.cpu_s else "",
        f"{row.search_s:.1f} s" if row.search_s is not None else "",
        f"{row.memory_bytes / 1e9:.2f} GB" if row.memory_bytes else "",
        f"{row.target:.0f} s{met}" if row.target else "",
        f"{row.peer:,.0f} s" if row.peer else "",
        f"{row.ratio:.0f}x" if row.ratio else "",
        row.layout or row.note,
    )


def parts(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows of seconds by table."""
    titles = {"": "From a model's name to its plan", "layers": "Growth with layers", "devices": "Growth with devices"}
    found = [(title, [r for r in rows if r.unit == "s" and r.sweep == sweep]) for sweep, title in titles.items()]
    return [(title, mine) for title, mine in found if mine]


def markdown(about: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The page: header, tables, growth, sources."""
    lines = ["# Planning times", "", INTRO, ""]
    lines += ["| | |", "|---|---|", *(f"| {key} | {_words(value)} |" for key, value in about.items()), ""]
    for title, mine in parts(rows):
        lines += [f"## {title}", "", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
        lines += [f"| {' | '.join(cells(row))} |" for row in mine]
        if exponent := growth(mine):
            lines += ["", f"From the first row to the last, processor time grows with the power {exponent:.2f} of the number."]
        lines.append("")
    lines += ["## What was planned", "", "| case | step | MFU | above the bound |", "|---|---|---|---|"]
    for row in rows:
        if row.step_time_s:
            gap = f"{row.bound_gap:.1%}" if row.bound_gap is not None else "no bound"
            lines.append(f"| {row.case} | {row.step_time_s:.3g} s | {(row.mfu or 0):.1%} | {gap} |")
    lines += ["", "Predicted, not measured: [validation](../validation.md) says how far predictions are off.", ""]
    sources = dict.fromkeys(row.peer_name for row in rows if row.peer_name)
    lines += ["Peers' times, on their authors' machines:", "", *(f"- {name}" for name in sources), ""]
    return "\n".join(lines)


def growth(rows: Sequence[Row]) -> float | None:
    """The power of the sweep's number with which processor time grows, between its ends; None where rows are no sweep."""
    from math import log

    if len(rows) < 2 or not rows[0].sweep:
        return None
    first, last = (float(row.case.partition(" ")[0].replace(",", "")) for row in (rows[0], rows[-1]))
    seconds = [row.cpu_s or row.shardwise for row in (rows[0], rows[-1])]
    return log(seconds[1] / seconds[0]) / log(last / first)


INTRO = """Seconds from the start of `shardwise plan` to the end of its process: starting Python and torch, building the model without
memory,
tracing it, searching, timing the leading candidates with the simulator, and leaving. Memory is the process's largest resident set.
Python's bytecode of shardwise is there before, as an installation has it. Where the machine was busy with other things (`load` above 1),
targets are held against processor time, since the planner has one thread, and ratios say too little."""


def _words(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench plan", description="how long planning takes", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header and rows to FILE")
    p.add_argument("--rounds", type=int, default=1, help="times that each is run; the median counts")
    p.add_argument("--only", metavar="WORD", default="", help="cases whose name has this word; does not write the page")
    p.add_argument("--quick", action="store_true", help="no sweeps; does not write the page")
    given = p.parse_args(list(arguments))
    console = Console(width=200) if not sys.stdout.isatty() else Console()
    about = header(
        command("plan", arguments),
        versions(("torch", "transformers")),
        load=load(),
        measured=f"{given.rounds} runs of each, one after another; medians",
    )
    compileall.compile_dir(ROOT / "src", quiet=2)
    rows: list[Row] = []
    busy = os.getloadavg()[0] > 1
    with tempfile.TemporaryDirectory() as folder:
        for work in (*CASES, *(() if given.quick else SWEEPS)):
            if given.only not in work.case:
                continue
            found = [run(work, Path(folder)) for _ in range(given.rounds)]
            rows += rows_of(work, found, busy)
            console.print(
                f"{rows[-1 if work.sweep else -2].shardwise:7.1f} s  {work.case}  {found[-1].answer.get('error', '')}", markup=False
            )
    show(console, rows)
    if given.json:
        given.json.write_text(json.dumps({"header": about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    if not given.quick and not given.only:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(markdown(about, rows))
        console.print(f"wrote {PAGE.relative_to(ROOT)}")
    failed = [row for row in rows if row.note]
    for row in failed:
        print(f"shardwise: {row.case}: {row.note}", file=sys.stderr)
    return 4 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
