"""Adapter for Hugging Face trainers and their subclasses: `from shardwise.adapters.transformers import Trainer`.

`Trainer`, `Seq2SeqTrainer` and all other trainers of transformers can be imported from here; `trainer_of` takes any subclass. The trainer
parallelizes the model when it is constructed, captured with the first batch of its data set and the arguments of its own call. It sees one
process with one device (`shardwise.adapters`), so `per_device_train_batch_size` is the global batch on any number of ranks, and losses,
schedules and steps equal the serial run's. Checkpoints have transformers' own format with full weights and optimizer state, and can be
resumed on any number of ranks, with or without shardwise. Not modelled: activation checkpointing, which has no effect on a captured model.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.adapters.accelerate import (
    FullOptimizerState,
    accelerator_class,
    appear_as_one_process,
    as_main_process,
    patch_states_to_one_process,
)
from shardwise.adapters.first_call import PlanLike, divide_module, first_call
from shardwise.adapters.optional_imports import import_required
from shardwise.run.loop.module import sharded_modules_of
from shardwise.run.loop.shard_module import full_state_dict
from shardwise.run.loop.weight_files import read_weights, write_weights
from shardwise.train.data.peek_first_batch import first_batch
from shardwise.units import parse_bytes
from shardwise.world.launch.current import current_world

DRAW_STATE_FILE = "shardwise.json"  # file of a checkpoint: state of the model's random number generators


_Trainer: Any = object


class DividingTrainer(_Trainer):  # type: ignore[misc]
    """Mixin that overrides what a trainer of transformers has to do differently for a parallelized model."""

    model: Any
    optimizer: Any

    def __init__(self, *args: Any, plan: PlanLike = None, **kwargs: Any) -> None:
        self._plan = plan
        super().__init__(*args, **kwargs)
        self._has_data = True
        if self.model_init is None:
            self._divide(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        appear_as_one_process(current_world())
        self.args._n_gpu = min(1, self.args.n_gpu)
        self.args.accelerator_config.dispatch_batches = False  # every rank reads
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = accelerator_class()

    def call_model_init(self, trial: Any = None) -> nn.Module:
        model: nn.Module = super().call_model_init(trial)
        if getattr(self, "_has_data", False):
            self._divide(model)
        return model

    def _divide(self, model: nn.Module) -> None:
        if self.train_dataset is None:  # nothing is trained: the model stays replicated
            return
        inner = _base_model(model)

        def batch() -> Any:
            with self._plain_loaders():
                inputs = first_batch(self.get_train_dataloader())
            inputs = self._prepare_inputs(inputs)
            count = self._get_num_items_in_batch([inputs], self.args.device)
            return first_call(inner, lambda: self.compute_loss(model, inputs, num_items_in_batch=count))

        model.train()
        divide_module(inner, batch, self._plan, current_world())

    @contextmanager
    def _plain_loaders(self) -> Iterator[None]:
        """Run a block in which Accelerate leaves data loaders as torch built them."""
        self.accelerator.prepare = lambda loader: loader
        try:
            yield
        finally:
            del self.accelerator.prepare

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Build a loader whose workers draw the same random numbers on all ranks."""
        with as_main_process():
            return super()._get_dataloader(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as transformers does; every rank calls it."""
        if not sharded_modules_of(self.model):
            super().save_model(output_dir, _internal_call)
            return
        state = full_state_dict(self.model)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call and self.args.should_save:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer, self.optimizer = self.optimizer, FullOptimizerState(self.optimizer)
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = optimizer

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)
            draws = [m.draw_state() for _, m in sharded_modules_of(self.model)]
            Path(output_dir, DRAW_STATE_FILE).write_text(json.dumps(draws))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None and Path(checkpoint, DRAW_STATE_FILE).is_file():
            stored = json.loads(Path(checkpoint, DRAW_STATE_FILE).read_text())
            for (_, sharded_module), draw in zip(sharded_modules_of(self.model), stored, strict=False):
                sharded_module.load_draw_state(draw)


@cache
def trainer_of(base: Any) -> Any:
    """Build a subclass of the trainer `base` that parallelizes its model; the constructor also takes `plan`, as
    `shardwise.auto_parallelize`."""
    return type(base.__name__, (DividingTrainer, base), {"__doc__": base.__doc__, "__module__": __name__})


def _base_model(model: nn.Module) -> nn.Module:
    """Return the module that computes: for a `peft` model the base model with its adapters, which `generate` calls too."""
    base: Any = getattr(model, "get_base_model", None)
    return model if base is None else base()


def save_pretrained(model: Any, folder: str | Path, max_shard_size: str | float = "5GB") -> None:
    """Write a parallelized model as its own `save_pretrained` does; no rank holds more than one full tensor. Every rank calls it.

    A model whose weights transformers stores under other names is gathered on rank 0 and written by its own method.
    """
    world = current_world()
    state = {name: torch.empty(p.shape, device="meta") for name, p in model.named_parameters()}
    if _stored_names(model, state) != state.keys():
        state_dict = full_state_dict(model)
        if world.rank == 0:
            model.save_pretrained(folder, state_dict=state_dict, max_shard_size=max_shard_size)
        world.all_reduce_max([0])
        return
    if world.rank == 0:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    write_weights(model, Path(folder), parse_bytes(max_shard_size))


def _stored_names(model: Any, state: dict[str, torch.Tensor]) -> set[str]:
    """Return the names under which transformers stores these tensors in files."""
    try:
        loading = importlib.import_module("transformers.core_model_loading")
    except ImportError:  # before version 5 the names are the model's own
        return set(state)
    return set(loading.revert_weight_conversion(model, dict(state)))


def load_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Load a folder of `save_pretrained`, written with or without shardwise, into a parallelized model's shards. Every rank calls it."""
    read_weights(model, Path(folder))


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return trainer_of(getattr(import_required("transformers", "hf"), name))


patch_states_to_one_process()  # from here on: a script parses its arguments before it makes a trainer
