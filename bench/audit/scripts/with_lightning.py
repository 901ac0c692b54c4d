"""Lightning, with its own sampler or with the script's."""

import os

import lightning
import torch
from common import GPT, arguments, loss_fn, samples
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

a = arguments(devices=1, own=0)


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = GPT()

    def training_step(self, batch, i):
        return loss_fn(self.net(batch[0]), batch[1])

    def train_dataloader(self):
        data = TensorDataset(*samples(a))
        sampler = DistributedSampler(data, a.devices, self.trainer.global_rank, shuffle=False) if a.own else None
        return DataLoader(data, batch_size=a.batch, sampler=sampler)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.set_num_threads(1)
torch.manual_seed(a.seed)
task = Task()
# Named, since Lightning otherwise asks mpi4py, which ends where there is no MPI.
plugins = [] if "TORCHELASTIC_RUN_ID" in os.environ else [LightningEnvironment()]
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
strategy = "ddp" if a.devices > 1 else "auto"
trainer = lightning.Trainer(
    accelerator="cpu", devices=a.devices, strategy=strategy, max_steps=a.steps, plugins=plugins, use_distributed_sampler=not a.own, **quiet
)
trainer.fit(task)
