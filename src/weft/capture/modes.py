"""Which modules of a model train: its modes, in the order of `modules()`.

In: a module. Out: its modes, those that it trains or evaluates with, and a block in which it has others. A model computes by its modes
(dropout, batch norm, `if self.training`), so each of them is a capture of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

Modes = tuple[bool, ...]


def modes_of(model: nn.Module) -> Modes:
    """Of every module, whether it trains now."""
    return tuple(module.training for module in model.modules())


def set_modes(model: nn.Module, modes: Modes) -> None:
    """Let every module train or not."""
    for module, trains in zip(model.modules(), modes, strict=True):
        module.training = trains


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
    """The modes that it trains with: those that it has; one in evaluation (`from_pretrained` returns it so) is trained as after `train()`.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    >>> net[1].eval()
    Dropout(p=0.5, inplace=False)
    >>> training_modes(net), training_modes(net.eval()), net.training
    ((True, True, False), (True, True, True), False)
    """
    return modes_of(model) if model.training else _after(model, True)


def evaluation_modes(model: nn.Module) -> Modes:
    """The modes that it has after `eval()`."""
    return _after(model, False)


def _after(model: nn.Module, mode: bool) -> Modes:
    """Modes after `train(mode)`, which a model may have in its own way: with layers that never train."""
    with in_modes(model, modes_of(model)):
        model.train(mode)
        return modes_of(model)
