"""Optimizers whose step makes something of full matrices, on parameters that are cut between ranks.

In: an optimizer of a kind in `FULL_STEPS`. Out: its step with each cut parameter gathered, its gradient and its state with it, one
parameter at a time; afterwards every rank keeps its part of the three, so that between steps nothing is held more than once. All ranks of a
group compute the same. What has all parameters in one vector (LBFGS) gathers them together, and its state stays on every rank.

Not modelled: dividing the matrices among the ranks of a group, each of which would compute some of them for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import islice
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.lower.redistribute import moved
from weft.plan.placement import R
from weft.run.loop.checkpoints import state_like
from weft.run.loop.cut import Cut
from weft.run.state.spans import block_of
from weft.world import private

# By the name of the class: whether all parameters are taken together. torch's, and libraries' of the same algorithms.
FULL_STEPS = {"Muon": False, "Adafactor": False, "LBFGS": True}


def gather_for_steps(optimizer: Optimizer) -> None:
    """Let the optimizer's steps see full matrices, if it needs them and has parts."""
    together = FULL_STEPS.get(type(optimizer).__name__)
    cut = any(isinstance(p, Cut) for group in optimizer.param_groups for p in group["params"])
    inner: Any = optimizer.step
    if together is None or not cut or getattr(inner, "gathers", False):
        return

    @wraps(inner)
    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return (_step_together if together else _step_each)(self, inner, closure)

    step.gathers = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def gathered(x: Cut) -> Tensor:
    """The full tensor of this rank's part. Every rank calls it."""
    with private.as_base_tensor():
        part = x.detach().as_subclass(Tensor)
        for form, group in reversed(x.full.cuts):
            part = moved(part, form, R, group)
    return part


def _step_each(optimizer: Optimizer, inner: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    before = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for group, _ in before:
            group["params"] = []
        for group, parameters in before:
            others = [p for p in parameters if not isinstance(p, Cut)]
            for some in [others, *([p] for p in parameters if isinstance(p, Cut))]:
                with _full(optimizer, some) as group["params"]:
                    inner()
            group["params"] = []
    finally:
        for group, parameters in before:
            group["params"] = parameters
    return loss


def _step_together(optimizer: Optimizer, inner: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
    held = [(group["params"], list(group["params"])) for group in optimizer.param_groups]
    parameters = [p for _, some in held for p in some]

    def hold(tensors: Iterable[Tensor]) -> None:
        fed = iter(tensors)
        for place, some in held:
            place[:] = list(islice(fed, len(some)))  # the list itself, which such an optimizer keeps

    with _full(optimizer, parameters) as full:

        def again() -> Any:
            """Of the weights that it tries, which the model has in parts."""
            assert closure is not None
            _write(parameters, full)
            hold(parameters)
            loss = closure()
            hold(full)
            _set_gradients(parameters, full)
            return loss

        try:
            hold(full)
            return inner(None if closure is None else again)
        finally:
            hold(parameters)


@contextmanager
def _full(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """A block with full parameters, gradients and state in the place of parts, which have what was made of them afterwards."""
    full: list[Tensor] = [nn.Parameter(gathered(p)) if isinstance(p, Cut) else p for p in parameters]
    _set_gradients(parameters, full)
    for p, x in zip(parameters, full, strict=True):
        if p is not x and p in optimizer.state:
            slots = optimizer.state.pop(p)
            optimizer.state[x] = {slot: gathered(value) if isinstance(value, Cut) else value for slot, value in slots.items()}
    try:
        yield full
    finally:
        _write(parameters, full)
        for p, x in zip(parameters, full, strict=True):
            if isinstance(p, Cut) and x in optimizer.state:
                optimizer.state[p] = {slot: _part(p, value) for slot, value in optimizer.state.pop(x).items()}


def _set_gradients(parameters: Sequence[Tensor], full: Sequence[Tensor]) -> None:
    for p, x in zip(parameters, full, strict=True):
        if isinstance(p, Cut):
            x.grad = gathered(p.grad) if isinstance(p.grad, Cut) else None


def _write(parameters: Sequence[Tensor], full: Sequence[Tensor]) -> None:
    with torch.no_grad(), private.as_base_tensor():
        for p, x in zip(parameters, full, strict=True):
            if isinstance(p, Cut):
                p.copy_(block_of(x, p.full.spans))


def _part(p: Cut, value: Any) -> Any:
    """This rank's part of a tensor of the state that lies as the parameter does."""
    of = state_like(p, tuple(value.shape)) if isinstance(value, Tensor) else None
    if of is None:
        return value
    with private.as_base_tensor():
        return Cut.of(block_of(value, of.spans).clone(), of)
