"""ZeRO-2 and 3: what a rank keeps, when weights are whole, what is sent, counted; and that nothing but that changes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.run.engine import Engine
from shardwise.run.gradients.gradient_reducer import GradientScatterer
from shardwise.run.residency.weight_gatherer import WeightGatherer
from shardwise.run.verify.verify import Options, verify_on_rank
from shardwise.schedules.lower import gather_weights, reduce_gradients
from shardwise.world.world import Group, World
from tests.support.equal_layers import DEPTH, LAYER, Deep, deep_batch, deep_loss


def _engine(world: World, layout: str) -> Any:
    return shardwise.parallelize(
        Deep, deep_batch(), loss=deep_loss, plan=f"{layout} precision=float64", seed=0, world=world, optimizer={"clip": 0.1}
    )


def _step(world: World, layout: str) -> dict[str, Any]:
    """What one step sends by collective, the most weights that were whole, and what is kept after it, in bytes."""
    sent: Counter[str] = Counter()
    for name, counted in (("all_reduce", 0), ("reduce_scatter_into", 1), ("all_gather_into", 0)):
        real = getattr(Group, name)

        def wrapped(self: Group, *args: Any, real: Any = real, name: str = name, counted: int = counted, **kwargs: Any) -> Any:
            sent[name] += args[counted].nbytes
            return real(self, *args, **kwargs)

        setattr(Group, name, wrapped)
    engine = _engine(world, layout)
    sent.clear()  # building agrees on who has the same weights
    most = [0]
    enter = WeightGatherer.enter_layer

    def entering(self: WeightGatherer, *args: Any) -> None:
        enter(self, *args)
        most[0] = max(most[0], self.gathered_bytes)

    WeightGatherer.enter_layer = entering  # type: ignore[method-assign]
    engine.step(deep_batch())
    before = dict(sent)
    sent.clear()
    engine.step(deep_batch())
    groups = engine.rank_model.groups
    kept = {
        "data": sum(g.data.untyped_storage().nbytes() for g in groups),
        "grad": sum(g.grad.untyped_storage().nbytes() for g in groups),
        "whole": engine._weight_gatherer.gathered_bytes,
        "parameters": sum(
            {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in engine.rank_model.parameters.values()}.values()
        ),
    }
    return {"first": before, "sent": dict(sent), "most_whole": most[0], **kept}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_is_kept_and_what_is_sent(ranks: Callable[..., list[Any]], microbatches: int) -> None:
    """Rajbhandari et al. 2020, section 7: stage 2 sends 2Φ as data parallelism does (here for each microbatch), stage 3 sends 3Φ."""
    size, piece = 8 * LAYER * DEPTH, 8 * math.ceil(LAYER / 2) * DEPTH
    for zero in (1, 2, 3):
        for found in ranks(_step, 2, f"data=2 zero={zero} microbatches={microbatches}"):
            assert found["first"] == found["sent"]
            assert found["data"] == (piece if zero == 3 else size)
            if zero > 1:
                assert found["grad"] == piece
            assert found["whole"] == 0
            assert found["parameters"] == (0 if zero == 3 else size)
            scattered = size * (microbatches if zero > 1 else 1)
            gathered = size * 2 * microbatches if zero == 3 else size
            assert (found["sent"]["reduce_scatter_into"], found["sent"]["all_gather_into"]) == (scattered, gathered)
            assert found["most_whole"] == (2 * 8 * LAYER if zero == 3 else 0)


def _trained(world: World, layout: str, folder: str, steps: int, save: bool) -> Any:
    engine = _engine(world, layout)
    if not save:
        engine.load(folder)
    for _ in range(steps):
        engine.step(deep_batch())
    if save:
        engine.save(folder)
    return engine.full_state_dict()


@pytest.mark.parametrize(
    ("written", "read"), [("data=2 zero=3", "data=1"), ("data=1", "data=2 zero=3"), ("data=2 zero=2", "data=2 zero=3")]
)
def test_checkpoints_of_pieces_are_those_of_any_layout(ranks: Callable[..., list[Any]], tmp_path: Path, written: str, read: str) -> None:
    numbers = [2 if "data=2" in layout else 1 for layout in (written, read)]
    ranks(_trained, numbers[0], written, str(tmp_path), 2, True)
    went_on = ranks(_trained, numbers[1], read, str(tmp_path), 2, False)[0]
    whole = ranks(_trained, 1, "data=1", str(tmp_path / "other"), 4, True)[0]
    assert max(float((went_on[name] - whole[name]).abs().max()) for name in whole) < 1e-12


def _spoiled(world: World, kind: str) -> Any:
    if kind == "stale":  # weights that are never gathered anew

        def kept(self: WeightGatherer, unit: Any, user: object = None) -> None:
            return None

        WeightGatherer.leave_layer = kept  # type: ignore[method-assign]
    if kind == "lost":  # the second microbatch's gradients are dropped
        scatter, seen = GradientScatterer._scatter, Counter[int]()

        def once(self: GradientScatterer, number: int) -> None:
            seen[number] += 1
            if seen[number] % 2:
                scatter(self, number)
            else:
                self._open.pop(number)

        GradientScatterer._scatter = once  # type: ignore[method-assign]
    layout = "data=2 zero=3 microbatches=2 precision=float64"
    plan = shardwise.plan(Deep, deep_batch(), loss=deep_loss, cluster="1xcpu-2", layout=layout)
    found = verify_on_rank(world, plan, Deep, deep_batch(), deep_loss)
    return None if found is None else found.ok


@pytest.mark.parametrize(("kind", "ok"), [("", True), ("stale", False), ("lost", False)])
def test_broken_twins_are_found(ranks: Callable[..., list[Any]], kind: str, ok: bool) -> None:
    assert ranks(_spoiled, 2, kind)[0] is ok


def _reads(world: World) -> str:
    try:
        _ = _engine(world, "data=2 zero=3").parameters
    except shardwise.errors.UsageError as error:
        return str(error)
    return ""


def test_weights_that_are_not_whole_are_not_handed_out(ranks: Callable[..., list[Any]]) -> None:
    assert "full_state_dict" in ranks(_reads, 2)[0]


def _by_program(world: World, layout: str, how: str) -> Any:
    """Verify a plan whose program says when weights are gathered and gradients reduced; also the bytes that one step scatters."""
    plan = shardwise.plan(Deep, deep_batch(), loss=deep_loss, cluster="1xcpu-2", layout=f"{layout} precision=float64")
    parts = Engine(plan, Deep, deep_batch(), deep_loss, world, seed=0).rank_model
    bare, size = parts.program, 8 * sum(spec.size for spec in parts.local_parameters.values())
    program = {
        "gather": lambda: gather_weights(bare),
        "reduce": lambda: reduce_gradients(bare),
        "reduce all": lambda: reduce_gradients(bare, every_microbatch=True),
    }[how]()
    real, sent = Group.reduce_scatter_into, [0]

    def counted(self: Group, out: torch.Tensor, x: torch.Tensor, wait: bool = True) -> Any:
        sent[0] += x.nbytes
        return real(self, out, x, wait)

    Group.reduce_scatter_into = counted  # type: ignore[method-assign]
    own = replace(plan, layout=plan.layout.with_schedule("own.txt", str(program)))
    found = verify_on_rank(world, own, Deep, deep_batch(), deep_loss, options=Options(steps=1))
    return None if found is None else [found.ok, str(found), sent[0] / size]


@pytest.mark.parametrize(
    ("layout", "how", "times"),
    [
        ("data=2 pipeline=2 microbatches=2 zero=3", "gather", 2),
        ("data=2 chunks=2 schedule=interleaved microbatches=2 zero=3", "gather", 2),
        ("data=2 pipeline=2 microbatches=4 zero=2", "reduce", 1),
        ("data=2 pipeline=2 microbatches=4 zero=2", "reduce all", 4),
    ],
)
def test_a_program_says_when(ranks: Callable[..., list[Any]], layout: str, how: str, times: int) -> None:
    """Rank 0 scatters its stages' gradients as often as its program reduces them."""
    pipeline = 2 if "pipeline" in layout else 1
    ok, told, sent = ranks(_by_program, 2 * pipeline, layout, how)[0]
    assert ok, told
    assert sent == times
