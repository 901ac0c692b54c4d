"""Lightning's manual optimization on 1 and 2 ranks: two optimizers as in its own GAN, closures, a step without an index, batches that the
trainer's precision and a module's hook convert; weights are the serial run's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwise.world.world import World

lightning = pytest.importorskip("lightning.pytorch")


def adversaries() -> Any:
    """As Lightning's example of a GAN: `training_step` takes no index, and freezes one half while the other trains."""

    class Gan(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.generator = nn.Sequential(nn.Linear(5, 16), nn.LeakyReLU(0.2), nn.Linear(16, 6))
            self.discriminator = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

        def forward(self, z: torch.Tensor) -> Any:
            return self.generator(z)

        def training_step(self, batch: Any) -> None:
            (x,) = batch
            first, second = self.optimizers()
            z = torch.randn(len(x), 5).type_as(x)
            true, false = torch.ones(len(x), 1).type_as(x), torch.zeros(len(x), 1).type_as(x)
            self.toggle_optimizer(first)
            loss = F.binary_cross_entropy_with_logits(self.discriminator(self(z)), true)
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
            real = F.binary_cross_entropy_with_logits(self.discriminator(x), true)
            fake = F.binary_cross_entropy_with_logits(self.discriminator(self(z).detach()), false)
            second.zero_grad()
            self.manual_backward((real + fake) / 2)
            second.step()
            self.untoggle_optimizer(second)
            self.log_dict({"generator": loss, "discriminator": real + fake})
            for schedule in self.lr_schedulers():
                schedule.step()

        def configure_optimizers(self) -> Any:
            made = [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.generator, self.discriminator)]
            return made, [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in made]

    return Gan()


def closures() -> Any:
    """One optimizer, whose step takes a closure with another inside; a hook adds a column to the batch."""

    class Closed(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.first, self.second = nn.Linear(7, 8), nn.Linear(8, 1)

        def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
            return [torch.cat((batch[0], batch[0][:, :1] ** 2), 1)]

        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()

            def closure() -> torch.Tensor:
                def error() -> torch.Tensor:
                    return F.mse_loss(self.second(self.first(batch[0]).tanh()), batch[0].sum(1, keepdim=True))

                loss = error()
                optimizer.zero_grad()
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    return Closed()


MODELS = (adversaries, closures)


def fitted(folder: str, make: Callable[[], Any], **options: Any) -> dict[str, torch.Tensor]:
    x = torch.randn(14, 6, generator=torch.Generator().manual_seed(1))  # float32, which the trainer's precision converts
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), 4, shuffle=True)
    lightning.seed_everything(1, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=2, default_root_dir=folder, accelerator="cpu", devices=1, precision="64-true", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, **options,
    )  # fmt: skip
    model = make()
    trainer.fit(model, loader)
    return dict(trainer.strategy.lightning_module_state_dict())


def ranked(world: World, folder: str, layout: str) -> list[dict[str, torch.Tensor]]:
    from shardwise.adapters.lightning import ShardwiseStrategy

    return [fitted(folder, make, strategy=ShardwiseStrategy(plan=f"{layout} precision=float64")) for make in MODELS]


@pytest.mark.parametrize("layout", ["data=2", "tensor=2"])
def test_manual_optimization_is_the_serial_run(ranks: Callable[..., list[Any]], tmp_path: Any, layout: str) -> None:
    from shardwise.adapters.lightning import ShardwiseStrategy

    assert ShardwiseStrategy.__doc__
    serial = [fitted(str(tmp_path), make) for make in MODELS]
    found, *_ = ranks(ranked, 2, str(tmp_path), layout, timeout_s=200.0)
    for name, wanted, ours in zip(("adversaries", "closures"), serial, found, strict=True):
        assert ours.keys() == wanted.keys(), name
        for key, x in wanted.items():
            torch.testing.assert_close(ours[key], x, rtol=1e-9, atol=1e-12, msg=f"{name}: {key}")
