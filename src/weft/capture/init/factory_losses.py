"""Losses that a factory returns with its model, found again by model.

A loss may read its own model (a penalty on weights) and tensors made with it (class weights), so each model has a loss of its own. Fake
tensors are found in modules, containers, functions and plain attributes of a loss, not deeper inside of other objects.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from weft.capture.init.deferred import Deferred
from weft.capture.init.materialize import realize
from weft.errors import ModelError

Loss = Callable[[Any, Any], torch.Tensor]


class Losses:
    """The losses of all models of one factory. Called directly it is the first loss, which has no fake tensors."""

    def __init__(self, first: Loss) -> None:
        self._first = first
        self._of: WeakKeyDictionary[nn.Module, Loss] = WeakKeyDictionary()

    def add(self, model: nn.Module, loss: Loss | None) -> None:
        """Register the loss that was made with `model`."""
        if loss is not None:
            self._of[model] = loss

    def of(self, model: nn.Module) -> Loss:
        """Return the loss made with `model`; the first loss for a model that the factory did not make."""
        return self._of.get(model, self._first)

    def __call__(self, output: Any, batch: Any) -> torch.Tensor:
        return self._first(output, batch)


def loss_of(loss: Loss | None, model: nn.Module) -> Loss | None:
    """Return the loss to call with the outputs of `model`."""
    return loss.of(model) if isinstance(loss, Losses) else loss


def realize_loss(deferred: Deferred, loss: Loss, model: nn.Module) -> Loss:
    """Replace fake tensors of `deferred` in a loss (its closure, attributes and modules) by real ones, and return it.

    `model` is not changed. Functions and objects are changed in place.

    Raises:
        ModelError: a tensor that cannot be materialized; the loss references a parameter of the model directly, or has its own.
    """
    modules, weights = set(model.modules()), {id(p): name for name, p in model.named_parameters()}
    return _Realizing(deferred, modules, weights).real(loss)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Realizing:
    """Materializes a loss of a model with `modules` and `weights` (parameter names by id); `visited`: visited objects."""

    deferred: Deferred
    modules: set[nn.Module]
    weights: dict[int, str]
    seen: dict[int, Any] = field(default_factory=dict)

    def real(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if id(item) in self.weights:
                raise ModelError(
                    f"the loss holds the model's parameter {self.weights[id(item)]} itself; let it read the parameter from the model when "
                    "it is called"
                )
            if not self.deferred.is_fake(item):
                return item
            return self.seen.setdefault(id(item), self.deferred.value(item).requires_grad_(item.requires_grad))
        if isinstance(item, nn.Module):
            if item in self.modules:
                return item
            _refuse_learned(item)
            return realize(self.deferred, item)
        if type(item) in (list, tuple):
            return type(item)(map(self.real, item))
        if type(item) is dict:
            return {key: self.real(value) for key, value in item.items()}
        if isinstance(item, functools.partial):
            return functools.partial(self.real(item.func), *map(self.real, item.args), **self.real(item.keywords))
        if isinstance(item, FunctionType | MethodType) or callable(item):
            self.inside(item)
        return item

    def inside(self, item: Any) -> None:
        """Replace the fake tensors of a function or an object."""
        if isinstance(item, MethodType):
            self.real(item.__self__) if isinstance(item.__self__, nn.Module) else self.inside(item.__self__)
        elif id(item) not in self.seen and isinstance(item, FunctionType):
            self.seen[id(item)] = item
            for cell in item.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell: the name is bound later
                    cell.cell_contents = self.real(cell.cell_contents)
            item.__defaults__, item.__kwdefaults__ = self.real(item.__defaults__), self.real(item.__kwdefaults__)
        elif id(item) not in self.seen and not isinstance(item, type) and type(getattr(item, "__dict__", None)) is dict:
            self.seen[id(item)] = item
            vars(item).update({key: self.real(value) for key, value in vars(item).items()})


def _refuse_learned(module: nn.Module) -> None:
    """Raise ModelError if a module of the loss has trainable parameters."""
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    if names:
        raise ModelError(
            f"the loss has a parameter of its own, {names[0]} of {type(module).__name__}, which would not be trained; make it a part of "
            "the model, whose forward returns the loss"
        )
