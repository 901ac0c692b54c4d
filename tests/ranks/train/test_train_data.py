"""Runs on data files: one loss curve under any layout, equal to plain PyTorch's on the same samples, and after a stop the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import shardwise
from shardwise import api
from shardwise.plan.plan import Plan
from shardwise.train import flow
from shardwise.train.config import TrainingConfig
from shardwise.train.corpus import open_data
from shardwise.train.data.packed_text import packed_text
from shardwise.train.flow import PlannedRun
from shardwise.train.metrics import read_metrics
from shardwise.train.training_task import text_source_of, training_task_of
from shardwise.world.launch.launch import Launcher
from shardwise.world.launch.watch import LaunchOptions
from shardwise.zoo.resolve import resolve

CONFIG = """
[model]
name = "gpt:vocabulary=256,sequence=24,hidden=32,layers=2,heads=2"
[data]
source = "jsonl"
sequence = 24
validation_fraction = 0.2
[train]
steps = 6
batch = 8
learning_rate = 0.01
schedule = "constant"
checkpoint_every = 3
evaluate_every = 3
clip = 0.5
[run]
sample = 4
"""
ROWS = [{"prompt": "ask " * (i % 4 + 1), "completion": "say" * (i % 3 + 1) + str(i)} for i in range(40)]


def planner(config: TrainingConfig, known: Plan | None) -> PlannedRun:
    plan = known or api.plan(config.model.name, config.train.batch, cluster="2xcpu-2", layout=config.plan.layout)
    return PlannedRun(replace(plan, batch_size=config.train.batch), 1e9, "cpu")


@pytest.fixture
def run(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> Callable[[TrainingConfig], dict[str, Any]]:
    """Trains in the session's prepared process."""
    monkeypatch.setattr(flow, "launch", lambda *args, preload, **options: launcher.launch(*args, options=LaunchOptions(**options)))
    return lambda config: flow.train(config, planner)


def configure(folder: Path, layout: str, *changes: str) -> TrainingConfig:
    (folder.parent / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = [f"data.path={folder.parent / 'a.jsonl'}", f"run.folder={folder}", f"plan.layout={layout} threads=1", *changes]
    return TrainingConfig.parse(CONFIG, changes=words)


def losses(config: TrainingConfig, key: str = "loss") -> list[float]:
    return [row[key] for row in read_metrics(Path(config.run.folder) / "metrics.jsonl") if key in row]  # type: ignore[misc]


def serial(config: TrainingConfig, tmp_path: Path) -> list[float]:
    """The losses of a loop of plain PyTorch over the same samples."""
    subject = training_task_of(config, open_data(config.data, config.model.name, tmp_path / "serial"))
    torch.manual_seed(config.train.seed)
    model = subject.make()
    matrices = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": group, "weight_decay": 0.0} for group in matrices]
    optimizer = torch.optim.AdamW(groups, lr=config.train.learning_rate, betas=config.train.betas)
    found = []
    for step in range(config.train.steps):
        batch = subject.source.train(step, range(config.train.batch))
        logits = model(**batch)
        counts = batch["labels"] != -100
        loss = F.cross_entropy(logits[counts], batch["labels"][counts], reduction="sum") / counts.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize(
    ("packing", "layouts"), [("none", ["data=4"]), ("documents", ["data=2 microbatches=2", "tensor=2 pipeline=2 microbatches=2"])]
)
def test_instructions_learn_as_in_plain_pytorch_under_any_layout(
    packing: str, layouts: list[str], tmp_path: Path, run: Callable[[TrainingConfig], dict[str, Any]]
) -> None:
    """Ranks and microbatches have unequal numbers of tokens that count, by which their losses are weighed."""
    wanted = serial(configure(tmp_path / "s", "data=1", f"data.packing={packing}"), tmp_path)
    for layout in layouts:
        config = configure(tmp_path / layout.replace(" ", "_"), layout, f"data.packing={packing}")
        summary = run(config)
        assert losses(config) == pytest.approx(wanted, rel=2e-5)
        assert summary["eval_loss"] == pytest.approx(losses(config, "eval_loss")[-1])
        assert summary["eval_loss"] is not None


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the hub has them: a GPT-2 with its usual dropout, its weights in two files, and a tokenizer of words."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    names = ["<unk>", "</s>", "ask", *(f"{'say' * (i % 3 + 1)}{i}" for i in range(40))]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder = tmp_path_factory.mktemp("pretrained")
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(7)
    config = transformers.GPT2Config(vocab_size=48, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=1)
    transformers.GPT2LMHeadModel(config).bfloat16().save_pretrained(folder, max_shard_size="6KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def test_a_pretrained_model_goes_on_from_its_weights(
    tmp_path: Path, pretrained: Path, run: Callable[[TrainingConfig], dict[str, Any]]
) -> None:
    """With dropout, which training has and evaluation has not; tokens are those of the model's own folder."""
    layout = "data=2 tensor=2"
    words = ["data.tokenizer=model", "train.steps=1", "learning_rate=1e-9"]
    config = configure(tmp_path / "run", layout, f"model.name=hf:{pretrained}", *words)
    summary = run(config)
    weights: dict[str, torch.Tensor] = {}
    for file in pretrained.glob("*.safetensors"):
        weights |= load_file(file)
    trained = load_file(Path(config.run.folder) / "model.safetensors")
    for name, x in weights.items():
        torch.testing.assert_close(trained[f"transformer.{name.removeprefix('transformer.')}"], x.float(), rtol=0, atol=1e-6)
    subject = training_task_of(config, open_data(config.data, config.model.name, tmp_path / "serial"))
    model = subject.make().eval()
    batch = subject.source.validation(0, range(8))
    with torch.no_grad():
        assert summary["eval_loss"] == pytest.approx(float(model(**batch).loss), rel=1e-5)


def test_a_run_that_was_stopped_goes_on_with_the_same_bits_and_samples(
    tmp_path: Path, run: Callable[[TrainingConfig], dict[str, Any]]
) -> None:
    more = configure(tmp_path / "whole", "data=2", "data.packing=documents", "train.optimizer=nadam")
    run(more)
    run(configure(tmp_path / "broken", "data=2", "data.packing=documents", "train.optimizer=nadam", "train.steps=3"))
    broken = configure(tmp_path / "broken", "data=2", "data.packing=documents", "train.optimizer=nadam")
    run(broken)
    assert losses(broken) == losses(more)
    assert losses(broken, "eval_loss") == losses(more, "eval_loss")
    folder = Path(broken.run.folder)
    tokens = folder / "data" / "tokens.bin"
    data = tokens.read_bytes()
    tokens.unlink()
    flow.prepare_run_folder(broken, folder, planner)  # the data makes the same tokens again
    assert tokens.read_bytes() == data
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:-1]))
    flow.prepare_run_folder(broken, folder, planner)  # what was prepared stays with the run
    tokens.unlink()
    with pytest.raises(shardwise.errors.ConfigError, match=r"is not what run.folder .* was trained on"):
        flow.prepare_run_folder(broken, folder, planner)


