"""A divided module as it was before, for tracing it once more: with tensors of the whole model's shapes, and the forward of its class.

In: a module that is about to be divided. Out: a block in which the same object is whole again, but for the values of its tensors. What
else its user has changed on it since stays so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft.capture.fakes import Fake, FakeMode
from weft.world import private


class Original:
    """The tables of tensors of every module, with fake ones of `mode` for real ones, and the root's own attributes `names`."""

    def __init__(self, model: nn.Module, names: Iterable[str], mode: FakeMode) -> None:
        self._model = model
        self._attributes = {name: vars(model).get(name) for name in names}
        stands: dict[int, Tensor] = {}
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for module in model.modules():
            for table in private.tensors_of(module):
                self._tables.append((table, {key: None if x is None else _stand_in(x, stands, mode) for key, x in table.items()}))

    @contextmanager
    def back(self) -> Iterator[None]:
        """A block in which the module is what it was, and torch traces as it does outside of the user's own blocks."""
        now = [(table, dict(table)) for table, _ in self._tables]
        attributes = {name: vars(self._model).get(name) for name in self._attributes}
        hooks = [(table, dict(table)) for table in private.tables_of(self._model)[1]]
        drawn = torch.random.get_rng_state()
        try:
            _fill(self._tables)
            _fill([(table, {}) for table, _ in hooks])  # those of the whole are called around what is traced
            _assign(self._model, self._attributes)
            with ExitStack() as stack:
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.enable_grad())
                for kind in ("cpu", "cuda"):
                    stack.enter_context(torch.autocast(kind, enabled=False))
                yield
        finally:
            _fill(now)
            _fill(hooks)
            _assign(self._model, attributes)
            torch.random.set_rng_state(drawn)


def _stand_in(x: Tensor, stand_ins: dict[int, Tensor], mode: FakeMode) -> Tensor:
    """A tensor of the same form without memory; tied ones stay tied."""
    if isinstance(x, Fake):
        return x
    if id(x) not in stand_ins:
        with mode:
            stand = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
            stand_ins[id(x)] = nn.Parameter(stand, x.requires_grad) if isinstance(x, nn.Parameter) else stand
    return stand_ins[id(x)]


def _fill(tables: Iterable[tuple[dict[Any, Any], dict[Any, Any]]]) -> None:
    for table, items in tables:
        table.clear()
        table.update(items)


def _assign(model: nn.Module, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        if value is None:
            vars(model).pop(name, None)
        else:
            vars(model)[name] = value
