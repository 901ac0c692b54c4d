"""`state_dict` and `load_state_dict` of an optimizer of sharded parameters, and its steps where they need full matrices.

`state_dict` is refused, since it would hold this rank's shards only; `load_state_dict` takes full tensors, of which a rank keeps its shard;
steps gather where they must (`run/loop/gathered_optimizer`). torch has no hook for the construction of an optimizer, so methods of its base
class are wrapped, once a process and not before a parameter is sharded; optimizers without sharded parameters are unaffected.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from weft.errors import UsageError
from weft.run.loop.checkpoints import state_like
from weft.run.loop.cut import Cut
from weft.run.loop.gathered_steps import gather_for_steps, gathered
from weft.run.state.spans import block_of
from weft.world import private


@cache
def guard_optimizers() -> None:
    """Patch torch's Optimizer so that state dicts of sharded parameters are never mistaken for full ones."""
    get_state, set_state, add_group = Optimizer.state_dict, Optimizer.load_state_dict, Optimizer.add_param_group

    @wraps(add_group)
    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        add_group(self, param_group)
        gather_for_steps(self, self.param_groups[-1:])

    @wraps(get_state)
    def state_dict(self: Optimizer) -> dict[str, Any]:
        first = next((p for group in self.param_groups for p in group["params"] if isinstance(p, Cut)), None)
        if first is not None:
            raise UsageError(
                f"{type(self).__name__}.state_dict() would hold this rank's parts only, of {first.full.name} {list(first.shape)} of "
                f"{list(first.full.shape)}; weft.save(folder, net, optimizer), called on every rank, saves all of it, and weft.load takes "
                "it back in any layout"
            )
        return get_state(self)

    @wraps(set_state)
    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        return set_state(self, _in_parts(self, state_dict))

    Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    Optimizer.state_dict = state_dict  # type: ignore[method-assign]
    Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def full_optimizer_state(optimizer: Optimizer, main: bool) -> dict[str, Any] | None:
    """Return an optimizer's state dict with full tensors on the CPU if `is_main`, else None. Every rank calls it."""
    state_dict: dict[str, Any] = _state_dict_as_it_is(optimizer)
    state = {}
    for index, slots in state_dict["state"].items():
        # Gathers run on every rank, one tensor at a time.
        full = {slot: gathered(x) if isinstance(x, Cut) else x for slot, x in slots.items()}
        if main:
            state[index] = {slot: x.detach().cpu().clone() if isinstance(x, Tensor) else x for slot, x in full.items()}
    return {**state_dict, "state": state} if main else None


def _state_dict_as_it_is(optimizer: Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = getattr(Optimizer.state_dict, "__wrapped__", Optimizer.state_dict)(optimizer)
    return state


def _in_parts(optimizer: Optimizer, slots: dict[str, Any]) -> dict[str, Any]:
    """Return a full state dict with the slots of sharded parameters cut to this rank's shard."""
    indices = [index for group in slots["param_groups"] for index in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sharded = {index: p for index, p in zip(indices, parameters, strict=False) if isinstance(p, Cut)}
    state = dict(slots["state"])
    for index in sharded.keys() & state.keys():
        state[index] = {slot: _part(sharded[index], slot, x) for slot, x in state[index].items()}
    return {**slots, "state": state}


def _part(p: Cut, slot: str, value: Any) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, Cut) or not value.dim():
        return value
    spec = state_like(p, tuple(value.shape))
    if spec is not None:
        with private.as_base_tensor():
            return Cut.of(block_of(value, spec.spans).clone(), spec)
    if value.dim() == len(p.full.shape):
        raise UsageError(
            f"the state {slot} of {p.full.name} is {list(value.shape)}, and the whole parameter is {list(p.full.shape)}: load whole "
            "tensors, or what weft.save wrote with weft.load"
        )
    return value
