"""Factor rules beside PyTorch's brute force: a sample of what `scripts/validate rules` runs, and a wrong rule that it must find."""

from __future__ import annotations

import warnings

import pytest
import torch

pytest.importorskip("torch.distributed.tensor._ops.strategy_validation", reason="this PyTorch has no brute force over cuts")
pytest.importorskip("expecttest", reason="PyTorch's samples need it")

from bench.verify.rules import compare, truth
from bench.verify.rules.__main__ import of_operator
from bench.verify.rules.compare import Finding
from shardwise.ops import Rule

SAMPLED = (
    "nn.functional.linear softmax sum cat nn.functional.layer_norm nn.functional.embedding bmm where std_mean narrow transpose gather "
    "nn.functional.cross_entropy nn.functional.conv2d tensor_split"
).split()


@pytest.mark.parametrize(("owner", "name"), truth.NAMES, ids=[name for _, name in truth.NAMES])
def test_the_names_are_where_they_were(owner: object, name: str) -> None:
    assert hasattr(owner, name), f"adapt bench/verify/rules/truth.py: {owner} has no {name}"


def sampled(names: list[str], most: int) -> list[Finding]:
    with warnings.catch_warnings():
        return [finding for name in names for _, finding in of_operator(name, most)]


def test_no_rule_of_a_sample_is_wrong() -> None:
    found = sampled(SAMPLED, 3)
    assert not [line for f in found for line in f.wrong]
    offering = {f.operator for f in found if f.offers}
    assert {"aten.linear.default", "aten.embedding.default", "aten.sum.default", "aten.cat.default"} <= offering


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax cut along itself: refused as shardwise runs it, and by torch."""

    def along(op: object, tensors: object) -> Rule:
        return Rule((("a", "b"),), (("a", "b"),))

    for place in ("shardwise.model.graph.rule_of", "bench.verify.rules.compare.rule_of"):
        monkeypatch.setattr(place, along)
    call = ("aten.softmax.int", (torch.randn(6, 4, dtype=torch.float64), 1), {})
    finding = compare.held_against_truth(call, enumerate_cuts=False)
    assert finding is not None
    assert any("cut by b" in line and "differs" in line for line in finding.wrong)
    assert any("cut by b" in line and "torch says" in line for line in finding.wrong)


def test_a_right_cut_that_no_rule_offers_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.verify.rules.compare.rule_of", lambda op, tensors: None)
    found = [f for f in sampled(["mm"], 1) if f.operator == "aten.mm.default"]
    assert {(("S0", "R"), ("S0",)), (("S1", "S0"), ("P",)), (("R", "S1"), ("S1",))} == {cut for f in found for cut in f.lacks}
