"""The update of a torch optimizer, bound once: the lists of tensors that its fused kernel takes are kept from step to step.

In: a torch optimizer whose parameters have gradients. Out: its step. torch builds the lists anew in every step, and calls the kernel once a
parameter group; a rank's flat tensors are the same in every step, and have groups of their own. Optimizers other than AdamW, and AdamW with
options that its kernel does not take, run torch's own step.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from shardwise.world import private_optimizers


class InnerUpdate:
    """The step of `optimizer`. Whoever changes its parameters, their gradients or state calls `unbind` before the next one; changes of
    options are found."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._step = optimizer, private_optimizers.optimizer_step(optimizer)
        self._hooks = private_optimizers.step_hooks_of(optimizer)
        self._bound: Callable[[], None] | None = None
        self._options: list[tuple[Any, ...]] = []

    @property
    def is_bound(self) -> bool:
        """Return whether the gradients that parameters have are still those of the last step."""
        return self._bound is not None

    def unbind(self) -> None:
        """Read parameters, gradients and state anew in the next step."""
        self._bound = None

    def run(self) -> None:
        """Update the parameters that have a gradient."""
        has_hooks = any(self._hooks)
        if has_hooks and not all(map(private_optimizers.only_observes, chain(*map(dict.values, self._hooks)))):
            self._bound = None  # hooks may change gradients
            with torch.no_grad():
                self._step()
            return
        options = [tuple(map(entry.get, private_optimizers.ADAM_OPTIONS)) for entry in self._optimizer.param_groups]
        if self._bound is None or options != self._options:
            self._bound, self._options = private_optimizers.bind_fused_adamw(self._optimizer), options
        if self._bound is None:
            with torch.no_grad():
                self._step()
        elif has_hooks:
            private_optimizers.call_between(self._hooks, self._optimizer, self._bound)
        else:
            self._bound()
