"""Lightning around a divided model: `Trainer(strategy=WeftStrategy(), devices=1)`, from `weft.adapters.lightning`.

In: a LightningModule. Out: each of its children that `training_step` calls is divided, by what it is called with for the first batch of
training; what else the module does is computed by every rank. Lightning sees one process with one device (`weft.adapters`): every rank
loads the whole batch. Logs and files are rank 0's. Checkpoints have Lightning's own form, whole weights and whole optimizers' states, and
are gone on from with any number of ranks, with weft or without.

Not modelled: objects in `broadcast` that are not JSON, which every rank has of itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

import torch

from weft.adapters.first_call import NotCalled, Wanted, divide, first_call
from weft.adapters.required import required
from weft.run.loop.divide import full_state_dict
from weft.run.loop.module import sharded_modules_of
from weft.world.current import current_world

DRAWN = "weft"  # of a checkpoint: where the divided modules' own random numbers are


_SingleDevice: Any = object


class Dividing(_SingleDevice):  # type: ignore[misc]
    """What Lightning's strategy for a single device does otherwise where all ranks are that device."""

    model: Any

    def __init__(self, plan: Wanted = None, modules: Sequence[str] = (), **kwargs: Any) -> None:
        self._weft = world = current_world()
        super().__init__(device=world.device, **kwargs)
        self._plan, self._names = plan, tuple(modules)
        self._draws: Sequence[Any] = ()
        self.global_rank, self.local_rank = world.rank, world.local_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank writes."""
        return self._weft.rank == 0

    def setup_environment(self) -> None:
        """Says what rank this is to those who print and log once."""
        for name in ("lightning.fabric.utilities.rank_zero", "lightning.pytorch.utilities.rank_zero"):
            required(name, "lightning").rank_zero_only.rank = self._weft.rank
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Divides before optimizers are made."""
        if trainer.state.fn == "fit":
            self.model = self.precision_plugin.convert_module(self.model)
            self.model_to_device()
            self._divide(trainer)
        super().setup(trainer)

    def _divide(self, trainer: Any) -> None:
        module, combined = self.lightning_module, required("lightning.pytorch.utilities.combined_loader", "lightning").CombinedLoader
        loaders, loaded = combined(trainer.fit_loop._data_source.dataloader(), "min_size"), list[Any]()

        def run() -> None:
            loaded.extend([next(iter(loaders))[0]] if not loaded else [])
            with torch.no_grad(), self.precision_plugin.forward_context(), _logging_nothing(module):
                module.training_step(module.transfer_batch_to_device(loaded[0], self._weft.device, 0), 0)

        module.train()
        steps = {id(one.model): one.way.draw.step for _, one in sharded_modules_of(module)}
        for name in self._names or [name for name, child in module.named_children() if any(True for _ in child.parameters())]:
            child = module.get_submodule(name)
            try:
                divide(child, partial(first_call, child, run), self._plan, self._weft)
            except NotCalled:
                if self._names:
                    raise
                # Every rank computes what there is.
        for _, one in sharded_modules_of(module):
            one.way.draw.step = steps.get(id(one.model), 0)  # another's first call may have called it
        for (_, one), draw in zip(sharded_modules_of(module), self._draws, strict=False):
            one.load_draw_state(draw)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """All ranks come here."""
        self._weft.maximum([0])

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What rank 0 has, if it is JSON."""
        told = ""
        if self._weft.rank == 0:
            with suppress(TypeError, ValueError):
                told = json.dumps(obj)
        told = self._weft.told(lambda: told)
        return json.loads(told) if told else obj

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole state on rank 0."""
        module = self.lightning_module
        return (full_state_dict(module) or {}) if sharded_modules_of(module) else dict(module.state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The whole state on rank 0."""
        return full_state_dict(getattr(optimizer, "_optimizer", optimizer)) or {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """As Lightning's, with where the model's own random numbers are."""
        draws = [one.draw_state() for _, one in sharded_modules_of(self.lightning_module)]
        super().save_checkpoint({**checkpoint, DRAWN: draws}, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """As Lightning's, before the model is divided or behind."""
        super().load_model_state_dict(checkpoint, strict)
        self._draws = checkpoint.get(DRAWN, ())


@contextmanager
def _logging_nothing(module: Any) -> Iterator[None]:
    module.log = module.log_dict = lambda *_, **__: None
    try:
        yield
    finally:
        del module.log, module.log_dict


def _without_a_broken_mpi() -> None:
    """Lightning asks mpi4py whether this process is one of MPI's, and ends where that finds no library of MPI."""
    environment = required("lightning.fabric.plugins.environments.mpi", "lightning").MPIEnvironment
    try:
        environment.detect()
    except RuntimeError:
        environment.detect = staticmethod(lambda: False)


@cache
def _strategy() -> Any:
    _without_a_broken_mpi()
    base = required("lightning.pytorch", "lightning").strategies.SingleDeviceStrategy
    described = """Lightning's strategy where all ranks are one device.

    `plan`: as of `weft.auto_parallelize`; `modules`: names of those that are divided, by default every child of the LightningModule that
    has parameters and is called."""
    return type("WeftStrategy", (Dividing, base), {"__doc__": described, "__module__": __name__, "strategy_name": "weft"})


def __getattr__(name: str) -> Any:
    if name == "WeftStrategy":
        return _strategy()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
