"""Ranks that something else started, each as if on a host of its own: hosts are lost, the others go on, and nobody's hand is needed.

Every rank is a plain process with torchrun's variables. The run without a loss, on one rank, is what the losses are held against: other
ranks add in another order, and so in float32 they differ by rounding alone.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_train import configure

from shardwise import api
from shardwise.errors import RunError
from shardwise.plan.plan import Plan
from shardwise.train import flow
from shardwise.train.config import TrainingConfig
from shardwise.train.flow import PlannedRun
from shardwise.train.metrics import read_metrics
from shardwise.world.launch.current import current_world
from tests.support.networks import INTERFACE, Hosts, NoNetworks

STEPS = 24


def planner(config: TrainingConfig, known: Plan | None) -> PlannedRun:
    layout, words = config.plan.layout or None, list(config.plan.constrain)
    plan = known or api.plan(config.model.name, config.train.batch, cluster="4xcpu-2", layout=layout, constraints=words)
    return PlannedRun(replace(plan, batch_size=config.train.batch), 1e9, "cpu")


def of_torchrun(rank: int, num_ranks: int) -> dict[str, Any]:
    return {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": 0}


def of_srun(rank: int, num_ranks: int) -> dict[str, Any]:
    told = {"SLURM_PROCID": rank, "SLURM_NTASKS": num_ranks, "SLURM_LOCALID": 0, "SLURM_JOB_ID": 77}
    return {**told, "SLURM_STEP_NODELIST": "localhost"}


Variables = Callable[[int, int], dict[str, Any]]


class Ranks:
    """The processes of one run, with the `variables` of whoever started them."""

    def __init__(
        self, folder: Path, layout: str, num_ranks: int, transport: str = "gloo", hosts: Hosts | None = None,
        variables: Variables = of_torchrun, **run: Any,
    ) -> None:  # fmt: skip
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.folder = folder
        others = ("SLURM", "MASTER", "TORCHELASTIC", "PMI", "OMPI")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        address = hosts.address(0) if hosts is not None else "127.0.0.1"
        told = {"MASTER_ADDR": address, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        paths = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**kept, **{name: str(value) for name, value in told.items()}, "PYTHONPATH": paths}
        env |= {"SHARDWISE_TRANSPORT": transport, "SHARDWISE_TOKEN": "of this test alone"}
        command = [sys.executable, __file__, str(folder), layout, json.dumps(run)]
        outputs = [open(f"{folder}-{rank}.txt", "w+") for rank in range(num_ranks)]  # noqa: SIM115
        self.processes = [
            subprocess.Popen(
                hosts.command(rank, command) if hosts is not None else command,
                env=env | {name: str(value) for name, value in variables(rank, num_ranks).items()},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(outputs)
        ]

    def rows(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def harm(self, ranks: Sequence[int], number: signal.Signals, at: int) -> None:
        """Once `at` steps are told."""
        until = time.monotonic() + 120
        while self.rows() < at:
            assert time.monotonic() < until, self.said()
            assert all(one.poll() in (None, -number) for one in self.processes), self.said()
            time.sleep(0.005)
        for rank in ranks:
            self.processes[rank].send_signal(number)

    def ends(self, lost: Sequence[int] = ()) -> list[int]:
        """The exit codes of the others."""
        return [one.wait(120) for rank, one in enumerate(self.processes) if rank not in lost]

    def said(self) -> str:
        return "\n".join(Path(f"{self.folder}-{rank}.txt").read_text() for rank in range(len(self.processes)))

    def losses(self) -> list[float]:
        rows = read_metrics(self.folder / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        return [float(row["loss"] or 0.0) for row in rows]

    def close(self) -> None:
        for one in self.processes:
            one.kill()
            one.wait()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("calm") / "run"
    summary = flow.train(configure(folder, "data=1", steps=STEPS), planner)
    assert summary["step"] == STEPS
    return [float(row["loss"] or 0.0) for row in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Ranks]]:
    running: list[Ranks] = []
    yield running
    for one in running:
        one.close()


LOST = [
    ("data=2", 2, "gloo", (0,), signal.SIGKILL, "1 go on after step"),
    ("data=2 zero=1", 2, "gloo", (1,), signal.SIGSTOP, "1 go on after step"),
    ("data=2 tensor=2", 4, "boxes=2", (2, 3), signal.SIGKILL, "2 go on after step"),
    ("data=2 tensor=2", 4, "boxes=2", (0, 1), signal.SIGSTOP, "2 go on after step"),
    ("data=4 zero=2", 4, "boxes=2", (1,), signal.SIGKILL, "and 1 wait"),
    ("data=2 pipeline=2 microbatches=2", 4, "boxes=2", (0, 1), signal.SIGSTOP, "2 go on after step"),
    ("pipeline=2 microbatches=2", 2, "gloo", (0,), signal.SIGKILL, "1 go on after step"),
    ("tensor=2", 2, "gloo", (1,), signal.SIGKILL, "1 go on after step"),
    ("data=2 zero=3", 2, "gloo", (0,), signal.SIGKILL, "1 go on after step"),
]


@pytest.mark.parametrize(("layout", "num_ranks", "transport", "lost", "number", "said"), LOST)
def test_the_others_go_on(
    tmp_path: Path, started: list[Ranks], calm: list[float], layout: str, num_ranks: int, transport: str, lost: tuple[int, ...],
    number: signal.Signals, said: str,
) -> None:  # fmt: skip
    ranks = Ranks(tmp_path / "run", layout, num_ranks, transport, copy_every=1)
    started.append(ranks)
    ranks.harm(lost, number, 8)
    assert ranks.ends(lost) == [0] * (num_ranks - len(lost)), ranks.said()
    assert ranks.losses() == pytest.approx(calm, rel=2e-5)
    assert said in ranks.said()
    assert "are lost with those" not in ranks.said()
    assert json.loads((tmp_path / "run" / "checkpoints" / "fence.json").read_text())["token"] >= 2
    assert not (tmp_path / "run" / ".regroup").exists()


@pytest.mark.parametrize("layout", ["pipeline=2 microbatches=2", "tensor=2", "data=2 zero=3"])
def test_what_hosts_alone_had_is_with_others(tmp_path: Path, started: list[Ranks], calm: list[float], layout: str) -> None:
    """One host is lost, and a spare takes its place, which loses the other in turn; there is no checkpoint."""
    undisturbed = Ranks(tmp_path / "undisturbed", layout, 2)
    started.append(undisturbed)
    assert undisturbed.ends() == [0, 0], undisturbed.said()
    ranks = Ranks(tmp_path / "run", layout, 3, variables=of_srun, spares=1, copy_every=1)
    started.append(ranks)
    ranks.harm((0,), signal.SIGKILL, 8)
    ranks.harm((1,), signal.SIGKILL, 16)
    assert ranks.ends((0, 1)) == [0], ranks.said()
    first, second = (int(text) for text in re.findall(r"go on after step (\d+)", ranks.said()))
    assert first >= 7, ranks.said()  # the copy of step 8 may have been under way
    assert second >= 15, ranks.said()
    assert ranks.losses()[:second] == undisturbed.losses()[:second]
    assert ranks.losses() == pytest.approx(calm, rel=2e-5)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts, each a network of its own, and a link between them."""
    try:
        with Hosts(2) as made:
            yield made
    except NoNetworks as error:
        pytest.skip(str(error))


