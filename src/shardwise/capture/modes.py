"""Training modes of a model: the `training` flag of every module, in the order of `modules()`.

A model's computation depends on its modes (dropout, batch norm, `if self.training`), so each combination has a capture of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

Modes = tuple[bool, ...]


def modes_of(model: nn.Module) -> Modes:
    """Return the `training` flag of every module."""
    return tuple(module.training for module in model.modules())


def set_modes(model: nn.Module, modes: Modes) -> None:
    """Set the `training` flag of every module."""
    for module, is_training in zip(model.modules(), modes, strict=True):
        module.training = is_training


@contextmanager
def in_modes(model: nn.Module, modes: Modes) -> Iterator[None]:
    """A block in which the model has these modes."""
    before = modes_of(model)
    set_modes(model, modes)
    try:
        yield
    finally:
        set_modes(model, before)


def training_modes(model: nn.Module) -> Modes:
    """Return the modes to train with: the current ones; for a model in evaluation (as from `from_pretrained`) those after `train()`.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    >>> net[1].eval()
    Dropout(p=0.5, inplace=False)
    >>> training_modes(net), training_modes(net.eval()), net.training
    ((True, True, False), (True, True, True), False)
    """
    return modes_of(model) if model.training else _modes_after(model, True)


def evaluation_modes(model: nn.Module) -> Modes:
    """Return the modes after `eval()`."""
    return _modes_after(model, False)


def _modes_after(model: nn.Module, mode: bool) -> Modes:
    """Return the modes after `train(mode)`, which a model may override, for example to keep layers frozen."""
    with in_modes(model, modes_of(model)):
        model.train(mode)
        return modes_of(model)
