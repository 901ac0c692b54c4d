"""Plans tried by ranks of their own, as `shardwise plan --trials` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from test_train import CONFIG

import shardwise
from shardwise import api
from shardwise.cluster.cluster import Cluster
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import read_plan
from shardwise.train import flow
from shardwise.train.config import TrainingConfig
from shardwise.train.flow import PlannedRun
from shardwise.train.metrics import read_metrics
from shardwise.train.trials import num_steps, try_plans
from shardwise.world.world import World


def test_plans_are_tried_and_one_that_cannot_run_is_told() -> None:
    plans = [shardwise.plan("gpt-tiny", 8, cluster="1xcpu-2", layout=layout) for layout in ("data=2", "pipeline=2 microbatches=2")]
    missing = shardwise.plan("gpt-tiny", 8, cluster="1xcpu-2", layout=Layout())
    plans.append(replace(missing, model="no-such-model"))
    heard: list[str] = []
    found = try_plans(plans, device="cpu", say=heard.append)
    assert [t.plan for t in found] == plans
    assert [t.measured_s is not None for t in found] == [True, True, False]
    assert "no-such-model" in found[2].note
    assert len(heard) == 3
    assert num_steps(plans[0]) > 1


def in_ranks(world: World, folder: str, trials: int, layout: str) -> str:
    """As under torchrun; the layout that was trained."""
    changes = ["train.steps=3", f"run.folder={folder}", f"plan.trials={trials}", f"plan.layout={layout}", f"data.text={__file__}"]
    config = TrainingConfig.parse(CONFIG, changes=[change for change in changes if not change.endswith("=")])
    cluster = Cluster.parse("1xcpu-2")

    def of(layout: Any) -> Plan:
        return api.plan(config.model.name, config.train.batch, cluster=cluster, layout=layout, constraints="ranks=2")

    def planner(config: TrainingConfig, known: Plan | None) -> PlannedRun:
        if known is not None:
            return PlannedRun(known, 1e9, "cpu")
        plan = of(config.plan.layout or None)
        request = api.PlanRequest(cluster, trials=config.plan.num_trials, sequence=16, world=world)
        return PlannedRun(plan if config.plan.layout else api.choose_by_trials(plan, request, of), 1e9, "cpu")

    flow.train(config, planner, world)
    return str(read_plan(Path(folder) / "plan.toml").layout)


def test_ranks_that_something_else_started_try_plans_too_and_train_as_if_they_had_not(
    tmp_path: Path, ranks: Callable[..., list[Any]]
) -> None:
    first, second = ranks(in_ranks, 2, str(tmp_path / "tried"), 3, "")
    assert first == second
    plan = read_plan(tmp_path / "tried" / "plan.toml")
    assert dict(plan.reasons)["trials"].count("took") >= 2
    again, _ = ranks(in_ranks, 2, str(tmp_path / "tried"), 3, "")  # goes on: nothing is tried, and nobody waits
    assert again == first
    assert ranks(in_ranks, 2, str(tmp_path / "plain"), 0, first) == [first, first]
    losses = [[row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in row] for name in ("tried", "plain")]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
