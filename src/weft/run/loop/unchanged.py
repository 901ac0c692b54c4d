"""Guard against changes of a module after it was sharded: later mutations are not part of its captured graphs.

At every call the module's tensors and hooks are compared with those at capture, and what has changed is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UsageError
from weft.run.loop.hooks import Hooked
from weft.world import private

INSIDE = "do it inside the block of weft.auto_parallelize, before the model is divided"
AROUND_FORWARD = 2  # of a module's tables of hooks, the first ones hold forward hooks


@dataclass(frozen=True, slots=True)
class _Hooks:
    """A table of a module's hooks, with the ids of the hooks it held at capture."""

    module: str
    table: dict[int, Any]
    before: frozenset[int]
    on_backward: bool


class Unchanged:
    """The tensors, shapes and hooks of a module when it was sharded."""

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[str, dict[str, Any], tuple[tuple[str, Any], ...]]] = []
        self._shapes: list[tuple[str, Tensor, torch.Size]] = []
        self._hooks: list[_Hooks] = []
        for name, module in model.named_modules():
            tensor_tables, hooks = private.tables_of(module)
            for table in tensor_tables:
                self._held.append((name, table, tuple(table.items())))
                self._shapes += [(_path(name, key), x, x.shape) for key, x in table.items() if isinstance(x, Tensor)]
            if module is not model:  # hooks of the root module are called
                self._hooks += [_Hooks(name, table, frozenset(table), number >= AROUND_FORWARD) for number, table in enumerate(hooks)]

    def check(self) -> None:
        """Raise UsageError if something was replaced, resized or hooked. Runs at every call of the model."""
        for name, table, items in self._held:
            changed = [key for key, value in items if table.get(key) is not value]
            if changed or len(table) != len(items):
                changed += [key for key in table if key not in dict(items)]
                raise UsageError(f"{_path(name, changed[0])} was replaced after the model was divided: {INSIDE}")
        with private.as_base_tensor():
            resized = next((path for path, x, shape in self._shapes if x.shape != shape), None)
        if resized is not None:
            raise UsageError(f"{resized} was resized after the model was divided: {INSIDE}")
        for hook in self._hooked_since():
            if hook.on_backward and hook.table.keys() - hook.before:
                raise UsageError(
                    f"a hook on the backward of {hook.module} would never be called, since the divided model runs as a whole: let a hook "
                    "on its forward see what it returns, or one on a parameter its gradient"
                )
            if hook.before - hook.table.keys():
                raise UsageError(f"a hook on {hook.module} was removed after the model was divided: {INSIDE}")

    def hooked(self) -> Hooked:
        """Return submodules with forward hooks registered since, and the ids of these hooks."""
        hooked: dict[str, frozenset[int]] = {}
        for hooks in self._hooked_since():
            if ids := hooks.table.keys() - hooks.before if not hooks.on_backward else ():
                hooked[hooks.module] = hooked.get(hooks.module, frozenset()) | ids
        return tuple(hooked.items())

    def _hooked_since(self) -> list[_Hooks]:
        return [hooks for hooks in self._hooks if hooks.table.keys() != hooks.before]


def _path(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key
