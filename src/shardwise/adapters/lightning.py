"""Adapter for Lightning: `Trainer(strategy=ShardwiseStrategy(), devices=1)`, from `shardwise.adapters.lightning`.

Each child of the LightningModule that `training_step` calls is parallelized, captured with its arguments for the first training batch; the
rest of the module is replicated on every rank. Lightning sees one process with one device (`shardwise.adapters`): every rank loads the
global
batch; rank 0 writes logs and files. Checkpoints have Lightning's own format with full weights and optimizer state, and can be resumed on
any number of ranks, with or without shardwise. Not modelled: `broadcast` of objects that are not JSON; every rank keeps its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any

import torch

from shardwise.adapters.first_call import ModuleNotCalled, PlanLike, divide_module, first_call
from shardwise.adapters.optional_imports import import_required
from shardwise.run.loop.module import sharded_modules_of
from shardwise.run.loop.shard_module import full_state_dict
from shardwise.world.launch.current import current_world

DRAW_STATE_KEY = "shardwise"  # checkpoint key: state of the parallelized modules' random number generators


_SingleDevice: Any = object


class DividingStrategy(_SingleDevice):  # type: ignore[misc]
    """Mixin that overrides what Lightning's single-device strategy has to do differently where all ranks act as that device."""

    model: Any

    def __init__(self, plan: PlanLike = None, modules: Sequence[str] = (), **kwargs: Any) -> None:
        self._shardwise = world = current_world()
        super().__init__(device=world.device, **kwargs)
        self._plan, self._names = plan, tuple(modules)
        self._draws: Sequence[Any] = ()
        self.global_rank, self.local_rank = world.rank, world.local_rank

    @property
    def is_global_zero(self) -> bool:
        """Return whether this rank writes logs and files."""
        return self._shardwise.rank == 0

    def setup_environment(self) -> None:
        """Set the rank that Lightning's rank-zero-only functions check."""
        for name in ("lightning.fabric.utilities.rank_zero", "lightning.pytorch.utilities.rank_zero"):
            import_required(name, "lightning").rank_zero_only.rank = self._shardwise.rank
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Parallelize the module before Lightning builds the optimizers."""
        if trainer.state.fn == "fit":
            self.model = self.precision_plugin.convert_module(self.model)
            self.model_to_device()
            self._divide(trainer)
        super().setup(trainer)

    def _divide(self, trainer: Any) -> None:
        module, combined = self.lightning_module, import_required("lightning.pytorch.utilities.combined_loader", "lightning").CombinedLoader
        loaders, loaded = combined(trainer.fit_loop._data_source.dataloader(), "min_size"), list[Any]()

        def run() -> None:
            loaded.extend([next(iter(loaders))[0]] if not loaded else [])
            # As Lightning's loop has it: converted to the trainer's precision, then changed by the module's and data module's hooks.
            batch = module._on_before_batch_transfer(self.precision_plugin.convert_input(loaded[0]))
            batch = self.batch_to_device(batch, self._shardwise.device)
            # A trial step updates nothing and logs nothing; its optimizers exist so that it reaches the modules that it calls.
            with torch.no_grad(), self.precision_plugin.forward_context(), _trial_step(module):
                module.training_step(*_step_arguments(module, batch))

        module.train()
        steps = {id(m.model): m.replica.draw.step for _, m in sharded_modules_of(module)}
        for name in self._names or [name for name, child in module.named_children() if any(True for _ in child.parameters())]:
            child = module.get_submodule(name)
            try:
                divide_module(child, partial(first_call, child, run), self._plan, self._shardwise)
            except ModuleNotCalled:
                if self._names:
                    raise
                # A child that is not called stays replicated.
        for _, sharded_module in sharded_modules_of(module):
            sharded_module.replica.draw.step = steps.get(id(sharded_module.model), 0)  # another child's trial run may have called it
        for (_, sharded_module), draw in zip(sharded_modules_of(module), self._draws, strict=False):
            sharded_module.load_draw_state(draw)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        self._shardwise.all_reduce_max([0])

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank 0's object where it is JSON, else this rank's own."""
        text = ""
        if self._shardwise.rank == 0:
            with suppress(TypeError, ValueError):
                text = json.dumps(obj)
        text = self._shardwise.broadcast_text(lambda: text)
        return json.loads(text) if text else obj

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's full state on rank 0."""
        module = self.lightning_module
        return (full_state_dict(module) or {}) if sharded_modules_of(module) else dict(module.state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's full state on rank 0."""
        return full_state_dict(getattr(optimizer, "_optimizer", optimizer)) or {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save as Lightning does, with the state of the model's random number generators."""
        draws = [m.draw_state() for _, m in sharded_modules_of(self.lightning_module)]
        super().save_checkpoint({**checkpoint, DRAW_STATE_KEY: draws}, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load as Lightning does, before or after the model is parallelized."""
        super().load_model_state_dict(checkpoint, strict)
        self._draws = checkpoint.get(DRAW_STATE_KEY, ())


_TRIAL_METHODS = ("log", "log_dict", "manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients")


@contextmanager
def _trial_step(module: Any) -> Iterator[None]:
    """Context of a `training_step` without effects: it logs nothing, and its optimizers and schedulers do nothing."""
    stand_in = _IdleOptimizers(module)
    replaced: dict[str, Any] = dict.fromkeys(_TRIAL_METHODS, lambda *_, **__: None)
    replaced |= {
        "optimizers": stand_in.optimizers,
        "lr_schedulers": stand_in.schedulers,
        "toggled_optimizer": lambda *_, **__: nullcontext(),
    }
    own = {name: vars(module)[name] for name in replaced if name in vars(module)}
    vars(module).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del vars(module)[name]
        vars(module).update(own)


class _IdleOptimizers:
    """What `self.optimizers()` and `self.lr_schedulers()` return in a trial step: stand-ins, as many as `configure_optimizers` makes."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._counts: tuple[int, int] | None = None

    def _count(self) -> tuple[int, int]:
        if self._counts is None:
            made = self._module.configure_optimizers()
            self._counts = _count_configured(made)
        return self._counts

    def optimizers(self, *_: Any, **__: Any) -> Any:
        """Return one stand-in, or a list of several, as `LightningModule.optimizers` does."""
        return _several_or_one([_IdleOptimizer() for _ in range(self._count()[0])])

    def schedulers(self) -> Any:
        """Return one stand-in, a list of several, or None."""
        return _several_or_one([_IdleOptimizer() for _ in range(self._count()[1])])


class _IdleOptimizer:
    """An optimizer or scheduler whose every method does nothing; `step(closure)` calls its closure, as the optimizer would."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": [], "lr": 0.0}]
        self.state: dict[Any, Any] = {}

    def step(self, closure: Any = None, *_: Any, **__: Any) -> Any:
        """Call the closure."""
        return closure() if callable(closure) else None

    def toggle_model(self, *_: Any, **__: Any) -> Any:
        """Return an empty context."""
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            return self
        return lambda *_, **__: None


def _several_or_one(items: list[Any]) -> Any:
    return items[0] if len(items) == 1 else items or None


def _count_configured(made: Any) -> tuple[int, int]:
    """Return the numbers of optimizers and schedulers in a result of `configure_optimizers`, in each of Lightning's forms."""
    if made is None:
        return 0, 0
    if isinstance(made, Mapping):
        return 1, int("lr_scheduler" in made)
    if isinstance(made, list | tuple):
        if len(made) == 2 and all(isinstance(part, list | tuple) for part in made):
            return len(made[0]), len(made[1])
        return len(made), sum(isinstance(part, Mapping) and "lr_scheduler" in part for part in made)
    return 1, 0


def _step_arguments(module: Any, batch: Any) -> tuple[Any, ...]:
    """Return the arguments with which Lightning calls `training_step`: a step may leave `batch_idx` out."""
    takes = import_required("lightning.pytorch.utilities.signature_utils", "lightning").is_param_in_hook_signature
    return (batch, 0) if takes(module.training_step, "batch_idx", min_args=2) else (batch,)


def _disable_broken_mpi() -> None:
    """Disable Lightning's MPI detection where mpi4py finds no MPI library, which would end the process."""
    environment = import_required("lightning.fabric.plugins.environments.mpi", "lightning").MPIEnvironment
    try:
        environment.detect()
    except RuntimeError:
        environment.detect = staticmethod(lambda: False)


@cache
def _strategy_class() -> Any:
    _disable_broken_mpi()
    base = import_required("lightning.pytorch", "lightning").strategies.SingleDeviceStrategy
    described = """Lightning strategy in which all ranks act as one device.

    `plan`: as for `shardwise.auto_parallelize`; `modules`: names of the modules to parallelize, by default every child of the
LightningModule
    that has parameters and is called."""
    return type("ShardwiseStrategy", (DividingStrategy, base), {"__doc__": described, "__module__": __name__, "strategy_name": "shardwise"})


def __getattr__(name: str) -> Any:
    if name == "ShardwiseStrategy":
        return _strategy_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
