"""Whether a divided module is still the one that was divided: a graph was taken from it, and what is done to it afterwards is not in there.

In: the module as it was divided, and as it is called. Out: nothing, or an error that names what has changed.
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
AROUND_FORWARD = 2  # of a module's tables of hooks, the first are these


@dataclass(frozen=True, slots=True)
class _Hooks:
    """A table of a module's hooks, with what was in it."""

    module: str
    table: dict[int, Any]
    before: frozenset[int]
    on_backward: bool


class Unchanged:
    """What a module was when it was divided."""

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[str, dict[str, Any], tuple[tuple[str, Any], ...]]] = []
        self._shapes: list[tuple[str, Tensor, torch.Size]] = []
        self._hooks: list[_Hooks] = []
        for name, module in model.named_modules():
            held, hooks = private.tables_of(module)
            for table in held:
                self._held.append((name, table, tuple(table.items())))
                self._shapes += [(_path(name, key), x, x.shape) for key, x in table.items() if isinstance(x, Tensor)]
            if module is not model:  # those of the whole are called
                self._hooks += [_Hooks(name, table, frozenset(table), number >= AROUND_FORWARD) for number, table in enumerate(hooks)]

    def check(self) -> None:
        """Raise UsageError where something was replaced or hooked. Called at every call of the model."""
        for name, table, items in self._held:
            changed = [key for key, value in items if table.get(key) is not value]
            if changed or len(table) != len(items):
                changed += [key for key in table if key not in dict(items)]
                raise UsageError(f"{_path(name, changed[0])} was replaced after the model was divided: {INSIDE}")
        with private.as_base_tensor():
            resized = next((path for path, x, shape in self._shapes if x.shape != shape), None)
        if resized is not None:
            raise UsageError(f"{resized} was resized after the model was divided: {INSIDE}")
        for one in self._hooked_since():
            if one.on_backward and one.table.keys() - one.before:
                raise UsageError(
                    f"a hook on the backward of {one.module} would never be called, since the divided model runs as a whole: let a hook on "
                    "its forward see what it returns, or one on a parameter its gradient"
                )
            if one.before - one.table.keys():
                raise UsageError(f"a hook on {one.module} was removed after the model was divided: {INSIDE}")

    def hooked(self) -> Hooked:
        """The parts with hooks around forward that were registered since, and which these are."""
        hooked: dict[str, frozenset[int]] = {}
        for one in self._hooked_since():
            if ids := one.table.keys() - one.before if not one.on_backward else ():
                hooked[one.module] = hooked.get(one.module, frozenset()) | ids
        return tuple(hooked.items())

    def _hooked_since(self) -> list[_Hooks]:
        return [one for one in self._hooks if one.table.keys() != one.before]


def _path(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key
