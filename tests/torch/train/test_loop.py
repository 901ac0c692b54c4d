"""The loop against itself: whatever interrupts a run, the losses are those of a run that nothing interrupted, bit for bit."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwise.errors import CheckpointError, ConfigError, ModelError, RunError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run import checkpoint
from shardwise.run.checkpoint import disk
from shardwise.train import checkpoint_saver, loop
from shardwise.train.checkpoint_saver import CheckpointSaver, interval_s
from shardwise.train.config import TrainingConfig, TrainSection
from shardwise.train.corpus import open_corpus
from shardwise.train.data.reading import files
from shardwise.train.data.sources import TextRows
from shardwise.train.display import format_row
from shardwise.train.learning_rate import learning_rate
from shardwise.train.loop import TrainingJob
from shardwise.train.metrics import MetricsFile, last_step, read_metrics
from shardwise.train.recovery import anomalies
from shardwise.train.training_task import TrainingTask, text_form
from shardwise.world.world import World
from shardwise.zoo.resolve import ResolvedModel

CONFIG = """
[model]
name = "gpt:vocabulary=256,hidden=16,layers=1,heads=2"
[data]
sequence = 16
[train]
steps = 12
batch = 4
learning_rate = 0.01
warmup_steps = 3
checkpoint_every = 3
evaluate_every = 5
evaluate_batches = 2
clip = 1.0
[run]
sample = 5
"""


@dataclass
class Result:
    loss: float
    grad_norm: float | None
    step_time_s: float = 0.01
    loss_scale: float | None = None


@dataclass
class SerialEngine:
    """What the loop needs of an engine, in one process and with torch's own optimizer."""

    subject: TrainingTask
    section: TrainSection
    before_step: Callable[[int], None] = lambda step: None
    data_index: int = 0
    data_size: int = 1
    model_flops: float = 1e6
    timeline: None = None
    tensor_collectives_notice: str = ""
    step_index: int = 0
    seen: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.section.seed)
        self.model = self.subject.make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1.0)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.optimizer.step()  # makes the state exist
        torch.manual_seed(self.section.seed)
        self.model.load_state_dict(self.subject.make().state_dict())
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.num_parameters = sum(p.numel() for p in self.model.parameters())

    def step(self, batch: Any, lr: float | None = None, record: bool = False, samples: int = 0) -> Result:
        self.before_step(self.step_index)
        self.seen.append((self.step_index, batch))
        self.optimizer.zero_grad()
        loss = self._loss(batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.section.clip)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        self.step_index += 1
        return Result(float(loss.detach()), float(norm))

    def peak_memory_over_ranks(self) -> dict[str, float]:
        return {}

    def evaluate(self, batch: Any, is_global_batch: bool | None = None, samples: int = 0) -> float:
        with torch.no_grad():
            return float(self._loss(batch))

    def _loss(self, batch: Any) -> torch.Tensor:
        assert self.subject.loss is not None
        return self.subject.loss(self.model(**batch), batch)

    def state_shards(self) -> list[checkpoint.StateShard]:
        out = []
        for name, p in self.model.named_parameters():
            out.append(checkpoint.full_shard(name, "parameter", p.detach()))
            out += [checkpoint.full_shard(name, "optimizer", value, slot) for slot, value in self.optimizer.state[p].items()]
        return out

    def load(self, path: Path) -> dict[str, Any]:
        extra = checkpoint.load(path, self.state_shards())
        self.step_index = extra["step"]
        return extra

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()


