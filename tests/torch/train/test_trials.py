"""Plans tried by the clock: which are tried, which is taken, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import shardwise
from shardwise import api
from shardwise.cli import run
from shardwise.errors import ConfigError, Infeasible, RunError, UsageError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import LayoutCandidate, MemoryBreakdown, Plan, Prediction
from shardwise.train import trials
from shardwise.train.config import TrainingConfig
from shardwise.train.trials import PlanTrial, fastest_plan, num_steps, num_worthwhile_trials, select_distinct_candidates


def candidate(layout: str, seconds: float, note: str = "") -> LayoutCandidate:
    return LayoutCandidate(Layout.parse(layout), Prediction(seconds, 0.1, 1e9, MemoryBreakdown()), note)


def plan(layout: str, seconds: float = 1.0) -> Plan:
    one = candidate(layout, seconds)
    return Plan(one.layout, "gpt-tiny", "here", 8, prediction=one.prediction)


def test_one_plan_of_every_way_to_divide_the_ranks_is_tried_the_chosen_first() -> None:
    every = [
        candidate("data=2", 1.01),  # chosen: the calmest of equals
        candidate("data=2 zero=1", 1.0),
        candidate("tensor=4", 0.2, "does not fit"),
        candidate("tensor=2x2", 1.4),
        candidate("data=1", 1.3),
        candidate("data=1 microbatches=2", 1.2),
        candidate("tensor=4", 1.5),
    ]
    assert [str(c.layout) for c in select_distinct_candidates(every, 3)] == [
        str(Layout.parse(t)) for t in ("data=2", "data=1 microbatches=2", "tensor=2x2")
    ]
    assert len(select_distinct_candidates(every, 9)) == 4


def test_the_fastest_by_the_clock_is_taken_and_of_equals_the_first() -> None:
    slow, fast, same = plan("data=2"), plan("data=1"), plan("tensor=2")
    assert fastest_plan([PlanTrial(slow, 1.2), PlanTrial(fast, 1.0), PlanTrial(same, 0.99)]) is fast
    assert fastest_plan([PlanTrial(slow, None, "no memory"), PlanTrial(same, 3.0)]) is same
    with pytest.raises(Infeasible, match=r"none of the 1 plans tried runs: data=2.*no memory"):
        fastest_plan([PlanTrial(slow, None, "no memory")])


def test_short_steps_are_timed_more_often() -> None:
    assert [num_steps(plan("data=1", s)) for s in (10.0, 0.5, 1e-4)] == [trials.MIN_TIMED_STEPS, 6, trials.MAX_TIMED_STEPS]


def test_unasked_trials_are_of_plans_near_the_first_and_short_beside_the_run() -> None:
    every = [candidate("data=2", 1.0), candidate("tensor=2", 1.1), candidate("pipeline=2 microbatches=2", 1.2), candidate("data=1", 1.24)]
    # Three plans take 6 s to start and make 2 steps and then 3: 18 + 5 (1 + 1.1 + 1.2) = 34.5 s, which is 5 % of 690 steps of 1 s.
    assert [num_worthwhile_trials(every, steps) for steps in (1, 689, 691)] == [0, 0, 3]
    assert num_worthwhile_trials([every[0], candidate("tensor=2", 1.26)], 10**6) == 0
    # Alike in what is divided, so there is nothing to choose.
    assert num_worthwhile_trials([every[0], candidate("data=2 zero=1", 1.0)], 10**6) == 0


def test_a_configuration_says_how_many_or_leaves_it_open() -> None:
    def section(words: str) -> Any:
        return TrainingConfig.parse(f'[model]\nname = "gpt-10m"\n[plan]\n{words}').plan

    assert (section("").trials, section("").num_trials) == ("auto", 0)
    assert (section('trials = "auto"').num_trials, section("trials = 0").trials, section("trials = 3").num_trials) == (0, 0, 3)
    for wrong in ("-1", "true", "1.5", '"all"'):
        with pytest.raises(ConfigError, match=r'at least 0, or "auto"'):
            section(f"trials = {wrong}")
    assert TrainingConfig.parse(TrainingConfig.parse('[model]\nname = "gpt-10m"').dump()).plan.trials == "auto"
    assert TrainingConfig.parse('[model]\nname = "gpt-10m"', changes=["plan.trials=2"]).plan.trials == 2


def dictated(seconds: Callable[[Layout], float | Exception]) -> type:
    """A launcher whose ranks take the seconds that it is told."""

    class Told:
        def __init__(self, **_: Any) -> None:
            self.threads: list[int] = []

        def __enter__(self) -> Told:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def launch(
            self, function: Any, num_ranks: int, text: str, sequence: int | None, steps: int, *_: Any, **__: Any
        ) -> list[list[float]]:
            layout = trials.parse_plan(text).layout
            assert num_ranks == layout.num_ranks
            took = seconds(layout)
            if isinstance(took, Exception):
                raise took
            # Every rank but the last is twice as fast, and one step takes long: what counts is the slowest rank's median.
            return [[took * (1.0 if r == num_ranks - 1 else 0.5)] * (steps - 1) + [9.0] for r in range(num_ranks)]

    return Told


def test_the_plan_that_the_clock_finds_faster_is_taken_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = shardwise.plan("gpt-tiny", 8, cluster="1xcpu-2")
    others = [c.layout for c in select_distinct_candidates(chosen.candidates, 3)]
    assert others[0] == chosen.layout
    assert len(others) == 3

    def seconds(layout: Layout) -> float | Exception:
        return {others[0]: 0.5, others[1]: RunError("rank 1 was killed")}.get(layout, 0.25)

    monkeypatch.setattr(trials, "Launcher", dictated(seconds))
    heard: list[str] = []
    found = shardwise.plan("gpt-tiny", 8, cluster="1xcpu-2", trials=3)
    assert found.layout == others[2]
    assert found.candidates == chosen.candidates
    said = dict(found.reasons)["trials"]
    assert f"{others[2]} took 250 ms" in said
    assert f"{others[1]} does not run: rank 1 was killed" in said
    machines = shardwise.Cluster.parse("1xcpu-2")
    again = api.choose_by_trials(chosen, api.PlanRequest(machines, trials=1, say=heard.append), lambda layout: chosen)
    assert again is chosen
    assert not heard


def test_a_plan_stays_where_the_clock_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = shardwise.plan("gpt-tiny", 8, cluster="1xcpu-2")
    monkeypatch.setattr(trials, "Launcher", dictated(lambda layout: 0.1 if layout == chosen.layout else 0.2))
    found = shardwise.plan("gpt-tiny", 8, cluster="1xcpu-2", trials=2)
    assert found.layout == chosen.layout
    assert found.reasons[:-1] == chosen.reasons


def test_trials_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="give it as text"):
        shardwise.plan(torch.nn.Linear(2, 2), (torch.ones(2, 2),), loss=lambda out, _: out.sum(), cluster="1xcpu-2", trials=2)
    with pytest.raises(UsageError, match="2xcpu-2 is another"):
        shardwise.plan("gpt-tiny", 8, cluster="2xcpu-2", trials=2)
    with pytest.raises(UsageError, match="the objective is memory"):
        shardwise.plan("gpt-tiny", 8, cluster="1xcpu-2", trials=2, objective="memory")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="is another; leave them out"):
            shardwise.plan("gpt-tiny", 8, cluster="1xp3.16xlarge", trials=2)


@pytest.mark.parametrize("words", [["--trials", "-1"], ["--trials", "two"]])
def test_wrong_numbers_of_trials(words: Sequence[str]) -> None:
    assert run(["plan", "gpt-tiny", "--cluster", "1xcpu-2", *words]) == 2
