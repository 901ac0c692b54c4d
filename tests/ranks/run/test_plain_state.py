"""A plain loop's training state on disk: saved under one layout, gone on from under another, against the loop that nobody disturbed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.errors import CheckpointError, UsageError
from shardwise.run.loop.sharded_tensor import ShardedTensor
from shardwise.world.world import World
from tests.support.plain_models import Mixed, batches, loss_of, matches, plan_of, said

STEPS, BEFORE = 6, 3  # of the whole run, and those before it is saved


class Loop:
    """Adam with a schedule of its rate, in two groups, and a loss that the loop draws a number for."""

    def __init__(self, net: nn.Module, kind: Callable[..., torch.optim.Optimizer] = torch.optim.Adam, **options: Any) -> None:
        self.net = net
        matrices, others = ([p for p in net.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
        self.opt = kind(groups, lr=0.05, **options)
        self.rate = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.8)

    def run(self, data: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
        losses = []
        for x, y in data:
            loss = loss_of(self.net, x, y) * (1.0 + torch.rand((), dtype=torch.float64))
            losses.append(float(loss.detach()))
            self.opt.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
            self.opt.step()
            self.rate.step()
        return losses

    def save(self, folder: Path) -> None:
        shardwise.save(folder, self.net, self.opt, step=BEFORE, epoch=2, rate=self.rate.state_dict())

    def load(self, folder: Path) -> None:
        told = shardwise.load(folder, self.net, self.opt)
        assert (told["step"], told["epoch"]) == (BEFORE, 2)
        self.rate.load_state_dict(told["rate"])


def data(first: int, last: int) -> list[tuple[Tensor, Tensor]]:
    return (batches() * 2)[first:last]


def made(world: World, layout: str, seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    if not layout:  # nobody's but torch's
        return Mixed().double()
    with shardwise.auto_parallelize(batch=batches()[0], plan=plan_of(layout), world=world):
        net = Mixed()
    return net


def mean(losses: list[float], world: World) -> list[float]:
    total = torch.tensor(losses, dtype=torch.float64)
    world.world_group.all_reduce(total)
    return (total / world.num_ranks).tolist()


def saves(world: World, layout: str, folder: str) -> list[float]:
    loop = Loop(made(world, layout))
    torch.manual_seed(11)
    losses = loop.run(shardwise.shard(data(0, BEFORE)) if layout else data(0, BEFORE))
    loop.save(Path(folder))
    return mean(losses, world)


def loads(world: World, layout: str, folder: str) -> dict[str, Any]:
    """Losses of the rest, and which weights differ at the end from those of the undisturbed run."""
    loop = Loop(made(world, layout, seed=8))
    torch.manual_seed(12)
    loop.load(Path(folder))
    losses = mean(loop.run(shardwise.shard(data(BEFORE, STEPS)) if layout else data(BEFORE, STEPS)), world)
    _, want = undisturbed()
    cut = [type(t) for state in loop.opt.state.values() for t in state.values() if isinstance(t, ShardedTensor)]
    wrong = [name for name, p in loop.net.named_parameters() if not matches(p.detach(), want[name].detach())]
    return {"losses": losses, "wrong": wrong, "cut": len(cut)}


def undisturbed() -> tuple[list[float], dict[str, Tensor]]:
    state = torch.random.get_rng_state()
    torch.manual_seed(7)
    loop = Loop(Mixed().double())
    torch.manual_seed(11)
    losses = loop.run(data(0, STEPS))
    torch.random.set_rng_state(state)
    return losses, dict(loop.net.named_parameters())


WAYS = {
    ("tensor=2", 2): [("data=2", 2), ("", 1), ("data=1", 1), ("tensor=2", 2), ("data=2 tensor=2", 4)],
    ("data=2 tensor=2", 4): [("tensor=2", 2)],
    ("", 1): [("tensor=2", 2)],
}


@pytest.mark.parametrize("writer", WAYS, ids=lambda way: way[0] or "serial")
def test_a_loop_goes_on_under_another_layout(ranks: Callable[..., list[Any]], tmp_path: Path, writer: tuple[str, int]) -> None:
    losses, _ = undisturbed()
    for found in ranks(saves, writer[1], writer[0], str(tmp_path)):
        assert found == pytest.approx(losses[:BEFORE], rel=1e-9)
    for layout, num_ranks in WAYS[writer]:
        for found in ranks(loads, num_ranks, layout, str(tmp_path)):
            assert found["losses"] == pytest.approx(losses[BEFORE:], rel=1e-9), layout
            assert found["wrong"] == [], layout
            assert found["cut"] == (2 * 4 if "tensor" in layout else 0), layout


def refusals(world: World, folder: str) -> dict[str, str]:
    """What is said to folders, models and optimizers that are not those that were saved; nothing changes."""
    home = Path(folder)
    net = made(world, "tensor=2")
    loop = Loop(net)
    loop.run(shardwise.shard(data(0, 2)))
    loop.save(home / "good")
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    if world.rank == 0:
        (home / "empty").mkdir()
    world.world_group.barrier()
    torch.manual_seed(7)
    with shardwise.auto_parallelize(batch=(torch.ones(4, 2),), plan="data=2", world=world):
        other = nn.Linear(2, 2)
    alone = torch.optim.Adam([p for name, p in net.named_parameters() if name != "up.weight"])
    calls: dict[str, Callable[[], Any]] = {
        "nothing": lambda: shardwise.load(home / "none", net, loop.opt),
        "empty": lambda: shardwise.load(home / "empty", net, loop.opt),
        "model": lambda: shardwise.load(home / "good", other),
        "kind": lambda: shardwise.load(home / "good", net, torch.optim.SGD(net.parameters(), lr=0.1)),
        "groups": lambda: shardwise.load(home / "good", net, alone),
        "no state": lambda: (shardwise.save(home / "bare", net, step=1), shardwise.load(home / "bare", net, loop.opt)),
        "stranger": lambda: shardwise.save(home / "bad", net, torch.optim.SGD(other.parameters(), lr=0.1)),
        "twice": lambda: shardwise.save(home / "bad", net, [loop.opt, alone]),
        "extra": lambda: shardwise.save(home / "bad", net, loop.opt, what={1, 2}),
        "state dict": loop.opt.state_dict,
        "pickled": lambda: net.up.weight.__reduce_ex__(2),  # type: ignore[union-attr,operator]
    }
    found = {name: said(call, CheckpointError, UsageError) for name, call in calls.items()}
    world.world_group.barrier()
    if world.rank == 0:
        file = next((home / "good").glob("step-*/*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    world.world_group.barrier()
    with pytest.warns(RuntimeWarning) if world.rank == 0 else pytest.MonkeyPatch.context():
        found["damaged"] = said(lambda: shardwise.load(home / "good", net, loop.opt), CheckpointError)
    found["path"] = said(lambda: shardwise.load(next((home / "good").glob("step-*")), net, loop.opt), CheckpointError)
    found["changed"] = ", ".join(name for name, p in net.named_parameters() if not torch.equal(p.detach(), before[name]))
    return found


def test_what_was_not_saved_so_is_refused_by_name(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    for found in ranks(refusals, 2, str(tmp_path)):
        assert "holds no checkpoint that is whole" in found["nothing"]
        assert "holds no checkpoint that is whole" in found["empty"]
        assert "is a checkpoint of another model" in found["model"]
        assert "has the state of Adam, and is loaded into SGD" in found["kind"]
        assert "the state of another Adam (number 0): up.weight is in one of them only" in found["groups"]
        assert "has no optimizer's state, and is loaded into Adam" in found["no state"]
        assert "the optimizer has a parameter of [2, 2] that is none of the model's" in found["stranger"]
        assert "is in two optimizers" in found["twice"]
        assert "what is a set, which a checkpoint cannot hold" in found["extra"]
        assert found["state dict"].startswith("Adam.state_dict() would hold this rank's parts only, of emb.weight [8, 8] of [16, 8]; ")
        assert "shardwise.save(folder, net, optimizer)" in found["state dict"]
        assert "saving of up.weight, of which this rank holds a part" in found["pickled"]
        assert "holds no checkpoint that is whole" in found["damaged"]
        assert "is damaged" in found["path"]
        assert found["changed"] == ""


def whole_states(world: World) -> list[str]:
    """Weights that differ where an optimizer is given the whole state of a serial run; what is said to a part."""
    torch.manual_seed(7)
    serial = Mixed().double()
    theirs = Loop(serial)
    torch.manual_seed(11)
    theirs.run(data(0, BEFORE))
    state = copy.deepcopy(theirs.opt.state_dict())
    net = made(world, "tensor=2")
    net.load_state_dict(serial.state_dict())
    mine = Loop(net)
    mine.opt.load_state_dict(state)
    mine.rate.load_state_dict(theirs.rate.state_dict())
    again = torch.random.get_rng_state()
    theirs.run(data(BEFORE, STEPS))
    torch.random.set_rng_state(again)
    mine.run(shardwise.shard(data(BEFORE, STEPS)))
    want = dict(serial.named_parameters())
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"][:3]
    return [
        *(name for name, p in net.named_parameters() if not matches(p.detach(), want[name].detach())),
        said(lambda: mine.opt.load_state_dict(state), UsageError),
    ]


def test_an_optimizer_takes_a_whole_state(ranks: Callable[..., list[Any]]) -> None:
    for (refused,) in ranks(whole_states, 2):
        assert refused.startswith("the state exp_avg of emb.weight is [3, 8], and the whole parameter is [16, 8]: load whole tensors")
