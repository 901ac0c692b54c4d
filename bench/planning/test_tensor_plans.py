"""Where shardwise cuts weights, against the tensor plans that transformers ships with its configuration classes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench.common.tiny_models import planned
from bench.planning.tensor_plans import compare, library_cuts, run

SAMPLE = ("llama", "gemma2", "exaone4", "granite", "phi3")
NOT_COMPARED = 24  # classes whose model is not text alone, cannot be captured, or has no code beside it


@pytest.mark.parametrize("name", SAMPLE)
def test_cuts_are_the_librarys_or_cheaper(name: str) -> None:
    row = compare(name, planned(name)[name])
    assert row.compared >= 9
    assert row.status in ("equal", "cheaper"), row


def test_all_plans_that_the_library_ships() -> None:
    rows = list(run())
    assert [row for row in rows if row.status == "dearer"] == []
    assert sum(row.status == "not compared" for row in rows) <= NOT_COMPARED
    assert len(rows) >= 132


def test_layers_that_are_applied_again_are_searched_more_widely() -> None:
    """Two stacks that take turns, five times: their weights' forms are all in the frontier at once."""
    row = compare("hrm_text", planned("hrm_text")["hrm_text"])
    assert row.status in ("equal", "cheaper"), row
    assert row.compared >= 28


def test_a_plan_that_says_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round: outputs where the library cuts inputs."""
    cls = planned("llama")["llama"]
    turned = {name: {"colwise": "rowwise", "rowwise": "colwise"}[word] for name, word in cls.base_model_tp_plan.items()}
    monkeypatch.setattr(cls, "base_model_tp_plan", turned)
    row = compare("llama", cls)
    assert row.status == "cheaper"
    assert len(row.differ) >= 7
    assert row.sent_bytes[0] < row.sent_bytes[1]
    assert row.predicted_s[0] < row.predicted_s[1]


def test_words_of_the_library() -> None:
    config = SimpleNamespace(
        base_model_tp_plan={"layers.*.up": "colwise", "layers.*.down": "rowwise", "layers.*.experts": "moe_tp_experts"}
    )
    kind = SimpleNamespace(base_model_prefix="model", _tp_plan={"head": "colwise_gather_output"})
    names = ("layers.0.up.weight", "layers.10.up.bias", "layers.0.down.weight", "layers.0.down.bias", "layers.0.experts.up", "head.weight")
    found = library_cuts(object(), config, kind, names)
    assert {name: dim for name, (_, dim) in found.items()} == {
        "layers.0.up.weight": 0, "layers.10.up.bias": 0, "layers.0.down.weight": 1, "layers.0.down.bias": None, "head.weight": 0,
    }  # fmt: skip
