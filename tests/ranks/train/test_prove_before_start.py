"""`run.prove = true`: a plan is proven before its ranks start; one that is not equal ends train and launch with exit code 4."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import run
from shardwise.errors import VerifyError
from shardwise.run.prove import rank_threads

CONFIG = """[model]
name = "gpt:layers=1,hidden=8,heads=2,sequence=4,vocabulary=12"
[data]
source = "synthetic"
[train]
steps = 1
batch = 4
[plan]
layout = "{layout}"
cluster = "cpu-2"
[run]
folder = "{folder}"
prove = true
"""
BROKEN = """from shardwise.run.rank_model.runnable_capture import RunnableCapture
summand = RunnableCapture.loss_summand
RunnableCapture.loss_summand = lambda self, result: summand(self, result) * (1 + 1e-15)
"""


def write_config(folder: Path, layout: str) -> Path:
    path = folder / "config.toml"
    path.write_text(CONFIG.format(layout=layout, folder=folder / "run"))
    return path


def test_a_plan_that_differs_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    join_flat = rank_threads.join_flat

    def rotated(parts: Sequence[Any]) -> Any:
        return join_flat([*parts[1:], parts[0]] if parts[0].is_floating_point() else parts)

    monkeypatch.setattr(rank_threads, "join_flat", rotated)
    assert run(["train", str(write_config(tmp_path, "data=2 zero=3"))]) == VerifyError.exit_code == 4
    error = capfd.readouterr().err
    assert "first at " in error
    assert " on rank 0 (data:" in error
    assert "run.prove=false" in error
    assert not list((tmp_path / "run").glob("metrics*"))


def test_a_plan_that_is_equal_is_trained(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["train", str(write_config(tmp_path, "microbatches=2"))]) == 0
    assert "equal (a wrong plan passes" in capfd.readouterr().err
    assert list((tmp_path / "run").glob("metrics*"))


def test_a_launch_ends_with_the_same_code(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    where = f"--host 0 --hosts 1 --ranks 1 --address 127.0.0.1 --port {port} --".split()
    command = [sys.executable, "-m", "shardwise", "launch", *where, "train", str(write_config(tmp_path, "microbatches=2"))]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == VerifyError.exit_code, ended.stderr
    assert "tensors differ, first the loss of the batch" in ended.stderr
