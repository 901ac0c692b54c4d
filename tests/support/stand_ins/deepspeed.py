"""The calls of `docs/migrate/deepspeed.md` as DeepSpeed documents them, on one process: a stand-in where DeepSpeed is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader


class DeepSpeedEngine:
    """Forward, backward and a step with clipping, of `initialize`'s model."""

    global_rank = 0

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float) -> None:
        self.model, self.optimizer, self.clip = model, optimizer, clip

    def __call__(self, *batch: Any) -> Any:
        return self.model(*batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save_checkpoint(self, folder: str) -> None:
        Path(folder).mkdir(exist_ok=True)
        torch.save(self.model.state_dict(), Path(folder) / "deepspeed.pt")


def initialize(model: nn.Module, training_data: Any, config: dict[str, Any]) -> tuple[Any, ...]:
    """Return engine, optimizer, loader and no schedule. DeepSpeed's loader shuffles nothing on one process here."""
    assert set(config) <= {"train_batch_size", "optimizer", "zero_optimization", "gradient_clipping"}
    optimizer = getattr(torch.optim, config["optimizer"]["type"])(model.parameters(), **config["optimizer"]["params"])
    loader = DataLoader(training_data, batch_size=config["train_batch_size"])
    return DeepSpeedEngine(model, optimizer, config["gradient_clipping"]), optimizer, loader, None