def test_of_two_parts_of_a_network_one_goes_on(tmp_path: Path, started: list[Ranks], calm: list[float], hosts: Hosts) -> None:
    """The link is cut, so that nothing tells either end of the other: both live, and one of them ends."""
    ranks = Ranks(tmp_path / "run", "data=2", 2, hosts=hosts)
    started.append(ranks)
    ranks.harm((), signal.SIGKILL, 8)
    subprocess.run(["ip", "-n", hosts.names[1], "link", "set", INTERFACE, "down"], check=True)
    codes = ranks.ends()
    assert codes[0] == 0, ranks.said()
    assert codes[1] not in (0, -9), ranks.said()
    assert "is cut off from" in ranks.said()
    assert ranks.losses() == pytest.approx(calm, rel=2e-5)


def test_who_was_stopped_and_comes_back_writes_nothing(tmp_path: Path, started: list[Ranks], calm: list[float]) -> None:
    """It is the rank that wrote checkpoints and rows."""
    ranks = Ranks(tmp_path / "run", "pipeline=2 microbatches=2", 2, copy_every=1)
    started.append(ranks)
    ranks.harm((0,), signal.SIGSTOP, 8)
    until = time.monotonic() + 60
    while "1 go on after step" not in ranks.said():
        assert time.monotonic() < until, ranks.said()
        time.sleep(0.01)
    ranks.processes[0].send_signal(signal.SIGCONT)
    codes = ranks.ends()
    assert codes[1] == 0, ranks.said()
    assert codes[0] not in (0, -9), ranks.said()
    assert "left the failed step after the others had continued without it" in ranks.said()
    assert ranks.losses() == pytest.approx(calm, rel=2e-5)


