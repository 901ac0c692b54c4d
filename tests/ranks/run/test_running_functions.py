"""Functions with a backward of the user's own under every kind of axis, in float64 against plain PyTorch (`function_models.py`)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ranks")]

from test_awkward import check  # noqa: E402

from shardwise.ops import Rule  # noqa: E402
from tests.support.function_models import NAMES  # noqa: E402
from tests.support.verified_models import Subject  # noqa: E402

TWO = ("data=2", "tensor=2", "tensor=2 sequence_parallel=on", "pipeline=2", "data=2 zero=3")
ALL = ("data=2 microbatches=2 zero=1", "data=2 zero=2", "data=2 recompute=full", "pipeline=2 microbatches=4 schedule=zb-h1")


@pytest.mark.parametrize("name", NAMES)
def test_functions_of_users_are_what_they_are_in_one_process(name: str) -> None:
    subject = Subject(str(ROOT / f"tests/support/function_models.py:{name}"))
    assert not check(subject, (*TWO, *ALL) if name in ("all", "product", "distance", "two", "narrow", "held") else TWO)
    if name in ("all", "unbiased", "centered"):
        assert not check(subject, ("data=2 tensor=2", "data=2 pipeline=2 microbatches=2"))


def test_a_wrong_rule_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: a mean over samples, cut along samples, and nothing that tries it beforehand."""
    subject = Subject(str(ROOT / "tests/support/function_models.py:centered"))
    monkeypatch.setattr("shardwise.lower.operator_lowering.check_sharded_function", lambda *given: None)
    monkeypatch.setattr("shardwise.capture.autograd_functions.infer_factor_rule", lambda *given: Rule((("a", "b"),), (("a", "b"),)))
    assert "data=2" in check(subject, ("data=2",))
