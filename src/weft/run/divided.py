"""A divided module as its user has it: what calling, copying, saving and loading it mean.

In: the module whose parameters are this rank's parts, and the lowered graph. Out: its forward, its copies, its whole state. Not
modelled: training a copy, whose gradients nobody would sum.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import Infeasible, ModelError, UsageError
from weft.lower.redistribute import counted, redistribute
from weft.model.nesting import BatchForm, batch_size_of, leaves, rebuild
from weft.plan.plan import Plan
from weft.run.build import Parts
from weft.run.state import full_state, weights_of
from weft.run.unchanged import Unchanged
from weft.world import private
from weft.world.world import Group, World

_PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)


class NotReturned:
    """Stands for an output that a divided model does not compute: an object of another kind than nested tensors (a cache of keys)."""

    def __init__(self, path: str, kind: str) -> None:
        self._why = f"the output {path} is a {kind}, which a divided model does not return; switch it off in the model (use_cache=False)"

    def __repr__(self) -> str:
        return f"NotReturned({self._why})"

    def __getattr__(self, name: str) -> Any:
        raise ModelError(self.__dict__["_why"])

    def __getitem__(self, key: object) -> Any:
        raise ModelError(self._why)

    def __len__(self) -> int:
        raise ModelError(self._why)


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


@dataclass(frozen=True)
class Divided:
    """How a divided module computes: its `forward`, and that of its copies, which have weights of their own and are not trained.

    `batch`: what it was captured with; `cannot`: why it cannot be evaluated; `training`: by module's name, whether it trained then.
    """

    model: nn.Module
    parts: Parts
    plan: Plan
    batch: Any
    world: World
    signature: inspect.Signature
    cannot: ModelError | None
    training: Mapping[str, bool]
    copied: bool = False

    def bind(self) -> None:
        """Let the module compute so."""
        assert self._eager is not None  # made here, not while torch.compile reads on
        assert self._unchanged is not None  # from here on
        assert self._frozen is not None
        self.model.forward = self.forward
        # Copying and pickling ask the object, not its class.
        self.model.__deepcopy__ = self.copy  # type: ignore[assignment]
        self.model.__reduce_ex__ = self.unsaved  # type: ignore[method-assign]

    @cached_property
    def _outputs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The model's output by path: tensors, and everything else as it will be returned."""
        found = list(leaves(self.parts.structure))
        tensors = {path: leaf for path, leaf in found if isinstance(leaf, Tensor)}
        return tensors, {path: _kept(path, leaf) for path, leaf in found if path not in tensors}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, of this rank's samples."""
        return self._eager(*args, **kwargs)

    @cached_property
    def _unchanged(self) -> Unchanged:
        return Unchanged(self.model, self.training)

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
        parts, layout, local = self.parts, self.plan.layout, self.parts.only
        self._unchanged.check()
        self._check_frozen()
        called = _as_captured(self.batch, self.signature, args, kwargs)
        given = self._form.tensors_of(called)
        self._check(batch_size_of(called), given)
        parts.draw.step += 1
        parts.draw.evaluating = not self.model.training
        if self.cannot is not None and not self.model.training:
            raise self.cannot
        tensors = {v.value: given[v.name].to(self.world.device) for v in parts.graph.inputs}
        for value, group in self._summed_inputs:
            if tensors[value].requires_grad:  # another model made it, and waits for the whole gradient
                tensors[value] = redistribute(tensors[value], "R", "+", group)
        values = [parts.variables[v] if v in parts.variables else tensors[v] for v in local.variables]
        for position, share in self._unlike:
            values[position] = counted(values[position], share)
        kind = self.world.device.type
        theirs = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None  # the user's own, around the call
        autocast = torch.bfloat16 if layout.precision == "bfloat16" else theirs
        with private.as_plain(), torch.autocast(kind, dtype=autocast, enabled=autocast is not None):
            results = local.module(*values)
        out = []
        for name, x in zip(local.results, results, strict=True):
            # The same on all data ranks, each of which may make something else of it: a scale of its own samples' scores.
            once = layout.data > 1 and x.is_floating_point() and local.forms[name].get("data", "R")[0] != "S"
            out.append(redistribute(x, "R", "+", self._data) if once else x)
        paths, others = self._outputs
        return rebuild(parts.structure, others | dict(zip(paths, out, strict=True)))

    @cached_property
    def _unlike(self) -> list[tuple[int, float]]:
        """Where parameters enter of whose gradient more or fewer than the data ranks have a summand, with how many times as many they are.

        The exchange takes the mean (see `weft.run.plain`): of what is whole on every data rank it then counts the data ranks' part.
        """
        data, sharding = self.plan.layout.data, self.parts.sharding
        exchanged = {one.name for group in self.parts.groups for one in group.members}
        shares = {
            v.value: prod(sharding.sizes[axis] for axis in sharding.gradients.get(v.value, ())) / data
            for v in self.parts.graph.parameters
            if v.name in exchanged
        }
        return [(i, shares[v]) for i, v in enumerate(self.parts.only.variables) if shares.get(v, 1.0) != 1.0]

    @cached_property
    def _summed_inputs(self) -> list[tuple[str, Group]]:
        """Inputs of whose gradient each rank of a group of tensor ranks has a summand."""
        mesh, rank = self.plan.layout.mesh, self.world.rank
        gradients = self.parts.sharding.gradients
        axes = [(v.value, axis) for v in self.parts.graph.inputs for axis in gradients.get(v.value, ()) if axis != "data"]
        return [(value, self.world.group(mesh.group(rank, axis))) for value, axis in axes]

    @cached_property
    def _data(self) -> Group:
        return self.world.group(self.plan.layout.mesh.group(self.world.rank, "data"))

    @cached_property
    def _form(self) -> BatchForm:
        return BatchForm.of(self.batch)

    def _check(self, have: int, given: Mapping[str, Tensor]) -> None:
        """Raise where the module is called with something else than it was divided for."""
        plan, parts = self.plan, self.parts
        rows = plan.batch_size // plan.layout.data
        if have != rows:
            raise Infeasible(
                f"the model is divided for {plan.batch_size} samples, {rows} on each of data={plan.layout.data}, and was called with "
                f"{have}; draw batches through weft.shard(loader), with drop_last=True"
            )
        for v in parts.graph.inputs:
            want = parts.sharding.shape(v.value, v.tensor.shape)
            if tuple(given[v.name].shape) != want:
                raise Infeasible(
                    f"{v.name} has shape {list(given[v.name].shape)}, and the model was captured with {list(want)} on each rank; "
                    "pad or cut batches to one shape"
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
        parts = self.parts
        parameters, buffers, variables = (
            {name: memo.get(id(x), x) for name, x in found.items()} for found in (parts.parameters, parts.buffers, parts.variables)
        )
        replace(self, model=made, parts=replace(parts, parameters=parameters, buffers=buffers, variables=variables), copied=True).bind()
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


def _kept(path: str, leaf: Any) -> Any:
    return leaf if leaf is None or isinstance(leaf, _PLAIN) else NotReturned(path, type(leaf).__name__)


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
