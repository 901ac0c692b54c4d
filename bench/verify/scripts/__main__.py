"""scripts/validate scripts: public training scripts as their authors wrote them, and with the lines that divide their model.

The losses of 1, 2 and 4 ranks are held against those of the original on one process. Writes docs/benchmarks/data/scripts.json and the table
of docs/scripts.md. A case that is there already, unchanged, is not run again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from contextvars import Context
from pathlib import Path
from typing import Any

from bench.verify.scripts import data, document
from bench.verify.scripts.case import RANKS, Case, cases, changed, texts

ROOT = Path(__file__).resolve().parents[3]
FORK = multiprocessing.get_context("fork")
LIMIT_S = 600.0  # a run takes seconds on a machine that does nothing else
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/validate scripts", description=__doc__)
    parser.add_argument("names", nargs="*", help="of cases; all where none is given")
    parser.add_argument("--sources", type=Path, metavar="DIR", help="a folder with clones of the repositories, in place of the network")
    parser.add_argument("--work", type=Path, default=Path("runs/scripts"), metavar="DIR", help="where runs and data lie (runs/scripts)")
    parser.add_argument("--again", action="store_true", help="also what is there already")
    asked = parser.parse_args(arguments)
    os.environ.update(OFFLINE, HF_HOME=str(asked.work.absolute() / "cache"))
    table, rows = cases(), document.load()
    for name in asked.names or table:
        if name not in table:
            print(f"scripts/validate scripts: no case {name}; there are {', '.join(table)}", file=sys.stderr)
            return 2
        row = rows.get(name, {})
        if asked.again or not row.get("equal") or row["fingerprint"] != table[name].fingerprint:
            began = time.perf_counter()
            row = compared(table[name], asked.sources, asked.work.absolute())
            print(f"{document.told(name, row)}  {time.perf_counter() - began:.0f} s", flush=True)
            rows = document.load() | {name: row}
            document.save({name: rows[name] for name in table if name in rows}, table)
    return 0 if all(row["equal"] for row in rows.values()) else 1


def compared(case: Case, sources: Path | None, work: Path) -> dict[str, Any]:
    """A row: numbers that the original computed, the worst relative difference by ranks, and what went wrong."""
    row: dict[str, Any] = {"fingerprint": case.fingerprint, "lines": case.num_lines, "differences": {}, "failed": {}, "equal": False}
    try:
        files = texts(case, sources)
    except (OSError, ValueError) as error:
        return row | {"failed": {"sources": str(error)}}
    for library in case.libraries:
        importlib.import_module(library)  # once for all ranks
    for name in case.data:
        made = name.partition(":")[0]
        _forked(data.make, (made, work / "data" / made))
    shutil.rmtree(work / case.name, ignore_errors=True)
    wanted, why = run(case, files, 0, work)
    row["numbers"] = len(wanted)
    if why or not wanted:
        return row | {"failed": {"original": why or "no losses"}}
    for count in RANKS:
        found, why = run(case, files, count, work)
        if why:
            row["failed"][str(count)] = why
        else:
            row["differences"][str(count)] = difference(found, wanted)
    return row | {"equal": not row["failed"] and all(x <= case.tolerance for x in row["differences"].values())}


def difference(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The worst relative one of two sequences of numbers; infinite where one has more.

    >>> difference([1.0, 2.0], [1.0, 4.0]), difference([1.0], [1.0, 1.0])
    (0.5, inf)
    """
    if len(found) != len(wanted):
        return float("inf")
    return max((abs(a - b) / abs(b) if b else float(a != b) for a, b in zip(found, wanted, strict=True)), default=0.0)


def run(case: Case, files: dict[str, str], ranks: int, work: Path) -> tuple[list[float], str]:
    """The numbers of one run, of rank 0; and why there are none. 0 ranks: the original."""
    folder = work / case.name / (f"{ranks}" if ranks else "original")
    folder.mkdir(parents=True)
    layout = case.layouts[RANKS.index(ranks)] if ranks else ""
    plan = f"{layout} precision=float64" if case.precision == "float64" else layout
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(changed(text, case.changes_of(name, bool(ranks)), plan=plan))
    for name in case.data:
        made, _, there = name.partition(":")
        (folder / (there or made)).parent.mkdir(parents=True, exist_ok=True)
        (folder / (there or made)).symlink_to(work / "data" / made)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(max(ranks, 1)):
        told = {"SHARDWISE_CACHE": str(folder.parent / "captures"), **case.environment}
        if ranks > 1:
            told |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        children.append(FORK.Process(target=_rank, args=(case, folder, rank, not ranks, told)))
        children[-1].start()
    late = time.monotonic() + LIMIT_S
    while any(child.is_alive() for child in children) and time.monotonic() < late and not any(child.exitcode for child in children):
        time.sleep(0.1)
    time.sleep(1.0 if any(child.is_alive() for child in children) else 0.0)
    for child in children:
        if child.is_alive():
            child.kill()
        child.join()
    codes = [child.exitcode for child in children]
    if any(codes):
        ended = "no end in ten minutes" if time.monotonic() > late else ""
        told_why = [_last_words(folder / f"rank{rank}.log") for rank, code in enumerate(codes) if code and code > 0]
        return [], ended or (told_why[0] if told_why else f"exit codes {codes}")
    return json.loads((folder / "rank0.json").read_text()), ""


def _rank(case: Case, folder: Path, rank: int, original: bool, told: dict[str, str]) -> None:
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115  # until the process ends
    os.environ.update(told)
    from bench.verify.scripts.run import script

    # In a context of its own: this process is a fork, and may have had a world.
    words = folder, case.script, case.arguments.split(), original, case.precision, list(case.standins), folder / f"rank{rank}.json"
    code = Context().run(script, *words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _forked(function: Any, arguments: tuple[Any, ...]) -> None:
    child = FORK.Process(target=function, args=arguments)
    child.start()
    child.join()


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["ended without a word"]
    errors = [line for line in lines if "Error" in line or "Infeasible" in line]
    return (errors or lines)[-1][:300]


if __name__ == "__main__":
    sys.exit(main())
