"""Interrupted steps of a user's optimizer over a divided module. In: torch's hooks around every optimizer's step. Out: a refusal to go on.

An optimizer's step that began and did not end, as by Ctrl-C, may have updated some of the parameters, and other ranks all of theirs.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise.errors import UsageError
from shardwise.world import private_optimizers


class OptimizerSteps:
    """Watches the steps of optimizers that update parameters of a module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._is_concerned: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()  # with its groups' number
        self._running: weakref.ref[Optimizer] | None = None
        this = weakref.ref(self)

        def record_begin(optimizer: Optimizer, *_: Any) -> None:
            if (steps := this()) is not None and steps._updates_module(optimizer):
                steps._running = weakref.ref(optimizer)

        def record_end(optimizer: Optimizer, *_: Any) -> None:
            if (steps := this()) is not None and steps._running is not None and steps._running() is optimizer:
                steps._running = None

        hooks = private_optimizers.observe_only(record_begin), private_optimizers.observe_only(record_end)
        for handle in (register_optimizer_step_pre_hook(hooks[0]), register_optimizer_step_post_hook(hooks[1])):
            weakref.finalize(self, handle.remove)

    def check(self) -> None:
        """Raise UsageError if a step began and did not end, unless it is this call's own, whose closure calls the module."""
        optimizer = self._running() if self._running is not None else None
        if self._running is None or (optimizer is not None and _is_on_stack(optimizer)):
            return
        raise UsageError(
            "a step of the optimizer was interrupted, so that some parameters of this divided module are updated and others are not, or "
            "those of other ranks: load a checkpoint into a module that is divided anew, and make the optimizer anew"
        )

    def _updates_module(self, optimizer: Optimizer) -> bool:
        num_groups, known = self._is_concerned.get(optimizer, (-1, False))
        if num_groups != len(optimizer.param_groups):  # a loop may add parameters later (add_param_group)
            module = self._module()
            own = {id(p) for p in module.parameters()} if module is not None else set()
            known = any(id(p) in own for group in optimizer.param_groups for p in group["params"])
            self._is_concerned[optimizer] = len(optimizer.param_groups), known
        return known


def _is_on_stack(optimizer: Optimizer) -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
