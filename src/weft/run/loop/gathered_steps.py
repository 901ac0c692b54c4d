"""Optimizers whose step makes something of more than an element by itself, on parameters that are cut between ranks.

In: any optimizer. Out: where a trial on small matrices says so, its step with each cut parameter gathered, its gradient and its state with
it, one parameter at a time; afterwards every rank keeps its part of the three, so that between steps nothing is held more than once. All
ranks of a group compute the same. What updates parameters together (LBFGS), or cannot be tried, gathers all of them, and what state it has
of all stays on every rank.

Not modelled: dividing the matrices among the ranks of a group, each of which would compute some of them for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
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
from weft.run.state.optimizer_kinds import takes
from weft.run.state.spans import block_of
from weft.world import private

_SHAPES, _STEPS = ((4, 3), (3, 5)), 5  # of the trial


def gather_for_steps(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Let the optimizer's steps see full matrices, if it needs them for `groups` of its parameters, and has parts there."""
    kind = type(optimizer)
    answers = {
        _remembered(kind, group, group["params"][0].device) for group in groups if any(isinstance(p, Cut) for p in group["params"])
    } - {None}
    if not answers:
        return
    inner: Any = optimizer.step
    gathers: dict[str, bool] | None = getattr(inner, "gathers", None)
    if gathers is not None:  # for groups that were added before
        gathers["together"] |= True in answers
        return
    gathers = {"together": True in answers}

    @wraps(inner)
    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return (_step_together if gathers["together"] else _step_each)(self, inner, closure)

    step.gathers = gathers  # type: ignore[attr-defined]
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def _remembered(kind: Any, group: Mapping[str, Any], device: torch.device) -> bool | None:
    """`updates_together`, tried once for groups with the same options, of which a large model may have one a layer."""
    options = _options(group)
    try:
        return _updates_together(kind, tuple(options.items()), device)
    except TypeError:  # options that are lists
        return updates_together(kind, options, device)


@lru_cache(maxsize=256)
def _updates_together(kind: type[Optimizer], options: tuple[tuple[str, Any], ...], device: torch.device) -> bool | None:
    return updates_together(kind, dict(options), device)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group tells the optimizer, at a learning rate that moves something: a warm-up may begin at 0."""
    options = {name: value for name, value in group.items() if name not in ("params", "param_names", "initial_lr")}
    return options | ({"lr": 0.1} if isinstance(options.get("lr"), float | Tensor) else {})


def updates_together(kind: type[Optimizer], group: Mapping[str, Any], device: torch.device) -> bool | None:
    """Whether an optimizer with the options of `group` updates parameters together; False: each by itself, None: each element by itself.

    Tried: matrices in one optimizer, in one each, and every element in one of its own. What cannot be tried counts as together. Options
    that only a group has, and the constructor does not know, count too.

    >>> updates_together(torch.optim.AdamW, {}, torch.device("cpu")) is None
    True
    """
    options = _options(group)
    made_with = {name: options[name] for name in takes(kind) & options.keys()}
    generator = torch.Generator().manual_seed(0)
    drawn = [[torch.randn(shape, generator=generator).to(device) for shape in _SHAPES] for _ in range(1 + _STEPS)]

    def updated(parts: list[list[list[Tensor]]]) -> Tensor:
        """All elements after the steps; `parts`: by optimizer, by parameter: its value and its gradients."""
        ends = []
        for some in parts:
            parameters = [nn.Parameter(values[0].clone()) for values in some]
            one: Any = kind(parameters, **made_with)
            for each in one.param_groups:
                each.update(options)
            for at in range(1, 1 + _STEPS):
                for p, values in zip(parameters, some, strict=True):
                    p.grad = values[at].clone()
                one.step()
            ends += [p.detach().flatten() for p in parameters]
        return torch.cat(ends)

    values = [list(one) for one in zip(*drawn, strict=True)]
    elements = [[list(one)] for of in values for one in zip(*(x.flatten().view(-1, 1, 1) for x in of), strict=True)]
    try:
        expected = updated([values])
        for answer, parts in ((None, elements), (False, [[one] for one in values])):
            if torch.allclose(updated(parts), expected, rtol=1e-5, atol=1e-6):
                return answer
    except Exception:
        pass  # it wants a closure, or more than its groups tell
    return True


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
