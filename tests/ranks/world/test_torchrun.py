"""Real agents of torchrun, two on this machine as if on two hosts, whose workers are `shardwise train`: others go on without what is
killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shardwise.train.metrics import read_metrics

STEPS, AT = 600, 10
CONFIG = """
[model]
name = "gpt:vocabulary=256,hidden=32,layers=2,heads=2"
[data]
text = "{folder}/text.txt"
sequence = 16
[train]
steps = {steps}
batch = 8
checkpoint_every = 0
[plan]
layout = "pipeline=2 microbatches=2 threads=1"
[run]
folder = "{folder}/run"
sample = 0
copy_every = 1
"""
STATIC = ("--rdzv-backend=static", "--node-rank={node}", "--master-addr=127.0.0.1", "--master-port={port}")


class Agents:
    """Two agents, with a worker each."""

    def __init__(self, folder: Path, options: tuple[str, ...]) -> None:
        self.folder = folder
        (folder / "text.txt").write_bytes(bytes(range(32, 127)) * 200)
        (folder / "train.toml").write_text(CONFIG.format(folder=folder, steps=STEPS))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        others = ("SLURM", "MASTER", "TORCHELASTIC", "PMI", "OMPI")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        paths = os.pathsep.join([str(Path(__file__).parents[3] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = kept | {"OMP_NUM_THREADS": "1", "SHARDWISE_TRANSPORT": "gloo", "SHARDWISE_TOKEN": "of this test alone", "PYTHONPATH": paths}
        self.agents = []
        for node in range(2):
            words = [word.format(node=node, port=port) for word in ("--nnodes=2", "--nproc-per-node=1", *options)]
            command = [sys.executable, "-m", "torch.distributed.run", *words, "-m", "shardwise", "train", str(folder / "train.toml")]
            with (folder / f"agent-{node}.txt").open("w") as said:
                self.agents.append(subprocess.Popen(command, env=env, stdout=said, stderr=subprocess.STDOUT, cwd=folder))

    def worker(self, node: int) -> int:
        pid = self.agents[node].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def until(self, rows: int) -> None:
        path, until = self.folder / "run" / "metrics.jsonl", time.monotonic() + 120
        while not path.exists() or path.read_bytes().count(b"\n") < rows:
            assert time.monotonic() < until, self.said()
            time.sleep(0.01)

    def said(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("agent-*.txt")))


@pytest.fixture
def agents(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Agents]:
    made = Agents(tmp_path, request.param)
    workers: list[int] = []
    try:
        made.until(AT)
        workers += [made.worker(node) for node in range(2)]
        yield made
    finally:
        for pid in (*(one.pid for one in made.agents), *workers):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for one in made.agents:
            one.wait()


@pytest.mark.parametrize("agents", [("--max-restarts=0", *STATIC)], indirect=True)
@pytest.mark.parametrize("what", ["worker", "agent"])
def test_the_other_worker_goes_on(agents: Agents, what: str) -> None:
    """Of the host that has torchrun's store."""
    os.kill(agents.worker(0) if what == "worker" else agents.agents[0].pid, signal.SIGKILL)
    agents.until(STEPS)
    said = (agents.folder / "agent-1.txt").read_text()
    assert "1 of 2 ranks failed" in said, said
    rows = read_metrics(agents.folder / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
