"""Gradients of a layout with branches are reduced after backward, and priced so."""

from __future__ import annotations

import pytest

import shardwise
from shardwise.cost.devices.gpus import Gpus


def _step_s(layout: str) -> float:
    plan = shardwise.plan("inception", 64, cluster="2xdgx-h100", layout=layout)
    assert plan.prediction is not None
    return plan.prediction.step_time_s


def test_nothing_of_a_reduction_is_hidden_with_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = "data=8 branch=2", "data=16"
    hidden = [_step_s(layout) for layout in layouts]
    monkeypatch.setattr(Gpus, "overlap", lambda self, layout: 0.0)
    branched, plain = (_step_s(layout) for layout in layouts)
    assert hidden[0] == branched
    assert hidden[1] < plain  # a twin: a layout whose reductions overlap
