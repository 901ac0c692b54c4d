"""Optimizers of sharded parameters: how they are prepared for steps, and state dicts that are never mistaken for full ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, wraps
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.errors import UsageError
from shardwise.run.loop.checkpoints import slot_spec
from shardwise.run.loop.gathered_optimizer import gather_for_steps, gather_full_tensor
from shardwise.run.loop.sharded_tensor import ShardedTensor
from shardwise.run.state.block_ranges import block_of
from shardwise.world import private


@cache
def patch_optimizer_methods() -> None:
    """Patch torch's Optimizer so that state dicts of sharded parameters are never mistaken for full ones."""
    get_state, set_state, add_group = Optimizer.state_dict, Optimizer.load_state_dict, Optimizer.add_param_group

    @wraps(add_group)
    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        add_group(self, param_group)
        prepare_steps(self, self.param_groups[-1:])

    @wraps(get_state)
    def state_dict(self: Optimizer) -> dict[str, Any]:
        first = next((p for group in self.param_groups for p in group["params"] if isinstance(p, ShardedTensor)), None)
        if first is not None:
            raise UsageError(
                f"{type(self).__name__}.state_dict() would hold this rank's parts only, of {first.spec.name} {list(first.shape)} of "
                f"{list(first.spec.global_shape)}; shardwise.save(folder, net, optimizer), called on every rank, saves all of it, and "
                f"shardwise.load takes "
                "it back in any layout"
            )
        return get_state(self)

    @wraps(set_state)
    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        return set_state(self, _shard_state_dict(self, state_dict))

    register_optimizer_step_pre_hook(_refuse_unprepared)
    Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    Optimizer.state_dict = state_dict  # type: ignore[method-assign]
    Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


_prepared: WeakSet[Optimizer] = WeakSet()


def prepare_steps(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Make an optimizer step with the sharded parameters of `groups`: elementwise on shards, or on full matrices."""
    _prepared.add(optimizer)
    gather_for_steps(optimizer, groups)


def _refuse_unprepared(optimizer: Optimizer, *_: object) -> None:
    """Raise UsageError if an optimizer has shards and has not been prepared for them."""
    if optimizer not in _prepared:
        p = next((p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedTensor)), None)
        if p is not None:
            raise UsageError(
                f"this {type(optimizer).__name__} got {p.spec.name} in a way that torch's Optimizer does not have (a copy, a list changed "
                "in place), so that its state and its steps do not fit this rank's shard: make it of net.parameters()"
            )


def full_optimizer_state(optimizer: Optimizer, is_main: bool) -> dict[str, Any] | None:
    """Return an optimizer's state dict with full tensors on the CPU if `is_main`, else None. Every rank calls it."""
    state_dict: dict[str, Any] = _original_state_dict(optimizer)
    state = {}
    for index, slots in state_dict["state"].items():
        # Gathers run on every rank, one tensor at a time.
        full = {slot: gather_full_tensor(x) if isinstance(x, ShardedTensor) else x for slot, x in slots.items()}
        if is_main:
            state[index] = {slot: x.detach().cpu().clone() if isinstance(x, Tensor) else x for slot, x in full.items()}
    return {**state_dict, "state": state} if is_main else None


def _original_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = getattr(Optimizer.state_dict, "__wrapped__", Optimizer.state_dict)(optimizer)
    return state


def _shard_state_dict(optimizer: Optimizer, slots: dict[str, Any]) -> dict[str, Any]:
    """Return a full state dict with the slots of sharded parameters cut to this rank's shard."""
    indices = [index for group in slots["param_groups"] for index in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sharded = {index: p for index, p in zip(indices, parameters, strict=False) if isinstance(p, ShardedTensor)}
    state = dict(slots["state"])
    for index in sharded.keys() & state.keys():
        state[index] = {slot: shard_slot(sharded[index], slot, x) for slot, x in state[index].items()}
    return {**slots, "state": state}


def shard_slot(p: ShardedTensor, slot: str, value: Any) -> Any:
    """Return this rank's shard of a slot of an optimizer's state for `p`, where it is cut like `p`."""
    if not isinstance(value, Tensor) or isinstance(value, ShardedTensor) or not value.dim():
        return value
    spec = slot_spec(p, tuple(value.shape))
    if spec is not None:
        with private.as_base_tensor():
            return ShardedTensor.from_local(block_of(value, spec.block_ranges).clone(), spec)
    whole = p.spec.global_shape
    if value.dim() == len(whole) and any(n not in (1, size) for n, size in zip(value.shape, whole, strict=True)):
        raise UsageError(
            f"the state {slot} of {p.spec.name} is {list(value.shape)}, and the whole parameter is {list(whole)}: load whole "
            "tensors, or what shardwise.save wrote with shardwise.load"
        )
    return value
