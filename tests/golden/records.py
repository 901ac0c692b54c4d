"""Records of plans, programs and runs without the words around them. Write them anew: `python tests/golden/records.py`.

Messages may be reworded; every number, layout, shard and action stays.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cases import PLANS, PROGRAMS

DATA = Path(__file__).resolve().parent / "data"
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
STEPS = 12
CONFIG = """
[model]
name = "gpt:vocabulary=256,hidden=32,layers=2,heads=2"
[data]
text = "text.txt"
sequence = 16
[train]
steps = 12
batch = 8
learning_rate = 0.01
checkpoint_every = 4
[plan]
layout = "data=2 zero=1 threads=1 precision=float64"
"""


def plan_of(model: str, batch: int, cluster: str, layout: str) -> dict[str, Any]:
    """Return what a plan says in numbers: layout, shards, prediction, candidates, and the numbers in its reasons."""
    from shardwise import plan
    from shardwise.errors import ShardwiseError
    from shardwise.report.tables import plan_record

    try:
        chosen = plan(model, batch, cluster=cluster, layout=layout or None)
    except ShardwiseError as error:
        return {"refused": type(error).__name__, "numbers": NUMBER.findall(str(error))}
    record = json.loads(json.dumps(plan_record(chosen)))
    del record["planning_time_s"]
    record["reasons"] = [[row["choice"], NUMBER.findall(row["reason"])] for row in record["reasons"] if row["choice"] != "searched"]
    for row in record["candidates"]:
        row["note"] = NUMBER.findall(row["note"])
    record |= {"shards": [[axis, dict(dims)] for axis, dims in chosen.shards], "bucket_bytes": chosen.bucket_bytes}
    return record


def program_of(schedule: str, stages: int, microbatches: int, chunks: int) -> str:
    """Return the text of a schedule's program."""
    from shardwise.schedules import build

    return str(build(schedule, stages, microbatches, chunks=chunks))


def descendants_of(pid: int) -> dict[int, list[int]]:
    """Return {process: its children} of all that a process has started, as the system tells."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found: dict[int, list[int]] = {}
    waiting = [pid]
    while waiting:
        process = waiting.pop()
        found[process] = sorted(children.get(process, []))
        waiting += found[process]
    return found


def run_of(folder: Path, kill_at: int = 0) -> dict[str, Any]:
    """Return the transcript of a run of two ranks by the command line: exit status, JSON, losses; a rank is killed after step `kill_at`."""
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text("Whoever makes a thing twice has found a way to make it three times. " * 120)
    (folder / "train.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "shardwise", "train", "train.toml", "run.folder=run", "--json"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = folder / "run" / "metrics.jsonl"
    until = time.monotonic() + 120
    while kill_at and run.poll() is None and time.monotonic() < until:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= kill_at:
            tree = descendants_of(run.pid)
            forked = [pid for pids in tree.values() if len(pids) > 1 for pid in pids if not tree[pid]]
            if forked:
                os.kill(forked[-1], signal.SIGKILL)
                break
        time.sleep(0.001)
    out, told = run.communicate(timeout=240)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    summary = json.loads(out)
    return {
        "exit": run.returncode,
        "step": summary.get("step"),
        "keys": sorted(summary),
        "steps": [row["step"] for row in rows],
        "losses": [f"{row['loss']:.7f}" for row in rows],
        "checkpoints": sorted(path.name for path in (folder / "run" / "checkpoints").glob("step*")),
        "killed": bool(re.search("SIGKILL", told)),
    }


def write(name: str, record: Any) -> None:
    """Write one record as a line an entry."""
    DATA.mkdir(exist_ok=True)
    entries = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items()]
    (DATA / name).write_text("{\n" + ",\n".join(entries) + "\n}\n")


def read(name: str) -> Any:
    """Read what `write` wrote."""
    return json.loads((DATA / name).read_text())


if __name__ == "__main__":
    import tempfile

    write("plans.json", {" | ".join(map(str, case)): plan_of(*case) for case in PLANS})
    write("programs.json", {" ".join(map(str, case)): program_of(*case) for case in PROGRAMS})
    with tempfile.TemporaryDirectory() as folder:
        write("runs.json", {"calm": run_of(Path(folder) / "calm"), "killed": run_of(Path(folder) / "killed", 3)})
