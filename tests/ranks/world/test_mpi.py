"""Ranks that mpirun started, over MPI. Skipped where there is no mpi4py, or no mpiexec beside this Python or in PATH."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import UsageError
from shardwise.world.launch.join import join

MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None, reason="pip install mpi4py mpich, or beside an MPI of this machine"
)

CODE = """
import os

import torch
import shardwise
from shardwise.run.verify.verify import Options, verify_on_rank
from shardwise.world.launch.join import join
from shardwise.zoo.resolve import resolve

world = join(os.environ, "cpu")
group, n, me = world.world_group, world.num_ranks, world.rank
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.bool):
    x = (torch.arange(10) + me).to(dtype)
    group.all_reduce(x)
    assert torch.equal(x, sum((torch.arange(10) + i).double() for i in range(n)).to(dtype)), dtype
x = torch.full((me + 1,), float(me))
assert torch.equal(group.all_gather(x, length=[i + 1 for i in range(n)]), torch.cat([torch.full((i + 1,), float(i)) for i in range(n)]))
x = group.reduce_scatter(torch.arange(7.0) + me)
assert torch.equal(x, torch.tensor_split(sum(torch.arange(7.0) + i for i in range(n)), n)[me])
x = torch.full((3,), float(me))
group.broadcast(x, 1)
assert torch.equal(x, torch.ones(3))
sent, got = group.isend(torch.full((2,), float(me)), (me + 1) % n, 1 << 30), torch.empty(2)
group.irecv(got, (me - 1) % n, 1 << 30).wait()
sent.wait()
assert got[0] == (me - 1) % n
model = resolve("gpt-tiny:layers=2")
for layout in ("data=2", "pipeline=2 microbatches=2", "tensor=2"):
    batch = model.batch(4)
    plan = shardwise.plan(model, batch, layout=f"{layout} precision=float64", cluster="1xcpu-2")
    found = verify_on_rank(world, plan, model.make, batch, model.loss, options=Options(steps=1))
    assert found is None or found.ok, str(found)
print(type(group._transport).__name__, "ok" if me or found.ok else "")
"""


def run(code: str, transport: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MASTER", "RANK", "PMI", "OMPI"))}
    env |= {"SHARDWISE_TRANSPORT": transport, "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert MPIEXEC is not None
    return subprocess.run([MPIEXEC, "-n", "2", sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)


@needs_mpi
def test_collectives_and_training_over_mpi() -> None:
    done = run(CODE, "mpi")
    assert done.stdout.count("MpiChannel ok") == 2, done.stdout + done.stderr


@needs_mpi
def test_a_rank_that_fails_ends_all() -> None:
    """An exception on one rank, while the other waits for it in a collective."""
    code = "import os\nfrom shardwise.world.launch.join import join\nimport torch\nworld = join(os.environ, 'cpu')\n"
    code += "world.world_group.connect()\n"
    code += "if world.rank: raise ValueError('rank 1 fails')\nworld.world_group.all_reduce(torch.ones(1))\n"
    done = run(code, "mpi")
    assert done.returncode
    assert "rank 1 fails" in done.stderr


@needs_mpi
def test_without_asking_for_mpi_ranks_share_memory() -> None:
    code = "import os\nfrom shardwise.world.launch.join import join\nimport torch\nworld = join(os.environ, 'cpu')\nx = torch.ones(1)\n"
    code += "world.world_group.all_reduce(x)\nprint(type(world.world_group._transport).__name__, int(x))\n"
    assert run(code, "").stdout.count("Channel 2\n") == 2


def test_ranks_that_mpi_does_not_know_are_refused() -> None:
    """Without mpi4py by its name, with it because this process is no rank of two."""
    with pytest.raises(UsageError, match=r"mpi4py and an MPI library|start the ranks with mpirun"):
        join({"RANK": "0", "WORLD_SIZE": "2", "SHARDWISE_TRANSPORT": "mpi"}, "cpu")