def test_who_is_told_to_stop_while_others_are_missed_stops(tmp_path: Path, started: list[Ranks]) -> None:
    ranks = Ranks(tmp_path / "run", "data=2", 2)
    started.append(ranks)
    ranks.harm((1,), signal.SIGKILL, 8)
    until = time.monotonic() + 60
    while not list(ranks.folder.glob(".regroup/*/*")):
        assert time.monotonic() < until, ranks.said()
        time.sleep(0.01)
    ranks.processes[0].send_signal(signal.SIGTERM)
    assert ranks.ends((1,)) == [0], ranks.said()
    assert "told to stop: saving after step" in ranks.said()
    assert ranks.rows() < STEPS


def test_a_second_launch_into_the_folder_is_refused(tmp_path: Path, started: list[Ranks]) -> None:
    (tmp_path / "run").mkdir()
    with flow.lock_run_folder(tmp_path / "run"):
        second = Ranks(tmp_path / "run", "data=2", 2)
        started.append(second)
        assert second.processes[0].wait(120) not in (0, -9)
    assert "is in use by another shardwise train" in second.said()


def test_a_run_has_its_folder_to_itself(tmp_path: Path, started: list[Ranks], calm: list[float]) -> None:
    ranks = Ranks(tmp_path / "run", "data=2", 2)
    started.append(ranks)
    ranks.harm((), signal.SIGKILL, 2)
    with pytest.raises(RunError, match="in use by another"), flow.lock_run_folder(tmp_path / "run"):
        pass
    assert ranks.ends() == [0, 0], ranks.said()
    assert ranks.losses() == pytest.approx(calm, rel=2e-5)


def test_one_that_fails_by_itself_ends_all(tmp_path: Path, started: list[Ranks]) -> None:
    ranks = Ranks(tmp_path / "run", "data=2", 2)
    started.append(ranks)
    ranks.harm((), signal.SIGKILL, 2)
    (tmp_path / "text.txt").write_bytes(b"another text")
    assert all(code not in (0, -9) for code in ranks.ends())
    assert ranks.said().count("has changed while it was trained on") >= 2  # the other rank says it, too


if __name__ == "__main__":
    told_folder, told_layout, told_run = sys.argv[1:]
    told = configure(Path(told_folder), told_layout, steps=STEPS)
    saves = {} if "copy_every" not in told_run else {"checkpoint_every": 0}
    told = told.model_copy(update={"run": told.run.model_copy(update=json.loads(told_run))})
    told = told.model_copy(update={"train": told.train.model_copy(update=saves)})
    flow.train(told, planner, current_world("cpu"))
