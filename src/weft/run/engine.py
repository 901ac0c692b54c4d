"""The engine: one rank's parts at work, step after step. Made by `weft.parallelize`.

In: a plan, a model, a batch, a loss. Out: losses, gradients, updated parameters, in the serial model's terms and under its names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import Infeasible
from weft.model.capture import Loss, batch_size_of, leaves
from weft.model.propagate import needs_gradient
from weft.model.work import model_flops
from weft.plan.placement import piece
from weft.plan.plan import Plan
from weft.plan.timeline import Span, Timeline
from weft.run.build import Parts, Source, build
from weft.run.executor import Crossing, Executor, Result
from weft.run.gradients import Gradients
from weft.run.optimizer import Optimizer, OptimizerSpec
from weft.run.stage import StageRunner, with_recomputation
from weft.schedules import build as build_schedule
from weft.model.stages import links
from weft.world.world import Group, World


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step tells: the loss over the whole batch, the gradient norm where it is clipped, seconds."""

    loss: float
    grad_norm: float | None
    step_time_s: float


class Engine:
    """Trains one rank's part of a model under a plan. Every rank makes one and calls the same methods in the same order."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module | Callable[[], nn.Module],
        batch: Any,
        loss: Loss | None,
        world: World,
        optimizer: OptimizerSpec | str | Mapping[str, Any] = "adamw",
        *,
        seed: int = 0,
        source: Source | None = None,
        compile: bool = False,
    ) -> None:
        self.plan, self.world = plan, world
        self.spec = OptimizerSpec.of(optimizer)
        source = source or Source.of(model)
        self.parts = build(plan, source, batch, loss, world, self.spec, seed)
        self.mesh = plan.layout.mesh
        at = self.mesh.coordinates(world.rank)
        self.data_index, self.data_size = at["data"], plan.layout.data
        self.stage_index = at["pipeline"]
        self.step_index = 0
        self._everyone = world.group(tuple(range(world.num_ranks)))
        self._pipeline = world.group(self.mesh.group(world.rank, "pipeline"))
        self._draw = self.parts.draw
        sums = [world.group(g.sum_ranks) if len(g.sum_ranks) > 1 else None for g in self.parts.groups]
        axes = [world.group(self.mesh.group(world.rank, axis)) for axis in self.parts.sharding.sizes]
        # In one order on every rank: a group that two ranks connect at different times would stop them both.
        for group in sorted({self._everyone, self._pipeline, *axes, *(g for g in sums if g is not None)}, key=lambda g: g.ranks):
            group.connect()
        self._executor = self._build_executor(compile)
        self.gradients = Gradients(self.parts.groups, self.parts.parameters, sums)
        self._executor.gradients = self.gradients
        self._optimizer = Optimizer(self.spec, self.parts.groups, sums, self._everyone, plan.layout.zero > 0)
        self._optimizer.load_parameters()
        self.timeline: Timeline | None = None
        self.model_flops = model_flops(self.parts.graph) * plan.layout.microbatches

    def _build_executor(self, compile: bool) -> Executor:
        parts, layout = self.parts, self.plan.layout
        graph, sharding = parts.graph, parts.sharding
        grads = needs_gradient(graph) - {v.value for v in graph.inputs}
        local = with_recomputation(parts.local, self._draw) if layout.recompute == "full" else parts.local
        autocast = torch.bfloat16 if layout.precision == "bfloat16" else None
        dtypes = {value: getattr(torch, t.dtype) for value, t in graph.tensors.items()}
        runner = StageRunner(local, parts.variables, grads, dtypes, self._draw, autocast, self.world.device, compile)
        crossings: dict[tuple[int, int], list[Crossing]] = {}
        for stage in parts.stages:
            for q, values in stage.sends:
                crossings[stage.index, q] = [
                    Crossing(
                        v,
                        sharding.shape(v, graph.tensors[v].shape, {a: "R" if f == "P" else f for a, f in sharding.forms[v].items()}),
                        dtypes[v],
                        v in grads,
                    )
                    for v in values
                ]
        program = build_schedule(layout.schedule, layout.pipeline, layout.microbatches, links(parts.stages))
        return Executor(program, {parts.stage.index: (parts.stage, runner)}, crossings, self._pipeline, self.world.device, None, self._draw)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's blocks of the parameters, by the model's own names."""
        return self.parts.parameters

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, each tied one once."""
        return self.parts.graph.num_parameters

    def step(self, batch: Any, lr: float | None = None, record: bool = False) -> StepResult:
        """One step on a batch: the global one (the same on every rank), or this rank's rows as `weft.shard` gives them.

        Raises:
            Infeasible: a batch of another size than the plan's.
        """
        began = time.perf_counter()
        result = self.forward_backward(batch, record=record)
        norm = self._optimizer.step(lr)
        loss = self._loss(result)
        self.step_index += 1
        return StepResult(loss, norm, time.perf_counter() - began)

    def forward_backward(self, batch: Any, record: bool = False, want_inputs: bool = False) -> Result:
        """Forward and backward of all microbatches; summed gradients lie in the flat groups."""
        self._draw.step = self.step_index
        inputs = self._local(batch)
        self.gradients.start()
        result = self._executor.run(inputs, record=record, want_inputs=want_inputs)
        self.gradients.finish()
        if record:
            name = f"{self.plan.model} {self.plan.layout}, step {self.step_index}"
            self.timeline = Timeline(name, self.plan.layout.pipeline, tuple(result.spans))
        return result

    def evaluate(self, batch: Any) -> float:
        """The loss on a batch, without training. Operators stay as captured (batch norm and dropout in training mode)."""
        self._draw.step = self.step_index
        with torch.no_grad():
            return self._loss(self._executor.run(self._local(batch), train=False))

    def _loss(self, result: Result) -> float:
        """The mean over microbatches, from every rank's summands."""
        total = torch.zeros((), dtype=torch.float64)
        if result.losses:
            forms = self.parts.local.forms[self.parts.graph.loss]
            at = self.mesh.coordinates(self.world.rank)
            if all(form == "P" or at[axis] == 0 for axis, form in forms.items()):
                total += torch.stack([x.double() for x in result.losses]).mean().cpu()
        self._everyone.all_reduce(total)
        return float(total)

    def _local(self, batch: Any) -> list[dict[str, Tensor]]:
        """This rank's tensors of every microbatch, by graph value."""
        layout = self.plan.layout
        rows = batch_size_of(batch)
        is_global = rows == self.plan.batch_size
        if not is_global and rows != self.plan.batch_size // layout.data:
            raise Infeasible(
                f"the batch has {rows} samples; the plan is for {self.plan.batch_size} in all, which is "
                f"{self.plan.batch_size // layout.data} for each of data={layout.data}"
            )
        given = {path: leaf for path, leaf in leaves(batch) if isinstance(leaf, Tensor)}
        out: list[dict[str, Tensor]] = []
        needed = set(self.parts.local.variables)
        for m in range(layout.microbatches):
            tensors: dict[str, Tensor] = {}
            for v in self.parts.graph.inputs:
                if v.value not in needed:
                    continue
                x = given[v.name]
                if v.batched:
                    start, length = piece(x.shape[0], layout.microbatches, m)
                    x = x.narrow(0, start, length)
                    if is_global and layout.data > 1:
                        start, length = piece(length, layout.data, self.data_index)
                        x = x.narrow(0, start, length)
                dtype = getattr(torch, v.tensor.dtype)
                tensors[v.value] = x.to(device=self.world.device, dtype=dtype if x.is_floating_point() else x.dtype, non_blocking=True)
            out.append(tensors)
        return out

    def full_tensors(self, which: Callable[[str], Tensor | None] | None = None) -> dict[str, Tensor] | None:
        """Whole parameters (or what `which(name)` gives for this rank's block of each), assembled on rank 0; None elsewhere."""
        return assemble(self.parts, self._everyone, self.mesh, which or (lambda name: self.parts.parameters[name].detach()))

    def gradient(self, name: str) -> Tensor | None:
        """This rank's block of the summed gradient of a parameter, after `forward_backward`."""
        for group in self.parts.groups:
            if name in group.views:
                return group.views[name]
        return None


