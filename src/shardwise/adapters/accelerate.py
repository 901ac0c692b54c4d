"""Adapter for Hugging Face Accelerate: `from shardwise.adapters.accelerate import Accelerator`.

Accelerate sees one process with one device: it shards no data loader, gathers nothing, and steps the scheduler once a step. Only
`is_main_process`, `print` and `wait_for_everyone` take the ranks into account. The first model that is prepared together with a data loader
is parallelized, captured with the inputs of the loader's first batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from shardwise.adapters.first_call import PlanLike, divide_module
from shardwise.adapters.optional_imports import import_required
from shardwise.errors import UsageError
from shardwise.run.loop.module import accumulate, sharded_modules_of
from shardwise.run.loop.shard_module import full_state_dict
from shardwise.train.data.peek_first_batch import first_batch
from shardwise.world.launch.current import current_world, without_launcher_variables
from shardwise.world.world import World


def appear_as_one_process(world: World) -> None:
    """Set Accelerate's state in this process to a single process; its index is the rank, so that rank 0 is the main process."""
    state = import_required("accelerate.state", "hf")
    state.PartialState()
    _patch_wait_for_everyone(state.PartialState)
    single_process = {
        "num_processes": 1,
        "process_index": world.rank,
        "local_process_index": world.local_rank,
        "distributed_type": state.DistributedType.NO,
        "device": world.device,
        "backend": None,
    }
    for kind in (state.PartialState, state.AcceleratorState):
        if kind._shared_state:
            kind._shared_state.update(single_process)
    state.GradientState._shared_state.clear()


@cache
def patch_states_to_one_process() -> None:
    """Patch Accelerate's state to be a single process as soon as it is constructed, without a process group of its own.

    The training arguments of transformers construct one before there is a trainer.
    """
    kind = import_required("accelerate.state", "hf").PartialState
    construct = kind.__init__

    @wraps(construct)
    def construct_alone(self: Any, *args: Any, **kwargs: Any) -> None:
        if kind._shared_state:
            construct(self, *args, **kwargs)
            return
        with without_launcher_variables():
            construct(self, *args, **kwargs)
        appear_as_one_process(current_world())

    kind.__init__ = construct_alone


@cache
def _patch_wait_for_everyone(kind: Any) -> None:
    """Patch `wait_for_everyone` to wait for all ranks; the state is pickled with a run's arguments, so it cannot store a `World`."""
    kind.wait_for_everyone = lambda self: current_world().all_reduce_max([0])


@contextmanager
def as_main_process() -> Iterator[None]:
    """Run a block in which every rank appears to be the main process."""
    state = import_required("accelerate.state", "hf")
    tables = [kind._shared_state for kind in (state.PartialState, state.AcceleratorState) if kind._shared_state]
    indices = [table["process_index"] for table in tables]
    for table in tables:
        table["process_index"] = 0
    try:
        yield
    finally:
        for table, index in zip(tables, indices, strict=True):
            table["process_index"] = index


class FullOptimizerState:
    """Stand-in for an optimizer while its state is saved: the full state, on the main process. Every rank constructs one."""

    def __init__(self, optimizer: Any) -> None:
        self._state = full_state_dict(getattr(optimizer, "optimizer", optimizer)) or {}

    def state_dict(self) -> dict[str, Any]:
        return self._state


class _FullModel:
    """Stand-in for a parallelized model while its weights are loaded."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, **_: Any) -> Any:
        return self._model.load_state_dict({**state, **_tied_parameters(self._model, state)}, strict=strict)


def _tied_parameters(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return tied tensors, which a file stores once, under their other names."""
    stored = {id(p): state[name] for name, p in model.named_parameters(remove_duplicate=False) if name in state}
    return {name: stored[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if id(p) in stored and name not in state}


_Accelerator: Any = object


class DividingAccelerator(_Accelerator):  # type: ignore[misc]
    """Mixin that overrides what Accelerate has to do differently for a parallelized model."""

    _models: list[Any]
    _optimizers: list[Any]
    plan: PlanLike = None

    def __init__(self, *args: Any, plan: PlanLike = None, **kwargs: Any) -> None:
        appear_as_one_process(current_world())
        super().__init__(*args, **kwargs)
        self.plan = plan
        self.dataloader_config.dispatch_batches = False  # every rank reads

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare as Accelerate does; a model that is prepared with a data loader is parallelized first."""
        models = [x for x in args if isinstance(x, nn.Module)]
        loaders = [x for x in args if isinstance(x, DataLoader)]
        if any(not sharded_modules_of(model) for model in models) and loaders:
            if len(models) > 1:
                raise UsageError(
                    f"{len(models)} models are prepared together, and what each is called with is not known: divide each by "
                    "shardwise.auto_parallelize(model, batch) before, and prepare() leaves them alone"
                )
            divide_module(models[0], lambda: first_batch(loaders[0]), self.plan, current_world())
        return super().prepare(*args, **kwargs)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare as Accelerate does, without moving optimizer state, which is on its device already."""
        return super().prepare_optimizer(optimizer, device_placement=False)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Run a block whose backward passes reduce no gradients (gradient accumulation)."""
        return accumulate(model)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state on the main process and nothing on the other ranks; every rank calls it."""
        if not sharded_modules_of(model):
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        return OrderedDict(full_state_dict(model) or {})  # an OrderedDict tells Accelerate that it may drop tied tensors

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load as Accelerate does, into parallelized models."""
        models, self._models = self._models, [_FullModel(model) for model in self._models]
        try:
            with as_main_process():  # all ranks load the main process's generator state
                return super().load_state(input_dir, *args, **kwargs)
        finally:
            self._models = models

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save as Accelerate does, with full weights and optimizer state: a folder that can be loaded on any number of ranks."""
        optimizers, self._optimizers = self._optimizers, [FullOptimizerState(optimizer) for optimizer in self._optimizers]
        try:
            return super().save_state(*args, **kwargs)
        finally:
            self._optimizers = optimizers
            self.wait_for_everyone()


@cache
def accelerator_class() -> Any:
    """Build the `Accelerator` subclass for parallelized models. `plan`: as for `shardwise.auto_parallelize`; the rest is Accelerate's."""
    patch_states_to_one_process()
    base = import_required("accelerate", "hf").Accelerator
    return type("Accelerator", (DividingAccelerator, base), {"__doc__": base.__doc__, "__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == "Accelerator":
        return accelerator_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
