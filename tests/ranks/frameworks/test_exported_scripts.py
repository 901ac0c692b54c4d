"""Exported scripts that run on two CPU ranks have the losses of serial training: replicas, sharded weights, pipelines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.frameworks import ExportRequest, export_layout, find_framework
from shardwise.plan.layout import Layout
from shardwise.zoo.resolve import resolve

MODEL, BATCH, SEQUENCE, STEPS, LR = "llama-tiny", 8, 32, 3, 1e-3
TOLERANCE = 2e-6  # of losses near 4.5 in float32


def serial_losses() -> list[float]:
    """Losses of the script's steps on the whole batch."""
    torch.manual_seed(0)
    model = resolve(MODEL, BATCH, SEQUENCE)
    module, batch, losses = model.make(), model.batch(BATCH), []
    assert model.loss is not None
    optimizer = torch.optim.AdamW(module.parameters(), LR)
    for _ in range(STEPS):
        loss = model.loss(module(**batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_of_script(layout: str, starts: tuple[str, ...], folder: Path, port: int) -> list[float]:
    request = ExportRequest(Layout.parse(layout), BATCH, MODEL, SEQUENCE, 4, stage_starts=starts)
    for name, text in export_layout(find_framework("pytorch"), request).files.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port), "train_pytorch.py"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr[-3000:]
    return [float(value) for value in re.findall(r"step \d+ loss ([\d.]+)", run.stdout)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "starts"),
    [
        ("data=2 zero=3 microbatches=2 recompute=full", ()),
        ("data=2 microbatches=2", ()),
        ("pipeline=2 microbatches=4", ("layers.2",)),
        ("pipeline=2 microbatches=4 schedule=zb-h1", ("layers.2",)),
        ("pipeline=2 microbatches=4 schedule=interleaved chunks=2", ("layers.1", "layers.2", "layers.3")),
    ],
)
def test_the_script_trains_as_the_serial_model(layout: str, starts: tuple[str, ...], tmp_path: Path) -> None:
    port = 29700 + abs(hash((layout, os.getpid()))) % 200
    parallel = losses_of_script(layout, starts, tmp_path, port)
    assert parallel == pytest.approx(serial_losses(), abs=TOLERANCE)
