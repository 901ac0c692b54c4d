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

from shardwise.capture.initialization.deferred import DeferredInit
from shardwise.capture.initialization.materialize import materialize_module
from shardwise.errors import ModelError

Loss = Callable[[Any, Any], torch.Tensor]


class FactoryLosses:
    """The losses of all models of one factory. Called directly it is the first loss, which has no fake tensors."""

    def __init__(self, first: Loss) -> None:
        self._first = first
        self._by_model: WeakKeyDictionary[nn.Module, Loss] = WeakKeyDictionary()

    def add(self, model: nn.Module, loss: Loss | None) -> None:
        """Register the loss that was made with `model`."""
        if loss is not None:
            self._by_model[model] = loss

    def loss_for(self, model: nn.Module) -> Loss:
        """Return the loss made with `model`; the first loss for a model that the factory did not make."""
        return self._by_model.get(model, self._first)

    def __call__(self, output: Any, batch: Any) -> torch.Tensor:
        return self._first(output, batch)


def loss_of(loss: Loss | None, model: nn.Module) -> Loss | None:
    """Return the loss to call with the outputs of `model`."""
    return loss.loss_for(model) if isinstance(loss, FactoryLosses) else loss


def materialize_loss(deferred: DeferredInit, loss: Loss, model: nn.Module) -> Loss:
    """Replace fake tensors of `deferred` in a loss (its closure, attributes and modules) by real ones, and return it.

    `model` is not changed. Functions and objects are changed in place.

    Raises:
        ModelError: a tensor that cannot be materialized; the loss references a parameter of the model directly, or has its own.
    """
    modules, weights = set(model.modules()), {id(p): name for name, p in model.named_parameters()}
    return _LossMaterializer(deferred, modules, weights).materialize(loss)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _LossMaterializer:
    """Materializes a loss of a model with `modules` and `weights` (parameter names by id); `visited`: visited objects."""

    deferred: DeferredInit
    modules: set[nn.Module]
    weights: dict[int, str]
    visited: dict[int, Any] = field(default_factory=dict)

    def materialize(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if id(item) in self.weights:
                raise ModelError(
                    f"the loss holds the model's parameter {self.weights[id(item)]} itself; let it read the parameter from the model when "
                    "it is called"
                )
            if not self.deferred.is_fake(item):
                return item
            return self.visited.setdefault(id(item), self.deferred.real_value(item).requires_grad_(item.requires_grad))
        if isinstance(item, nn.Module):
            if item in self.modules:
                return item
            _refuse_trainable(item)
            return materialize_module(self.deferred, item)
        if type(item) in (list, tuple):
            return type(item)(map(self.materialize, item))
        if type(item) is dict:
            return {key: self.materialize(value) for key, value in item.items()}
        if isinstance(item, functools.partial):
            return functools.partial(self.materialize(item.func), *map(self.materialize, item.args), **self.materialize(item.keywords))
        if isinstance(item, FunctionType | MethodType) or callable(item):
            self.materialize_contents(item)
        return item

    def materialize_contents(self, item: Any) -> None:
        """Replace the fake tensors of a function or an object."""
        if isinstance(item, MethodType):
            self.materialize(item.__self__) if isinstance(item.__self__, nn.Module) else self.materialize_contents(item.__self__)
        elif id(item) not in self.visited and isinstance(item, FunctionType):
            self.visited[id(item)] = item
            for cell in item.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell: the name is bound later
                    cell.cell_contents = self.materialize(cell.cell_contents)
            item.__defaults__, item.__kwdefaults__ = self.materialize(item.__defaults__), self.materialize(item.__kwdefaults__)
        elif id(item) not in self.visited and not isinstance(item, type) and type(getattr(item, "__dict__", None)) is dict:
            self.visited[id(item)] = item
            vars(item).update({key: self.materialize(value) for key, value in vars(item).items()})


def _refuse_trainable(module: nn.Module) -> None:
    """Raise ModelError if a module of the loss has trainable parameters."""
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    if names:
        raise ModelError(
            f"the loss has a parameter of its own, {names[0]} of {type(module).__name__}, which would not be trained; make it a part of "
            "the model, whose forward returns the loss"
        )
