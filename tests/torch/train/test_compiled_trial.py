"""Whether compiling pays, by the clock: start-up counted, and plans that cannot be compiled left as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import shardwise
from shardwise.errors import RunError
from shardwise.plan.layout import DEFAULTS, Layout
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import format_plan, parse_plan
from shardwise.train import trials
from shardwise.train.trials import choose_compilation


def _told(seconds: Callable[[Layout], list[float]]) -> type:
    """A launcher whose two ranks take the seconds that it is told, of which the first half as long."""

    class Told:
        def __init__(self, **_: Any) -> None:
            pass

        def __enter__(self) -> Told:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def launch(self, function: Any, num_ranks: int, text: str, *_: Any, **__: Any) -> list[list[float]]:
            took = seconds(parse_plan(text).layout)
            return [[0.5 * s for s in took], took]

    return Told


@pytest.fixture(scope="module")
def plan() -> Plan:
    return shardwise.plan("gpt-tiny", 8, cluster="1xcpu-2", layout="data=2")


@pytest.mark.parametrize(("steps", "wins"), [(60, False), (100, True)])
def test_it_is_taken_where_it_saves_more_than_it_takes(monkeypatch: pytest.MonkeyPatch, plan: Plan, steps: int, wins: bool) -> None:
    """A quarter of a second a step for 20 s at the start: from 80 steps on."""
    monkeypatch.setattr(trials, "Launcher", _told(lambda one: [20.75, 0.75, 0.75, 0.75] if one.compile == "on" else [1.0] * 4))
    found = choose_compilation(plan, steps)
    assert found.layout.compile == ("on" if wins else "off")
    said = dict(found.reasons)["compile"]
    assert ("saves 5.00 s" if wins else "costs 5.00 s") in said


def test_a_plan_that_does_not_compile_stays(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    def seconds(layout: Layout) -> list[float]:
        if layout.compile == "on":
            raise RunError("no C++ compiler")
        return [1.0] * 4

    monkeypatch.setattr(trials, "Launcher", _told(seconds))
    found = choose_compilation(plan, 1000)
    assert found.layout == plan.layout
    assert "compile=on does not run: no C++ compiler" in dict(found.reasons)["compile"]


def test_what_does_not_go_with_compiled_stages_is_not_tried(plan: Plan) -> None:
    whole = shardwise.plan("gpt-tiny", 8, cluster="1xcpu-2", layout="data=2 recompute=full")
    assert choose_compilation(whole, 1000) is whole


def test_a_plan_file_has_words_for_every_key() -> None:
    """A plan of a layout with any key set is written and read back."""
    for words in ("data=2 compile=on", "data=2 batch_norm=local", "data=2 servers=1 staleness=1", "data=2 precision=float8"):
        layout = Layout.parse(words)
        assert parse_plan(format_plan(Plan(layout, "m", "here", 4, ()))).layout == layout
    assert "compile" in DEFAULTS
