"""The adapter for torch's private names of optimizers: the hooks around their steps, and the kernel of fused AdamW.

In: an optimizer. Out: its step without torch's frames around it, with or without its hooks. `tests/torch/house/test_private.py` names one
that torch removes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as optimizer_hooks

_OPTIMIZER = SimpleNamespace(**torch.optim.Optimizer.__annotations__)  # the names of its objects' attributes
# (owner, attribute) of every private name used below, for the test.
NAMES: tuple[tuple[Any, str], ...] = (
    (_OPTIMIZER, "_optimizer_step_pre_hooks"),
    (_OPTIMIZER, "_optimizer_step_post_hooks"),
    (optimizer_hooks, "_global_optimizer_pre_hooks"),
    (optimizer_hooks, "_global_optimizer_post_hooks"),
    (torch, "_foreach_add_"),
    (torch, "_fused_adamw_"),
)

StepHooks = tuple[dict[int, Any], dict[int, Any], dict[int, Any], dict[int, Any]]


def step_hooks_of(optimizer: Any) -> StepHooks:
    """Return the tables of hooks around an optimizer's step: two called before it, and two after."""
    return (
        optimizer_hooks._global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks, optimizer_hooks._global_optimizer_post_hooks,
    )  # fmt: skip


def observe_only(hook: Any) -> Any:
    """Mark a hook on an optimizer's step as one that changes nothing."""
    hook.shardwise_observes = True
    return hook


def only_observes(hook: Any) -> bool:
    """Return whether a hook on an optimizer's step is marked as one that changes nothing."""
    return getattr(hook, "shardwise_observes", False)


def call_between(hooks: StepHooks, optimizer: Any, update: Callable[[], object]) -> None:
    """Call an optimizer's update between the hooks on its step."""
    for table in hooks[:2]:
        for hook in table.values():
            hook(optimizer, (optimizer,), {})
    update()
    for table in hooks[2:]:
        for hook in table.values():
            hook(optimizer, (optimizer,), {})


def optimizer_step(optimizer: Any) -> Callable[[], object]:
    """Return an optimizer's step, to be called in blocks without gradients: its update, between the hooks on steps. It has no arguments
    that these could replace, and no profiler's record around it, which takes longer than a small update."""
    update, hooks = inspect.unwrap(type(optimizer).step), step_hooks_of(optimizer)
    if optimizer.defaults.get("differentiable"):
        return lambda: optimizer.step()
    return lambda: call_between(hooks, optimizer, lambda: update(optimizer))


ADAM_OPTIONS = ("lr", "betas", "eps", "weight_decay", "maximize")
_ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")


def bind_fused_adamw(optimizer: Any) -> Callable[[], None] | None:
    """Return the update of torch's fused AdamW with the gradients, states and options that an optimizer's parameters have now, in one call
    for all that have the same options; None for others."""
    entries: list[dict[str, Any]] = optimizer.param_groups
    plain = {"fused": True, "amsgrad": False, "differentiable": False, "decoupled_weight_decay": True}
    if type(optimizer) is not torch.optim.AdamW or any(entry[key] is not value for entry in entries for key, value in plain.items()):
        return None
    lists: dict[tuple[Any, ...], list[tuple[Tensor, ...]]] = {}
    for entry in entries:
        options = tuple(entry[name] for name in ADAM_OPTIONS)
        for p in entry["params"]:
            state = optimizer.state.get(p, {})
            if p.grad is None:
                continue
            if p.grad.is_sparse or isinstance(entry["lr"], Tensor) or any(name not in state for name in _ADAM_STATE):
                return None
            lists.setdefault((options, p.device, p.dtype), []).append((p, p.grad, *(state[name] for name in _ADAM_STATE)))
    calls = [(tuple(map(list, zip(*rows, strict=True))), options) for (options, _, _), rows in lists.items()]

    def update() -> None:
        for (parameters, gradients, means, squares, steps), (lr, (beta1, beta2), eps, weight_decay, maximize) in calls:
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                parameters, gradients, means, squares, [], steps, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps,
                amsgrad=False, maximize=maximize, grad_scale=None, found_inf=None,
            )  # fmt: skip

    return update


@contextmanager
def without_step_hooks(optimizer: Any) -> Iterator[None]:
    """Call no hooks of an optimizer's step within a block, as its own hooks were called around it."""
    tables = step_hooks_of(optimizer)
    saved = [dict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        yield
    finally:
        for table, hooks in zip(tables, saved, strict=True):
            table.update(hooks)
