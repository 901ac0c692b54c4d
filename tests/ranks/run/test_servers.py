"""Servers that hold the weights, against a loop of plain torch and closed forms: numbers, waiting, bytes, memory, checkpoints."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_stale import STEPS, _batch, _bounded, _engine, _late, _loss, _make, _off, _rate, _resumed, _trained
from torch import nn

import shardwise
from shardwise.plan.layout import Layout
from shardwise.run.gradients.parameter_servers import ParameterServers
from shardwise.run.verify.verify import Options, verify_on_rank
from shardwise.world.comm.group import Group
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

CASES = [(0, "adamw"), (1, "sgd"), (2, "adamw")]


def _each(world: World, layout: str) -> list[Any]:
    return [_trained(world, f"{layout} staleness={staleness}", name) for staleness, name in CASES]


@pytest.mark.parametrize("layout", ["data=2 servers=1", "data=3 servers=2 microbatches=2"])
def test_it_is_the_loop_of_one_process(ranks: Callable[..., list[Any]], layout: str) -> None:
    """At once and late; momentum, clipping, rates and AdamW's count of steps go with the step whose gradients they are."""
    found = ranks(_each, Layout.parse(layout).num_ranks, layout)
    for (staleness, name), each in zip(CASES, zip(*found, strict=True), strict=True):
        assert _off(list(each), _late(name, staleness)) < 1e-9, (staleness, name)
        assert all(losses == each[0][0] for losses, _ in each)


def _besides(world: World) -> list[Any]:
    return [
        _trained(world, "data=2 servers=2 staleness=1 recompute=full", "sgd"),
        _trained(world, "data=2 servers=1 offload=activations", "sgd"),
        _trained(world, "data=2 servers=2 staleness=2", "sgd", branching=True),
    ]


def test_it_goes_with_what_a_layout_may_have_besides(ranks: Callable[..., list[Any]]) -> None:
    for staleness, each in zip((1, 0, 2), zip(*ranks(_besides, 2), strict=True), strict=True):
        assert _off(list(each), _late("sgd", staleness)) < 1e-9


@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
def test_every_transport_does(ranks: Callable[..., list[Any]], transport: str) -> None:
    found = ranks(_trained, 2, "data=2 servers=2 staleness=1", "adamw", env={"SHARDWISE_TRANSPORT": transport})
    assert _off(found, _late("adamw", 1)) < 1e-9


def _verified(world: World, layout: str, spoil: str) -> Any:
    if spoil == "sum":  # the twin whose server takes its own gradients only
        ParameterServers._reduce_on_server = lambda self, tag, own: _taken(self, tag, own)  # type: ignore[method-assign]
    elif spoil == "early":
        real = ParameterServers._advance_to
        ParameterServers._advance_to = lambda self, version: real(self, min(version + 1, self._pushed))  # type: ignore[method-assign]
    plan = shardwise.plan(_make(), _batch(0), loss=_loss, layout=f"{layout} precision=float64")
    sabotage = {"0.weight": 1.001} if spoil == "gradient" else None
    options = Options(optimizer={"name": "adamw", "clip": 0.1}, sabotage=sabotage)
    found = verify_on_rank(world, plan, _make, _batch(0), _loss, options=options)
    return None if found is None else (found.ok, str(found))


def _taken(self: ParameterServers, tag: int, own: torch.Tensor) -> None:
    lane = self._state.links[self._server_index]
    for work in [lane.irecv(torch.empty_like(own), rank, tag) for rank in self._other_ranks]:
        work.wait()


@pytest.mark.parametrize("layout", ["data=3 servers=1", "data=3 servers=2 staleness=2"])
def test_verification_proves_it(ranks: Callable[..., list[Any]], layout: str) -> None:
    ok, said = ranks(_verified, 3, layout, "")[0]
    assert ok, said


def _of_several_ranks(layout: str) -> Any:
    """A model with tied weights, on the first and the last stage, and norms that tensor ranks have whole; gradients clipped."""
    model, clipped = resolve("gpt-tiny:layers=2"), {"name": "adamw", "clip": 0.1}
    return shardwise.verify(model.make, layout, model.batch(4), loss=model.loss, cut_everything=True, optimizer=clipped)


@pytest.mark.parametrize(
    "layout",
    [
        "data=2 servers=1 tensor=2 sequence_parallel=on",
        "data=2 servers=2 pipeline=2 microbatches=2",
        "data=2 servers=1 tensor=2 pipeline=2 microbatches=2 staleness=1",
        "data=2 tensor=2 pipeline=2 microbatches=2 staleness=1",
    ],
)
def test_replicas_of_several_ranks_are_served_each_rank_what_it_holds(layout: str) -> None:
    found = _of_several_ranks(layout)
    assert found.ok, found
    assert found.tolerance == 1e-9


def test_broken_twin_summands_inside_of_a_replica_that_are_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParameterServers, "_reduce_in_replica", lambda self, over, whole: None)
    assert "gradients of tokens.weight" in str(_of_several_ranks("data=2 servers=1 pipeline=2 microbatches=2").first_difference)


@pytest.mark.parametrize(("spoil", "names"), [("sum", "gradients"), ("early", ""), ("gradient", "gradients of 0.weight")])
def test_verification_finds_what_is_wrong(ranks: Callable[..., list[Any]], spoil: str, names: str) -> None:
    ok, said = ranks(_verified, 2, "data=2 servers=1 staleness=1", spoil)[0]
    assert not ok
    assert names in said


