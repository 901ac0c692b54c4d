"""A loop that is stopped within an epoch and resumed on other ranks continues it: weights are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

import shardwise
from shardwise.world.world import World

N, BATCH, STOP, STEPS = 22, 4, 8, 14  # six batches an epoch, the last of two samples


class Counted(Dataset[Any]):
    def __init__(self) -> None:
        self.x = torch.randn(N, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        self.num_loaded = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.num_loaded += 1
        return self.x[index], self.x[index, :2]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def trained(net: nn.Module, batches: Any, steps: range, at: Callable[[int, Any], object]) -> None:
    opt = torch.optim.AdamW(net.parameters(), lr=0.05)
    step = steps.start
    at(-1, opt)
    while step < steps.stop:
        for x, y in batches:
            mse_loss(net(x), y).backward()
            opt.step()
            opt.zero_grad()
            step += 1
            if step == steps.stop:
                break
    at(step, opt)


def divided(world: World, folder: str, layout: str, first: int, last: int) -> tuple[list[Tensor], int]:
    """Train from `first`, resumed where it is not 0, and return the weights after `last` and the number of samples that were loaded."""
    torch.manual_seed(5)
    data, net = Counted(), network()
    net = shardwise.auto_parallelize(net, (data.x[:BATCH],), plan=f"{layout} precision=float64", world=world)
    torch.manual_seed(5 if first == 0 else 77)
    loader = shardwise.shard(DataLoader(data, BATCH, shuffle=True))

    def at(step: int, opt: Any) -> None:
        if step == -1 and first:
            assert shardwise.load(folder, net, opt)["step"] == first
        elif step == last:
            shardwise.save(folder, net, opt, step=step)

    trained(net, loader, range(first, last), at)
    full = shardwise.full_state_dict(net) or {}
    return [x.double() for x in full.values()], data.num_loaded


def test_a_resumed_loop_is_the_serial_run(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    torch.manual_seed(5)
    serial = network()
    torch.manual_seed(5)
    trained(serial, DataLoader(Counted(), BATCH, shuffle=True), range(STEPS), lambda *_: None)
    before = ranks(divided, 2, str(tmp_path), "data=2", 0, STOP)
    assert [count for _, count in before] == [N // 2 + 2 * BATCH // 2] * 2  # an epoch and two batches, half of them each
    after = ranks(divided, 2, str(tmp_path), "tensor=2", STOP, STEPS)
    assert [count for _, count in after] == [STEPS * BATCH - STOP * BATCH - 2 * (2 if STEPS > 12 else 1) + 2] * 2
    for ours, wanted in zip(after[0][0], serial.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-12)
