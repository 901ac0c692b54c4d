"""What a script made of a module's parameters before it was divided: optimizers, lists of parameters, hooks on them.

A parameter stays the object that it was, and becomes this rank's shard (`become_shard`), so that whatever has it has the shard. Optimizers
are found among all objects, and their state is cut to shards. Parameters of a module that was built in the block of
`shardwise.auto_parallelize` had no memory yet and are replaced, in optimizers too.

Refused at its first step: an optimizer of other tensors that shared the parameters' memory (a flat buffer).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.capture.fakes import Fake
from shardwise.capture.nesting import map_tensors
from shardwise.errors import UsageError
from shardwise.run.gradients.parameter_hooks import hook_tables_of
from shardwise.run.loop.optimizer_state import prepare_steps, shard_slot
from shardwise.run.loop.sharded_tensor import ShardedParameter, ShardedTensor
from shardwise.run.parts.rank_model import RankModel
from shardwise.run.state.block_ranges import block_of
from shardwise.world import private


class EarlierParameters:
    """A module's parameters before it is divided, with their hooks, and the optimizers that have them.

    >>> net = nn.Linear(2, 2)
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> [type(found).__name__ for found in EarlierParameters(net).optimizers if found is optimizer]
    ['SGD']
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._dtypes = {name: p.dtype for name, p in self._parameters.items()}
        self._hooks = {name: private.take_gradient_hooks(p) for name, p in self._parameters.items()}
        ids = {id(p) for p in self._parameters.values()}
        memory = {_memory_of(p): name for name, p in self._parameters.items()}
        self.optimizers: list[Optimizer] = []
        self._optimizers_of_views: list[tuple[Optimizer, str]] = []
        for optimizer in live_optimizers():
            tensors = [p for group in optimizer.param_groups for p in group["params"]]
            if any(id(p) in ids for p in tensors):
                self.optimizers.append(optimizer)
            views = [memory[_memory_of(p)] for p in tensors if id(p) not in ids and _memory_of(p) in memory]
            if views:
                self._optimizers_of_views.append((optimizer, views[0]))

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Divide the module in this block; afterwards hooks and optimizers are those of the divided one. An error restores the hooks."""
        try:
            yield
        except BaseException:
            for name, p in self._parameters.items():
                private.set_gradient_hooks(p, *self._hooks[name])
            raise
        now = dict(self._model.named_parameters())
        for name, tables in self._hooks.items():
            registered = hook_tables_of(now[name])
            if registered is not None:
                registered.use_tables(*tables)
            else:
                private.set_gradient_hooks(now[name], *tables)
        replaced = {id(p): (now[name], self._dtypes[name]) for name, p in self._parameters.items()}
        for optimizer in self.optimizers:
            _follow_parameters(optimizer, replaced)
        for optimizer, name in self._optimizers_of_views:
            _refuse_steps(optimizer, name)


def live_optimizers() -> Iterator[Optimizer]:
    """Yield all optimizers of this process."""
    for found in gc.get_objects():
        if issubclass(type(found), Optimizer) and "param_groups" in vars(found):  # isinstance would ask lazy objects for their class
            yield found


def _memory_of(p: Tensor) -> object:
    """Return a key of the memory in which a parameter lies; parameters without any have keys of their own."""
    if isinstance(p, Fake) or p.layout is not torch.strided or p.is_meta:
        return id(p)
    with private.as_base_tensor():
        return p.untyped_storage().data_ptr() or id(p)


def _follow_parameters(optimizer: Optimizer, replaced: Mapping[int, tuple[nn.Parameter, torch.dtype]]) -> None:
    """Give an optimizer the parameters of the divided module, and state in their shards and precision."""
    for group in optimizer.param_groups:
        group["params"][:] = [replaced[id(p)][0] if id(p) in replaced else p for p in group["params"]]  # in place: LBFGS keeps the list
    for old in [p for p in optimizer.state if id(p) in replaced]:
        p, dtype = replaced[id(old)]
        slots = optimizer.state.pop(old)
        optimizer.state[p] = {slot: _convert_slot(p, dtype, slot, value) for slot, value in slots.items()}
    prepare_steps(optimizer, optimizer.param_groups)


def _convert_slot(p: nn.Parameter, dtype: torch.dtype, slot: str, value: Any) -> Any:
    """Return a slot of an optimizer's state for `p`, which had another `dtype`: its shard, where it is cut like `p`."""

    def convert(x: Tensor) -> Tensor:
        is_of_weights = x.dim() > 0 and x.is_floating_point()
        return x.to(p.device, p.dtype if is_of_weights and x.dtype is dtype else x.dtype) if x.dim() else x

    value = map_tensors(value, convert)
    return shard_slot(p, slot, value) if isinstance(p, ShardedTensor) else value


def _refuse_steps(optimizer: Optimizer, name: str) -> None:
    def refuse(*_: object) -> None:
        raise UsageError(
            f"this {type(optimizer).__name__} was made before the model was divided, of tensors that shared the memory of {name} and are "
            "none of the model's parameters; it would train nothing: make it of net.parameters(), or after shardwise.auto_parallelize"
        )

    optimizer.register_step_pre_hook(refuse)


def keep_parameter_objects(model: nn.Module, rank_model: RankModel) -> None:
    """Make the module's own parameters this rank's shards, in place, instead of those that were built for it."""
    built = {id(p): name for name, p in rank_model.parameters.items()}
    for name, p in model.named_parameters():
        if not isinstance(p, Fake):
            become_shard(p, rank_model.parameters[name])
            rank_model.parameters[name] = p
    for value, x in rank_model.variables.items():
        if id(x) in built:
            rank_model.variables[value] = rank_model.parameters[built[id(x)]]


def become_shard(p: nn.Parameter, shard: nn.Parameter) -> None:
    """Give a parameter the values, kind and memory of `shard`; its gradient, if it has one, is cut alike."""
    with torch.no_grad(), private.as_base_tensor():
        grad, p.grad = p.grad, None
        # Data of another dtype makes autograd forget the node of an earlier graph, which expects gradients of the former shape.
        p.data = torch.empty(0, dtype=torch.float32 if p.dtype is torch.bfloat16 else torch.bfloat16)
        p.data = shard.data
        p.requires_grad_(shard.requires_grad)
        spec = shard.spec if isinstance(shard, ShardedParameter) else None
        if grad is not None:
            grad = grad.to_dense() if grad.is_sparse else grad
            p.grad = (grad if spec is None else block_of(grad, spec.block_ranges).clone()).to(p.device, p.dtype)
    if spec is not None:
        p.__class__ = ShardedParameter
        p.spec = spec  # type: ignore[attr-defined]
