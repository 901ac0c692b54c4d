"""The launcher's side of training: which run folders are taken, which are refused, and what the ranks find in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError, Infeasible, RunError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import MemoryBreakdown, Plan, Prediction
from shardwise.plan.plan_file import read_plan, write_plan
from shardwise.run import checkpoint
from shardwise.train import flow
from shardwise.train.config import TrainingConfig
from shardwise.train.corpus import read_description
from shardwise.train.flow import PlannedRun, existing_plan, lock_run_folder, prepare_run_folder
from shardwise.world.launch.launch import engine_modules

TEXT = b"to be or not to be, that is the question. " * 100


@pytest.fixture
def config(tmp_path: Path) -> TrainingConfig:
    (tmp_path / "t.txt").write_bytes(TEXT)
    words = f'[model]\nname = "gpt:hidden=16,layers=1,heads=2"\n[data]\ntext = "{tmp_path / "t.txt"}"\nsequence = 16\n'
    return TrainingConfig.parse(words + f'[train]\nbatch = 4\n[run]\nfolder = "{tmp_path / "run"}"')


def planner(layout: str = "data=1", **values: Any) -> flow.Planner:
    def plan(config: TrainingConfig, known: Plan | None) -> PlannedRun:
        made = Plan(Layout.parse(layout), config.model.name, "here", config.train.batch)
        return PlannedRun(known or replace(made, **values), 1e9)

    return plan


def folder_of(config: TrainingConfig) -> Path:
    return Path(config.run.folder)


def set_up(config: TrainingConfig, by: flow.Planner | None = None) -> PlannedRun:
    with lock_run_folder(folder_of(config)):
        return prepare_run_folder(config, folder_of(config), by or planner())


def trained(config: TrainingConfig) -> Path:
    """The folder of a run that has a checkpoint."""
    import torch

    set_up(config)
    checkpoint.save(folder_of(config) / "checkpoints", 1, [checkpoint.full_shard("w", "parameter", torch.ones(1))])
    return folder_of(config)


def changed(config: TrainingConfig, section: str, **values: Any) -> TrainingConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def test_the_folder_holds_what_the_ranks_need(config: TrainingConfig) -> None:
    planned = set_up(config)
    folder = folder_of(config)
    assert TrainingConfig.read(folder / "config.toml") == config
    assert read_plan(folder / "plan.toml") == planned.plan
    corpus = read_description(folder / flow.DESCRIPTION)
    assert corpus is not None
    assert corpus.tokens()[:].tobytes() == TEXT


def test_train_launches_the_plan_s_ranks_on_the_folder(config: TrainingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def launch(function: Any, num_ranks: int, *args: Any, **options: Any) -> list[Any]:
        calls.append((function, num_ranks, args, options["threads"], options["device"], options["preload"]))
        return [{"step": 3}, None]

    monkeypatch.setattr(flow, "launch", launch)
    assert flow.train(config, planner("data=2 threads=1")) == {"step": 3}
    assert calls == [(flow.rank_main, 2, (config.run.folder, 1e9), 1, "auto", engine_modules("auto"))]


def test_spares_are_refused_where_ranks_are_started_here(config: TrainingConfig) -> None:
    """A rank that is lost is replaced then, and one that waited would do nothing."""
    spares = config.model_copy(update={"run": config.run.model_copy(update={"spares": 1})})
    with pytest.raises(ConfigError, match=r"run\.spares = 1, and spare ranks wait .* or run\.spares = 0"):
        flow.train(spares, planner())
    assert not folder_of(config).exists()


def test_a_run_that_goes_on_keeps_its_plan(config: TrainingConfig) -> None:
    first = set_up(config, planner("data=2"))
    assert set_up(config, planner("data=4")).plan == first.plan
    assert set_up(changed(config, "plan", layout="data=4"), planner("data=4")).plan.layout.data == 4


def test_a_slow_machine_makes_fewer_steps_and_as_many_when_the_run_goes_on(config: TrainingConfig) -> None:
    """300 steps of 0.5 s are 150 s; within 90 s there are 180, of which the ranks know, and so does the rate that falls with them."""
    config = changed(config, "train", steps=300, within_s=90.0)
    slow, fast = (planner(prediction=Prediction(s, 0.1, 1e9, MemoryBreakdown())) for s in (0.5, 0.1))
    set_up(config, slow)
    assert TrainingConfig.read(folder_of(config) / "config.toml").train.steps == 180
    set_up(config, fast)  # goes on under the plan that it has
    assert TrainingConfig.read(folder_of(config) / "config.toml").train.steps == 180
    set_up(changed(config, "train", within_s=0.0), fast)
    assert TrainingConfig.read(folder_of(config) / "config.toml").train.steps == 300


def test_a_plan_from_a_file(config: TrainingConfig, tmp_path: Path) -> None:
    plan = Plan(Layout(data=2), "mine", "here", 4)
    write_plan(plan, tmp_path / "mine.toml")
    config = changed(config, "plan", file=str(tmp_path / "mine.toml"))
    assert existing_plan(config, folder_of(config)) == plan
    assert set_up(config).plan == plan
    with pytest.raises(ConfigError, match=r"none\.toml"):
        set_up(changed(config, "plan", file="none.toml"))


def test_a_plan_for_another_batch(config: TrainingConfig) -> None:
    with pytest.raises(Infeasible, match=r"for 8 samples a step, train.batch is 4; set train.batch=8"):
        set_up(config, planner(batch_size=8))


def test_steps_and_rates_may_change_when_a_run_goes_on(config: TrainingConfig) -> None:
    trained(config)
    set_up(changed(config, "train", steps=2000, learning_rate=0.5))


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        ("model", {"name": "gpt:hidden=32"}, "model.name was"),
        ("data", {"sequence": 8}, "data.sequence was 16, now it is 8"),
        ("train", {"batch": 8}, "train.batch was 4, now it is 8"),
        ("train", {"optimizer": "sgd"}, 'train.optimizer was "adamw", now it is "sgd"'),
        ("train", {"seed": 1}, "train.seed was 0, now it is 1"),
        ("run", {"resume": False}, "run.resume is false"),
    ],
)
def test_a_folder_of_another_run_is_refused(config: TrainingConfig, section: str, values: dict[str, Any], says: str) -> None:
    folder = trained(config)
    before = (folder / "config.toml").read_text()
    with pytest.raises(ConfigError) as caught:
        set_up(changed(config, section, **values))
    assert says in str(caught.value)
    assert str(folder) in str(caught.value)
    assert (folder / "config.toml").read_text() == before


def test_a_run_without_a_checkpoint_may_be_anything(config: TrainingConfig) -> None:
    set_up(config)
    set_up(changed(config, "train", batch=8))


def test_a_folder_of_strangers_is_refused(config: TrainingConfig) -> None:
    folder_of(config).mkdir()
    (folder_of(config) / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"holds thesis\.tex and no run of shardwise"):
        set_up(config)


def test_where_planning_failed_the_next_attempt_has_the_folder(config: TrainingConfig) -> None:
    def refuses(config: TrainingConfig, known: Plan | None) -> PlannedRun:
        (folder_of(config) / "machine.toml").touch()  # as the command line leaves it
        raise Infeasible("a schedule that is refuted")

    with pytest.raises(Infeasible):
        set_up(config, refuses)
    assert set_up(config)


def test_a_folder_in_use_is_refused(config: TrainingConfig) -> None:
    with lock_run_folder(folder_of(config)), pytest.raises(RunError, match="in use by another"), lock_run_folder(folder_of(config)):
        pass
    with lock_run_folder(folder_of(config)):
        pass


@pytest.mark.parametrize("place", ["file", "proc"])
def test_a_folder_that_cannot_be_written(config: TrainingConfig, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    folder = {"file": str(tmp_path / "file" / "run"), "proc": "/proc/run"}[place]
    with pytest.raises(ConfigError, match=r"cannot be written: .*; choose another run.folder"):
        flow.train(changed(config, "run", folder=folder), planner())


def test_text_that_changed_since_the_checkpoint_is_refused(config: TrainingConfig, tmp_path: Path) -> None:
    trained(config)
    set_up(config)
    (tmp_path / "t.txt").write_bytes(TEXT[1:])
    with pytest.raises(ConfigError, match=f"is not what run.folder .* was trained on .{len(TEXT)} bytes then, {len(TEXT) - 1} now"):
        set_up(config)


def test_gathered_text_stays_with_the_run(config: TrainingConfig, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "a.txt").write_bytes(TEXT + b"\n")
    config = changed(config, "data", text=str(tmp_path / "many"))
    folder = trained(config)
    (tmp_path / "many" / "b.txt").write_bytes(TEXT)
    set_up(config)
    corpus = read_description(folder / flow.DESCRIPTION)
    assert corpus is not None
    assert (corpus.size, corpus.origin) == (len(TEXT) + 1, str(tmp_path / "many"))


@pytest.mark.parametrize("name", ["plan.toml", "corpus.json"])
def test_a_file_of_the_run_that_is_not_what_it_wrote_is_refused(config: TrainingConfig, name: str) -> None:
    folder = trained(config)
    data = bytearray((folder / name).read_bytes())
    data[data.rindex(b"1")] ^= 1 << 1  # another digit, which can be read
    (folder / name).write_bytes(data)
    with pytest.raises(ConfigError, match=f"{name} is not what this run wrote"):
        set_up(config)
    with pytest.raises(ConfigError, match=f"{name} is not what this run wrote"):
        flow._read_job(folder, 0.0)
    (folder / name).unlink()
    set_up(config)
