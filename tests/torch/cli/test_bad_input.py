"""Bad input, one row each: the exit code, and what the message must say: the numbers and the remedy. Never a traceback."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardwise.cli import run

CONFIG = """[model]
name = "gpt-tiny"
[data]
source = "synthetic"
[train]
steps = 2
batch = 4
[plan]
layout = "data=1"
"""

MODELS = """
import torch
from torch import nn

class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        raise ValueError("no good at 17")

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 1)
    def forward(self, x):
        return self.two(torch.relu(self.one(x))).mean()

def raises():
    return Raises(), {"x": torch.zeros(4, 4)}

def small():
    return Small(), {"x": torch.ones(4, 4)}

def broken():
    raise RuntimeError("factory fell over at 23")

def nothing():
    return 42

def typed():
    return Small(), {"x": torch.ones(4, 4, dtype=torch.long)}

class Linked(Small):
    def forward(self, x, order):
        return super().forward(x[order])

def linked():
    return Linked(), {"x": torch.ones(4, 4), "order": torch.tensor([3, 2, 1, 0])}

def detached():
    return nn.Linear(4, 2), (torch.ones(4, 4),), lambda output, batch: output.detach().mean()
"""


@dataclass(frozen=True)
class Row:
    """`words` of the command line, with {tmp} for the test's folder; `says`: fragments of the message; `change`: (old, new) of CONFIG."""

    name: str
    words: str
    exit_code: int
    says: tuple[str, ...]
    change: tuple[str, str] | None = None