class Told(World):
    """A world of one rank that is told to stop after some looks."""

    def __init__(self, looks: int = 10**9) -> None:
        super().__init__()
        self.looks = looks

    @property
    def stopping(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.fixture
def job(tmp_path: Path) -> TrainingJob:
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    config = TrainingConfig.parse(CONFIG)
    return TrainingJob(config, Plan(Layout(), config.model.name, "here", 4), tmp_path / "run", open_corpus((str(text),), tmp_path), 1e9)


def change(job: TrainingJob, section: str, **values: Any) -> TrainingJob:
    config = job.config.model_copy(update={section: getattr(job.config, section).model_copy(update=values)})
    return replace(job, config=config)


def run(job: TrainingJob, world: World | None = None, **options: Any) -> tuple[dict[str, Any], list[SerialEngine]]:
    made: list[SerialEngine] = []

    def make(world: World, job: TrainingJob, subject: TrainingTask) -> SerialEngine:
        made.append(SerialEngine(subject, job.config.train, **options))
        return made[-1]

    job.folder.mkdir(exist_ok=True)
    return loop.train(world or World(), job, make), made  # type: ignore[arg-type]


NUMBERS = ("step", "loss", "lr", "grad_norm", "eval_loss")


def curve(job: TrainingJob) -> list[tuple[Any, ...]]:
    return [tuple(row.get(key) for key in NUMBERS) for row in read_metrics(job.folder / "metrics.jsonl")]


def test_a_run_learns_and_leaves_its_files(job: TrainingJob, capsys: pytest.CaptureFixture[str]) -> None:
    job = change(job, "train", steps=60)
    summary, (engine,) = run(job)
    rows = read_metrics(job.folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert summary["loss"] == rows[-1]["loss"] < summary["byte_frequency_loss"] < rows[0]["loss"]
    assert summary["eval_loss"] == rows[-1]["eval_loss"]
    assert [row["step"] for row in rows if "eval_loss" in row] == list(range(5, 61, 5))
    assert summary["mfu"] == pytest.approx(1e6 / summary["step_time_s"] / 1e9)
    assert summary["tokens_per_s"] == pytest.approx(64 / summary["step_time_s"])
    weights = load_file(job.folder / "model.safetensors")
    assert {name: w.tolist() for name, w in weights.items()} == {n: w.tolist() for n, w in engine.model.state_dict().items()}
    assert (job.folder / "sample.txt").read_text().startswith("def ")
    assert [s.step for s in checkpoint.committed_checkpoints(job.folder / "checkpoints")] == [57, 60]
    assert not [p.name for p in job.folder.iterdir() if p.name.startswith(".")]
    assert "step 60/60" in capsys.readouterr().err


def test_a_step_lasts_until_the_device_has_done_it(job: TrainingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU runs behind its host, which has given it a step long before the step is over."""
    now = [0.0]

    class Behind(World):
        def synchronize(self) -> None:
            now[0] += 100.0

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    summary, _ = run(job, Behind())
    assert summary["step_time_s"] == 100.0


def test_the_engine_gets_the_rate_of_each_step_and_the_rows_in_order(job: TrainingJob) -> None:
    _, (engine,) = run(job)
    assert [row[2] for row in curve(job)] == [learning_rate(step, job.config.train) for step in range(12)]
    assert [step for step, _ in engine.seen] == list(range(12))


@pytest.mark.parametrize(("batch", "batches", "seen"), [(4, 1000, "all"), (5, 1000, "all"), (4, 2, 8), (1000, 3, "all")])
def test_an_evaluation_takes_every_sample_once(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch, batch: int, batches: int, seen: Any
) -> None:
    """Also those of the last batch, which is smaller: the loss is the mean over samples, each counted alike."""
    job = change(job, "train", batch=batch, steps=1, evaluate_every=1, evaluate_batches=batches)
    job = replace(job, plan=Plan(Layout(), job.config.model.name, "here", batch))
    rows: list[torch.Tensor] = []
    losses: list[tuple[float, int]] = []
    evaluate = SerialEngine.evaluate

    def watched(self: SerialEngine, given: Any, **_: Any) -> float:
        found = evaluate(self, given)
        rows.extend(given["input_ids"])
        losses.append((found, len(given["input_ids"])))
        return found

    monkeypatch.setattr(SerialEngine, "evaluate", watched)
    summary, (engine,) = run(job)
    number = engine.subject.source.num_validation
    assert len(rows) == (seen if seen != "all" else max(number, batch))  # text that is too short for one batch is gone through again
    assert summary["eval_loss"] == pytest.approx(sum(x * n for x, n in losses) / sum(n for _, n in losses))


@pytest.mark.parametrize("save", ["async", "sync"])
@pytest.mark.parametrize("at", [0, 1, 4, 7, 11])
def test_a_run_that_crashed_goes_on_with_the_same_losses(job: TrainingJob, at: int, save: str) -> None:
    whole = replace(change(job, "run", save="sync"), folder=job.folder / "whole")
    job.folder.mkdir()
    run(whole)
    job = change(job, "run", save=save)

    def crash(step: int) -> None:
        if step == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job, before_step=crash)
    _, (engine,) = run(job)
    done = at // 3 * 3
    assert engine.seen[0][0] in ((done,) if save == "sync" else (max(0, done - 3), done))  # the newest may not have been written yet
    assert curve(job) == curve(whole)
    assert [row[0] for row in curve(job)] == list(range(1, 13))


def test_told_to_stop_it_saves_and_goes_on_later(job: TrainingJob) -> None:
    whole = replace(job, folder=job.folder / "whole")
    job.folder.mkdir()
    run(whole)
    summary, _ = run(job, Told(looks=3))
    assert summary["stopped"]
    stopped = summary["step"]
    assert 1 < stopped < 12
    assert checkpoint.committed_checkpoints(job.folder / "checkpoints")[-1].step == stopped
    assert not (job.folder / "model.safetensors").exists()
    summary, (engine,) = run(job)
    assert (summary["stopped"], summary["step"], engine.seen[0][0]) == (False, 12, stopped)
    assert curve(job) == curve(whole)


def test_a_finished_run_starts_and_ends_at_once(job: TrainingJob) -> None:
    first, _ = run(job)
    again, (engine,) = run(job)
    assert engine.seen == []
    assert again == {**first, "saving_s": 0.0, "data_wait_s": 0.0, "saving": again["saving"]}
    assert (first["saving"]["saves"], again["saving"]["saves"]) == (4, 0)
    assert len(curve(job)) == 12


def test_more_steps_go_on_from_the_end(job: TrainingJob) -> None:
    run(job)
    summary, (engine,) = run(change(job, "train", steps=15))
    assert (summary["step"], engine.seen[0][0]) == (15, 12)


def test_without_resume_it_begins_anew(job: TrainingJob) -> None:
    run(job)
    _, (engine,) = run(change(job, "run", resume=False))
    assert engine.seen[0][0] == 0


def test_a_loss_that_is_not_finite_ends_the_run_with_what_is_whole(job: TrainingJob) -> None:
    def poison(step: int) -> None:
        if step == 7:
            with torch.no_grad():
                next(engines[-1].model.parameters()).fill_(math.nan)

    engines: list[SerialEngine] = []

    def make(world: World, job: TrainingJob, subject: TrainingTask) -> SerialEngine:
        engines.append(SerialEngine(subject, job.config.train, before_step=poison))
        return engines[-1]

    job.folder.mkdir()
    with pytest.raises(
        RunError, match=r"loss is nan at step 8; the checkpoint of step 6 .* is whole; lower learning_rate = 0.01"
    ) as caught:
        loop.train(World(), job, make)  # type: ignore[arg-type]
    assert caught.value.exit_code == 4
    assert checkpoint.committed_checkpoints(job.folder / "checkpoints")[-1].step == 6


def test_a_checkpoint_that_fails_is_told_and_training_goes_on(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = checkpoint.save, []

    def save(*args: Any, **kwargs: Any) -> Path:
        calls.append(args[1])
        if args[1] in (3, 6):
            raise CheckpointError("No space left on device: 0 B is free")
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "save", save)
    summary, _ = run(change(job, "run", save="sync"))
    assert (summary["step"], calls) == (12, [3, 6, 9, 12])
    said = capsys.readouterr().err
    assert said.count("No space left on device") == 2
    assert "training goes on" in said


def failing(monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...], code: int) -> None:
    """The disk fails where it is given a file of the checkpoints of `steps`."""
    real = disk.write_file

    def write_file(path: Path, parts: Any) -> tuple[int, str]:
        if any(f"{step:08d}" in path.parent.name for step in steps):
            raise OSError(code, os.strerror(code))
        return real(path, parts)

    monkeypatch.setattr(disk, "write_file", write_file)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_checkpoint_that_fails_beside_training_is_told_and_training_goes_on(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    failing(monkeypatch, (3, 9), code)
    summary, _ = run(change(job, "train", keep=9))
    assert (summary["step"], summary["saving"]["saves"], summary["saving"]["beside"]) == (12, 2, 1)
    assert [one.step for one in checkpoint.committed_checkpoints(job.folder / "checkpoints")] == [6, 12]
    said = capsys.readouterr().err
    for step, newest in ((3, 0), (9, 6)):
        assert f"checkpoint of step {step} not saved: {os.strerror(code)}: " in said
        assert f"training goes on, and step {newest} is the newest checkpoint" in said
    failing(monkeypatch, (15,), code)
    with pytest.raises(CheckpointError, match=os.strerror(code)):
        run(change(job, "train", keep=9, steps=15))


def test_where_there_is_no_room_for_a_copy_saves_are_waited_for(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = change(job, "train", keep=9)
    with_room, _ = run(replace(job, folder=job.folder.with_name("room")))
    monkeypatch.setattr(anomalies, "available_bytes", lambda: 1e4)
    without, _ = run(job)
    assert (with_room["saving"]["saves"], with_room["saving"]["beside"]) == (4, 3)
    assert (without["saving"]["saves"], without["saving"]["beside"]) == (4, 0)
    assert with_room["saving"]["bytes"] == without["saving"]["bytes"]
    said = capsys.readouterr().err
    assert said.count("checkpoints are written synchronously, while training waits: 1 rank needs") == 1
    assert "KiB that are free on the host, and no more than 50%" in said
    for step in (3, 6, 9, 12):
        tensors = [load_file(folder / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors") for folder in
                   (job.folder, job.folder.with_name("room"))]  # fmt: skip
        assert {name: x.tolist() for name, x in tensors[0].items()} == {name: x.tolist() for name, x in tensors[1].items()}


def test_a_save_by_the_clock_is_not_due_beside_another(job: TrainingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which every step is late: one save after the other, none of which waits for the one before."""
    monkeypatch.setattr(CheckpointSaver, "finish", lambda self: None)  # it would fail where one begins beside another
    monkeypatch.setattr(checkpoint_saver, "FIRST_SAVE_S", 0.0)
    monkeypatch.setattr(checkpoint_saver, "interval_s", lambda save_s, between_s: 0.0)
    real = CheckpointSaver.last

    def last(self: CheckpointSaver, step: int) -> None:
        monkeypatch.undo()
        real(self, step)

    monkeypatch.setattr(CheckpointSaver, "last", last)
    summary, _ = run(change(job, "train", checkpoint_every="auto", keep=99))
    assert 2 <= summary["saving"]["saves"] <= 13


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_save_costs_decides_the_next(job: TrainingJob, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """By a clock that goes on 20 s at each look: the copy, and not the file, and from its end on."""
    now, told = [0.0], list[tuple[float, float]]()

    def clock() -> float:
        now[0] += 20.0
        return now[0]

    if fails:
        failing(monkeypatch, tuple(range(1, 12)), errno.EIO)
    monkeypatch.setattr(checkpoint_saver, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(checkpoint_saver.SaveInterval, "record_save", lambda self, save_s, at: told.append((save_s, at)))
    monkeypatch.setattr(checkpoint_saver, "slowdown_s", lambda times, number, seconds: 0.5)
    run(change(job, "train", checkpoint_every="auto", keep=99))
    assert told
    assert {save_s for save_s, _ in told} == {20.0 + (0 if fails else 0.5)}
    assert all(at < now[0] for _, at in told)


def test_what_saving_cost_is_reported(job: TrainingJob) -> None:
    summary, _ = run(job)
    said = summary["saving"]
    paths = [job.folder / "checkpoints" / f"step-{step:08d}" for step in (9, 12)]
    assert said["bytes"] == pytest.approx(2 * sum(checkpoint.size_of(path) for path in paths), rel=0.01)  # 3 and 6 are gone
    assert said["waited_s"] == summary["saving_s"] > 0
    assert said["writing_s"] > 0
    assert said["failure_loses_s"] == pytest.approx(said["every_s"] / 2 + said["writing_s"] / 3)
    never, _ = run(replace(change(job, "train", checkpoint_every=0), folder=job.folder.with_name("never")))
    assert (never["saving"]["saves"], never["saving"]["every_s"], never["saving"]["failure_loses_s"]) == (1, None, None)


def test_a_model_that_cannot_be_followed_in_evaluation_is_evaluated_as_it_is(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(self: SerialEngine, batch: Any, **_: Any) -> float:
        raise ModelError("the model computes something else in evaluation")

    wanted = run(replace(job, folder=job.folder.with_name("wanted")))[0]
    monkeypatch.setattr(SerialEngine, "evaluate", evaluate)
    summary, _ = run(job)
    assert summary["step"] == 12
    assert summary["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-5)
    assert capsys.readouterr().err.count("with all weights: the model computes something else in evaluation") == 1


def test_the_last_checkpoint_must_be_written(job: TrainingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(*args: Any, **kwargs: Any) -> Path:
        raise CheckpointError("Read-only file system")

    monkeypatch.setattr(checkpoint, "save", save)
    with pytest.raises(CheckpointError, match="Read-only"):
        run(job)
    assert len(curve(job)) == 12


def test_a_run_that_was_replaced_ends(job: TrainingJob) -> None:
    def take_over(step: int) -> None:
        if step == 4:
            checkpoint.claim_folder(job.folder / "checkpoints")

    with pytest.raises(checkpoint.WriterReplaced, match="another run took over"):
        run(job, before_step=take_over)


def test_text_that_changed_is_refused(job: TrainingJob, tmp_path: Path) -> None:
    run(job)
    (tmp_path / "text.txt").write_bytes(b"the quick brown fox jumps over the lazy cat. " * 200)
    changed = replace(job, corpus=open_corpus((str(tmp_path / "text.txt"),), tmp_path))
    with pytest.raises(ConfigError, match="text has changed"):
        run(changed)


def test_a_vocabulary_that_is_too_small(job: TrainingJob) -> None:
    with pytest.raises(ConfigError, match="vocabulary of at least 256"):
        run(change(job, "model", name="gpt:vocabulary=64,hidden=16,layers=1,heads=2"))


def test_any_model_trains_on_its_own_batch(job: TrainingJob) -> None:
    job = replace(change(job, "data", source="synthetic"), corpus=None)
    job = change(job, "model", name="gpt:vocabulary=40,sequence=8,hidden=16,layers=1,heads=2")
    summary, _ = run(job)
    assert summary["byte_frequency_loss"] is None
    assert summary["tokens_per_s"] == pytest.approx(32 / summary["step_time_s"])
    assert not (job.folder / "sample.txt").exists()


# Learning rates


def test_learning_rates_in_closed_form() -> None:
    section = TrainSection(steps=100, warmup_steps=10, learning_rate=1.0, min_learning_rate=0.2)
    assert [learning_rate(s, section) for s in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert learning_rate(55, section) == pytest.approx(0.6)  # half way down a cosine
    assert learning_rate(100, section) == pytest.approx(0.2)
    assert learning_rate(55, section.model_copy(update={"schedule": "linear"})) == pytest.approx(0.6)
    assert learning_rate(32, section.model_copy(update={"schedule": "linear"})) == pytest.approx(1 - 0.8 * 22 / 90)
    assert learning_rate(99, section.model_copy(update={"schedule": "constant"})) == 1.0
    assert learning_rate(0, TrainSection(steps=1, learning_rate=1.0)) == 1.0


# Metrics


def test_metrics_lose_the_rows_that_will_be_computed_again_and_half_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n{"step": 3, "loss": 1}\n{"step": 4, "lo')
    with MetricsFile(path, 2, print) as metrics:
        metrics.write({"step": 3, "loss": 0.1, "mfu": None})
    assert path.read_text().startswith('{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n{"step": 3, "loss": 0.1, "digest": ')
    assert read_metrics(path)[2:] == [{"step": 3, "loss": 0.1}]


def test_the_last_row_is_read_without_the_others(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_step(path) == -1
    for text, step in (("", -1), ('{"step": 1}\n', 1), ('{"a": 1}\n' * 9000 + '{"step": 7}\n', 7), ('{"step": 1}\n{"st', -1), ("[]\n", -1)):
        path.write_text(text)
        assert last_step(path) == step


def test_a_full_disk_loses_no_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, said, room = tmp_path / "metrics.jsonl", [], [10**9]
    real = os.write

    def write(handle: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        size = min(room[0], len(data))
        room[0] -= size
        return real(handle, data[:size])

    with MetricsFile(path, 0, said.append) as metrics:
        monkeypatch.setattr(os, "write", write)
        for step in range(1, 8):
            room[0] = 10 if step in (3, 4) else 0 if step == 5 else 10**9
            metrics.write({"step": step, "loss": 1.0})
        monkeypatch.undo()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 8))
    assert len(said) == 1
    assert "No space left" in said[0]


def test_a_row_without_all_numbers_can_be_shown() -> None:
    assert format_row({"step": 1, "loss": 3.0, "tokens_per_s": None, "mfu": None}, 2, 1.0) == "step 1/2  loss 3.000  1.00 s left"


# What text is to a model


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ({"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[2, 3]])}, {"input_ids": 5, "labels": 6}),
        ({"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1, 2]])}, {"input_ids": 5, "labels": 5}),
        ((torch.tensor([[1, 2]]), torch.tensor([[2, 3]])), (5, 6)),
    ],
)
def test_text_takes_the_form_of_the_model_s_batch(example: Any, expected: Any) -> None:
    form = text_form(ResolvedModel("m", torch.nn.Identity, lambda n: example, None, 1))
    x, y = torch.full((1, 2), 5), torch.full((1, 2), 6)
    found = form(TextRows(x, y, x))
    values = {k: int(v[0, 0]) for k, v in found.items()} if isinstance(found, dict) else tuple(int(v[0, 0]) for v in found)
    assert values == expected


@pytest.mark.parametrize(
    "example",
    [
        {"pixels": torch.zeros(1, 3)},
        (torch.zeros(1, 3), torch.zeros(1)),
        torch.zeros(2),
        {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[-100, 2, -100]])},  # a masked language model
        {"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[2, 3]]), "memory": torch.zeros(1)},
    ],
)
def test_a_model_that_takes_no_text_is_refused(example: Any) -> None:
    with pytest.raises(ConfigError, match="synthetic"):
        text_form(ResolvedModel("m", torch.nn.Identity, lambda n: example, None, 1))


def test_by_itself_a_run_saves_as_often_as_pays(job: TrainingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that each look moves by 20 s: the first save is due after 60, later ones as Young and Daly say of what the save took."""
    job = change(job, "train", checkpoint_every="auto", keep=99)
    now = [0.0]

    def clock() -> float:
        now[0] += 20.0
        return now[0]

    monkeypatch.setattr(checkpoint_saver, "time", SimpleNamespace(perf_counter=clock))
    run(job, Told(looks=10**9))
    steps = [one.step for one in checkpoint.committed_checkpoints(job.folder / "checkpoints")]
    assert steps[-1] == 12
    assert 1 <= len(steps) < 12
    never, _ = run(change(replace(job, folder=job.folder / "never"), "train", checkpoint_every=0))
    assert never["step"] == 12
    assert [one.step for one in checkpoint.committed_checkpoints(job.folder / "never" / "checkpoints")] == [12]


def test_the_interval_is_the_best_of_a_simulated_run() -> None:
    """Time lost to saves and failures over a grid of intervals, by the exact expectation (Daly 2006, equation 13): the least is where
    `interval_s` says, to within what the curve is flat."""

    def lost(interval: float, save: float, between: float) -> float:
        return between * math.expm1((interval + save) / between) / interval - 1

    for save, between in ((0.1, 86400.0), (5.0, 3600.0), (60.0, 3600.0)):
        chosen = interval_s(save, between)
        best = min(lost(chosen * 1.02**k, save, between) for k in range(-80, 81))
        assert lost(chosen, save, between) <= best * 1.001 + 1e-12


@pytest.mark.parametrize("how", ["longer", "shorter", "anew", "gone"])
def test_a_text_that_is_written_to_while_it_is_trained_on_ends_the_run(job: TrainingJob, how: str) -> None:
    assert job.corpus is not None
    path = Path(job.corpus.path)
    text = path.read_bytes()

    def write(step: int) -> None:
        if step == 6:
            if how == "gone":
                path.rename(path.with_suffix(".old"))
            else:
                path.write_bytes({"longer": text + b"x", "shorter": text[:5000], "anew": text[::-1]}[how])
                os.utime(path, ns=(1, 1))

    with pytest.raises(RunError, match="cannot be read any more" if how == "gone" else "has changed while|cut off while"):
        run(job, before_step=write)


def test_a_text_that_was_copied_over_itself_has_not_changed(job: TrainingJob) -> None:
    assert job.corpus is not None
    path = Path(job.corpus.path)
    text = path.read_bytes()

    def write(step: int) -> None:
        if step == 6:
            path.write_bytes(text)
            os.utime(path, ns=(1, 1))

    summary, _ = run(job, before_step=write)
    assert summary["step"] == job.config.train.steps


def test_every_byte_of_a_text_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 64)
    monkeypatch.setattr(files, "PART_BYTES", 16)
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(200)) * 2)
    before = open_corpus((str(path),), tmp_path).digest
    seen = set()
    for at in range(0, 400, 13):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        other = tmp_path / "other.txt"
        other.write_bytes(bytes(data))
        seen.add(open_corpus((str(other),), tmp_path).digest)
    assert before not in seen
    assert len(seen) == len(range(0, 400, 13))


def test_of_a_long_text_blocks_from_all_over_it_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_DIGESTED_BYTES", 10 * files.BLOCK_BYTES)
    starts = files._digested_block_starts(100 * files.BLOCK_BYTES + 1)
    assert (starts[0], starts[-1]) == (0, 100 * files.BLOCK_BYTES)
    assert 9 <= len(starts) <= 12
