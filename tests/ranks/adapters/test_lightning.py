"""Lightning's Trainer with ShardwiseStrategy on 1 and 2 ranks: what it logs, saves and goes on from is the serial run's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwise.world.world import World

lightning = pytest.importorskip("lightning.pytorch")
LONG = pytest.mark.long


def module() -> Any:
    """As Lightning's own first example: two parts, each called in a step, and a penalty that is computed outside of them."""

    class Coder(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.encoder = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
            self.decoder = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 6))
            self.scale = nn.Parameter(torch.ones(()))

        def loss(self, batch: Any) -> torch.Tensor:
            (x,) = batch
            z = self.encoder(x)
            return F.mse_loss(self.decoder(z) * self.scale, x) + 0.1 * (z @ z.T).logsumexp(1).mean()  # between samples

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("valid", self.loss(batch))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Coder()


def loader(count: int, seed: int, shuffle: bool) -> Any:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), 4, shuffle=shuffle)


def fitted(folder: str, epochs: int, resume: str | None = None, **options: Any) -> tuple[dict[str, Any], Any]:
    """Metrics by step, and the trainer."""
    seen: dict[str, Any] = {}

    class Notes(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen[f"loss {trainer.global_step}"] = float(trainer.callback_metrics["loss"])

        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                seen[f"valid {trainer.global_step}"] = float(trainer.callback_metrics["valid"])

    lightning.seed_everything(1, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=epochs, default_root_dir=folder, callbacks=[Notes()], accelerator="cpu", devices=1, precision="64-true", logger=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.1, accumulate_grad_batches=2, **options,
    )  # fmt: skip
    trainer.fit(module(), loader(14, 1, True), loader(6, 2, False), ckpt_path=resume)
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    return seen, trainer


def ranked(world: World, folder: str, layout: str, serial: str) -> list[Any]:
    from shardwise.adapters.lightning import ShardwiseStrategy

    first, trainer = fitted(f"{folder}/a", 3, strategy=ShardwiseStrategy(plan=f"{layout} precision=float64"))
    assert trainer.is_global_zero == (world.rank == 0)
    again, _ = fitted(f"{folder}/b", 3, serial, strategy=ShardwiseStrategy(plan=f"{layout} precision=float64"))
    return [first, again]


@pytest.mark.parametrize("layout", ["tensor=2", pytest.param("data=2", marks=LONG), pytest.param("data=2 zero=1", marks=LONG)])
def test_what_lightning_sees_is_the_serial_run(ranks: Callable[..., list[Any]], tmp_path: Path, layout: str) -> None:
    from shardwise.adapters.lightning import ShardwiseStrategy

    assert ShardwiseStrategy.__doc__
    wanted, _ = fitted(str(tmp_path / "serial"), 3)
    fitted(str(tmp_path / "short"), 2)
    resumed, _ = fitted(str(tmp_path / "again"), 3, f"{tmp_path}/short/last.ckpt")
    for first, again in ranks(ranked, 2, str(tmp_path), layout, f"{tmp_path}/short/last.ckpt", timeout_s=200.0):
        assert first == pytest.approx(wanted, rel=1e-9)
        assert again == pytest.approx(resumed, rel=1e-9)
    # Plain Lightning goes on from what was written here.
    ours = torch.load(tmp_path / "a" / "last.ckpt", weights_only=False)["state_dict"]
    for name, x in torch.load(tmp_path / "serial" / "last.ckpt", weights_only=False)["state_dict"].items():
        torch.testing.assert_close(ours[name], x)
