"""Recurrent layers cut by hidden units: equal to the serial model in every composition, bytes by count, a broken twin."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import shardwise
from shardwise.capture.capture import capture
from shardwise.lower.kernels import recurrent
from shardwise.model.sharding.propagate import propagate
from shardwise.model.sharding.sharding import FREE_LINKS
from shardwise.plan.layout import Layout
from shardwise.run.engine import Engine
from shardwise.run.verify.verify import Verification
from shardwise.world.comm.group import Group
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve
from tests.support.traced import of

MODELS = "tests/support/recurrent_models.py"
PATH = Path(__file__).parents[2].joinpath("support", "recurrent_models.py")


def verified(name: str, layout: str) -> Verification:
    model = resolve(f"{PATH}:{name}")
    return shardwise.verify(model.make, layout, model.batch(model.default_batch), loss=model.loss, cut_everything=True)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("lstm", "tensor=2"),
        ("lstm", "tensor=4 microbatches=2 recompute=full"),
        ("lstm", "tensor=2 sequence_parallel=on pipeline=2 microbatches=2"),
        ("lstm_both", "data=2 tensor=2 zero=3"),
        ("gru", "tensor=3"),
        ("rnn", "tensor=2 zero=1"),
        ("cells", "tensor=2"),
    ],
)
def test_a_layout_that_cuts_hidden_units_equals_serial(name: str, layout: str) -> None:
    found = verified(name, layout)
    assert found.ok, found
    assert found.divided["tensor"] == {"parameters": 1.0, "flops": 1.0} or "tensor=2" not in layout or "pipeline" in layout, found.divided


def test_projected_states_are_whole_and_equal() -> None:
    found = verified("projected", "tensor=2")
    assert found.ok, found
    assert 0 < found.divided["tensor"]["parameters"] < 0.9


@pytest.mark.parametrize(("name", "label"), [("lstm", "h"), ("dropping", ""), ("projected", "")])
def test_what_draws_inside_is_whole(name: str, label: str) -> None:
    model = resolve(f"{PATH}:{name}")
    graph = capture(model.make(), model.batch(model.default_batch), model.loss).graph
    found = propagate(graph, {"tensor": 2}, prices=FREE_LINKS)
    assert [found.labels[op.name]["tensor"] for op in graph.operators if "lstm" in op.target] == [label]


def sent(world: World) -> dict[str, int]:
    """Elements that this rank hands to collectives in forward and backward."""
    subject, found = of(f"{MODELS}:lstm_both", 4), Counter[str]()
    plan = replace(subject.plan(Layout.parse("tensor=2 precision=float64")), shards=())
    engine = Engine(plan, replace(subject.source, prices=FREE_LINKS), subject.batch, subject.loss, world, seed=0)
    rights = {name: getattr(Group, name) for name in ("all_gather", "reduce_scatter")}

    def counting(name: str) -> Any:
        def call(self: Group, x: Tensor, *rest: Any) -> Tensor:
            found[f"{name} of {x.dim()}"] += x.numel()
            made: Tensor = rights[name](self, x, *rest)
            return made

        return call

    for name in rights:
        setattr(Group, name, counting(name))
    try:
        engine.forward_backward(subject.batch)
    finally:
        for name, right in rights.items():
            setattr(Group, name, right)
    return dict(found)


def test_a_step_gathers_its_hidden_state_and_nothing_else_moves() -> None:
    """Two layers in two directions over five steps of 4 samples: 12 units, in pieces of 6."""
    found = launch(sent, 2, timeout_s=120, show=False)[0]
    # The second layer hands on pieces, so that nobody reads its last state whole; states that begin have no gradient.
    assert found["all_gather of 2"] == 2 * ((5 + 1) + 5) * 4 * 6
    assert found["reduce_scatter of 2"] == 2 * (5 + 4) * 4 * 12
    assert (found["all_gather of 3"], found["reduce_scatter of 3"]) == (4 * 5 * 20, 4 * 5 * 40)  # of the logits


def test_gates_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: a rank that forgets the state it was given."""
    right = recurrent.STEPS["lstm"]
    monkeypatch.setitem(recurrent.STEPS, "lstm", lambda x, h, states: right(x, h, (states[0], states[1] * 0.5)))
    assert not verified("lstm", "tensor=2").ok
