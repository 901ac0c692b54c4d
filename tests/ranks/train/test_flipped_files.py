"""One bit flipped in a file of a run folder: the run is refused by name, or its losses are those that they would have been.

Which bits, a seed says. Broken twin: a plan that nobody compares with its digest runs as another.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_train import configure, losses, planner

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.train import flow, loop
from shardwise.train.config import TrainingConfig
from shardwise.world.launch.launch import Launcher
from shardwise.world.launch.watch import LaunchOptions

FILES = [
    ".digests.json", "config.toml", "corpus.json", "plan.toml", "text.sums", "checkpoints/fence.json",
    "checkpoints/step-00000003/manifest.json", "checkpoints/step-00000003/rank-00001.safetensors",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, launcher: Launcher
) -> Iterator[tuple[Path, Callable[[Path], TrainingConfig], list[float]]]:
    """A folder after three of five steps, what goes on in a copy of it, and the losses of all five."""
    base = tmp_path_factory.mktemp("flipped")
    patch = pytest.MonkeyPatch()
    patch.setattr(flow, "launch", lambda *args, preload, **options: launcher.launch(*args, options=LaunchOptions(**options)))
    began = configure(base / "run", "data=2 zero=1", steps=3, schedule="constant", evaluate_every=0)
    flow.train(began, planner)

    def go_on(folder: Path) -> TrainingConfig:
        section = began.train.model_copy(update={"steps": 5})
        return began.model_copy(update={"train": section, "run": began.run.model_copy(update={"folder": str(folder)})})

    shutil.copytree(base / "run", base / "calm")
    calm = go_on(base / "calm")
    flow.train(calm, planner)
    yield base / "run", go_on, losses(calm)
    patch.undo()


@pytest.mark.parametrize("name", FILES)
def test_it_is_refused_by_name_or_changes_nothing(tmp_path: Path, trained: Any, name: str) -> None:
    folder, go_on, calm = trained
    draw = random.Random(name)
    for _ in range(3 if name.endswith((".json", ".toml")) and "/" not in name else 1):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        file = Path(shutil.copytree(folder, tmp_path / "run")) / name
        data = bytearray(file.read_bytes())
        bit = draw.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        said = ""
        try:
            flow.train(go_on(tmp_path / "run"), planner)
        except ShardwiseError as error:
            said = str(error)
        assert str(tmp_path / "run") in said if said else losses(go_on(tmp_path / "run")) == calm


def test_without_their_digests_the_checkpoint_has_them(tmp_path: Path, trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, go_on, _ = trained
    run = Path(shutil.copytree(folder, tmp_path / "run"))
    (run / loop.DIGESTS).unlink()
    text = (run / "plan.toml").read_text()
    (run / "plan.toml").write_text(text.replace("zero = 1", "zero = 0"))
    assert text != (run / "plan.toml").read_text()
    with pytest.raises(ConfigError, match=r"plan\.toml is not what this run wrote"):
        flow.train(go_on(run), planner)
    monkeypatch.setattr(flow, "_recorded_digests", lambda folder: {})
    assert "zero=1" not in flow.train(go_on(run), planner)["layout"]


def test_a_checkpoint_says_what_it_belongs_to(trained: Any) -> None:
    folder, _, _ = trained
    manifest = json.loads((folder / "checkpoints" / "step-00000003" / "manifest.json").read_text())["manifest"]
    assert manifest["extra"]["files"] == {name: flow._file_digest(folder / name) for name in ("plan.toml", "corpus.json", "config.toml")}
