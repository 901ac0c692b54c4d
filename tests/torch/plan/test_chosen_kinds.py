"""Each way of splitting is chosen by the planner alone where the literature has it win, and is then predicted to be faster than without."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from shardwise.plan.layout import Layout

PATH = Path(__file__).resolve().parents[3] / "examples" / "chosen_kinds.py"


def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chosen_kinds", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["chosen_kinds"] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


EXAMPLE = _example()


@pytest.mark.parametrize("name", list(EXAMPLE.CASES))
def test_a_way_of_splitting_is_chosen_by_itself_where_it_wins(name: str) -> None:
    case = EXAMPLE.CASES[name]
    plan, other = EXAMPLE.planned(case), EXAMPLE.planned(case, case.without)
    assert getattr(plan.layout, case.key) != getattr(Layout(), case.key), plan.layout
    assert plan.prediction.step_time_s < other.prediction.step_time_s
    assert any(key == case.key for key, _ in plan.reasons)
    # What trains something else is in no plan unasked.
    assert (plan.layout.batch_norm, plan.layout.compress, plan.layout.staleness) == ("exact", "none", 0)
