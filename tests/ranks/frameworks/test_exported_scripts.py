"""Exported plans that run on two CPU ranks have the losses of serial training: scripts of plain PyTorch, and the frameworks' own trainers.

All plans of a test run one after the other in one pair of processes (`exported_programs.py`).
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.frameworks import ExportRequest, export_layout, find_framework
from shardwise.plan.layout import Layout
from shardwise.zoo.resolve import resolve

PROGRAM = Path(__file__).with_name("exported_programs.py")
BATCH, SEQUENCE, STEPS, LR, LAYERS = 8, 32, 3, 1e-3, 4
TOLERANCE = 2e-6  # of losses near 4.5 in float32
Plan = tuple[str, str, str, tuple[str, ...]]  # kind of program, model, layout, first modules of the stages
FOUR = ("layers.1", "layers.2", "layers.3")
QUICK: list[Plan] = [
    ("script", "llama-tiny", "data=2 microbatches=2", ()),
    ("script", "gpt-tiny", "pipeline=2 microbatches=4 schedule=interleaved chunks=2", FOUR),  # tied, and values that pass over stages
]
SLOW: list[Plan] = [
    ("script", "llama-tiny", "data=2 zero=3 microbatches=2 recompute=full", ()),
    ("script", "gpt-tiny", "data=2 zero=2", ()),
    ("script", "llama-tiny", "pipeline=2 microbatches=4", ("layers.2",)),
    ("script", "gpt-tiny", "pipeline=2 microbatches=4 schedule=gpipe", ("layers.2",)),
    ("script", "gpt-tiny", "pipeline=2 microbatches=4 schedule=zb-h1", ("layers.2",)),
    ("script", "llama-tiny", "pipeline=2 microbatches=4 schedule=interleaved chunks=2", FOUR),
    ("script", "llama-tiny", "pipeline=2 microbatches=4 schedule=breadth-first chunks=2", FOUR),
]
TRAINERS: list[Plan] = [
    ("accelerate", "llama-tiny", "data=2", ()),  # accumulation is said in the script; its FSDP is for GPUs only
    ("lightning", "llama-tiny", "data=2 microbatches=2", ()),
    ("lightning", "llama-tiny", "data=1 tensor=2 zero=3 microbatches=2", ()),
]
DEEPSPEED: list[Plan] = [("deepspeed", "llama-tiny", f"data=2 microbatches=2 zero={zero}", ()) for zero in (0, 1, 2, 3)]


def losses_of_serial_training(name: str) -> list[float]:
    torch.manual_seed(0)
    model = resolve(name, BATCH, SEQUENCE)
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


def export_plan(plan: Plan, folder: Path) -> Path:
    """Write a plan as its framework's configuration; returns the file."""
    kind, model, layout, starts = plan
    request = ExportRequest(Layout.parse(layout), BATCH, model, SEQUENCE, LAYERS, stage_starts=starts)
    files = export_layout(find_framework("pytorch" if kind == "script" else kind), request).files
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder / next(iter(files))


def free_ports(count: int) -> int:
    """Return a port with some free ones behind it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    return port if port + count < 65000 else port - 1000


def losses_of_ranks(plans: list[Plan], folder: Path, count: int = 2) -> list[list[float]]:
    words = [f"{plan[0]}:{export_plan(plan, folder / str(number))}" for number, plan in enumerate(plans)]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    common["MASTER_PORT"] = str(free_ports(len(plans)))
    ranks = []
    for rank in range(count):
        own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        output = (folder / f"log{rank}").open("w")
        ranks.append(subprocess.Popen([sys.executable, str(PROGRAM), *words], cwd=folder, env=own, stdout=output, stderr=output))
    try:
        codes = [process.wait(timeout=280) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    logs = [(folder / f"log{rank}").read_text(errors="replace") for rank in range(count)]
    assert codes == [0] * count, "\n".join(log[-3000:] for log in logs)
    runs = re.split(r"^== .*$", logs[0], flags=re.M)[1:]
    return [[float(value) for value in re.findall(r"step \d+ loss ([\d.]+)", run)] for run in runs]


def assert_losses_are_serial(plans: list[Plan], folder: Path, ranks: int = 2) -> None:
    serial = {model: losses_of_serial_training(model) for model in {plan[1] for plan in plans}}
    found = dict(zip(plans, losses_of_ranks(plans, folder, ranks), strict=True))
    assert {plan: losses for plan, losses in found.items() if losses != pytest.approx(serial[plan[1]], abs=TOLERANCE)} == {}


def test_scripts_of_plain_pytorch_train_as_the_serial_model(tmp_path: Path) -> None:
    assert_losses_are_serial(QUICK, tmp_path)


@pytest.mark.long
def test_other_scripts_of_plain_pytorch_train_as_the_serial_model(tmp_path: Path) -> None:
    assert_losses_are_serial(SLOW, tmp_path)


@pytest.mark.long
def test_a_mesh_of_two_dimensions_trains_as_the_serial_model(tmp_path: Path) -> None:
    plans = [("script", "llama-tiny", f"data=4 shard=2 {rest}", ()) for rest in ("zero=3", "zero=2 microbatches=2")]
    assert_losses_are_serial(plans, tmp_path, 4)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["accelerate", "lightning", "deepspeed"])
def test_trainers_of_frameworks_train_as_the_serial_model(kind: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed")
    assert_losses_are_serial([plan for plan in (*TRAINERS, *DEEPSPEED) if plan[0] == kind], tmp_path)
