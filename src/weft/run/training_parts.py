"""What one rank trains with, made from a plan by `run/build`, or by `run/uncaptured` of a model that could not be captured: `Parts`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from weft.errors import Infeasible
from weft.lower.arrival import Arrival
from weft.lower.kernels.randomness import Draw
from weft.lower.local import LocalStage, Lowering
from weft.model.batch.additive import Coupling
from weft.model.batch.drawn import Fold
from weft.model.batch.normalise import Normalised
from weft.model.graph import Graph, Variable
from weft.model.sharding.sharding import Sharding
from weft.model.stages.stages import Stage, links
from weft.plan.axis import DATA
from weft.plan.placement import Placement, Shard
from weft.plan.plan import Plan
from weft.plan.program import Program
from weft.run.resized import Sized
from weft.run.state.parameters import FlatGroup, LocalParameter
from weft.run.state.spans import Spans
from weft.schedules import check_custom
from weft.schedules import program_of as schedule_of
from weft.world.world import World


@dataclass
class Parts:
    """All that one rank trains with."""

    graph: Graph
    sharding: Sharding
    stages: tuple[Stage, ...]  # of the whole model
    program: Program
    lowered: dict[int, LocalStage]  # this rank's stages, by number
    parameters: dict[str, nn.Parameter]  # by name
    specs: dict[str, LocalParameter]
    groups: list[FlatGroup]
    buffers: dict[str, Tensor]  # by name
    blocks: dict[str, tuple[Variable, Spans]]  # buffer name -> (variable, where its block lies)
    variables: dict[str, Tensor]  # what its stages are called with, by graph value
    draw: Draw = field(default_factory=Draw)
    structure: Any = None  # the model's output, where it runs without a loss
    saved: frozenset[str] = frozenset()  # names in the model's own state dict: buffers may be left out of it
    sized: Callable[[int, int], Sized] | None = None  # by samples of a microbatch and of the batch; None where the stages take any number
    folds: tuple[Fold | None, ...] = ()  # where samples lie in what is drawn, draw by draw
    shardings: tuple[Sharding, ...] = ()  # of the graph as each stage arranges its ranks, where they may differ
    lowering: Lowering | None = None  # how its stages were lowered; None where the model runs whole
    coupled: tuple[Coupling, ...] = ()  # where microbatches differ from the whole batch
    counted: frozenset[str] = frozenset()  # inputs from which what the loss divides by is counted
    arrival: Arrival = field(default_factory=Arrival)
    pieces: Mapping[str, Shard] = field(default_factory=dict)  # in a plain loop with ZeRO: of parameters, by name, which dim data ranks cut

    @property
    def only(self) -> LocalStage:
        """The one stage, of a plan without a pipeline."""
        (local,) = self.lowered.values()
        return local

    def stored(self, v: Variable) -> Mapping[str, Placement]:
        """How a parameter or buffer lies along every axis as it is stored."""
        forms = self.sharding.forms[v.value]
        return {**forms, DATA: self.pieces[v.name]} if v.name in self.pieces else forms

    def of_size(self, size: int, samples: int) -> Sized:
        """This rank's stages for microbatches of `size` samples of a batch of `samples`, all data replicas together.

        Raises:
            Infeasible: with so many the model computes something else.
        """
        if self.sized is not None:
            return self.sized(size, samples)
        return Sized(Normalised(self.graph), self.lowered, {}, (self.sharding,), self.sharding)

    def holders(self, value: str) -> list[int]:
        """Pipeline ranks that have a stage which reads a variable, in order; the first rank where no stage does."""
        return holders_of(self.stages, self.program, value)


def program_of(plan: Plan, stages: Sequence[Stage], world: World) -> Program:
    """The program that the layout's schedule means for these stages; one's own is proven here.

    Raises:
        Infeasible: the plan has another number of stages. ProgramError: a schedule of the user's own is for other links, or is refuted.
    """
    layout = plan.layout
    if len(stages) != layout.num_stages:
        raise Infeasible(f"the plan begins {len(stages)} stages, and its layout {layout} has {layout.num_stages}; plan again")
    # On NCCL a send may block until its receive is reached; the order that allows for it costs a thousandth of the step.
    rendezvous = world.device.type == "cuda"
    check_custom(layout, links(stages), rendezvous)
    return schedule_of(layout, links(stages), rendezvous)


def holders_of(stages: Sequence[Stage], program: Program, value: str) -> list[int]:
    """Pipeline ranks that have a stage which reads a variable, in order; the first rank where no stage does."""
    read = {stage.index for stage in stages if value in stage.variables}
    # What no operator reads is kept by the first rank, so that checkpoints are whole.
    return [rank for rank, those in enumerate(program.stages_of) if not read.isdisjoint(those)] or [0]
