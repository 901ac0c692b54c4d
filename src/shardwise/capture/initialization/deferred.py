"""Deferred initialisation: `with DeferredInit()` is a block of user code that builds modules on fake CPU tensors.

It has the outermost modules made, their fake mode, and the recording that `materialize_shards` replays. Code that reads a number
(`.item()`, `if mask.any()`) gets the true one. Tensors requested on another device are built on the CPU. Not supported: initial values
drawn on an accelerator; modules made by `copy.deepcopy` alone are not outermost.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from shardwise.capture.fakes import FakeMode
from shardwise.capture.initialization.operator_log import Recording
from shardwise.errors import ModelError


class DeferredInit:
    """A block in which modules are built on fake tensors of `fake_mode`; `roots` are the outermost ones, set at its end.

    The block restores the state of torch's random generator; `materialize_shards` advances it.

    >>> from shardwise.capture.initialization import materialize_shards
    >>> state = torch.manual_seed(0)
    >>> with DeferredInit() as deferred:
    ...     net = nn.Linear(4, 2)
    >>> {name: list(rows.shape) for name, rows in materialize_shards(deferred, net, lambda name, full: full[:1]).items()}
    {'weight': [1, 4], 'bias': [1]}
    """

    def __init__(self) -> None:
        self.recording = Recording()
        self.roots: tuple[nn.Module, ...] = ()
        self._modules_by_id: dict[int, weakref.ref[nn.Module]] = {}
        self._hooks: list[Any] = []

    @property
    def fake_mode(self) -> FakeMode:
        """The mode of this block's fake tensors; tracing the module needs it."""
        return self.recording.fake_mode

    def is_fake(self, value: object) -> bool:
        """Return whether this block made the tensor."""
        return self.recording.is_fake(value)

    def real_value(self, fake: torch.Tensor) -> torch.Tensor:
        """Return a real copy of one of the block's tensors, with its value at the end of the block.

        Raises:
            ModelError: the tensor is not of this block, or an operator cannot be replayed.
        """
        real: torch.Tensor = self.recording.real_copies(fake.detach())
        return real

    def __enter__(self) -> DeferredInit:
        """Start recording."""
        self._hooks = [
            register_module_parameter_registration_hook(self._record_module),
            register_module_buffer_registration_hook(self._record_module),
            register_module_module_registration_hook(self._record_module),
        ]
        self.recording.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop recording and find the outermost modules."""
        self.recording.stop()
        for hook in self._hooks:
            hook.remove()
        if error[0] is None:
            self.roots = self._outermost_modules()
            if len(self.roots) > 1:  # discarded modules may wait for garbage collection
                self.roots = ()
                gc.collect()
                self.roots = self._outermost_modules()
        self._modules_by_id = {}

    def _record_module(self, module: nn.Module, name: str, item: object) -> None:
        for m in (module, item):
            if isinstance(m, nn.Module) and ((recorded := self._modules_by_id.get(id(m))) is None or recorded() is not m):
                self._modules_by_id.pop(id(m), None)  # a discarded module had this id, earlier in the order
                self._modules_by_id[id(m)] = weakref.ref(m)

    def _outermost_modules(self) -> tuple[nn.Module, ...]:
        alive = [m for m in (ref() for ref in self._modules_by_id.values()) if m is not None]
        inner = {id(part) for module in alive for child in module.children() for part in child.modules()}
        return tuple(m for m in alive if id(m) not in inner)


@contextmanager
def deferred_model(finish: Callable[[nn.Module, DeferredInit], None]) -> Iterator[DeferredInit]:
    """A `DeferredInit` block that passes the one model built in it to `finish(model, deferred)` at its end.

    Outermost modules without parameters (a loss) are ignored if one has some. After an exception `finish` is not called.

    Raises:
        ModelError: no model was built in the block, or several.
    """
    deferred = DeferredInit()
    with deferred:
        yield deferred
    models = [m for m in deferred.roots if next(m.parameters(), None) is not None] or list(deferred.roots)
    if not models:
        raise ModelError("no model was built in the block; build it there, or pass a built one to shardwise.parallelize")
    if len(models) > 1:
        names = ", ".join(type(m).__name__ for m in models)
        raise ModelError(f"{len(models)} models were built in the block ({names}); make them parts of one module, or give each a block")
    finish(models[0], deferred)
