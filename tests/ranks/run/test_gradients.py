"""What gradient exchange sends, counted, and where the sums lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise
from shardwise.run.state.block_ranges import full_ranges
from shardwise.run.state.parameters import LocalParameter, build_groups, share_gradient_memory
from shardwise.world.world import Group, World


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def _loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()


def _sent(world: World, layout: str) -> dict[str, float]:
    """Bytes by collective of one step, and how far this rank's gradients are from the serial ones before and after `gather`."""
    bytes_of: Counter[str] = Counter()
    for name, counted in (("all_reduce", 0), ("reduce_scatter_into", 1), ("all_gather_into", 0)):
        real = getattr(Group, name)

        def wrapped(self: Group, *args: Any, real: Any = real, name: str = name, counted: int = counted, **kwargs: Any) -> Any:
            bytes_of[name] += args[counted].nbytes
            return real(self, *args, **kwargs)

        setattr(Group, name, wrapped)
    batch = (torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64),)
    engine = shardwise.parallelize(_model, batch, loss=_loss, plan=layout, seed=0, world=world)
    bytes_of.clear()
    engine.step(batch)
    sent = dict(bytes_of)
    result = engine.forward_backward(batch)
    engine.loss_of(result)
    torch.manual_seed(0)
    serial = _model().double()
    serial.load_state_dict(dict(zip(serial.state_dict(), _whole(engine, serial), strict=True)))
    _loss(serial(*batch), batch).backward()
    got = engine.full_gradients()
    off = 0.0
    if got is not None:
        off = max(float((got[name] - p.grad).abs().max()) for name, p in serial.named_parameters() if p.grad is not None)
    return {**sent, "off": off}


def _whole(engine: Any, serial: torch.nn.Module) -> list[torch.Tensor]:
    """The engine's weights on every rank, by the one way that every rank may go."""
    state = engine.full_state_dict()
    found = []
    for name, tensor in serial.state_dict().items():
        x = state[name].double() if state is not None else torch.zeros_like(tensor)
        engine._world_group.broadcast(x)
        found.append(x)
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_zero_halves_what_gradients_send(ranks: Callable[..., list[Any]], num_ranks: int) -> None:
    """An all-reduce of Φ is a reduce-scatter and an all-gather of Φ each (Rajbhandari et al. 2020, section 7): zero=1 costs no more."""
    parameters = 6 * 5 + 5 + 5 * 3 + 3
    padded = -(-parameters // num_ranks) * num_ranks
    fingerprints = 96 * num_ranks  # of weights that ranks have alike, what each says of its state and gradients, and its loss
    whole = ranks(_sent, num_ranks, f"data={num_ranks} precision=float64")
    for sent in whole:
        assert sent["all_reduce"] == 8 * parameters + fingerprints
        assert "reduce_scatter_into" not in sent
    for sent in ranks(_sent, num_ranks, f"data={num_ranks} zero=1 precision=float64"):
        assert sent["reduce_scatter_into"] == 8 * padded
        assert sent["all_gather_into"] == 8 * padded
        assert sent["all_reduce"] == fingerprints
        assert sent["off"] < 1e-15
    assert max(sent["off"] for sent in whole) < 1e-15


def _comes_and_goes(world: World) -> bool:
    """Whether gradients do whose sum nobody has connected yet, as in a plain loop."""
    parameter = LocalParameter("x", (4,), full_ranges((4,)), torch.float32, True, (0, 1), True, True)
    groups, _ = build_groups([parameter], world.device)
    share_gradient_memory(groups, [world.group((0, 1))], keeps_gradients=False)
    return groups[0].is_allocated_per_bucket


@pytest.mark.parametrize(("transport", "comes_and_goes"), [("shared_memory", False), ("gloo", True), ("boxes=1", True)])
def test_gradients_lie_where_others_can_read_them(ranks: Callable[..., list[Any]], transport: str, comes_and_goes: bool) -> None:
    assert ranks(_comes_and_goes, 2, env={"SHARDWISE_TRANSPORT": transport}) == [comes_and_goes] * 2
