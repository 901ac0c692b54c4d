"""Ranks that train with exported configurations, one after the other in the same processes: `exported_programs.py KIND:FILE ...`.

`script` runs an exported script of plain PyTorch; the others train the zoo's model of the test with the framework's own trainer, set up
from the exported file alone. Each prints its losses, means over all ranks and microbatches.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.zoo.resolve import resolve

MODEL, BATCH, SEQUENCE, STEPS, LR = "llama-tiny", 8, 32, 3, 1e-3


class Training:
    """The model, its batch, and the rows of it that a rank reads in a microbatch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = resolve(MODEL, BATCH, SEQUENCE)
        self.module, self.batch = self.model.make(), self.model.batch(BATCH)

    def rows(self, number: int, micro: int, count: int, rank: int) -> dict[str, torch.Tensor]:
        begin = (rank * count + number) * micro
        return {key: value[begin : begin + micro] for key, value in self.batch.items()}

    def loss(self, module: Any, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        assert self.model.loss is not None
        return self.model.loss(module(**rows), rows)


def print_loss(step: int, losses: list[torch.Tensor]) -> None:
    mean = torch.stack([loss.detach().double() for loss in losses]).mean()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    if os.environ.get("RANK", "0") == "0":
        print(f"step {step} loss {mean.item():.9f}", flush=True)


def train_serially() -> list[float]:
    """Return the losses of the whole batch on one process."""
    training, losses = Training(), []
    optimizer = torch.optim.AdamW(training.module.parameters(), LR)
    for _ in range(STEPS):
        loss = training.loss(training.module, training.batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_with_accelerate(file: Path) -> None:
    """Train with what `accelerate launch --config_file` sets; accumulation is the script's, as the export says."""
    from accelerate import Accelerator
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    options = launch_command_parser().parse_args(["--config_file", str(file), "--cpu", "train.py"])
    options = _validate_launch_command(options)[0]
    os.environ.update({key: value for key, value in prepare_multi_gpu_env(options).items() if key.startswith("ACCELERATE")})
    os.environ["ACCELERATE_USE_CPU"] = "true"
    training, count = Training(), 2
    accelerator = Accelerator(gradient_accumulation_steps=count)
    micro = BATCH // accelerator.num_processes // count
    module, optimizer = accelerator.prepare(training.module, torch.optim.AdamW(training.module.parameters(), LR))
    for step in range(STEPS):
        losses = []
        for number in range(count):
            with accelerator.accumulate(module):
                loss = training.loss(module, training.rows(number, micro, count, accelerator.process_index))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss)
        print_loss(step, losses)
    accelerator.end_training()


def train_with_lightning(file: Path) -> None:
    """Train with the Trainer of a LightningCLI file, on processors; the tensor plan is the module's, as the export says."""
    import lightning
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.pytorch import strategies
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from yaml import safe_load

    values = safe_load(file.read_text())["trainer"]
    count, strategy = values.get("accumulate_grad_batches", 1), values.pop("strategy")
    if isinstance(strategy, dict):
        arguments = strategy.get("init_args", {})
        strategy = getattr(strategies, strategy["class_path"].rpartition(".")[2])(**arguments)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.training_of = Training()
            self.module = self.training_of.module
            self.losses: list[torch.Tensor] = []

        def configure_model(self) -> None:
            mesh = self.device_mesh
            if mesh is None:
                return
            plan = {"mlp.up": ColwiseParallel(), "mlp.gate": ColwiseParallel(), "mlp.down": RowwiseParallel()}
            if mesh["tensor_parallel"].size() > 1:
                for layer in self.module.layers:
                    parallelize_module(layer, mesh["tensor_parallel"], plan)
            fully_shard(self.module, mesh=mesh["data_parallel"], reshard_after_forward=True)

        def training_step(self, rows: Any, index: int) -> torch.Tensor:
            replica = self.device_mesh["data_parallel"].get_local_rank() if self.device_mesh is not None else self.global_rank
            replicas = self.device_mesh["data_parallel"].size() if self.device_mesh is not None else self.trainer.world_size
            rows = self.training_of.rows(index % count, BATCH // replicas // count, count, replica)
            loss = self.training_of.loss(self.module, rows)
            self.losses.append(loss.detach())
            if len(self.losses) == count:
                print_loss(index // count, self.losses)
                self.losses.clear()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.module.parameters(), LR)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    values |= {"accelerator": "cpu", "devices": 2, "num_nodes": 1, "max_epochs": 1, "use_distributed_sampler": False}
    trainer = lightning.Trainer(**values, **quiet, strategy=strategy, plugins=[LightningEnvironment()])
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(STEPS * count, 1), batch_size=1))


def train_with_deepspeed(file: Path) -> None:
    """Train with the engine of an exported JSON, on processors."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    configuration = json.loads(file.read_text())
    configuration |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    micro, count = configuration["train_micro_batch_size_per_gpu"], configuration["gradient_accumulation_steps"]
    deepspeed.init_distributed("gloo")
    training = Training()
    optimizer = torch.optim.AdamW(training.module.parameters(), LR)
    engine, *_ = deepspeed.initialize(model=training.module, optimizer=optimizer, config=configuration)
    for step in range(STEPS):
        losses = []
        for number in range(count):
            loss = training.loss(engine, training.rows(number, micro, count, dist.get_rank()))
            engine.backward(loss)
            engine.step()
            losses.append(loss)
        print_loss(step, losses)


def run_script(file: Path) -> None:
    runpy.run_path(str(file), run_name="__main__")


KINDS = {"script": run_script, "accelerate": train_with_accelerate, "lightning": train_with_lightning, "deepspeed": train_with_deepspeed}


def main(words: list[str]) -> None:
    port = int(os.environ["MASTER_PORT"])
    for number, word in enumerate(words):
        kind, _, file = word.partition(":")
        os.environ["MASTER_PORT"] = str(port + number)
        began = time.perf_counter()
        if os.environ["RANK"] == "0":
            print(f"== {word}", flush=True)
        KINDS[kind](Path(file).absolute())
        if dist.is_initialized() and kind != "deepspeed":  # which keeps its groups
            dist.destroy_process_group()
        if os.environ["RANK"] == "0":
            print(f"took {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
