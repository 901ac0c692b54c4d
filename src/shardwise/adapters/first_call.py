"""Parallelize a module inside another library's training loop, captured with its loader's first batch or its first call.

The module is sharded in place, and optimizers that were built with its former parameters get the sharded ones. Random number generators
keep their state.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
from torch import nn

from shardwise.api_loop import auto_parallelize
from shardwise.errors import UsageError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.loop.module import sharded_modules_of
from shardwise.run.rank_agreement import synchronize_generators
from shardwise.train.data.peek_first_batch import preserve_random_state
from shardwise.world.world import World

PlanLike = Plan | Layout | str | None


class ModuleNotCalled(UsageError):
    """Raised where a training step does not call the module that is to be parallelized."""


class _FirstCall(BaseException):
    """Carries a module's call arguments up the stack. Not an `Exception`, so that `except Exception` does not catch it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.args, self.kwargs = args, kwargs


def divide_module(module: nn.Module, batch: Callable[[], Any], plan: PlanLike, world: World) -> None:
    """Parallelize `module`, captured with `batch()` (as for `shardwise.auto_parallelize`); every rank then calls it with the global batch.

    A module that is parallelized already, or contains one that is, is left unchanged.
    """
    _synchronize_all_generators(world)
    if not sharded_modules_of(module):
        with preserve_random_state():
            first = batch()
        auto_parallelize(module, first, plan=plan, world=world)
    for _, sharded_module in sharded_modules_of(module):
        sharded_module.expect_full_batches()


def first_call(module: nn.Module, run: Callable[[], object]) -> Any:
    """Return the arguments of the first call of `module` in `run()`, as a batch; `run()` is aborted at that call.

    Raises:
        NotCalled: `run()` does not call the module.
    """
    forward, own_forward = module.forward, vars(module).get("forward")

    @wraps(forward)
    def abort(*args: Any, **kwargs: Any) -> Any:
        raise _FirstCall(args, kwargs)

    module.forward = abort
    try:
        run()
    except _FirstCall as called:
        args, kwargs = called.args, called.kwargs
    else:
        args, kwargs = (), {}
    finally:
        if own_forward is None:
            del module.forward
        else:
            module.forward = own_forward
    if args or kwargs:
        return _arguments_as_batch(module, args, kwargs)
    raise ModuleNotCalled(f"{type(module).__name__} is parallelized at its first call, but a step on the first batch did not call it")


def _arguments_as_batch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return call arguments as a batch: a dict where the module's signature names all of them, else a tuple."""
    if not args:
        return kwargs
    signature = inspect.signature(module.forward)
    bound = signature.bind(*args, **kwargs).arguments
    named: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            if kwargs:
                raise UsageError(f"{type(module).__name__} is called with arguments in order and by name; call it with one of both")
            return args
        named.update(value if isinstance(value, Mapping) and kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return named


def _synchronize_all_generators(world: World) -> None:
    """Set the generators of Python, NumPy and torch to the state of rank 0's."""
    if world.num_ranks == 1:
        return
    synchronize_generators(world)
    kind, keys, *rest = np.random.get_state(legacy=True)
    local_state = json.dumps([random.getstate(), [kind, [int(key) for key in keys], *rest]])
    (version, numbers, gauss), numpys = json.loads(world.broadcast_text(lambda: local_state))
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(numpys))
