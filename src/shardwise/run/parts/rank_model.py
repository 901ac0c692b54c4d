"""`RankModel`: one rank's model, built from a plan by `run/rank_model/build`, or by `run/uncaptured` for a model that could not be
captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from shardwise.errors import Infeasible
from shardwise.lower.kernels.randomness import DrawState
from shardwise.lower.local import LocalStage, Lowering
from shardwise.lower.lowering import PendingConstants
from shardwise.model.batch.additive import SampleCoupling
from shardwise.model.batch.random_draws import SampleFold
from shardwise.model.batch.summable_loss import SummableLossGraph
from shardwise.model.gradients import parameters_with_gradient
from shardwise.model.graph import Graph, Variable
from shardwise.model.sharding.sharding import Sharding
from shardwise.model.stages.stages import Stage, stage_links
from shardwise.plan.ir.axis import DATA
from shardwise.plan.ir.placement import Placement, Shard
from shardwise.plan.ir.program import Manage, ManageOp, Program
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.parts.microbatch_variants import MicrobatchVariant
from shardwise.run.state.block_ranges import BlockRanges
from shardwise.run.state.parameters import FlatGroup, LocalParameter
from shardwise.schedules import check_custom
from shardwise.schedules import program_of as schedule_of
from shardwise.schedules.lower import overlap_zero
from shardwise.world.world import World


@dataclass
class RankModel:
    """Everything that one rank trains with: graph, sharding, lowered stages, parameters, buffers."""

    graph: Graph
    sharding: Sharding
    stages: tuple[Stage, ...]  # of the whole model
    program: Program
    lowered: dict[int, LocalStage] = field(default_factory=dict)  # this rank's stages, by index
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)  # by name
    local_parameters: dict[str, LocalParameter] = field(default_factory=dict)
    groups: list[FlatGroup] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)  # by name
    buffer_blocks: dict[str, tuple[Variable, BlockRanges]] = field(default_factory=dict)  # name -> (variable, local block)
    variables: dict[str, Tensor] = field(default_factory=dict)  # arguments of its stages, by graph value
    draw: DrawState = field(default_factory=DrawState)
    structure: Any = None  # the model's output, where it runs without a loss
    state_dict_names: frozenset[str] = frozenset()  # names in the model's own state dict, which may omit buffers
    variant_for: Callable[[int, int], MicrobatchVariant] | None = None  # (microbatch size, batch size); None: any size
    sample_folds: tuple[SampleFold | None, ...] = ()  # how samples lie in each random tensor, draw by draw
    shardings: tuple[Sharding, ...] = ()  # by pipeline rank, if stages have meshes of their own
    lowering: Lowering | None = None  # of its stages; None for an uncaptured model
    couplings: tuple[SampleCoupling, ...] = ()  # where microbatches compute something else than the whole batch
    divisor_inputs: frozenset[str] = frozenset()  # inputs from which the loss divisor is counted
    pending_constants: PendingConstants = field(default_factory=PendingConstants)
    zero_shards: Mapping[str, Shard] = field(default_factory=dict)  # ZeRO in a plain loop: data sharding by name

    @property
    def single_stage(self) -> LocalStage:
        """The only stage of a plan without a pipeline."""
        (local,) = self.lowered.values()
        return local

    @cached_property
    def trained_names(self) -> frozenset[str]:
        """Names of the parameters that have a gradient, on any rank."""
        trained = parameters_with_gradient(self.graph)
        return frozenset(v.name for v in self.graph.parameters if v.value in trained)

    def stored_placements(self, v: Variable) -> Mapping[str, Placement]:
        """Return the stored placement of a parameter or buffer on every axis."""
        forms = self.sharding.placements[v.value]
        return {**forms, DATA: self.zero_shards[v.name]} if v.name in self.zero_shards else forms

    def microbatch_variant(self, size: int, samples: int) -> MicrobatchVariant:
        """Return this rank's stages for microbatches of `size` samples (over all data replicas) of a batch of `samples`.

        Raises:
            Infeasible: with this size the model computes something else.
        """
        if self.variant_for is not None:
            return self.variant_for(size, samples)
        return MicrobatchVariant(SummableLossGraph(self.graph), self.lowered, {}, (self.sharding,), self.sharding)

    def pipeline_ranks_reading(self, value: str) -> list[int]:
        """Return the pipeline ranks with a stage that reads a variable, in order; the first rank if none does."""
        return pipeline_ranks_reading(self.stages, self.program, value)


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
    check_custom(layout, stage_links(stages), rendezvous)
    program = schedule_of(layout, stage_links(stages), rendezvous)
    return overlap_zero(program, layout.zero) if defers_gathers(plan, world) else program


def reduces_by_program(layout: Layout, program: Program) -> bool:
    """Return whether a custom schedule says when gradients are reduced; otherwise they are as soon as they are complete."""
    actions = (a for row in program.actions for a in row if isinstance(a, Manage))
    return bool(layout.actions) and any(a.op is ManageOp.REDUCE_GRAD for a in actions)


def defers_gathers(plan: Plan, world: World) -> bool:
    """Return whether gathers of updated weights (ZeRO-1 and 2) overlap the next forward: not through shared memory, nor where another than
    the engine's own update writes weights, or a custom schedule says when."""
    layout = plan.layout
    is_shared = world.device.type == "cpu" and len(world.ranks_by_host(tuple(range(world.num_ranks)))) == 1
    own = not (layout.staleness or layout.servers or layout.offloads_optimizer or layout.actions or plan.uncaptured)
    return layout.zero in (1, 2) and layout.weight_ranks > 1 and own and not is_shared


def pipeline_ranks_reading(stages: Sequence[Stage], program: Program, value: str) -> list[int]:
    """Return the pipeline ranks with a stage that reads a variable, in order; the first rank if none does."""
    read = {stage.index for stage in stages if value in stage.variables}
    # The first rank stores what no operator reads, so that checkpoints are complete.
    return [rank for rank, stage_indices in enumerate(program.stages_of) if not read.isdisjoint(stage_indices)] or [0]


def with_tensors(rank_model: RankModel, parameters: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> RankModel:
    """Return a capture's rank model over other tensors of the same names."""
    tensors = {**buffers, **parameters}
    names = {v.value: v.name for v in (*rank_model.graph.parameters, *rank_model.graph.buffers)}
    variables = {value: tensors[names[value]] if value in names else x for value, x in rank_model.variables.items()}
    return replace(rank_model, parameters=dict(parameters), buffers=dict(buffers), variables=variables)