def assemble(parts: Parts, everyone: Group, mesh: Any, block: Callable[[str], Tensor | None]) -> dict[str, Tensor] | None:
    """Every parameter whole, on rank 0: each rank sends its block, blocks are laid at their offsets."""
    out: dict[str, Tensor] = {}
    for v in parts.graph.parameters:
        spec = parts.specs.get(v.name)
        mine = block(v.name) if spec is not None else None
        dtype = parts.specs[v.name].dtype if spec is not None else None
        whole = _lay(everyone, v.tensor.shape, spec.offsets if spec is not None else None, mine, dtype)
        if everyone.index == 0:
            out[v.name] = whole
    return out if everyone.index == 0 else None


def _lay(group: Group, shape: tuple[int, ...], offsets: tuple[int, ...] | None, mine: Tensor | None, dtype: Any) -> Tensor:
    """Sum of blocks over how many ranks hold each element: exact, since copies are equal."""
    whole = torch.zeros(shape, dtype=torch.float64)
    count = torch.zeros(shape, dtype=torch.float64)
    if mine is not None and offsets is not None:
        place = tuple(slice(o, o + n) for o, n in zip(offsets, mine.shape, strict=True))
        whole[place] = mine.double().cpu()
        count[place] = 1.0
    group.all_reduce(whole)
    group.all_reduce(count)
    return whole / count


_ = Span
