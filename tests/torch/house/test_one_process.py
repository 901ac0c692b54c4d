"""A script with a class from `shardwise.adapters` is one process to Accelerate from its first state on, before there is a trainer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("accelerate")
SCRIPT = """
import torch
from shardwise.world.launch.current import set_world
from shardwise.world.world import World
set_world(World())
{line}
from accelerate.state import PartialState
state = PartialState(cpu=True)  # as arguments of transformers make one: joined its ranks, at the address where shardwise's then meet
print(state.num_processes, torch.distributed.is_initialized())
PartialState._shared_state.clear()
print(PartialState(cpu=True).num_processes)
"""


@pytest.mark.parametrize(
    "line", ["from shardwise.adapters.accelerate import Accelerator", "from shardwise.adapters.transformers import trainer_of"]
)
def test_accelerate_joins_no_ranks_of_its_own(line: str) -> None:
    told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{line}", line)], env={**os.environ, **told}, capture_output=True, text=True, timeout=240
    )
    assert ran.stdout.split() == ["1", "False", "1"], ran.stderr
