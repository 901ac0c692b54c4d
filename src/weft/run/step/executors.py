"""What runs a step of one capture of the model: an `Executor` for each way in which a step's samples fall into microbatches.

In: a rank's parts, as they were captured for training or for evaluation. Out: executors, made when they are first asked for, on every rank
at once. Parameters, their gradients and what holds them are shared between captures.
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
    """Those of one capture. `gradients`: their sums, None where no backward runs; `gathered`: weights that lie as pieces; `scale`: of the
    loss; `trains`: whether backward runs."""

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
        """What runs a step of microbatches of these sizes, all data replicas together, of a batch of `samples`, by default their sum.

        A size of 0 is that of a microbatch of which this rank has nothing: it runs one sample on each data rank, which counts nothing.
        """
        samples = samples or sum(sizes)
        return self.cache.of((sizes, samples), lambda: self._executor(sizes, samples))

    def of_other(self, parts: Parts, gathered: Gathered, trains: bool) -> Executors:
        """Those of another capture, over the same tensors."""
        return replace(self, parts=parts, gathered=gathered, trains=trains, cache=Recent(MOST_SIZES), by_size=Recent(MOST_SIZES))

    def _executor(self, sizes: tuple[int, ...], samples: int) -> Executor:
        parts, layout, world = self.parts, self.plan.layout, self.world
        pipeline = line_of(layout, world)
        program = parts.program
        if len(sizes) != layout.microbatches:
            fewer = replace(self.plan, layout=layout.with_microbatches(len(sizes)), batch_size=len(sizes) * layout.replicas)
            program = program_of(fewer, parts.stages, world)
        by_size = {
            size: Sizes(*self.runners_of(size or layout.data, samples), self._weight(size, samples)) for size in dict.fromkeys(sizes)
        }
        by_microbatch = {m: by_size[size] for m, size in zip(program.microbatches, sizes, strict=True)}
        names = {number: frozenset(name for name, _ in mine.values()) for number, mine in self._learned().items()}
        between = None
        if layout.inner:
            of_size = {m: parts.of_size(size or layout.data, samples) for m, size in zip(program.microbatches, sizes, strict=True)}
            between = Resharded(layout, of_size, world, world.everyone)
            crossings = by_microbatch[program.microbatches[0]].crossings
            for group in sorted(between.peers(crossings), key=lambda g: g.ranks):
                group.connect()  # all of a rank's in one order, as the others
            world.everyone.connect_pairs(between.pairs(crossings))
        if not layout.begins:
            pipeline.connect_pairs(pairs_of(program))
        lent = lent_threads(layout, program, parts.graph, parts.stages, sizes, pipeline, world) if self.trains else {}
        held = Held(self.gradients, names, self.gathered, self.host)
        return Executor(program, by_microbatch, pipeline, world.device, parts.draw, held, between, lent)

    def _learned(self) -> dict[int, dict[str, tuple[str, nn.Parameter]]]:
        """The trainable parameters that each of this rank's stages reads: (name, parameter) by graph value."""
        parts = self.parts
        learned = {v.value: (v.name, parts.parameters[v.name]) for v in parts.graph.parameters if v.name in parts.parameters}
        learned = {value: (name, p) for value, (name, p) in learned.items() if p.requires_grad}
        # A model that runs whole has its parameters inside; then its one stage has them all.
        return {
            number: learned if self.plan.uncaptured else {value: learned[value] for value in local.variables if value in learned}
            for number, local in parts.lowered.items()
        }

    def runners_of(self, size: int, samples: int) -> tuple[dict[int, StageRunner], Crossings]:
        """This rank's stages for microbatches of `size` samples of a batch, all data replicas together, and what crosses between stages."""
        return self.by_size.of((size, samples), lambda: self._build_runners(self.parts.of_size(size, samples)))

    def _weight(self, size: int, samples: int) -> float:
        """What the loss of a microbatch counts in the batch's."""
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
        if not self.trains:  # nothing is kept for backward, so nothing need be computed again or moved away
            layout = replace(layout, recompute="none", segment=1, offload="none")
        computing = Computing(self.world.device, self.memory, products_of(layout.precision), compile, self.scale)
        closed = without_gradient(graph) | sized.normal.given
        learned, runners = self._learned(), {}
        for number, local in sized.lowered.items():
            delayed = None
            if splits:
                local, delayed = delay_weight_gradients(local, learned[number], self._keeps_plainly())
            local = prepared(local, number, layout, parts.draw, self.gathered, self.host, self.memory)
            runners[number] = StageRunner(local, variables, grads, dtypes, parts.draw, computing, closed, delayed)
        return runners, self._crossings(sized, grads, dtypes)

    def _keeps_plainly(self) -> bool:
        """Whether what forward keeps for backward lies where it is until then."""
        layout = self.plan.layout
        managed = any(isinstance(a, Manage) for row in self.parts.program.actions for a in row)
        return layout.recompute == "none" and layout.offload == "none" and layout.zero < 3 and not managed

    def _crossings(self, sized: Sized, grads: set[str], dtypes: Mapping[str, torch.dtype]) -> Crossings:
        """What crosses between every two stages of the model, with the local shapes."""
        sharding, tensors = sized.sharding, sized.graph.tensors
        at = self.plan.layout.mesh_of(self.world.rank).coordinates(self.world.rank)

        def met(v: str) -> Crossing:
            forms = {axis: crossing(form) for axis, form in sharding.lies(v).items()}
            return Crossing(v, sharding.shape(v, tensors[v].shape, forms, at), dtypes[v], v in grads)

        return {(stage.index, q): [met(v) for v in values] for stage in self.parts.stages for q, values in stage.sends}
