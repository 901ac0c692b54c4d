"""One capture of a divided module at work: what its call computes, of this rank's samples.

In: the parts of one capture, with the tensors that the module holds. Out: the module's output, its tensors whole but for samples. A plain
loop exchanges each parameter's gradient over the same ranks whatever capture made it (`weft.run.plain`), so what a capture leaves to be
summed over other axes is summed where the parameter enters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from weft.capture.nesting import leaves, rebuild
from weft.errors import Infeasible, ModelError
from weft.lower.redistribute import counted, redistribute
from weft.plan.placement import D, R, is_shard
from weft.plan.plan import Plan
from weft.run.build import Parts
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


def _kept(path: str, leaf: Any) -> Any:
    return leaf if leaf is None or isinstance(leaf, _PLAIN) else NotReturned(path, type(leaf).__name__)


def with_tensors(parts: Parts, parameters: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> Parts:
    """The parts of a capture over other tensors of the same names."""
    held = {**buffers, **parameters}
    names = {v.value: v.name for v in (*parts.graph.parameters, *parts.graph.buffers)}
    variables = {value: held[names[value]] if value in names else x for value, x in parts.variables.items()}
    return replace(parts, parameters=dict(parameters), buffers=dict(buffers), variables=variables)


@dataclass(frozen=True)
class Forward:
    """One capture. `exchanged`: axes over which each parameter's gradient is exchanged, by name."""

    parts: Parts
    plan: Plan
    world: World
    exchanged: Mapping[str, tuple[str, ...]]

    def __call__(self, given: Mapping[str, Tensor]) -> Any:
        """The output. `given`: the tensors of the call by path."""
        parts, layout, local = self.parts, self.plan.layout, self.parts.only
        tensors = {v.value: given[v.name].to(self.world.device) for v in parts.graph.inputs}
        for value, group in self._summed_inputs:
            if tensors[value].requires_grad:  # another model made it, and waits for the whole gradient
                tensors[value] = redistribute(tensors[value], R, D, group)
        values = [parts.variables[v] if v in parts.variables else tensors[v] for v in local.variables]
        for position, group in self._summed_here:
            values[position] = redistribute(values[position], R, D, group)
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
            once = layout.data > 1 and x.is_floating_point() and not is_shard(local.forms[name].get("data", R))
            out.append(redistribute(x, R, D, self._group("data")) if once else x)
        paths, others = self._outputs
        return rebuild(parts.structure, others | dict(zip(paths, out, strict=True)))

    def check(self, given: Mapping[str, Tensor]) -> None:
        """Raise Infeasible where a tensor has another shape than in the capture."""
        parts = self.parts
        for v in parts.graph.inputs:
            want = parts.sharding.shape(v.value, v.tensor.shape)
            if tuple(given[v.name].shape) != want:
                raise Infeasible(
                    f"{v.name} has shape {list(given[v.name].shape)}, and the model was captured with {list(want)} on each rank; "
                    "pad or cut batches to one shape"
                )

    @cached_property
    def _outputs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The model's output by path: tensors, and everything else as it will be returned."""
        found = list(leaves(self.parts.structure))
        tensors = {path: leaf for path, leaf in found if isinstance(leaf, Tensor)}
        return tensors, {path: _kept(path, leaf) for path, leaf in found if path not in tensors}

    @cached_property
    def _axes(self) -> dict[str, tuple[set[str], set[str]]]:
        """By graph value of exchanged parameters: the axes over which this capture leaves summands, and those of the exchange."""
        names = {one.name for group in self.parts.groups for one in group.members}
        gradients = self.parts.sharding.gradients
        return {
            v.value: (set(gradients.get(v.value, ())), set(self.exchanged[v.name])) for v in self.parts.graph.parameters if v.name in names
        }

    @cached_property
    def _summed_here(self) -> list[tuple[int, Group]]:
        """Where parameters enter of whose gradient ranks have summands that no exchange sums, with these ranks."""
        found = []
        for i, value in enumerate(self.parts.only.variables):
            made, exchanged = self._axes.get(value, (set[str](), set[str]()))
            found += [(i, self._group(axis)) for axis in self.parts.sharding.sizes if axis in made - exchanged]
        return found

    @cached_property
    def _unlike(self) -> list[tuple[int, float]]:
        """Where parameters enter of whose gradient more or fewer than the data ranks have a summand, with how many times as many they are.

        The exchange takes the mean (see `weft.run.plain`): of what is whole on every data rank it then counts the data ranks' part.
        """
        data, sizes = self.plan.layout.data, self.parts.sharding.sizes
        shares = {value: prod(sizes[axis] for axis in made & exchanged) / data for value, (made, exchanged) in self._axes.items()}
        return [(i, shares[v]) for i, v in enumerate(self.parts.only.variables) if shares.get(v, 1.0) != 1.0]

    @cached_property
    def _summed_inputs(self) -> list[tuple[str, Group]]:
        """Inputs of whose gradient each rank of a group of tensor ranks has a summand."""
        gradients = self.parts.sharding.gradients
        axes = [(v.value, axis) for v in self.parts.graph.inputs for axis in gradients.get(v.value, ()) if axis != "data"]
        return [(value, self._group(axis)) for value, axis in axes]

    def _group(self, axis: str) -> Group:
        return self.world.group(self.plan.layout.mesh.group(self.world.rank, axis))
