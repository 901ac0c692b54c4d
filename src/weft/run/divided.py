"""A divided module as its user has it: what calling, copying, saving and loading it mean.

In: the module whose parameters are this rank's parts, and the lowered graph. Out: its forward, its copies, its whole state. Not
modelled: training a copy, whose gradients nobody would sum.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from weft.capture.modes import Modes, modes_of
from weft.capture.nesting import BatchForm, batch_size_of
from weft.errors import Infeasible, ModelError, UsageError
from weft.plan.plan import Plan
from weft.run.build import Parts
from weft.run.forward import Forward, with_tensors
from weft.run.state import full_state, weights_of
from weft.run.unchanged import Unchanged
from weft.world import private
from weft.world.world import World


def _as_captured(batch: Any, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call's arguments nested as the batch that the model was captured with: by keyword or in order."""
    bound = signature.bind(*args, **kwargs)
    if not isinstance(batch, Mapping):
        if bound.kwargs:
            raise Infeasible(
                f"the model was captured with arguments in order, and is called with {', '.join(bound.kwargs)} by keyword alone"
            )
        return bound.args
    given: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise Infeasible(f"the model was captured with arguments by keyword, and is called with {len(value)} more in order")
        given.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return given


OWN = ("forward", "__deepcopy__", "__reduce_ex__")  # what a divided module has of its own


Call = tuple[Modes, frozenset[str]]  # the model's modes, and which tensors it is called with


@dataclass(frozen=True)
class Captures:
    """The captures of one model, by its modes and by the tensors it is called with: `net(x)` is another graph than `net(x, targets)`.

    Copies of the model share them. `capture` is given the modes and a call's arguments, nested as the batch is.
    """

    made: dict[Call, Parts]
    capture: Callable[[Modes, Any], Parts]

    def of(self, call: Call, called: Any) -> Parts:
        """The parts of such a call, captured when it is first made, on every rank."""
        if call not in self.made:
            try:
                self.made[call] = self.capture(call[0], called)
            except ModelError as error:
                now = "trains" if call[0][0] else "evaluates"
                names = ", ".join(sorted(call[1]))
                raise ModelError(f"the model as it {now} now, called with {names}, cannot be divided: {error}") from error
        return self.made[call]


