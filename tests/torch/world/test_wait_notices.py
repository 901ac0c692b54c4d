"""Who waits for whom is found from what ranks record; a rank that waits for nobody, or not for long, is not named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.world.launch.rank_settings import wanted_threads
from shardwise.world.launch.wait_notices import NOTICE_S, CollectiveNotices, likely_cause
from shardwise.world.recorder import CollectiveRecord, RankStatus

NOW = 1000.0


def status(rank: int, index: int, running_s: float | None, op: str = "all_reduce") -> RankStatus:
    """A rank of three in its collective `index`, for `running_s`, or past it."""
    start = NOW - (running_s if running_s is not None else 1.0)
    last = CollectiveRecord(0, index, "0-2", op, "float32", (3,), 12, -1, 0, start, 0.0 if running_s is not None else NOW, "", index)
    return RankStatus(rank, 1, "running", NOW, index, last, {"0-2": index})


def test_the_rank_that_has_not_come_is_named() -> None:
    statuses = [status(0, 8, NOTICE_S + 1), status(1, 7, None), status(2, 8, NOTICE_S + 1)]
    notices = CollectiveNotices()
    text = notices.find_notice(statuses, NOW)
    assert "rank 0 of 3 has waited since" in text
    assert "in all_reduce #8 float32 [3] (ranks 0-2) for rank 1, which last did all_reduce #7" in text
    assert notices.find_notice(statuses, NOW + 1) == ""  # once
    assert notices.find_notice(statuses, NOW + 90) != ""
    known = CollectiveNotices().find_notice(statuses, NOW, {1: "process 5 of rank 1 is stopped"})
    assert known.endswith("Likely: process 5 of rank 1 is stopped")


@pytest.mark.parametrize(
    "statuses",
    [
        [status(0, 8, NOTICE_S - 1), status(1, 7, None), status(2, 8, 0.1)],  # not for long
        [status(0, 8, NOTICE_S + 1), status(1, 8, NOTICE_S + 1), status(2, 8, NOTICE_S + 1)],  # all are in it
        [status(0, 8, None), status(1, 7, None), status(2, 8, None)],  # nobody waits
    ],
)
def test_ranks_that_wait_for_nobody_are_not(statuses: list[RankStatus]) -> None:
    assert CollectiveNotices().find_notice(statuses, NOW) == ""


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "without srun"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "set by hand"),
        ({"RANK": "0", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}, "torchrun does not run on another host"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, "4 processes of mpirun"),
    ],
)
def test_the_cause_is_of_the_launcher(environment: dict[str, str], said: str) -> None:
    assert said in likely_cause(environment)


def test_threads_are_a_share_of_the_cores_unless_the_user_sets_them() -> None:
    local = {"RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    assert wanted_threads(local, 16, 16, is_set_by_agent=False) == 4
    assert wanted_threads({**local, "OMP_NUM_THREADS": "1"}, 16, 1, is_set_by_agent=True) == 4  # torchrun's own default
    assert wanted_threads({**local, "OMP_NUM_THREADS": "1"}, 16, 1, is_set_by_agent=False) == 1
    assert wanted_threads(local, 2, 2, is_set_by_agent=False) == 1


SCRIPT = """
import torch, shardwise
shardwise.auto_parallelize(torch.nn.Linear(4, 4), torch.zeros(8, 4))
"""
SLURM = {
    "SLURM_JOB_ID": "41", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "localhost",
    "SLURM_JOB_NODELIST": "localhost",
}  # fmt: skip
HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}


def test_a_process_that_is_alone_says_whom_it_waits_for(tmp_path: Path) -> None:
    """One process of a SLURM job without srun, and a rank 1 without a rank 0; neither shows warnings of torch's store."""
    others = ("SLURM", "MASTER", "TORCHELASTIC", "PMI", "OMPI", "RANK", "WORLD_SIZE", "LOCAL")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)} | {"OMP_NUM_THREADS": "1"}
    said = [tmp_path / "slurm", tmp_path / "hand"]
    processes = []
    for variables, path in zip((SLURM, HAND), said, strict=True):
        with path.open("w") as file:
            processes.append(subprocess.Popen([sys.executable, "-c", SCRIPT], env={**kept, **variables}, stderr=file, stdout=file))
    try:
        until = time.monotonic() + 120
        while not all("Likely" in path.read_text() for path in said) and time.monotonic() < until:
            assert all(process.poll() is None for process in processes), [path.read_text() for path in said]
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    slurm, hand = (path.read_text() for path in said)
    assert "for ranks 1, 2, 3, which have not started. Likely: the script was started without srun" in slurm
    assert "rank 1 of 2" in hand
    assert "for rank 0, which does not answer at 127.0.0.1:9. Likely: RANK and WORLD_SIZE=2 were set by hand" in hand
    assert "[c10d]" not in slurm + hand
