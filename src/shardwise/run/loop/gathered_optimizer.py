"""Steps of optimizers that are not elementwise (Muon, Shampoo, LBFGS) on sharded parameters.

If a trial on small matrices shows that an optimizer needs full matrices, its step all-gathers each sharded parameter with its gradient and
state, one parameter at a time, and every rank keeps its shard of the three afterwards, so that nothing is replicated between steps. All
ranks of a group compute the same update. Optimizers that update parameters jointly (LBFGS), or cannot be tried, gather all parameters, and
their joint state stays on every rank.

Not modelled: distributing the matrices over the ranks of a group, each of which would compute some of the updates for all.
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

from shardwise.lower.redistribute import redistribute_forward
from shardwise.plan.ir.placement import R
from shardwise.run.loop.checkpoints import slot_spec
from shardwise.run.loop.sharded_tensor import ShardedTensor
from shardwise.run.state.block_ranges import block_of
from shardwise.run.state.optimizer_kinds import option_names
from shardwise.world import private, private_optimizers

_SHAPES, _STEPS = ((4, 3), (3, 5)), 5  # matrices and steps of the trial


def gather_for_steps(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Replace the optimizer's step by one on full matrices, if it needs them for sharded parameters in `groups`."""
    kind = type(optimizer)
    answers = {
        _cached_trial(kind, group, group["params"][0].device)
        for group in groups
        if any(isinstance(p, ShardedTensor) for p in group["params"])
    } - {None}
    if not answers:
        return
    inner: Any = optimizer.step
    gathers: dict[str, bool] | None = getattr(inner, "gathers", None)
    if gathers is not None:  # the step was replaced for earlier groups
        gathers["together"] |= True in answers
        return
    gathers = {"together": True in answers}

    def step_without_hooks(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        def inner_without_hooks(*args: Any) -> Any:
            with private_optimizers.without_step_hooks(optimizer):
                return inner(*args)

        return (_step_together if gathers["together"] else _step_each)(optimizer, inner_without_hooks, closure)

    step: Any = wraps(inner)(Optimizer.profile_hook_step(step_without_hooks))  # hooks see one step, of the shards
    step.gathers = gathers
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def _cached_trial(kind: Any, group: Mapping[str, Any], device: torch.device) -> bool | None:
    """Return `updates_together`, cached for groups with equal options: a large model may have one group per layer."""
    options = _trial_options(group)
    try:
        return _updates_together(kind, tuple(options.items()), device)
    except TypeError:  # unhashable options, such as lists
        return updates_together(kind, options, device)


@lru_cache(maxsize=256)
def _updates_together(kind: type[Optimizer], options: tuple[tuple[str, Any], ...], device: torch.device) -> bool | None:
    return updates_together(kind, dict(options), device)


def _trial_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options, with a learning rate that changes weights: a warm-up may begin at 0."""
    options = {name: value for name, value in group.items() if name not in ("params", "param_names", "initial_lr")}
    return options | ({"lr": 0.1} if isinstance(options.get("lr"), float | Tensor) else {})


def updates_together(kind: type[Optimizer], group: Mapping[str, Any], device: torch.device) -> bool | None:
    """Return whether an optimizer with the options of `group` updates parameters jointly; False: one by one, None: elementwise.

    Compared are all matrices in one optimizer, each in its own, and every element in its own. An optimizer that cannot be tried counts as
    joint. Options of the group that the constructor does not take are set too.

    >>> updates_together(torch.optim.AdamW, {}, torch.device("cpu")) is None
    True
    """
    options = _trial_options(group)
    constructor_options = {name: options[name] for name in option_names(kind) & options.keys()}
    generator = torch.Generator().manual_seed(0)
    random_matrices = [[torch.randn(shape, generator=generator).to(device) for shape in _SHAPES] for _ in range(1 + _STEPS)]

    def updated(parts: list[list[list[Tensor]]]) -> Tensor:
        """Return all elements after the steps; `parts`: by optimizer and parameter, its value and gradients."""
        results = []
        for matrices in parts:
            parameters = [nn.Parameter(values[0].clone()) for values in matrices]
            optimizer: Any = kind(parameters, **constructor_options)
            for options_group in optimizer.param_groups:
                options_group.update(options)
            for step in range(1, 1 + _STEPS):
                for p, values in zip(parameters, matrices, strict=True):
                    p.grad = values[step].clone()
                optimizer.step()
            results += [p.detach().flatten() for p in parameters]
        return torch.cat(results)

    values = [list(matrix) for matrix in zip(*random_matrices, strict=True)]
    elements = [[list(element)] for matrix in values for element in zip(*(x.flatten().view(-1, 1, 1) for x in matrix), strict=True)]
    try:
        expected = updated([values])
        for granularity, parts in ((None, elements), (False, [[matrix] for matrix in values])):
            if torch.allclose(updated(parts), expected, rtol=1e-5, atol=1e-6):
                return granularity
    except Exception:
        pass  # it needs a closure, or other constructor arguments
    return True


def gather_full_tensor(x: ShardedTensor) -> Tensor:
    """Gather the full tensor of a shard. Every rank calls it."""
    with private.as_base_tensor():
        local = x.detach().as_subclass(Tensor)
        for placement, group in reversed(x.spec.placements):
            local = redistribute_forward(local, placement, R, group)
    return local


def _step_each(optimizer: Optimizer, inner: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    lists = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for group, _ in lists:
            group["params"] = []
        for group, parameters in lists:
            unsharded = [p for p in parameters if not isinstance(p, ShardedTensor)]
            for subset in [unsharded, *([p] for p in parameters if isinstance(p, ShardedTensor))]:
                with _full_tensors(optimizer, subset) as group["params"]:
                    inner()
            group["params"] = []
    finally:
        for group, parameters in lists:
            group["params"] = parameters
    return loss


def _step_together(optimizer: Optimizer, inner: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
    lists = [(group["params"], list(group["params"])) for group in optimizer.param_groups]
    parameters = [p for _, items in lists for p in items]

    def set_parameters(tensors: Iterable[Tensor]) -> None:
        fed = iter(tensors)
        for target, items in lists:
            target[:] = list(islice(fed, len(items)))  # in place: such an optimizer keeps the list

    with _full_tensors(optimizer, parameters) as full:

        def closure_on_shards() -> Any:
            """Evaluate the closure on the weights that the optimizer tries, of which the model stores shards."""
            assert closure is not None
            _write_shards(parameters, full)
            set_parameters(parameters)
            loss = closure()
            set_parameters(full)
            _set_gradients(parameters, full)
            return loss

        try:
            set_parameters(full)
            return inner(None if closure is None else closure_on_shards)
        finally:
            set_parameters(parameters)


@contextmanager
def _full_tensors(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Replace shards by full parameters, gradients and state in a block, and write the results back to the shards after it."""
    full: list[Tensor] = [nn.Parameter(gather_full_tensor(p)) if isinstance(p, ShardedTensor) else p for p in parameters]
    _set_gradients(parameters, full)
    for p, x in zip(parameters, full, strict=True):
        if p is not x and p in optimizer.state:
            slots = optimizer.state.pop(p)
            optimizer.state[x] = {
                slot: gather_full_tensor(value) if isinstance(value, ShardedTensor) else value for slot, value in slots.items()
            }
    try:
        yield full
    finally:
        _write_shards(parameters, full)
        for p, x in zip(parameters, full, strict=True):
            if isinstance(p, ShardedTensor) and x in optimizer.state:
                optimizer.state[p] = {slot: _shard_slot(p, value) for slot, value in optimizer.state.pop(x).items()}


def _set_gradients(parameters: Sequence[Tensor], full: Sequence[Tensor]) -> None:
    for p, x in zip(parameters, full, strict=True):
        if isinstance(p, ShardedTensor):
            x.grad = gather_full_tensor(p.grad) if isinstance(p.grad, ShardedTensor) else None


def _write_shards(parameters: Sequence[Tensor], full: Sequence[Tensor]) -> None:
    with torch.no_grad(), private.as_base_tensor():
        for p, x in zip(parameters, full, strict=True):
            if isinstance(p, ShardedTensor):
                p.copy_(block_of(x, p.spec.block_ranges))


def _shard_slot(p: ShardedTensor, value: Any) -> Any:
    """Return this rank's shard of a state tensor that is sharded like its parameter."""
    spec = slot_spec(p, tuple(value.shape)) if isinstance(value, Tensor) else None
    if spec is None:
        return value
    with private.as_base_tensor():
        return ShardedTensor.from_local(block_of(value, spec.block_ranges).clone(), spec)
