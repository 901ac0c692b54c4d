"""The serial side of a proof: the user's module at one random point after another, once for all layouts that compare with it.

In: a model as the ranks get it, what a layout changes of its serial run (`SerialTraits`), points. Out: loss, gradients, weights and
optimizer state of each step, and what they add to the certainty of a point.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture.capture import Loss
from shardwise.lower.float64_mode import cast_to_float64, is_float64
from shardwise.model.graph import Graph
from shardwise.plan.plan import Plan
from shardwise.run.prove.degrees import CERTAINTY, CONSTANT, Certainty
from shardwise.run.prove.field_tensor import ComplexFieldTensor, FieldMode, FieldTensor, NotProvable, lift_constants, random_like
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.run.state.optimizer import OptimizerSpec
from shardwise.run.verify.serial import SerialRun, SerialTraits, StepValues


@dataclass(frozen=True)
class ProofOptions:
    """Options of a proof. `max_error_probability`: that a wrong plan passes; points are added until it is met. `steps`: at each point."""

    max_error_probability: float = 1e-12
    steps: int = 1
    seed: int = 0
    optimizer: OptimizerSpec | str | Mapping[str, Any] = "adamw"


@dataclass(frozen=True)
class ProofModel:
    """A model and its batch, as the ranks and the serial run get them.

    `serial_points`: serial runs of earlier proofs of this model, which layouts with equal traits, options and points share.
    """

    make: Any
    batch: Any
    loss: Loss | None
    source: CachedModelSource
    serial_points: dict[object, SerialPoints] = field(default_factory=dict, repr=False, compare=False)

    def build_module(self, seed: int) -> tuple[nn.Module, bool]:
        """Build the user's module in float64; return it, and whether it is in float64 as written."""
        torch.manual_seed(seed)
        model = copy.deepcopy(self.make) if isinstance(self.make, nn.Module) else self.make()
        as_written = is_float64(model)  # else torch.finfo, by which masks are filled, is float32's on both sides
        return cast_to_float64(model), as_written

    def serial_points_of(self, plan: Plan, options: ProofOptions, first_point: int, traits: SerialTraits, graph: Graph) -> SerialPoints:
        """Return the serial run that a plan is compared with from its first point on, that of an earlier proof if there is one."""
        key = (plan.layout.staleness, options.seed, options.steps, repr(options.optimizer), first_point, traits, CERTAINTY.max_level)
        if key not in self.serial_points:
            self.serial_points[key] = SerialPoints(self, plan, options, traits, graph)
        return self.serial_points[key]


class SerialPoints:
    """A serial run at successive points. The optimizer's state goes on from point to point, as that of the ranks does."""

    def __init__(self, model: ProofModel, plan: Plan, options: ProofOptions, traits: SerialTraits, graph: Graph) -> None:
        self._model, self._plan, self._options, self._traits = model, plan, options, traits
        self._module, _ = model.build_module(options.seed)
        self._names = {name: v.name for v in graph.parameters for name in (v.name, *v.aliases)}
        self._buffers = constant_buffers(self._module)
        self._run: SerialRun | None = None
        self._error: Exception | None = None
        self._points: list[tuple[list[StepValues], Certainty]] = []

    def values_at(self, index: int, point: int, batch: Any) -> list[StepValues]:
        """Return the values of every step at a point, the index-th of this run, and add what they were computed by to the certainty."""
        if self._error is not None:
            raise self._error
        if index == len(self._points):
            try:
                with CERTAINTY.count_apart() as counted:
                    self._points.append((self._make_steps(point, batch), counted))
            except Exception as error:
                self._error = error  # another layout would meet it, too
                raise
        values, counted = self._points[index]
        CERTAINTY.add_counted(counted)
        return values

    def _make_steps(self, point: int, batch: Any) -> list[StepValues]:
        with FieldMode():  # type: ignore[no-untyped-call]
            if self._run is None:
                spec, cpu = OptimizerSpec.of(self._options.optimizer), torch.device("cpu")
                self._run = SerialRun(
                    lambda: self._fill_module(point), self._options.seed, batch, self._model.loss, self._plan, spec, cpu, self._traits
                )
            else:
                self._refill_run(self._run, point, batch)
            steps: list[StepValues] = []
            for _ in range(self._options.steps):
                values = self._run.step()
                if self._run.drew_differently:
                    raise NotProvable("the model draws random numbers by operators without a reproducible stream; prove it without them")
                steps.append({kind: {name: copy_of(x) for name, x in tensors.items()} for kind, tensors in values.items()})
        return steps

    def _refill_run(self, run: SerialRun, point: int, batch: Any) -> None:
        """Give the serial run this point's weights, buffers and inputs."""
        run.set_batch(batch)
        with torch.no_grad():
            for path, p in run.model.named_parameters():
                refill_tensor(p, random_like(p, self._names.get(path, path), point))
            for path, b in run.model.named_buffers():
                refill_tensor(b, self._buffers[path])

    def _fill_module(self, point: int) -> nn.Module:
        """Return the user's module with the first point's weights."""
        replaced: dict[int, nn.Parameter] = {}
        for path, p in self._module.named_parameters():
            value = random_like(p, self._names.get(path, path), point)
            replaced[id(p)] = nn.Parameter(value, requires_grad=p.requires_grad)
        buffers = {id(b): lift_constants(b) for b in self._module.buffers() if b.is_floating_point()}
        for module in self._module.modules():
            module._parameters.update({key: replaced[id(p)] for key, p in module._parameters.items() if p is not None})
            module._buffers.update({key: buffers[id(b)] for key, b in module._buffers.items() if b is not None and id(b) in buffers})
        return self._module


def constant_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a module by name, floating-point ones as constants of the field."""
    return {
        name: lift_constants(x.clone()) if x.is_floating_point() else x.clone() for name, x in model.named_buffers(remove_duplicate=False)
    }


def refill_tensor(x: Tensor, value: Tensor) -> None:
    """Write a point's numbers over those that a step has left."""
    numbers = x.pair if isinstance(x, ComplexFieldTensor) else x
    if isinstance(numbers, FieldTensor) and numbers.degree is not None:
        numbers.degree[0] = CONSTANT
    x.copy_(value)


def copy_of(x: Tensor) -> Tensor:
    return x.detach().clone()
