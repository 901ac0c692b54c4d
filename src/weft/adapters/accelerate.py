"""Hugging Face Accelerate around a divided model: `from weft.adapters.accelerate import Accelerator`.

In: a script's calls of `prepare`, `backward`, `gather`. Out: the same on one process with one device, as which all ranks appear: no loader
is divided, nothing is gathered, the scheduler steps once a step. `is_main_process`, `print` and `wait_for_everyone` know of the ranks. The
first model that is prepared together with a loader is divided by what it is called with for the loader's first batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from weft.adapters.first_call import Wanted, divide
from weft.adapters.required import required
from weft.errors import UsageError
from weft.run.loop.divide import full_state_dict
from weft.run.loop.module import accumulate, sharded_modules_of
from weft.train.first_batch import first_batch
from weft.world.current import current_world, launched_by_nobody
from weft.world.world import World


def appear_as_one_process(world: World) -> None:
    """Let Accelerate's states say so, in this process: one process, whose index is this rank's only in that rank 0 is the main one."""
    state = required("accelerate.state", "hf")
    state.PartialState()
    _wait_for_ranks(state.PartialState)
    mine = {
        "num_processes": 1,
        "process_index": world.rank,
        "local_process_index": world.local_rank,
        "distributed_type": state.DistributedType.NO,
        "device": world.device,
        "backend": None,
    }
    for kind in (state.PartialState, state.AcceleratorState):
        if kind._shared_state:
            kind._shared_state.update(mine)
    state.GradientState._shared_state.clear()


@cache
def always_one_process() -> None:
    """Let Accelerate's states say so from the moment that they are made, and join no process group of their own.

    Arguments of transformers make one before there is a trainer.
    """
    kind = required("accelerate.state", "hf").PartialState
    construct = kind.__init__

    @wraps(construct)
    def alone(self: Any, *args: Any, **kwargs: Any) -> None:
        if kind._shared_state:
            construct(self, *args, **kwargs)
            return
        with launched_by_nobody():
            construct(self, *args, **kwargs)
        appear_as_one_process(current_world())

    kind.__init__ = alone


@cache
def _wait_for_ranks(kind: Any) -> None:
    """Let its states, which are pickled with a run's arguments and so hold no ranks, wait for all of them."""
    kind.wait_for_everyone = lambda self: current_world().maximum([0])


@contextmanager
def as_main_process() -> Iterator[None]:
    """A block in which every rank appears to be the main process."""
    state = required("accelerate.state", "hf")
    tables = [kind._shared_state for kind in (state.PartialState, state.AcceleratorState) if kind._shared_state]
    before = [table["process_index"] for table in tables]
    for table in tables:
        table["process_index"] = 0
    try:
        yield
    finally:
        for table, index in zip(tables, before, strict=True):
            table["process_index"] = index


class FullState:
    """Stands for an optimizer where its state is saved: whole, on the main process. Every rank makes one."""

    def __init__(self, optimizer: Any) -> None:
        self._state = full_state_dict(getattr(optimizer, "optimizer", optimizer)) or {}

    def state_dict(self) -> dict[str, Any]:
        return self._state


class _FullModel:
    """Stands for a divided model where its weights are loaded."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, **_: Any) -> Any:
        return self._model.load_state_dict({**state, **_tied(self._model, state)}, strict=strict)


def _tied(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Under their other names the tensors that a file has once."""
    stored = {id(p): state[name] for name, p in model.named_parameters(remove_duplicate=False) if name in state}
    return {name: stored[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if id(p) in stored and name not in state}


_Accelerator: Any = object


class Dividing(_Accelerator):  # type: ignore[misc]
    """What Accelerate does otherwise around a divided model."""

    _models: list[Any]
    _optimizers: list[Any]
    plan: Wanted = None

    def __init__(self, *args: Any, plan: Wanted = None, **kwargs: Any) -> None:
        appear_as_one_process(current_world())
        super().__init__(*args, **kwargs)
        self.plan = plan
        self.dataloader_config.dispatch_batches = False  # every rank reads

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; a model that is prepared with a loader is divided first."""
        models = [x for x in args if isinstance(x, nn.Module)]
        loaders = [x for x in args if isinstance(x, DataLoader)]
        optimizers = [x for x in args if isinstance(x, Optimizer)]
        if any(not sharded_modules_of(model) for model in models) and loaders:
            if len(models) > 1:
                raise UsageError(
                    f"{len(models)} models are prepared together, and what each is called with is not known: divide each by "
                    "weft.auto_parallelize(model, batch) before, and prepare() leaves them alone"
                )
            divide(models[0], lambda: first_batch(loaders[0]), self.plan, current_world(), optimizers)
        return super().prepare(*args, **kwargs)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """As Accelerate's, but for moving a state that is where it belongs."""
        return super().prepare_optimizer(optimizer, device_placement=False)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A block whose backwards exchange no gradients."""
        return accumulate(model)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state on the main process, nothing elsewhere; every rank calls it."""
        if not sharded_modules_of(model):
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        return OrderedDict(full_state_dict(model) or {})  # by which Accelerate knows that it may drop tied tensors

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's, into divided models."""
        models, self._models = self._models, [_FullModel(one) for one in self._models]
        try:
            with as_main_process():  # whose random numbers all have
                return super().load_state(input_dir, *args, **kwargs)
        finally:
            self._models = models

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's, with whole weights and optimizers' states: a folder that it loads on any number of ranks."""
        optimizers, self._optimizers = self._optimizers, [FullState(one) for one in self._optimizers]
        try:
            return super().save_state(*args, **kwargs)
        finally:
            self._optimizers = optimizers
            self.wait_for_everyone()


@cache
def accelerator_class() -> Any:
    """Accelerate's `Accelerator` around divided models. `plan`: as of `weft.auto_parallelize`; the rest is Accelerate's own."""
    always_one_process()
    base = required("accelerate", "hf").Accelerator
    return type("Accelerator", (Dividing, base), {"__doc__": base.__doc__, "__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == "Accelerator":
        return accelerator_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
