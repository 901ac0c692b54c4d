"""Whether a divided module is still the one that was divided: a graph was taken from it, and what is done to it afterwards is not in there.

In: the module as it was divided, and as it is called. Out: nothing, or an error that names what has changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UsageError
from weft.run.loop.watched import Watched
from weft.world import private

INSIDE = "do it inside the block of weft.auto_parallelize, before the model is divided"


@dataclass(frozen=True, slots=True)
class _Was:
    """A module of the model, with the tables of what it holds and of its hooks, and what was in them."""

    name: str
    module: nn.Module
    held: tuple[tuple[dict[str, Any], tuple[tuple[str, Any], ...]], ...]
    shapes: tuple[tuple[str, Tensor, torch.Size], ...]
    hooks: tuple[tuple[dict[Any, Any], frozenset[int]], ...]  # around forward, then around backward


class Unchanged:
    """What a module was when it was divided."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = []
        for name, module in model.named_modules():
            held, hooks = private.tables_of(module)
            self._modules.append(
                _Was(
                    name,
                    module,
                    tuple((table, tuple(table.items())) for table in held),
                    tuple((key, x, x.shape) for table in held for key, x in table.items() if isinstance(x, Tensor)),
                    tuple((table, frozenset(table)) for table in hooks) if module is not model else (),  # those of the whole are called
                )
            )

    def check(self) -> None:
        """Raise UsageError where something was replaced or hooked."""
        for was in self._modules:
            for table, items in was.held:
                if len(table) != len(items) or any(table.get(key) is not value for key, value in items):
                    changed = [key for key, value in items if table.get(key) is not value] or [k for k in table if k not in dict(items)]
                    raise UsageError(f"{_path(was.name, changed[0])} was replaced after the model was divided: {INSIDE}")
            with private.as_plain():
                resized = next((key for key, x, shape in was.shapes if x.shape != shape), None)
            if resized is not None:
                raise UsageError(f"{_path(was.name, resized)} was resized after the model was divided: {INSIDE}")
            if any(table.keys() - before for table, before in was.hooks[2:]):
                raise UsageError(
                    f"a hook on the backward of {was.name} would never be called, since the divided model runs as a whole: let a hook on "
                    "its forward see what it returns, or one on a parameter its gradient"
                )
            if any(before - table.keys() for table, before in was.hooks):
                raise UsageError(f"a hook on {was.name} was removed after the model was divided: {INSIDE}")

    def watched(self) -> Watched:
        """The parts with hooks around forward that were registered since, and which these are."""
        found = ((was.name, frozenset().union(*(table.keys() - before for table, before in was.hooks[:2]))) for was in self._modules)
        return tuple((name, ids) for name, ids in found if ids)


def _path(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key
