"""`state_dict` and `load_state_dict` of an optimizer whose parameters are cut between ranks, and its steps where they need full matrices.

In: any optimizer of torch's kind. Out: the former is refused, since it would hold this rank's parts; the latter takes whole tensors, of
which a rank keeps its part; steps gather where they must (`run/loop/gathered_steps`). torch has no hook for when an optimizer is made or
copied, so methods of its base class are wrapped, once a process and not before a weight is cut; optimizers without cut parameters do not
notice.
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
    """From here on optimizers of cut parameters neither give nor take parts for wholes."""
    give, take, add = Optimizer.state_dict, Optimizer.load_state_dict, Optimizer.add_param_group

    @wraps(add)
    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        add(self, param_group)
        gather_for_steps(self, self.param_groups[-1:])

    @wraps(give)
    def state_dict(self: Optimizer) -> dict[str, Any]:
        first = next((p for group in self.param_groups for p in group["params"] if isinstance(p, Cut)), None)
        if first is not None:
            raise UsageError(
                f"{type(self).__name__}.state_dict() would hold this rank's parts only, of {first.full.name} {list(first.shape)} of "
                f"{list(first.full.shape)}; weft.save(folder, net, optimizer), called on every rank, saves all of it, and weft.load takes "
                "it back in any layout"
            )
        return give(self)

    @wraps(take)
    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        return take(self, _in_parts(self, state_dict))

    Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    Optimizer.state_dict = state_dict  # type: ignore[method-assign]
    Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def full_optimizer_state(optimizer: Optimizer, main: bool) -> dict[str, Any] | None:
    """An optimizer's state dict with whole tensors, on the CPU, where `main` is set; None elsewhere. Every rank calls it."""
    told: dict[str, Any] = _state_dict_as_it_is(optimizer)
    state = {}
    for place, slots in told["state"].items():
        # Gathers run on every rank, one tensor at a time.
        full = {slot: gathered(x) if isinstance(x, Cut) else x for slot, x in slots.items()}
        if main:
            state[place] = {slot: x.detach().cpu().clone() if isinstance(x, Tensor) else x for slot, x in full.items()}
    return {**told, "state": state} if main else None


def _state_dict_as_it_is(optimizer: Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = getattr(Optimizer.state_dict, "__wrapped__", Optimizer.state_dict)(optimizer)
    return state


def _in_parts(optimizer: Optimizer, slots: dict[str, Any]) -> dict[str, Any]:
    """A whole state dict with this rank's part of what belongs to cut parameters."""
    places = [place for group in slots["param_groups"] for place in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    cut = {place: p for place, p in zip(places, parameters, strict=False) if isinstance(p, Cut)}
    state = dict(slots["state"])
    for place in cut.keys() & state.keys():
        state[place] = {slot: _part(cut[place], slot, x) for slot, x in state[place].items()}
    return {**slots, "state": state}


def _part(p: Cut, slot: str, value: Any) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, Cut) or not value.dim():
        return value
    of = state_like(p, tuple(value.shape))
    if of is not None:
        with private.as_base_tensor():
            return Cut.of(block_of(value, of.spans).clone(), of)
    if value.dim() == len(p.full.shape):
        raise UsageError(
            f"the state {slot} of {p.full.name} is {list(value.shape)}, and the whole parameter is {list(p.full.shape)}: load whole "
            "tensors, or what weft.save wrote with weft.load"
        )
    return value
