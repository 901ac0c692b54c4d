"""`RankModel`: one rank's model, built from a plan by `run/build`, or by `run/uncaptured` for a model that could not be captured."""

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
    """Everything that one rank trains with: graph, sharding, lowered stages, parameters, buffers."""

    graph: Graph
    sharding: Sharding
    stages: tuple[Stage, ...]  # of the whole model
    program: Program
    lowered: dict[int, LocalStage]  # this rank's stages, by index
    parameters: dict[str, nn.Parameter]  # by name
    specs: dict[str, LocalParameter]
    groups: list[FlatGroup]
    buffers: dict[str, Tensor]  # by name
    blocks: dict[str, tuple[Variable, Spans]]  # buffer name -> (variable, ranges of its local block)
    variables: dict[str, Tensor]  # arguments of its stages, by graph value
    draw: Draw = field(default_factory=Draw)
    structure: Any = None  # the model's output, where it runs without a loss
    saved: frozenset[str] = frozenset()  # names in the model's own state dict, which may omit buffers
    sized: Callable[[int, int], Sized] | None = None  # (microbatch size, batch size); None: any size
    folds: tuple[Fold | None, ...] = ()  # how samples lie in each random tensor, draw by draw
    shardings: tuple[Sharding, ...] = ()  # by pipeline rank, if stages have meshes of their own
    lowering: Lowering | None = None  # of its stages; None for an uncaptured model
    coupled: tuple[Coupling, ...] = ()  # where microbatches compute something else than the whole batch
    counted: frozenset[str] = frozenset()  # inputs from which the loss divisor is counted
    arrival: Arrival = field(default_factory=Arrival)
    pieces: Mapping[str, Shard] = field(default_factory=dict)  # ZeRO in a plain loop: data sharding by name

    @property
    def only(self) -> LocalStage:
        """The only stage of a plan without a pipeline."""
        (local,) = self.lowered.values()
        return local

    def stored(self, v: Variable) -> Mapping[str, Placement]:
        """Return the stored placement of a parameter or buffer on every axis."""
        forms = self.sharding.forms[v.value]
        return {**forms, DATA: self.pieces[v.name]} if v.name in self.pieces else forms

    def of_size(self, size: int, samples: int) -> Sized:
        """Return this rank's stages for microbatches of `size` samples (over all data replicas) of a batch of `samples`.

        Raises:
            Infeasible: with this size the model computes something else.
        """
        if self.sized is not None:
            return self.sized(size, samples)
        return Sized(Normalised(self.graph), self.lowered, {}, (self.sharding,), self.sharding)

    def holders(self, value: str) -> list[int]:
        """Return the pipeline ranks with a stage that reads a variable, in order; the first rank if none does."""
        return holders_of(self.stages, self.program, value)


def program_of(plan: Plan, stages: Sequence[Stage], world: World) -> Program:
    """Return the program of the layout's schedule for these stages; a custom schedule is proven here.

    Raises:
        Infeasible: the plan has another number of stages. ProgramError: a custom schedule for other links, or proven wrong.
    """
    layout = plan.layout
    if len(stages) != layout.num_stages:
        raise Infeasible(f"the plan has {len(stages)} stages, and its layout {layout} has {layout.num_stages}; plan again")
    # On NCCL a send may block until its receive is posted; an order that tolerates this costs a thousandth of the step.
    rendezvous = world.device.type == "cuda"
    check_custom(layout, links(stages), rendezvous)
    return schedule_of(layout, links(stages), rendezvous)


def holders_of(stages: Sequence[Stage], program: Program, value: str) -> list[int]:
    """Return the pipeline ranks with a stage that reads a variable, in order; the first rank if none does."""
    read = {stage.index for stage in stages if value in stage.variables}
    # The first rank stores what no operator reads, so that checkpoints are complete.
    return [rank for rank, stage_indices in enumerate(program.stages_of) if not read.isdisjoint(stage_indices)] or [0]