@pytest.mark.parametrize("name", ["gpt:vocabulary=256,sequence=24,hidden=32,layers=2,heads=2", "llama-tiny:vocabulary=256,sequence=24"])
def test_packed_documents_have_the_losses_that_they_have_alone(name: str, tmp_path: Path) -> None:
    config = configure(tmp_path / "run", "data=1", "data.packing=documents", f"model.name={name}")
    corpus = open_data(config.data, name, tmp_path / "run")
    together, alone = (packed_text(corpus.store(), 24, 1, 0.2, 0, shares_samples=both) for both in (True, False))
    assert together.packing.num_samples < alone.packing.num_samples
    torch.manual_seed(0)
    model = resolve(name).make().double().eval()

    def total(samples: Any, positions: bool) -> torch.Tensor:
        rows = samples._read(torch.arange(samples.packing.num_samples).numpy())
        logits = model(rows.inputs, position_ids=rows.positions if positions else None)
        summed = F.cross_entropy(logits.flatten(0, 1), rows.targets.flatten(), reduction="sum")
        return torch.stack([summed, (rows.targets != -100).sum().double()])

    with torch.no_grad():
        packed, apart = total(together, True), total(alone, False)
        torch.testing.assert_close(packed, apart, rtol=1e-12, atol=0)
        broken = total(together, False)  # a twin that ignores boundaries
    assert abs(float(broken[0] - apart[0])) > 1e-3


def test_packed_documents_are_parallel_as_they_are_serial(tmp_path: Path) -> None:
    config = configure(tmp_path / "run", "data=1", "data.packing=documents")
    text = text_source_of(config, open_data(config.data, config.model.name, tmp_path / "run"))
    rows = text.train(0, range(4))
    batch = {"input_ids": rows.inputs, "labels": rows.targets, "position_ids": rows.positions}
    resolved = resolve(config.model.name, 4, 24)
    found = shardwise.verify(
        resolved.make(), ["data=2 microbatches=2", "tensor=2", "context=2"], batch, loss=resolved.loss, dtype="float64"
    )
    assert found.ok, found
