"""precision=bfloat16-mixed: 16-bit weights with float32 main weights in the optimizer, bit for bit as a serial loop of that precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.errors import Infeasible, LayoutError, RankError
from shardwise.lower.lowering import Lowering
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import format_plan, parse_plan
from shardwise.run.engine import Engine
from shardwise.run.verify.verify import Options, verify_on_rank
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

Ranks = Callable[..., list[Any]]
STEPS, SAMPLES = 3, 8
OPTIMIZER = {"name": "adamw", "lr": 1e-2}
MIXED = "precision=bfloat16-mixed"
BRANCHES = Path(__file__).parents[2].joinpath("support", "branch_models.py")
LLAMA = "llama:vocabulary=64,sequence=16,hidden=32,layers=2,heads=4,kv_heads=2,inner=64"


class Network(nn.Module):
    """An embedding, a norm and linear layers. The loss is a sum, so that microbatches and replicas scale nothing.

    Parameters have multiples of eight elements: torch's fused AdamW rounds the last ones of a tensor, fewer than a vector, otherwise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.one, self.two = nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 8)

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


def plan_of(layout: str) -> str:
    """The text of a plan of the network for a layout. Two stages meet at the norm, whose dtype is that of what it is sent."""
    asked = Layout.parse(layout)
    single = replace(asked, precision="float32", gradients="float32")
    plan = shardwise.plan(Network, tokens(), cluster="1xcpu-2", layout=single)
    return format_plan(replace(plan, layout=asked, stages=("norm/layer_norm",) if asked.num_stages == 2 else plan.stages))


def train_on_ranks(world: World, plans: list[str], folder: str) -> list[Any]:
    """Main weights, dtypes of held weights and gradients, and bytes of the optimizer, by layout."""
    results = []
    for number, plan in enumerate(plans):
        engine = Engine(parse_plan(plan), Network, tokens(), None, world, OPTIMIZER, seed=0)
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
        f"data=2 microbatches=2 zero=2 scatter=last {MIXED}": train_serially(2, 2, wide),
        f"data=2 microbatches=2 zero=3 scatter=last {MIXED}": train_serially(2, 2, wide),
        f"data=2 microbatches=2 gradients=bfloat16 {MIXED}": train_serially(2, 2, narrow),
        f"data=2 microbatches=2 zero=1 gradients=bfloat16 {MIXED}": train_serially(2, 2, narrow),
    }
    results, others = ranks(train_on_ranks, 2, [plan_of(layout) for layout in expected], str(tmp_path))
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


def test_pipelines_and_offload_equal_it_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    """Two microbatches add up alike in any order of backward; 1f1b has that of the serial loop with any number of them."""
    whole = train_serially(1, 2, torch.float32)
    schedules = ("1f1b", "gpipe", "zb-h1", "zb-v", "chimera", "interleaved chunks=2")
    expected = {
        **{f"pipeline=2 microbatches=2 schedule={name}": whole for name in schedules},
        "pipeline=2 microbatches=4": train_serially(1, 4, torch.float32),
        "pipeline=2 microbatches=2 recompute=full offload=all": whole,
        "pipeline=2 microbatches=2 gradients=bfloat16": train_serially(1, 2, torch.bfloat16),
        "data=2 microbatches=2 zero=1 offload=optimizer": train_serially(2, 2, torch.float32),
        "data=2 microbatches=2 zero=3 offload=all": train_serially(2, 2, torch.float32, scatters_each=True),
    }
    plans = [plan_of(f"{layout} {MIXED}") for layout in expected]
    for layout, (state, is_same, held, *_) in zip(expected, ranks(train_on_ranks, 2, plans, str(tmp_path))[0], strict=True):
        assert (is_same, held) == (True, ["torch.bfloat16"]), layout
        for name, x in expected[layout].items():
            assert torch.equal(state[name], x), (layout, name)


def train_with_wide_messages(world: World, plan: str, folder: str) -> Any:
    """The broken twin: activations are sent between stages as traced, in float32."""
    Lowering.dtype = lambda self, value: getattr(torch, self.graph.tensors[value].dtype)  # type: ignore[method-assign]
    return train_on_ranks(world, [plan], folder)[0][0]


def test_a_message_in_float32_would_be_read_by_another_norm(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="mixed dtype"):
        ranks(train_with_wide_messages, 2, plan_of(f"pipeline=2 microbatches=2 {MIXED}"), str(tmp_path))


def train_plain_loops(world: World, layouts: list[str]) -> list[Any]:
    """Weights after a loop of the user's own, by layout."""
    states = []
    for layout in layouts:
        torch.manual_seed(0)
        net = shardwise.auto_parallelize(Network(), tokens(), plan=f"{layout} {MIXED}", world=world)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
        for _ in range(STEPS):
            (rows,) = shardwise.shard([tokens()])
            optimizer.zero_grad()
            net(rows).backward()
            optimizer.step()
        assert {p.dtype for p in net.parameters()} == {torch.float32}
        states.append(shardwise.full_state_dict(net))
    return states


def test_a_plain_loop_reads_16_bit_weights_and_updates_its_own(ranks: Ranks) -> None:
    by_samples, whole = train_serially(2, 1, torch.float32), train_serially(1, 1, torch.float32)
    expected = {"data=2": by_samples, "data=2 zero=1": by_samples, "data=2 zero=3": by_samples, "tensor=2": whole}
    for layout, state in zip(expected, ranks(train_plain_loops, 2, list(expected))[0], strict=True):
        for name, x in expected[layout].items():
            assert torch.equal(state[name], x), (layout, name)


def test_axes_are_proven_against_the_serial_run_of_the_precision(ranks: Ranks) -> None:
    layouts = [f"tensor=2 sequence_parallel=on {MIXED}", f"context=2 {MIXED}", f"data=2 zero=2 gradients=bfloat16 {MIXED}"]
    for layout, result in zip(layouts, ranks(verify_layouts, 2, layouts)[0], strict=True):
        assert result == (True, None), layout


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("moe-tiny", "data=2 expert=2 zero=1"),
        ("gpt-tiny", "pipeline=2 inner=2x1/1x1 microbatches=2"),
        (f"{BRANCHES}:branched", "branch=2"),
        ("gpt-tiny", "data=2 staleness=1"),
        pytest.param("gpt-tiny", "compile=on", marks=pytest.mark.long),
    ],
)
def test_other_axes_are_within_the_noise_of_the_precision(model: str, layout: str) -> None:
    subject = resolve(model)
    found = shardwise.verify(subject.make, f"{layout} {MIXED}", subject.batch(8), loss=subject.loss)
    assert found.ok, found.first_difference


def test_what_does_not_go_with_it_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"servers=1 with precision=bfloat16-mixed.*use servers=0, or precision=bfloat16"):
        Layout.parse(f"data=2 servers=1 {MIXED}")
    with pytest.raises(Infeasible, match=r"the optimizer is the user's.*leave gradients out, or use shardwise.parallelize"):
        shardwise.auto_parallelize(nn.Linear(4, 4), torch.randn(2, 4), plan=f"gradients=bfloat16 {MIXED}")
    with pytest.raises(LayoutError, match=r"gradients=bfloat16.*use precision=bfloat16-mixed.*, or gradients=float32"):
        Layout.parse("gradients=bfloat16")
