"""`shardwise demo`: into which folder it trains, and that it ends with that one's page. Training itself is `shardwise train`'s."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import demo, options, run, train
from shardwise.cluster.cluster import Cluster


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, list[Any]]:
    """What was given to training, and whose end was shown."""
    seen: dict[str, list[Any]] = {"words": [], "shown": []}

    def training(config: Path, words: Sequence[str], out: Any, reasons: bool = True) -> dict[str, Any]:
        seen["words"].append(list(words))
        return {"run_folder": "there", "step": 1}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "load_cluster", lambda text, out: Cluster.parse("1xcpu-2"))
    monkeypatch.setattr(train, "run", training)
    monkeypatch.setattr(demo, "show_results", lambda folder, out: seen["shown"].append(folder))
    return seen


def test_each_run_has_a_folder_of_its_own_or_the_one_that_is_named(trained: dict[str, list[Any]], tmp_path: Path) -> None:
    assert run(["demo", "steps=2"]) == 0
    (tmp_path / "runs/demo").mkdir(parents=True)
    (tmp_path / "runs/demo/report.html").write_text("done")
    assert run(["demo"]) == 0
    assert run(["demo", "run.folder=elsewhere", "--layout", "data=2"]) == 0
    assert trained["shown"] == [Path("runs/demo"), Path("runs/demo-2"), Path("elsewhere")]
    folders = [dict(word.split("=", 1) for word in words)["run.folder"] for words in trained["words"]]
    assert folders == ["runs/demo", "runs/demo-2", "elsewhere"]
    assert trained["words"][0][1:] == ["steps=2"]  # as many as are asked for, however long they take
    assert "train.within_s=90" in trained["words"][1]
    assert trained["words"][2][-1] == "plan.layout=data=2"


def test_a_text_that_is_not_there(trained: dict[str, list[Any]], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--text", "nowhere.txt"]) == 2
    assert "nowhere.txt is not there" in capfd.readouterr().err
    assert not trained["words"]