ROWS = (
    Row("wrong key", "train {tmp}/config.toml", 2, ("config.toml, line 6", "train.stpes", "steps"), ("steps", "stpes")),
    Row("wrong section", "train {tmp}/config.toml", 2, ("trian", "did you mean train"), ("[train]", "[trian]")),
    Row("wrong type", "train {tmp}/config.toml", 2, ("line 6", "train.steps", "whole number"), ("steps = 2", 'steps = "two"')),
    Row("wrong value", "train {tmp}/config.toml", 2, ("train.steps", "0", "1"), ("steps = 2", "steps = 0")),
    Row("not TOML", "train {tmp}/config.toml", 2, ("config.toml", "line 6"), ("steps = 2", "steps = = 2")),
    Row("wrong word", "train {tmp}/config.toml stpes=3", 2, ("stpes=3", "steps")),
    Row("word without a value", "train {tmp}/config.toml steps", 2, ("steps", "key=value")),
    Row("missing configuration", "train {tmp}/none.toml", 2, ("none.toml", "No such file")),
    Row("missing plan", "simulate {tmp}/none.toml", 2, ("none.toml", "No such file")),
    Row("missing text", "train {tmp}/config.toml data.source=text data.text={tmp}/none.txt", 2, ("none.txt",)),
    Row("missing model file", "plan {tmp}/none.py:make --cluster cpu-2 --batch 4", 2, ("none.py",)),
    Row("missing cluster file", "plan gpt-tiny --cluster {tmp}/none.toml --batch 4", 2, ("none.toml",)),
    Row("missing run", "report {tmp}/none", 2, ("none",)),
    Row("missing checkpoint", "checkpoint inspect {tmp}", 4, ("holds no checkpoint",)),
    Row("unknown model", "plan gpt-tinny --cluster cpu-2 --batch 4", 2, ("gpt-tinny", "gpt-tiny")),
    Row("unknown cluster", "plan gpt-tiny --cluster 8xp3.17xlarge --batch 4", 2, ("p3.16xlarge",)),
    Row("a device for a cluster", "plan gpt-tiny --cluster 1xa100 --batch 4", 2, ("dgx-a100-80 has 8 A100-80", "4 devices of")),
    Row("unknown factory", "plan {tmp}/models.py:smal --cluster cpu-2 --batch 4", 2, ("smal", "small")),
    Row("unknown layout key", "verify gpt-tiny --layout datta=2", 2, ("datta", "data")),
    Row("channels that the model does not have", "verify gpt-tiny --layout channel=2", 2, ("channel=2", "no convolution", "leave it out")),
    Row("layout that is no word", "verify gpt-tiny --layout data", 2, ("data", "key=value")),
    Row("grid with an axis missing", "verify gpt-tiny --layout tensor=2x", 2, ("tensor=2x:", "rows x columns")),
    Row("grid of no ranks", "verify gpt-tiny --layout tensor=0x2", 2, ("tensor=0x2", "'0'", "1 or more")),
    Row("grid of four axes", "verify gpt-tiny --layout tensor=2x2x2x2", 2, ("4 axes", "at most 3")),
    Row("grid of more devices", "plan gpt-tiny --cluster p3.16xlarge --batch 64 --layout tensor=4x4", 3, ("tensor=4x4", "16", "8")),
    Row("grid that does not divide", 'plan gpt-tiny --cluster p3.16xlarge --batch 64 --constrain "tensor=3x2 ranks=8"', 3, ("8", "3x2")),
    Row("unknown schedule", 'verify gpt-tiny --layout "pipeline=2 schedule=1f2b"', 2, ("1f2b", "1f1b")),
    Row("ranks against layout", "verify gpt-tiny --layout data=2 --ranks 3", 2, ("--ranks 3", "2 ranks")),
    Row("unknown objective", "plan gpt-tiny --cluster cpu-2 --batch 4 --objective speed", 2, ("speed", "time")),
    Row("unknown constraint", 'plan gpt-tiny --cluster cpu-2 --batch 4 --constrain "tensr<=2"', 2, ("tensr", "tensor")),
    Row("unknown schedule to draw", "schedule 1f2b --stages 2 --microbatches 2", 2, ("1f2b", "1f1b")),
    Row("no microbatches", "schedule 1f1b --stages 2 --microbatches 0", 2, ("0", "at least 1")),
    Row("more microbatches than can be drawn", "schedule 1f1b --stages 4 --microbatches 1000000000", 2, ("4,000,000,000", "200,000")),
    Row("wrong times", "schedule 1f1b --stages 2 --microbatches 2 --times f=x", 2, ("'x'", "number")),
    Row("chunks of a schedule without", "schedule 1f1b --stages 2 --microbatches 2 --chunks 3", 2, ("1 stage a rank, not 3",)),
    Row("sizes beside a file of actions", "schedule {tmp}/mine.txt --stages 4", 2, ("mine.txt", "leave --stages out")),
    Row("more stages than layers", "verify {tmp}/models.py:small --layout pipeline=9", 3, ("pipeline=9",)),
    Row("too many stages, planned", "plan {tmp}/models.py:small --cluster cpu-2 --layout pipeline=9", 3, ("pipeline=9", "pipeline<=")),
    Row("fewer samples than replicas", "verify gpt-tiny --batch 2 --layout data=4", 3, ("2", "data=4")),
    Row("more microbatches than samples", 'verify gpt-tiny --batch 6 --layout "data=2 microbatches=4"', 3, ("6", "microbatches=3")),
    Row("fewer samples than replicas, trained", "train {tmp}/config.toml", 3, ("4", "data=8"), ("data=1", "data=8")),
    Row("more devices than there are", "plan gpt-tiny --cluster p3.16xlarge --batch 64 --layout data=16", 3, ("16", "8")),
    Row("constraint that nothing meets", 'plan gpt-tiny --cluster cpu-2 --batch 4 --constrain "data=3"', 3, ("data=3",)),
    Row("model that raises", "verify {tmp}/models.py:raises --layout data=2", 2, ("no good at 17",)),
    Row("types that do not go together", "verify {tmp}/models.py:typed --layout data=2", 2, ("Long", "plain PyTorch")),
    Row("places of other samples", 'verify {tmp}/models.py:linked --layout "microbatches=2"', 2, ("out of bounds", "microbatches=1")),
    Row("model that raises, planned", "plan {tmp}/models.py:raises --cluster cpu-2", 2, ("no good at 17",)),
    Row("loss that learns nothing", "plan {tmp}/models.py:detached --cluster cpu-2", 3, ("no parameter leads to the model's loss",)),
    Row("factory that raises", "plan {tmp}/models.py:broken --cluster cpu-2", 2, ("factory fell over at 23",)),
    Row("factory that returns nothing of use", "plan {tmp}/models.py:nothing --cluster cpu-2", 2, ("nothing", "int")),
)  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_bad_input(row: Row, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHARDWISE_DEBUG", raising=False)
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "mine.txt").write_text("0F0 0B0")
    old, new = row.change or ("", "")
    assert old in CONFIG
    (tmp_path / "config.toml").write_text(CONFIG.replace(old, new, 1) if old else CONFIG)
    words = shlex.split(row.words.replace("{tmp}", str(tmp_path)))
    code = run([*words, "--json"])
    captured = capfd.readouterr()
    assert code == row.exit_code, captured.err
    assert "Traceback" not in captured.err
    assert "fault in shardwise" not in captured.err
    for fragment in row.says:
        assert fragment in captured.err
    found = json.loads(captured.out)
    assert found["exit_code"] == row.exit_code


def test_every_row_has_a_name_of_its_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