@dataclass(frozen=True)
class Divided:
    """How a divided module computes: its `forward`, and that of its copies, which have weights of their own and are not trained.

    `parts` are of its training; `batch`: what it was captured with.
    """

    model: nn.Module
    parts: Parts
    plan: Plan
    batch: Any
    world: World
    signature: inspect.Signature
    captures: Captures
    copied: bool = False
    forwards: dict[Call, Forward] = field(default_factory=dict)

    def bind(self) -> None:
        """Let the module compute so."""
        assert self._eager is not None  # made here, not while torch.compile reads on
        assert self._unchanged is not None  # from here on
        assert self._frozen is not None
        self.model.forward = self.forward
        # Copying and pickling ask the object, not its class.
        self.model.__deepcopy__ = self.copy  # type: ignore[assignment]
        self.model.__reduce_ex__ = self.unsaved  # type: ignore[method-assign]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, of this rank's samples."""
        return self._eager(*args, **kwargs)

    @cached_property
    def _unchanged(self) -> Unchanged:
        return Unchanged(self.model)

    @cached_property
    def _frozen(self) -> list[tuple[str, nn.Parameter]]:
        """What did not train when the model was divided."""
        return [(name, p) for name, p in self.parts.parameters.items() if not p.requires_grad]

    def _check_frozen(self) -> None:
        """Raise where a parameter trains now whose gradient nobody sums."""
        for name, p in self._frozen:
            if p.requires_grad and self.world.num_ranks > 1:
                raise UsageError(
                    f"{name} was frozen when the model was divided, and trains now, so that its gradient would not be summed over ranks: "
                    "freeze it after the block of weft.auto_parallelize, then it can train again"
                )

    @cached_property
    def _eager(self) -> Callable[..., Any]:
        """As it is: torch.compile cannot see through collectives, and leaves it out."""
        return torch.compiler.disable(self._computed)  # type: ignore[no-untyped-call, no-any-return]

    def _computed(self, *args: Any, **kwargs: Any) -> Any:
        self._unchanged.check()
        self._check_frozen()
        called = _as_captured(self.batch, self.signature, args, kwargs)
        form = self._form.with_tensors_of(called)
        given = form.tensors_of(called)
        self._check(batch_size_of(called))
        forward = self._forward_of((modes_of(self.model), form.tensors), called)
        forward.check(given)
        forward.parts.draw.step += 1
        return forward(given)

    def _forward_of(self, call: Call, called: Any) -> Forward:
        if call not in self.forwards:
            parts = with_tensors(self.captures.of(call, called), self.parts.parameters, self.parts.buffers)
            exchanged = {name: spec.summed_over for name, spec in parts.specs.items()}
            self.forwards[call] = Forward(parts, self.plan, self.world, exchanged)
        return self.forwards[call]

    @cached_property
    def _form(self) -> BatchForm:
        return BatchForm.of(self.batch)

    def _check(self, have: int) -> None:
        """Raise where the module is called with something else than it was divided for."""
        plan, parts = self.plan, self.parts
        rows = plan.batch_size // plan.layout.data
        if have != rows:
            raise Infeasible(
                f"the model is divided for {plan.batch_size} samples, {rows} on each of data={plan.layout.data}, and was called with "
                f"{have}; draw batches through weft.shard(loader), with drop_last=True"
            )
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in parts.parameters.values())
        if self.copied and trains and self.world.num_ranks > 1:
            raise UsageError(
                "a copy of a divided model has weights of its own, whose gradients nobody sums over ranks; call it under "
                "torch.no_grad(), or after copy.requires_grad_(False)"
            )

    def copy(self, memo: dict[int, Any]) -> nn.Module:
        """The module with copies of its weights, for averages of them: what copy.deepcopy gives."""
        model = self.model
        made: nn.Module = model.__new__(type(model))
        memo[id(model)] = made
        made.__dict__.update(copy.deepcopy({k: v for k, v in model.__dict__.items() if k not in OWN}, memo))
        held = self.parts.parameters, self.parts.buffers
        parameters, buffers = ({name: memo.get(id(x), x) for name, x in tensors.items()} for tensors in held)
        replace(self, model=made, parts=with_tensors(self.parts, parameters, buffers), copied=True, forwards={}).bind()
        return made

    def unsaved(self, protocol: object) -> Any:
        """What torch.save of the module itself is told."""
        raise UsageError(
            f"{type(self.model).__name__} is divided, and what it computes with cannot be saved: save weft.full_state_dict(net), which "
            "every rank calls, and load it into a new one with load_state_dict"
        )

    def full_state(self) -> dict[str, Tensor] | None:
        """The whole model's state dict on rank 0, None elsewhere. Every rank calls it."""
        at = self.plan.layout.mesh.coordinates(self.world.rank)
        with private.as_plain():
            return full_state(self.parts, weights_of(self.parts, at), self.world.group(tuple(range(self.world.num_ranks))))


def cut_what_is_loaded(model: nn.Module, parts: Parts) -> None:
    """Let `load_state_dict` take whole tensors where this rank has parts, and `state_dict` say that it has no more."""
    places = {name: (spec.global_shape, spec.offsets, spec.shape) for name, spec in parts.specs.items()}
    for name, (variable, offsets) in parts.blocks.items():
        if name in parts.buffers:
            places[name] = (variable.tensor.shape, offsets, tuple(parts.buffers[name].shape))
    names = {id(x): name for name, x in (*parts.parameters.items(), *parts.buffers.items())}
    for module in model.modules():
        held = [kind(recurse=False, remove_duplicate=False) for kind in (module.named_parameters, module.named_buffers)]
        cuts = {}
        for local, x in chain(*held):
            if id(x) in names and places[names[id(x)]][0] != places[names[id(x)]][2]:
                cuts[local] = places[names[id(x)]]
        if cuts:
            module.register_load_state_dict_pre_hook(partial(_take_parts, cuts))  # type: ignore[no-untyped-call]
            module.register_state_dict_pre_hook(_refuse_parts)  # type: ignore[no-untyped-call]


def _take_parts(cuts: Mapping[str, Any], module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for local, (whole, offsets, shape) in cuts.items():
        given = state.get(prefix + local)
        if given is not None and tuple(given.shape) == whole:
            state[prefix + local] = given[tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))]


def _refuse_parts(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise UsageError(
        f"{prefix or type(module).__name__ + '.'}state_dict() would hold this rank's parts of cut weights only; weft.full_state_dict(net), "
        "called on every rank, gives the whole on rank 0, and net.load_state_dict takes the whole back"
    )
