"""Guard against changes of a module after it was sharded that are not part of its captured graphs; for attributes see `attribute_watch`.

At every call the module's tensors and hooks are compared with those at capture, and what has changed is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UsageError
from shardwise.run.loop.hooks import HookedModules
from shardwise.world import private

REMEDY = "do it inside the block of shardwise.auto_parallelize, before the model is divided"
NUM_FORWARD_HOOK_TABLES = 2  # of a module's tables of hooks, the first ones hold forward hooks


@dataclass(frozen=True, slots=True)
class _HookTable:
    """A table of a module's hooks, with the ids of the hooks it held at capture."""

    module: str
    table: dict[int, Any]
    initial_ids: frozenset[int]
    is_on_backward: bool


class MutationGuard:
    """The tensors, shapes and hooks of a module when it was sharded.

    Where nothing has changed a check is a few passes over lists, without a frame of Python an item: it runs between small operators."""

    def __init__(self, model: nn.Module) -> None:
        self._tensor_tables: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._shapes: list[tuple[str, Tensor, torch.Size]] = []
        self._hooks: list[_HookTable] = []
        for name, module in model.named_modules():
            tensor_tables, hooks = private.module_tables(module)
            for table in tensor_tables:
                self._tensor_tables.append((name, table, dict(table)))
                self._shapes += [(_qualified_name(name, key), x, x.shape) for key, x in table.items() if isinstance(x, Tensor)]
            if module is not model:  # hooks of the root module are called
                self._hooks += [
                    _HookTable(name, table, frozenset(table), number >= NUM_FORWARD_HOOK_TABLES) for number, table in enumerate(hooks)
                ]

        self._tables = [table for _, table, _ in self._tensor_tables]
        self._sizes = [len(items) for _, _, items in self._tensor_tables]
        self._holders = [table for _, table, items in self._tensor_tables for _ in items]
        self._keys = [key for _, _, items in self._tensor_tables for key in items]
        self._items = [item for _, _, items in self._tensor_tables for item in items.values()]
        self._tensors = [x for _, x, _ in self._shapes]
        self._sizes_of_tensors = [shape for _, _, shape in self._shapes]
        self._hook_tables = [hooks.table for hooks in self._hooks]
        self._has_initial_hooks = any(self._hook_tables)

    def check(self) -> None:
        """Raise UsageError if something was replaced, resized or hooked. Runs at every call of the model."""
        if list(map(len, self._tables)) != self._sizes or not all(map(is_, map(dict.get, self._holders, self._keys), self._items)):
            self._refuse_replaced()
        with private.as_base_tensor():
            if list(map(Tensor.size, self._tensors)) != self._sizes_of_tensors:
                resized = next(path for path, x, shape in self._shapes if x.shape != shape)
                raise UsageError(f"{resized} was resized after the model was divided: {REMEDY}")
        for hook in self._changed_hook_tables():
            if hook.is_on_backward and hook.table.keys() - hook.initial_ids:
                raise UsageError(
                    f"a hook on the backward of {hook.module} would never be called, since the divided model runs as a whole: let a hook "
                    "on its forward see what it returns, or one on a parameter its gradient"
                )
            if hook.initial_ids - hook.table.keys():
                raise UsageError(f"a hook on {hook.module} was removed after the model was divided: {REMEDY}")

    def _refuse_replaced(self) -> None:
        for name, table, items in self._tensor_tables:
            changed = [key for key, value in items.items() if table.get(key) is not value]
            changed += [key for key in table if key not in items]
            if changed:
                raise UsageError(f"{_qualified_name(name, changed[0])} was replaced after the model was divided: {REMEDY}")

    def hooked_modules(self) -> HookedModules:
        """Return submodules with forward hooks registered since, and the ids of these hooks."""
        hooked: dict[str, frozenset[int]] = {}
        for hooks in self._changed_hook_tables():
            if ids := hooks.table.keys() - hooks.initial_ids if not hooks.is_on_backward else ():
                hooked[hooks.module] = hooked.get(hooks.module, frozenset()) | ids
        return tuple(hooked.items())

    def _changed_hook_tables(self) -> list[_HookTable]:
        if not (self._has_initial_hooks or any(self._hook_tables)):
            return []
        return [hooks for hooks in self._hooks if hooks.table.keys() != hooks.initial_ids]


def _qualified_name(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key
