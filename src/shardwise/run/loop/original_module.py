"""The original form of a sharded module, for tracing it again: fake tensors of the full shapes, and the forward of its class.

Taken before the module is sharded. Within a block the same object has its original tensors, without their values; everything else that the
user has changed since stays changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture.fakes import Fake, FakeMode, set_original
from shardwise.world import private


class OriginalModule:
    """The tensor tables of every module, with fake tensors of `mode` for real ones, and the root's own attributes `names`."""

    def __init__(self, model: nn.Module, names: Iterable[str], mode: FakeMode) -> None:
        self._model = model
        self._attributes = {name: vars(model).get(name) for name in names}
        fakes: dict[int, Tensor] = {}
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for module in model.modules():
            for table in private.tensor_tables(module):
                self._tables.append((table, {key: None if x is None else _fake_copy(x, fakes, mode) for key, x in table.items()}))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the original module within a block, with torch's default grad, inference and autocast modes."""
        current = [(table, dict(table)) for table, _ in self._tables]
        attributes = {name: vars(self._model).get(name) for name in self._attributes}
        hooks = [(table, dict(table)) for table in private.module_tables(self._model)[1]]
        generator_state = torch.random.get_rng_state()
        try:
            _restore_tables(self._tables)
            _restore_tables([(table, {}) for table, _ in hooks])  # hooks of the root run around the traced graph
            _restore_attributes(self._model, self._attributes)
            with ExitStack() as stack:
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.enable_grad())
                for kind in ("cpu", "cuda"):
                    stack.enter_context(torch.autocast(kind, enabled=False))
                yield
        finally:
            _restore_tables(current)
            _restore_tables(hooks)
            _restore_attributes(self._model, attributes)
            torch.random.set_rng_state(generator_state)


def _fake_copy(x: Tensor, stand_ins: dict[int, Tensor], mode: FakeMode) -> Tensor:
    """Return a fake tensor of the same shape and strides; tied tensors stay tied."""
    if isinstance(x, Fake):
        return x
    if id(x) not in stand_ins:
        with mode:
            stand = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
            stand_ins[id(x)] = nn.Parameter(stand, x.requires_grad) if isinstance(x, nn.Parameter) else stand
            if isinstance(x, nn.Parameter):  # which stays the same object; the memory of a buffer would be kept
                set_original(stand_ins[id(x)], x)
    return stand_ins[id(x)]


def _restore_tables(tables: Iterable[tuple[dict[Any, Any], dict[Any, Any]]]) -> None:
    for table, items in tables:
        table.clear()
        table.update(items)


def _restore_attributes(model: nn.Module, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        if value is None:
            vars(model).pop(name, None)
        else:
            vars(model)[name] = value
