"""precision=bfloat16-mixed: 16-bit weights with float32 main weights in the optimizer, bit for bit as a serial loop of that precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.errors import Infeasible, LayoutError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.engine import Engine
from shardwise.run.verify.verify import Options, verify_on_rank
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

Ranks = Callable[..., list[Any]]
STEPS, SAMPLES = 3, 8
OPTIMIZER = {"name": "adamw", "lr": 1e-2}
MIXED = "precision=bfloat16-mixed"
LLAMA = "llama:vocabulary=64,sequence=16,hidden=32,layers=2,heads=4,kv_heads=2,inner=64"


class Network(nn.Module):
    """An embedding, a norm and linear layers. The loss is a sum, so that microbatches and replicas scale nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.one, self.two = nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.two(torch.nn.functional.gelu(self.one(self.norm(self.table(tokens))))).float().sin().sum()


def tokens() -> Tensor:
    return torch.randint(0, 32, (SAMPLES, 6), generator=torch.Generator().manual_seed(1))


def train_serially(replicas: int, microbatches: int, gradients: torch.dtype, scatters_each: bool = False) -> dict[str, Tensor]:
    """Main weights after `STEPS` steps in plain torch: every replica's gradients by themselves, then their sum."""
    torch.manual_seed(0)
    net = Network()
    main = {name: p.detach().clone() for name, p in net.named_parameters()}
    net.bfloat16()
    optimizer = torch.optim.AdamW(main.values(), lr=1e-2, fused=True)
    for _ in range(STEPS):
        by_replica: list[list[dict[str, Tensor]]] = [[] for _ in range(replicas)]
        for rows in tokens().chunk(microbatches):
            for replica, part in enumerate(rows.chunk(replicas)):
                net.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = net(part)
                loss.backward()
                by_replica[replica].append({name: p.grad.to(gradients) for name, p in net.named_parameters() if p.grad is not None})
        for name in main:
            parts = torch.stack([torch.stack([g[name] for g in each]) for each in by_replica])  # [replica, microbatch, ...]
            order = parts if scatters_each else parts.transpose(0, 1)
            main[name].grad = _add_up(torch.stack([_add_up(order[:, at]) for at in range(order.shape[1])])).float()
        optimizer.step()
        for name, p in net.named_parameters():
            p.data.copy_(main[name])
    return main


def _add_up(parts: Tensor) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def train_on_ranks(world: World, layouts: list[str], folder: str) -> list[Any]:
    """Main weights, dtypes of held weights and gradients, and bytes of the optimizer, by layout."""
    results = []
    for number, layout in enumerate(layouts):
        engine = Engine(Plan(Layout.parse(layout), "net", "1xcpu-2", SAMPLES), Network, tokens(), None, world, OPTIMIZER, seed=0)
        for _ in range(STEPS):
            engine.step(tokens())
        engine.save(f"{folder}/{number}")
        engine.step(tokens())
        last = engine.full_state_dict()
        engine.load(f"{folder}/{number}")
        state = engine.full_state_dict()
        engine.step(tokens())
        again = engine.full_state_dict()
        is_same = again is None or (last is not None and all(torch.equal(x, last[name]) for name, x in again.items()))
        held = sorted({str(group.data.dtype) for group in engine.rank_model.groups})
        summed = sorted({str(group.grad.dtype) for group in engine.rank_model.groups})
        main_bytes = sum(group.main.nbytes for group in engine.rank_model.groups if group.main is not None)
        results.append((state, is_same, held, summed, main_bytes))
    return results


def verify_layouts(world: World, layouts: list[str]) -> list[Any]:
    subject = resolve(LLAMA)
    results = []
    for layout in layouts:
        plan, options = Plan(Layout.parse(layout), "llama", "1xcpu-2", 4), Options(optimizer={"name": "adamw", "clip": 1.0})
        result = verify_on_rank(world, plan, subject.make, subject.batch(4), subject.loss, options=options)
        results.append(None if result is None else (result.ok, result.first_difference))
    return results


def test_equals_a_serial_loop_of_the_same_precision_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    wide, narrow = torch.float32, torch.bfloat16
    expected = {
        f"data=2 microbatches=2 {MIXED}": train_serially(2, 2, wide),
        f"data=2 microbatches=2 zero=1 {MIXED}": train_serially(2, 2, wide),
        f"data=2 microbatches=2 zero=2 {MIXED}": train_serially(2, 2, wide, scatters_each=True),
        f"data=2 microbatches=2 zero=3 {MIXED}": train_serially(2, 2, wide, scatters_each=True),
        f"data=2 microbatches=2 gradients=bfloat16 {MIXED}": train_serially(2, 2, narrow),
        f"data=2 microbatches=2 zero=1 gradients=bfloat16 {MIXED}": train_serially(2, 2, narrow),
    }
    results, others = ranks(train_on_ranks, 2, list(expected), str(tmp_path))
    for layout, (state, is_same, held, summed, main_bytes), (*_, other_bytes) in zip(expected, results, others, strict=True):
        assert held == ["torch.bfloat16"], layout
        assert summed == ["torch.bfloat16" if "gradients" in layout else "torch.float32"], layout
        assert is_same, layout  # after a load, the next step is the same again
        assert {name: x.dtype for name, x in state.items()} == dict.fromkeys(expected[layout], torch.float32), layout
        for name, x in expected[layout].items():
            assert torch.equal(state[name], x), (layout, name)
        size = sum(x.nbytes for x in expected[layout].values())
        assert main_bytes + other_bytes <= (size + 64 if "zero" in layout else 2 * size), layout
    one, other = expected[f"data=2 microbatches=2 {MIXED}"], expected[f"data=2 microbatches=2 gradients=bfloat16 {MIXED}"]
    assert any(not torch.equal(x, other[name]) for name, x in one.items())  # the broken twin: sums of another dtype show


def test_axes_are_proven_against_the_serial_run_of_the_precision(ranks: Ranks) -> None:
    layouts = [f"tensor=2 sequence_parallel=on {MIXED}", f"context=2 {MIXED}", f"data=2 zero=2 gradients=bfloat16 {MIXED}"]
    for layout, result in zip(layouts, ranks(verify_layouts, 2, layouts)[0], strict=True):
        assert result == (True, None), layout


def test_what_does_not_go_with_it_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"offload=optimizer with precision=bfloat16-mixed.*use offload=none"):
        Layout.parse(f"offload=optimizer {MIXED}")
    with pytest.raises(Infeasible, match=r"the optimizer is the user's.*use precision=bfloat16, or shardwise.parallelize"):
        shardwise.auto_parallelize(nn.Linear(4, 4), torch.randn(2, 4), plan=MIXED)
    with pytest.raises(LayoutError, match=r"gradients=bfloat16.*use precision=bfloat16-mixed, or gradients=float32"):
        Layout.parse("gradients=bfloat16")
