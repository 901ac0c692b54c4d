"""`shardwise.comm_hook` beside DDP's own all-reduce: the same gradients and weights in float64, with several buckets and `no_sync`."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise.errors import UsageError
from shardwise.world.shared_memory import segment
from shardwise.world.world import World

NAMES = (
    "auto", "native", "butterfly", "ring", "tree", "double_tree", "halving_doubling", "naive", "parameter_server", "hierarchical",
)  # fmt: skip
FIRST_BUCKET_MB = 0.0005  # of several


@contextmanager
def torchs_group(world: World, folder: str) -> Iterator[None]:
    """What a user's script begins and ends with."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=world.rank, world_size=world.num_ranks)
    yield
    dist.barrier()
    dist.destroy_process_group()


def net() -> torch.nn.Module:
    torch.manual_seed(3)
    sizes = [7, 31, 29, 13, 1]
    layers = [module for a, b in pairwise(sizes) for module in (torch.nn.Linear(a, b), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers).double()


def trained(rank: int, model: torch.nn.Module, steps: int = 3) -> list[torch.Tensor]:
    """Gradients of the last step and weights, after steps of two microbatches, of which the first is not synchronised."""
    optimizer = torch.optim.AdamW(model.parameters())
    draw = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        optimizer.zero_grad()
        with model.no_sync():  # type: ignore[operator]
            model(torch.randn(5, 7, generator=draw, dtype=torch.float64)).square().mean().backward()
        model(torch.randn(5, 7, generator=draw, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    return [*(p.grad.clone() for p in model.parameters() if p.grad is not None), *(p.detach().clone() for p in model.parameters())]


def beside(world: World, folder: str, names: Sequence[str] = NAMES, on_a_host: int = 0) -> list[int]:
    """How many buckets each name's hook was given. `on_a_host`: so many neighbours believe to be on one host, and no others."""
    counts = []
    if on_a_host:
        segment.host_identity = lambda: f"host {world.rank // on_a_host}"
    with torchs_group(world, folder):
        expected = trained(world.rank, DistributedDataParallel(net(), bucket_cap_mb=FIRST_BUCKET_MB))
        assert expected[0].abs().max() > 0
        for name in names:
            model = DistributedDataParallel(net(), bucket_cap_mb=FIRST_BUCKET_MB)
            state, hook = shardwise.comm_hook(name)
            start, seen = state.start, []
            state.start = lambda bucket, start=start, seen=seen: (seen.append(bucket.numel()), start(bucket))[1]
            model.register_comm_hook(state, hook)
            got = trained(world.rank, model)
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
            counts.append(len(seen))
            if name in ("auto", "native"):
                assert world.num_ranks == 1 or state._group.shares_memory == (on_a_host == 0)
                levels = state._sums.levels
                assert (levels is not None) == (name == "auto" and on_a_host > 1)
                assert levels is None or levels._box.shares_memory
    return counts


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_name_equals_ddp_without_a_hook(ranks: Any, num_ranks: int, tmp_path: Path) -> None:
    for counts in ranks(beside, num_ranks, str(tmp_path)):
        assert min(counts) > 3 * 2  # several buckets in each of three steps, and none for the microbatch in no_sync


@pytest.mark.parametrize(("num_ranks", "on_a_host"), [(2, 1), (4, 2)])
def test_between_hosts(ranks: Any, num_ranks: int, on_a_host: int, tmp_path: Path) -> None:
    ranks(beside, num_ranks, str(tmp_path), ("auto", "native", "butterfly"), on_a_host)


def of_a_subgroup(world: World, folder: str) -> None:
    with torchs_group(world, folder):
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mine = pairs[world.rank % 2]
        expected = trained(world.rank, DistributedDataParallel(net(), process_group=mine))
        model = DistributedDataParallel(net(), process_group=mine)
        model.register_comm_hook(*shardwise.comm_hook("ring", process_group=mine))
        for a, b in zip(trained(world.rank, model), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_a_process_group_of_ones_own(ranks: Any, tmp_path: Path) -> None:
    ranks(of_a_subgroup, 4, str(tmp_path))


def unlike(world: World, folder: str) -> str:
    """Rank 1 asks for another algorithm."""
    with torchs_group(world, folder):
        model = DistributedDataParallel(copy.deepcopy(net()))
        model.register_comm_hook(*shardwise.comm_hook("tree" if world.rank else "ring"))
        try:
            trained(world.rank, model, steps=1)
        except Exception as error:
            return str(error)
    return "no error"


def test_hooks_that_differ_are_an_error_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    for rank, said in enumerate(ranks(unlike, 3, str(tmp_path))):
        assert f"RunError: rank {rank} is in all_reduce of float64" in said  # and no value that is no tensor
        assert "in another collective, size, type or algorithm" in said


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"comm_hook\('buterfly'\).*did you mean butterfly"):
        shardwise.comm_hook("buterfly")
    with pytest.raises(UsageError, match=r"call torch.distributed.init_process_group first"):
        shardwise.comm_hook("ring")


def test_what_is_under_way_at_the_interpreters_end_ends_first() -> None:
    """A thread of torch's that comes back to an interpreter that is no more would abort the process."""
    script = (
        "import time\nfrom shardwise.world.comm.worker import BackgroundWorker\nworker = BackgroundWorker()\n"
        "worker.submit(lambda: (time.sleep(0.2), print('ended')))\nraise SystemExit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "ended\n", "")
