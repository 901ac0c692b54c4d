"""Dividing a module in somebody else's loop, by the first batch of its loader, or by its first call.

In: a module, and a loader, or a function that comes to call the module as the loop does. Out: the module divided, and optimizers of its
parameters with those that it has now. Random numbers are where they were.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from weft.api_loop import auto_parallelize
from weft.errors import UsageError
from weft.plan.layout import Layout
from weft.plan.plan import Plan
from weft.run.loop.gathered_steps import gather_for_steps
from weft.run.loop.module import sharded_modules_of
from weft.run.rank_agreement import synchronize_generators
from weft.train.first_batch import nothing_drawn
from weft.world.world import World

Wanted = Plan | Layout | str | None


class NotCalled(UsageError):
    """A step does not call what is to be divided."""


class _Called(BaseException):
    """How a module was called. No `Exception`: code on the way that catches all of these lets it through."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.args, self.kwargs = args, kwargs


def divide(module: nn.Module, batch: Callable[[], Any], plan: Wanted, world: World, optimizers: Sequence[Optimizer] = ()) -> None:
    """Divide `module` by what `batch()` gives, a batch as `weft.auto_parallelize` takes it. One that is divided, or has a divided module
    inside, stays as it is. Every rank will call it with the whole batch.

    `optimizers`: that were made of its parameters, and go on with those that it has then.

    Raises:
        UsageError: an optimizer has made steps.
    """
    _share_generators(world)
    if not sharded_modules_of(module):
        with nothing_drawn():
            first = batch()
        before = {id(p): name for name, p in module.named_parameters()}
        auto_parallelize(module, first, plan=plan, world=world)
        _hand_over(optimizers, before, dict(module.named_parameters()))
    for _, one in sharded_modules_of(module):
        one.expect_full_batches()


def first_call(module: nn.Module, run: Callable[[], object]) -> Any:
    """What `run()` calls `module` with first, as a batch. There `run()` ends.

    Raises:
        NotCalled: it does not call the module.
    """
    forward, before = module.forward, vars(module).get("forward")

    @wraps(forward)
    def ends(*args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)

    module.forward = ends
    try:
        run()
    except _Called as called:
        args, kwargs = called.args, called.kwargs
    else:
        args, kwargs = (), {}
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
    if args or kwargs:
        return _arguments(module, args, kwargs)
    raise NotCalled(f"{type(module).__name__} is to be divided at its first call, and a step on the first batch did not call it")


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As a batch: by name where the module's signature has names for all."""
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


def _hand_over(optimizers: Sequence[Optimizer], before: Mapping[int, str], now: Mapping[str, nn.Parameter]) -> None:
    """Let optimizers have the parameters that a module has now for those that it had before."""
    for one in optimizers:
        if any(id(p) in before and one.state.get(p) for group in one.param_groups for p in group["params"]):
            raise UsageError(f"{type(one).__name__} has made steps before its model was divided: prepare both before the first step")
        for group in one.param_groups:
            group["params"] = [now[before[id(p)]] if id(p) in before else p for p in group["params"]]
        gather_for_steps(one, one.param_groups)


def _share_generators(world: World) -> None:
    """Random numbers of Python, NumPy and torch go on from where rank 0's are."""
    if world.num_ranks == 1:
        return
    synchronize_generators(world)
    kind, keys, *rest = np.random.get_state(legacy=True)
    mine = json.dumps([random.getstate(), [kind, [int(key) for key in keys], *rest]])
    (version, numbers, gauss), numpys = json.loads(world.told(lambda: mine))
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(numpys))
