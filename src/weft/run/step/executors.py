"""Build and cache the executors of one capture of the model: one `Executor` for each combination of microbatch sizes.

In: a rank's model, captured for training or evaluation. Out: executors, built on first use, on every rank at once. Parameters, gradients
and their buffers are shared between captures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from weft.errors import UsageError
from weft.lower.split_backward import delay_weight_gradients
from weft.model.derivatives import without_gradient
from weft.model.gradients import needs_gradient
from weft.plan.placement import crossing
from weft.plan.plan import Plan
from weft.plan.program import Compute, Manage, Op
from weft.run.recent import MOST_SIZES, Recent
from weft.run.reduce.overlapped import Gradients
from weft.run.residency.gathered import Gathered
from weft.run.residency.host import HostStore
from weft.run.residency.prepare import prepared
from weft.run.resized import Sized
from weft.run.state.precision import LossScale, products_of
from weft.run.step.executor import Executor, Held, Sizes
from weft.run.step.lending import lent_threads
from weft.run.step.resharded import Resharded, line_of
from weft.run.step.stage_runner import Computing, StageRunner
from weft.run.step.transfers import Crossing, Crossings, pairs_of
from weft.run.training_parts import Parts, program_of
from weft.world.memory import Accounts
from weft.world.world import World


@dataclass
class Executors:
    """Executors of one capture. `gradients`: reducer, None without backward; `gathered`: ZeRO-3 weight gatherer."""

    parts: Parts
    plan: Plan
    world: World
    memory: Accounts
    gradients: Gradients | None
    gathered: Gathered
    host: HostStore
    compile: bool
    scale: LossScale
    trains: bool = True
    cache: Recent[Executor] = field(default_factory=lambda: Recent(MOST_SIZES))
    by_size: Recent[tuple[dict[int, StageRunner], Crossings]] = field(default_factory=lambda: Recent(MOST_SIZES))

    def of(self, sizes: tuple[int, ...], samples: int = 0) -> Executor:
        """Return the executor of microbatches of these sizes (over all data replicas) of a batch of `samples`, by default their sum.

        Size 0 stands for a microbatch of which this rank has no rows: it runs one placeholder sample per data rank, with weight 0.
        """
        samples = samples or sum(sizes)
        return self.cache.of((sizes, samples), lambda: self._executor(sizes, samples))

    def of_other(self, parts: Parts, gathered: Gathered, trains: bool) -> Executors:
        """Return the executors of another capture, over the same parameters and gradients."""
        return replace(self, parts=parts, gathered=gathered, trains=trains, cache=Recent(MOST_SIZES), by_size=Recent(MOST_SIZES))

    def _executor(self, sizes: tuple[int, ...], samples: int) -> Executor:
        parts, layout, world = self.parts, self.plan.layout, self.world
        pipeline = line_of(layout, world)
        program = parts.program
        if len(sizes) != layout.microbatches:
            shorter_plan = replace(self.plan, layout=layout.with_microbatches(len(sizes)), batch_size=len(sizes) * layout.replicas)
            program = program_of(shorter_plan, parts.stages, world)
        by_size = {
            size: Sizes(*self.runners_of(size or layout.data, samples), self._weight(size, samples)) for size in dict.fromkeys(sizes)
        }
        by_microbatch = {m: by_size[size] for m, size in zip(program.microbatches, sizes, strict=True)}
        names = {number: frozenset(name for name, _ in by_value.values()) for number, by_value in self._learned().items()}
        resharding = None
        if layout.inner:
            variants = {m: parts.of_size(size or layout.data, samples) for m, size in zip(program.microbatches, sizes, strict=True)}
            resharding = Resharded(layout, variants, world, world.everyone)
            crossings = by_microbatch[program.microbatches[0]].crossings
            for group in sorted(resharding.peers(crossings), key=lambda g: g.ranks):
                group.connect()  # in the same order on every rank
            world.everyone.connect_pairs(resharding.pairs(crossings))
        if not layout.begins:
            pipeline.connect_pairs(pairs_of(program))
        threads_by_step = lent_threads(layout, program, parts.graph, parts.stages, sizes, pipeline, world) if self.trains else {}
        resources = Held(self.gradients, names, self.gathered, self.host)
        return Executor(program, by_microbatch, pipeline, world.device, parts.draw, resources, resharding, threads_by_step)

    def _learned(self) -> dict[int, dict[str, tuple[str, nn.Parameter]]]:
        """Return the trainable parameters that each of this rank's stages reads: (name, parameter) by graph value."""
        parts = self.parts
        trainable = {v.value: (v.name, parts.parameters[v.name]) for v in parts.graph.parameters if v.name in parts.parameters}
        trainable = {value: (name, p) for value, (name, p) in trainable.items() if p.requires_grad}
        # The single stage of an uncaptured model is the user's module, with all parameters inside.
        return {
            number: trainable if self.plan.uncaptured else {value: trainable[value] for value in local.variables if value in trainable}
            for number, local in parts.lowered.items()
        }

    def runners_of(self, size: int, samples: int) -> tuple[dict[int, StageRunner], Crossings]:
        """Return this rank's stages for microbatches of `size` samples (over all data replicas), and the tensors sent between stages."""
        return self.by_size.of((size, samples), lambda: self._build_runners(self.parts.of_size(size, samples)))

    def _weight(self, size: int, samples: int) -> float:
        """Return the weight of a microbatch's loss in the batch's."""
        return size / samples if not size or not self.parts.of_size(size, samples).normal.adds else 1.0

    def _build_runners(self, sized: Sized) -> tuple[dict[int, StageRunner], Crossings]:
        parts, graph, compile, layout = self.parts, sized.graph, self.compile, self.plan.layout
        variables = {**parts.variables, **{v: x for v, x in sized.constants.items() if v in parts.variables}}
        grads = needs_gradient(graph) - {v.value for v in graph.inputs}
        dtypes = {value: getattr(torch, t.dtype) for value, t in graph.tensors.items()}
        splits = self.trains and any(isinstance(a, Compute) and a.op is Op.W for row in parts.program.actions for a in row)
        if splits and compile:
            name = parts.program.name
            raise UsageError(f"compile=on with {name}, which splits backward, is not supported; use compile=off or schedule=1f1b")
        if not self.trains:  # nothing is saved for backward, so nothing is recomputed or offloaded
            layout = replace(layout, recompute="none", segment=1, offload="none")
        computing = Computing(self.world.device, self.memory, products_of(layout.precision), compile, self.scale)
        non_differentiable = without_gradient(graph) | sized.normal.given
        trainable, runners = self._learned(), {}
        for number, local in sized.lowered.items():
            delayed = None
            if splits:
                local, delayed = delay_weight_gradients(local, trainable[number], self._keeps_plainly())
            local = prepared(local, number, layout, parts.draw, self.gathered, self.host, self.memory)
            runners[number] = StageRunner(local, variables, grads, dtypes, parts.draw, computing, non_differentiable, delayed)
        return runners, self._crossings(sized, grads, dtypes)

    def _keeps_plainly(self) -> bool:
        """Return whether saved tensors stay in place until backward: no recompute, offload or gathered weights."""
        layout = self.plan.layout
        managed = any(isinstance(a, Manage) for row in self.parts.program.actions for a in row)
        return layout.recompute == "none" and layout.offload == "none" and layout.zero < 3 and not managed

    def _crossings(self, sized: Sized, grads: set[str], dtypes: Mapping[str, torch.dtype]) -> Crossings:
        """Return the tensors sent between every two stages of the model, with their local shapes."""
        sharding, tensors = sized.sharding, sized.graph.tensors
        coordinates = self.plan.layout.mesh_of(self.world.rank).coordinates(self.world.rank)

        def crossing_of(v: str) -> Crossing:
            placements = {axis: crossing(placement) for axis, placement in sharding.lies(v).items()}
            return Crossing(v, sharding.shape(v, tensors[v].shape, placements, coordinates), dtypes[v], v in grads)

        return {(stage.index, q): [crossing_of(v) for v in values] for stage in self.parts.stages for q, values in stage.sends}
