"""The engine's edges on ranks, against torch's own serial run: parameters that a batch's form does not use, through
AdamW, SGD, ZeRO, and resumptions in other layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise.run.state.optimizer import Optimizer


class _Alternating(nn.Module):
    """Uses `b`, `c` or both, by which inputs a batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.c, self.o = nn.Linear(6, 16), nn.Linear(5, 16), nn.Linear(16, 3)
        self.c.bias.requires_grad_(False)

    def forward(self, y: Tensor, x: Tensor | None = None, z: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.b(x)) if x is not None else 0
        if z is not None:
            h = h + torch.tanh(self.c(z))
        return F.cross_entropy(self.o(h), y)


def _batches() -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(0)
    x, z = (torch.randn(8, n, generator=g, dtype=torch.float64) for n in (6, 5))
    y = torch.randint(3, (8,), generator=g)
    both = {"y": y, "x": x, "z": z}
    return [{"y": y, "z": z}, {"y": y, "z": z}, both, {"y": y, "x": x}, {"y": y, "z": z}, both]


RESUMED_AFTER = (1, 3)  # steps after which another engine goes on: before `b` was ever updated, and later


OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
    {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    {"name": "adagrad", "lr": 0.05, "options": {"initial_accumulator_value": 0.1}},
    {"name": "nadam", "lr": 0.01},
)


def _serial(options: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    net = _Alternating().double()
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "nadam": torch.optim.NAdam}
    options = {**options, **options.get("options", {})}
    optimizer = kinds[options.pop("name")](net.parameters(), **{key: value for key, value in options.items() if key != "options"})
    states = []
    for batch in _batches():
        optimizer.zero_grad()
        net(**batch).backward()
        optimizer.step()
        states.append(torch.cat([p.detach().flatten().clone() for p in net.parameters()]))
    return states


def _engine_states(
    world: Any, layouts: tuple[str, ...], folder: str, optimizers: Sequence[dict[str, Any]] = OPTIMIZERS
) -> list[list[Tensor]]:
    """States after every step, each resumed in the next of `layouts`."""
    results = []
    for number, options in enumerate(optimizers):
        remaining = iter(layouts)

        def make(options: dict[str, Any] = options, remaining: Iterator[str] = remaining) -> Any:
            plan = f"{next(remaining)} precision=float64"
            return shardwise.parallelize(_Alternating, _batches()[2], optimizer=options, plan=plan, world=world, seed=0)

        engine, states = make(), []
        for step, batch in enumerate(_batches()):
            engine.step(batch)
            state = engine.full_state_dict()
            names = [name for name, _ in _Alternating().named_parameters()]
            states.append(torch.cat([state[name].flatten() for name in names]) if state else torch.zeros(0))
            if step in RESUMED_AFTER:
                engine.save(f"{folder}/{number}-{step}")
                engine = make()
                engine.load(f"{folder}/{number}-{step}")
        results.append(states)
    return results


@pytest.mark.parametrize("layouts", [("data=2", "tensor=2", "data=2 zero=2"), ("tensor=2", "data=2 zero=2", "data=2")])
def test_unused_parameters_stay_as_in_the_serial_run(layouts: tuple[str, ...], tmp_path: Path) -> None:
    found = shardwise.launch(_engine_states, 2, layouts, str(tmp_path))[0]
    for options, states in zip(OPTIMIZERS, found, strict=True):
        for step, (actual, expected) in enumerate(zip(states, _serial(options), strict=True)):
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda text, o=options, s=step: f"{o} step {s}: {text}")


def test_broken_twin_a_checkpoint_that_forgets_skips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optimizer, "set_skip_state", lambda *_: None)
    (states,) = _engine_states(None, ("data=1",) * 3, str(tmp_path), OPTIMIZERS[:1])
    serial = _serial(OPTIMIZERS[0])
    torch.testing.assert_close(states[1], serial[1], rtol=1e-9, atol=1e-9)
    assert (states[2] - serial[2]).abs().max() > 1e-6
