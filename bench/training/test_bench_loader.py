"""The loader's benches on little work: rows of the form that all benches have, and libraries that are not here named as such."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from bench.training import loader, preprocess
from shardwise.train.data.loader import Loader


def test_rows_beside_the_data_loader(tmp_path: Path) -> None:
    rows = loader.measure("numbers", lambda step: torch.full((2,), step), 4, rounds=1, workers=1)
    assert [(r.case.split(",")[1].split()[0], r.peer_name, r.unit) for r in rows] == [
        (kind, peer, "s/batch") for kind in ("alone", "wait") for peer in ("DataLoader, none", "DataLoader, 1 processes")
    ]
    assert all(r.ratio == pytest.approx(r.peer / r.shardwise) for r in rows)
    assert loader.table(rows).row_count == 4


def test_every_contender_makes_the_same_batches() -> None:
    made = {name: [int(x[0]) for x in start()] for name, start in loader.contenders(lambda step: torch.full((2,), step), 5, 1).items()}
    assert list(made.values()) == [[0, 1, 2, 3, 4]] * 3


def test_waiting_is_counted_where_batches_are_late() -> None:
    def slow(step: int) -> int:
        time.sleep(0.02)
        return step

    with Loader(slow, 0, 4, workers=1) as loaded:
        list(loaded)
    assert loaded.waited_s > 0.02


def test_what_is_not_installed_is_said(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("sklearn")
    found = preprocess.measure(tmp_path, rounds=1, rows=50)
    assert [f.peer_name for f in found] == ["cuDF", "cuML", "DALI"]
    for f in found:
        assert f.why == f"{f.peer_name} is not installed"
        assert f.shardwise > 0
    assert preprocess.table(found).row_count == 3
