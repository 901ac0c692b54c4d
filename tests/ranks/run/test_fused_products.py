"""Products fused with tensor collectives over symmetric memory, by torch's own fallbacks over gloo, equal the serial model in float64.

A GPU's operators are not run here; which of the two ways is taken, that all ranks take the same, and the numbers of both directions are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.capture.capture import call_with_loss
from shardwise.run.step import executors
from shardwise.world import fused_products, symmetric_memory
from shardwise.world.fused_products import agree_on_fused_products
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

MODEL = "llama:vocabulary=60,sequence={},hidden=64,layers=1,heads=4,kv_heads=2,inner=96"
FORWARD, BACKWARD = "gather_and_multiply", "multiply_and_scatter"
# Calls of each operator in two steps. Two sites: the feed-forward of the layer, and the head, which is outside of the layer and not
# recomputed. The first layer's attention reads the embedding whole: nothing is gathered for it.
CASES = [  # sequence, layout, calls
    (256, "tensor=2 sequence_parallel=on precision=float64", {FORWARD: 4, BACKWARD: 4}),
    (256, "tensor=2 sequence_parallel=on precision=float64 recompute=full", {FORWARD: 6, BACKWARD: 4}),
    (255, "tensor=2 sequence_parallel=on precision=float64", {}),  # uneven pieces: plain collectives
]


def _count_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    calls: Counter[str] = Counter()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            calls[name] += 1
            return call(*args)

        return run

    for name in (FORWARD, BACKWARD):
        monkeypatch.setattr(symmetric_memory, name, counted(name, getattr(symmetric_memory, name)))
    return calls


def _serial_state(sequence: int, steps: int) -> dict[str, Tensor]:
    spec = resolve(MODEL.format(sequence))
    torch.manual_seed(0)
    model, batch = spec.make(), spec.batch(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        call_with_loss(model, batch, spec.loss).backward()
        optimizer.step()
    return {name: x.detach() for name, x in model.named_parameters()}


def _difference(world: World, sequence: int, layout: str) -> float:
    """Largest difference of a weight from the serial model's, after two steps; 0 on ranks that have no whole state."""
    spec = resolve(MODEL.format(sequence))
    batch = spec.batch(2)
    engine = shardwise.parallelize(spec.make, batch, loss=spec.loss, plan=layout, seed=0, world=world, optimizer={"name": "sgd", "lr": 0.1})
    assert engine.collectives_beside_products == ""
    for _ in range(2):
        engine.step(batch)
    state = engine.full_state_dict()
    serial = _serial_state(sequence, 2)
    return 0.0 if state is None else max(float((state[name] - x).abs().max()) for name, x in serial.items())


def _steps(world: World) -> list[tuple[float, dict[str, int]]]:
    torch.set_default_dtype(torch.float64)
    found: list[tuple[float, dict[str, int]]] = []
    with pytest.MonkeyPatch.context() as patch, symmetric_memory.run_fallbacks():
        patch.setattr(executors, "keeps_pieces", lambda device: True)
        patch.setattr(executors, "agree_on_fused_products", partial(agree_on_fused_products, probe=lambda world, groups: ""))
        for sequence, layout, _ in CASES:
            calls = _count_calls(patch)
            difference = _difference(world, sequence, layout)
            trials = {FORWARD: 1, BACKWARD: 1}
            found.append((difference, {name: n for name in calls if (n := calls[name] - trials[name])}))
        scattered = symmetric_memory.multiply_and_scatter
        patch.setattr(fused_products, "_trial_is_exact", lambda *args: True)  # a broken operator that no trial finds
        patch.setattr(symmetric_memory, "multiply_and_scatter", lambda *args: 1.001 * scattered(*args))
        found.append((_difference(world, *CASES[0][:2]), {}))
    return found


def test_steps_with_fused_products_equal_serial(ranks: Callable[..., list[Any]]) -> None:
    of_ranks = ranks(_steps, 2)
    for *cases, _ in of_ranks:
        for (difference, calls), case in zip(cases, CASES, strict=True):
            assert difference < 1e-9, case
            assert calls == case[2], case
    assert max(of_rank[-1][0] for of_rank in of_ranks) > 1e-9


def _agreements(world: World) -> list[str]:
    def agree(own: str = "") -> str:
        return agree_on_fused_products(world, [world.world_group], lambda world, groups: own if world.rank == 1 else "")

    found = [agree_on_fused_products(world, [world.world_group])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(fused_products.ASKED, "on")
        found += [agree_on_fused_products(world, [world.world_group]), agree("no memory"), agree()]
    with pytest.MonkeyPatch.context() as patch, symmetric_memory.run_fallbacks():
        if world.rank == 1:
            real = symmetric_memory.gather_and_multiply
            patch.setattr(symmetric_memory, "gather_and_multiply", lambda *args: [2 * x for x in real(*args)])
        found.append(agree())
    assert world.world_group.fused_name == ""
    with symmetric_memory.run_fallbacks():
        found.append(agree())
    assert world.world_group.fused_name
    return found


def test_all_ranks_take_the_same_way_for_a_reason_of_any(ranks: Callable[..., list[Any]]) -> None:
    first, second = ranks(_agreements, 2)
    assert first == second
    unasked, device, told, no_kernel, wrong, none = first
    assert unasked.startswith("rank 0: SHARDWISE_SYMMETRIC_MEMORY=on does not ask for them")
    assert device == "rank 0: its device is cpu, not a GPU"
    assert told == "rank 1: no memory"
    assert "rank 0: a trial of torch's fused products failed: " in no_kernel
    assert wrong == "rank 1: a trial of torch's fused products gave other numbers than plain collectives"
    assert none == ""