class Parabola(nn.Module):
    """Half the curvature times the square of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (0.5 * CURVATURE * nn.functional.linear(x, self.weight).square()).mean()


CURVATURE, RATE = 2.0, 0.1


def _on_parabola(world: World, staleness: int) -> list[float]:
    batch = (torch.ones(4, 1, dtype=torch.float64),)
    plan = f"data=2 servers=1 staleness={staleness} precision=float64"
    engine = shardwise.parallelize(Parabola, batch, plan=plan, seed=0, world=world, optimizer={"name": "sgd", "lr": RATE})
    return [engine.step(batch).loss for _ in range(12)]


def _closed_form(step: int, staleness: int) -> float:
    """The weight of a step. At once (1 - a)^t. With K = 1 v(t+1) = v(t) - a v(t-1) from v(0) = 1, v(1) = 1 - a, by the roots of
    r^2 - r + a, of which step t has v(t - 1)."""
    a = CURVATURE * RATE
    if not staleness:
        return (1 - a) ** step
    r, s = (0.5 * (1 + sign * (1 - 4 * a) ** 0.5) for sign in (1, -1))
    first = (1 - a - s) / (r - s)
    return 1.0 if not step else first * r ** (step - 1) + (1 - first) * s ** (step - 1)


@pytest.mark.parametrize("staleness", [0, 1])
def test_on_a_parabola_it_follows_the_closed_form(ranks: Callable[..., list[Any]], staleness: int) -> None:
    for losses in ranks(_on_parabola, 2, staleness):
        assert losses == pytest.approx([0.5 * CURVATURE * _closed_form(t, staleness) ** 2 for t in range(12)], rel=1e-9)


def test_nobody_waits_within_the_bound_and_nobody_passes_it(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Rank 0 serves: it may be ahead of rank 1 by so many steps, and sees it no further."""
    bounds = (0, 1, 3)
    for staleness in bounds:
        (tmp_path / str(staleness)).write_bytes(bytes(16))
    found = ranks(_bounded, 2, "auto servers=1", str(tmp_path))
    for staleness, first, second in zip(bounds, *found, strict=True):
        assert max(second) == staleness
        assert max(first) <= staleness


def _counted(world: World, layout: str) -> tuple[int, int]:
    """Bytes that this rank sends in a step by messages, and those of the weights."""
    engine = _engine(world, layout)
    engine.step(_batch(0))
    sent: Counter[int] = Counter()
    real = Group.isend

    def isend(self: Group, x: torch.Tensor, to_index: int, tag: int = 0) -> Any:
        sent[os.getpid()] += x.nbytes
        return real(self, x, to_index, tag)

    Group.isend = isend  # type: ignore[method-assign]
    engine.step(_batch(1))
    engine.drain()
    return sum(sent.values()), 8 * engine.num_parameters


@pytest.mark.parametrize("servers", [1, 2])
def test_bytes_are_those_of_the_formula(ranks: Callable[..., list[Any]], servers: int) -> None:
    """2 M (n - 1) in all; a server sends its part to n - 1, and the others' parts of its own gradients."""
    found = ranks(_counted, 3, f"data=3 servers={servers}")
    size = found[0][1]
    assert sum(sent for sent, _ in found) == pytest.approx(2 * size * 2, rel=0.01)
    serves = Layout.parse(f"data=3 servers={servers}").server_ranks
    for rank, (sent, _) in enumerate(found):
        want = 2 * size / servers + size * (servers - 1) / servers if rank in serves else size
        assert sent == pytest.approx(want, rel=0.01)


def test_a_run_that_saved_goes_on_as_one_that_resumes(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    losses, _ = _late("adamw", 1, drains=3)
    for before, straight, again in ranks(_resumed, 2, "data=2 servers=1 staleness=1", str(tmp_path)):
        assert straight == again
        assert [*before, *straight[:-1]] == pytest.approx(losses, rel=1e-9)


def _handed_over(world: World, folder: str) -> tuple[list[float], list[float]]:
    """Losses behind a checkpoint of servers, and of a layout without any that goes on from it."""
    first, second = _engine(world, "data=2 servers=1"), _engine(world, "data=2 zero=1")
    for step in range(3):
        first.step(_batch(step), lr=_rate(step))
    first.save(folder)
    second.load(folder)
    return tuple([one.step(_batch(step), lr=_rate(step)).loss for step in range(3, STEPS)] for one in (first, second))  # type: ignore[return-value]


def test_another_layout_goes_on_from_its_checkpoint(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    for mine, other in ranks(_handed_over, 2, str(tmp_path)):
        assert mine == pytest.approx(other, rel=1e-9)


def _held(world: World, layout: str) -> dict[str, float]:
    engine = _engine(world, layout)
    for step in range(3):
        engine.step(_batch(step))
    return engine.peak_memory_over_ranks()


@pytest.mark.parametrize("layout", ["data=2 servers=1", "data=3 servers=2 staleness=1"])
def test_memory_is_as_predicted(ranks: Callable[..., list[Any]], layout: str) -> None:
    held = ranks(_held, Layout.parse(layout).num_ranks, layout)[0]
    plan = shardwise.plan(_make(), _batch(0), loss=_loss, layout=f"{layout} precision=float64")
    assert plan.prediction is not None
    for part in ("parameters", "gradients", "optimizer"):
        assert held[part] == pytest.approx(getattr(plan.prediction.memory, part), rel=0.02), part
