"""Build and cache the executors of one capture of the model: one `Executor` for each combination of microbatch sizes.

In: a rank's model, captured for training or evaluation. Out: executors, built on first use, on every rank at once. Parameters, gradients
and their buffers are shared between captures.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from shardwise.errors import UsageError
from shardwise.lower.column_linears import fuse_column_linears, keeps_pieces
from shardwise.lower.direct_calls import call_operators_directly
from shardwise.lower.split_backward import delay_weight_gradients
from shardwise.model.gradients import undifferentiable_inputs, values_needing_gradient
from shardwise.model.graph import Graph
from shardwise.model.stages.stages import Stage
from shardwise.model.work import operator_work, stage_work
from shardwise.plan.compatibility import EACH
from shardwise.plan.ir.compression import Compression
from shardwise.plan.ir.grid import GRID_AXES, TENSOR
from shardwise.plan.ir.lending import concurrent_ranks, threads_per_rank
from shardwise.plan.ir.placement import across_stages
from shardwise.plan.ir.program import Compute, ComputeOp, Manage, ManageOp, Program
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.gradients.gradient_reducer import AT_END, BY_PROGRAM, GradientReducer
from shardwise.run.parts.lru_cache import MAX_MICROBATCH_SIZES, LRUCache
from shardwise.run.parts.microbatch_variants import MicrobatchVariant
from shardwise.run.parts.rank_model import RankModel, defers_gathers, program_of, reduces_by_program
from shardwise.run.residency.host_store import HostStore
from shardwise.run.residency.prepare_stage import prepare_stage
from shardwise.run.residency.weight_gatherer import WeightGatherer
from shardwise.run.state.precision import LossScale, autocast_dtype_of
from shardwise.run.step.executor import Executor, MicrobatchRunners, RankResources
from shardwise.run.step.stage_resharding import StageResharding, pipeline_group_of
from shardwise.run.step.stage_runner import StageRunner, StageRunnerOptions
from shardwise.run.step.transfers import Crossing, Crossings, rank_pairs_of
from shardwise.world.fused_products import agree_on_fused_products
from shardwise.world.memory import Accounts
from shardwise.world.world import Group, World


@dataclass
class ExecutorCache:
    """Executors of one capture. `gradients`: reducer, None without backward; `gathered`: ZeRO-3 weight gatherer."""

    rank_model: RankModel
    plan: Plan
    world: World
    memory: Accounts
    gradients: GradientReducer | None
    gathered: WeightGatherer
    host: HostStore
    compile: bool
    loss_scale: LossScale
    runs_backward: bool = True
    executor_cache: LRUCache[Executor] = field(default_factory=lambda: LRUCache(MAX_MICROBATCH_SIZES))
    runner_cache: LRUCache[tuple[dict[int, StageRunner], Crossings]] = field(default_factory=lambda: LRUCache(MAX_MICROBATCH_SIZES))

    def executor_for(self, sizes: tuple[int, ...], samples: int = 0) -> Executor:
        """Return the executor of microbatches of these sizes (over all data replicas) of a batch of `samples`, by default their sum.

        Size 0 stands for a microbatch of which this rank has no rows: it runs one placeholder sample per data rank, with weight 0.
        """
        samples = samples or sum(sizes)
        return self.executor_cache.get_or_build((sizes, samples), lambda: self._build_executor(sizes, samples))

    def for_capture(self, rank_model: RankModel, gathered: WeightGatherer, runs_backward: bool) -> ExecutorCache:
        """Return the executors of another capture, over the same parameters and gradients."""
        return replace(
            self,
            rank_model=rank_model,
            gathered=gathered,
            runs_backward=runs_backward,
            executor_cache=LRUCache(MAX_MICROBATCH_SIZES),
            runner_cache=LRUCache(MAX_MICROBATCH_SIZES),
        )

    def _build_executor(self, sizes: tuple[int, ...], samples: int) -> Executor:
        parts, layout, world = self.rank_model, self.plan.layout, self.world
        pipeline = pipeline_group_of(layout, world)
        program = parts.program
        if len(sizes) != layout.microbatches:
            shorter_plan = replace(self.plan, layout=layout.with_microbatches(len(sizes)), batch_size=len(sizes) * layout.replicas)
            program = program_of(shorter_plan, parts.stages, world)
        by_size = {
            size: MicrobatchRunners(*self.runners_of(size or layout.data, samples), self._loss_weight(size, samples))
            for size in dict.fromkeys(sizes)
        }
        by_microbatch = {m: by_size[size] for m, size in zip(program.microbatches, sizes, strict=True)}
        names = {number: frozenset(name for name, _ in by_value.values()) for number, by_value in self._trainable_by_stage().items()}
        resharding = None
        if layout.inner:
            variants = {
                m: parts.microbatch_variant(size or layout.data, samples) for m, size in zip(program.microbatches, sizes, strict=True)
            }
            resharding = StageResharding(layout, variants, world, world.world_group)
            crossings = by_microbatch[program.microbatches[0]].crossings
            for group in sorted(resharding.gather_groups(crossings), key=lambda g: g.ranks):
                group.connect()  # in the same order on every rank
            world.world_group.connect_pairs(resharding.rank_pairs(crossings))
        if not layout.begins:
            pipeline.connect_pairs(rank_pairs_of(program))
        threads_by_step = lent_threads(layout, program, parts.graph, parts.stages, sizes, pipeline, world) if self.runs_backward else {}
        resources = RankResources(self.gradients, names, self.gathered, self.host)
        return Executor(program, by_microbatch, pipeline, world.device, parts.draw, resources, resharding, threads_by_step)

    def _trainable_by_stage(self) -> dict[int, dict[str, tuple[str, nn.Parameter]]]:
        """Return the trainable parameters that each of this rank's stages reads: (name, parameter) by graph value."""
        parts = self.rank_model
        trainable = {v.value: (v.name, parts.parameters[v.name]) for v in parts.graph.parameters if v.name in parts.parameters}
        trainable = {value: (name, p) for value, (name, p) in trainable.items() if p.requires_grad}
        # The single stage of an uncaptured model is the user's module, with all parameters inside.
        return {
            number: trainable if self.plan.uncaptured else {value: trainable[value] for value in local.variables if value in trainable}
            for number, local in parts.lowered.items()
        }

    def runners_of(self, size: int, samples: int) -> tuple[dict[int, StageRunner], Crossings]:
        """Return this rank's stages for microbatches of `size` samples (over all data replicas), and the tensors sent between stages."""
        return self.runner_cache.get_or_build(
            (size, samples), lambda: self._build_runners(self.rank_model.microbatch_variant(size, samples))
        )

    def _loss_weight(self, size: int, samples: int) -> float:
        """Return the weight of a microbatch's loss in the batch's."""
        return size / samples if not size or not self.rank_model.microbatch_variant(size, samples).loss_graph.is_summable else 1.0

    def _build_runners(self, sized: MicrobatchVariant) -> tuple[dict[int, StageRunner], Crossings]:
        parts, graph, compile = self.rank_model, sized.graph, self.compile
        layout = self.plan.layout if compile else replace(self.plan.layout, compile="off")
        variables = {**parts.variables, **{v: x for v, x in sized.constants.items() if v in parts.variables}}
        grads = values_needing_gradient(graph) - {v.value for v in graph.inputs}
        sends = [value for stage in parts.stages for _, values in stage.sends for value in values]
        lowering = replace(parts.lowering, graph=graph, sharding=sized.sharding) if parts.lowering is not None and sends else None
        dtypes = {value: lowering.dtype(value) for value in sends} if lowering is not None else {}
        splits = self.runs_backward and any(isinstance(a, Compute) and a.op is ComputeOp.W for row in parts.program.actions for a in row)
        if splits and compile:
            name = parts.program.name
            raise UsageError(f"compile=on with {name}, which splits backward, is not supported; use compile=off or schedule=1f1b")
        if not self.runs_backward:  # nothing is saved for backward, so nothing is recomputed or offloaded
            layout = replace(layout, recompute="none", segment=1, offload="none")
        computing = StageRunnerOptions(self.world.device, self.memory, autocast_dtype_of(layout.precision), self.loss_scale)
        non_differentiable = undifferentiable_inputs(graph) | sized.loss_graph.microbatch_constants
        trainable, runners = self._trainable_by_stage(), {}
        for number, local in sized.lowered.items():
            delayed = None
            if splits:
                local, delayed = delay_weight_gradients(local, trainable[number], self._saves_in_place())
            elif keeps_pieces(self.world.device):
                local = fuse_column_linears(local)
            awaits = self.runs_backward and not (splits or compile)
            local = prepare_stage(local, number, layout, parts.draw, self.gathered, self.host, self.memory, awaits)
            runners[number] = StageRunner(local, variables, grads, dtypes, parts.draw, computing, non_differentiable, delayed)
            if not compile:
                runners[number].module = call_operators_directly(local.module)
        return runners, self._crossings(sized, grads, dtypes)

    def _saves_in_place(self) -> bool:
        """Return whether saved tensors stay in place until backward: no recompute, offload or gathered weights."""
        layout = self.plan.layout
        actions = (a for row in self.rank_model.program.actions for a in row if isinstance(a, Manage))
        managed = any(a.op not in (ManageOp.UNSHARD, ManageOp.REDUCE_GRAD) for a in actions)  # these alone move nothing that is saved
        return layout.recompute == "none" and layout.offload == "none" and layout.zero < 3 and not managed

    def _crossings(self, sized: MicrobatchVariant, grads: set[str], dtypes: Mapping[str, torch.dtype]) -> Crossings:
        """Return the tensors sent between every two stages of the model, with their local shapes."""
        sharding, tensors = sized.sharding, sized.graph.tensors
        coordinates = self.plan.layout.mesh_of(self.world.rank).coordinates(self.world.rank)

        def crossing_of(v: str) -> Crossing:
            placements = {axis: across_stages(placement) for axis, placement in sharding.read_placements(v).items()}
            return Crossing(v, sharding.local_shape(v, tensors[v].shape, placements, coordinates), dtypes[v], v in grads)

        return {(stage.index, q): [crossing_of(v) for v in values] for stage in self.rank_model.stages for q, values in stage.sends}


def agree_on_tensor_products(layout: Layout, world: World, rank_model: RankModel) -> str | None:
    """Return why products run beside plain collectives of tensor ranks ("": fused with them, over symmetric memory), equal on all ranks.

    None: no product of the layout reads what tensor ranks gathered. Groups are connected. Ranks agree in every case, whatever each one's
    device is.
    """
    if layout.sequence_parallel == "off" or rank_model.lowering is None:
        return None
    named = rank_model.lowering.groups.items()
    return agree_on_fused_products(world, [group for axis, group in sorted(named) if axis in (TENSOR, *GRID_AXES) and group.size > 1])


def describe_tensor_collectives(device: torch.device, reason: str | None) -> str:
    """Return how products and tensor collectives run, by what ranks agreed on; "" on processors, and where there are none."""
    if device.type != "cuda" or reason is None:
        return ""
    return "tensor collectives: " + (f"beside products ({reason})" if reason else "fused with products")


def build_gradient_reducer(
    layout: Layout, rank_model: RankModel, sums: Sequence[Group | None], beyond: Sequence[Group | None], memory: Accounts
) -> GradientReducer:
    """Return what reduces this rank's gradients. `sums`: the group of each flat group; `beyond`: of ranks with the same shards."""
    if layout.branch > 1:
        scatters = AT_END
    elif reduces_by_program(layout, rank_model.program):
        scatters = BY_PROGRAM
    else:
        scatters = layout.scatter if layout.scatters_last else EACH
    compression = Compression.parse(layout.compress)
    return GradientReducer(rank_model.groups, rank_model.parameters, sums, layout.zero > 0, scatters, compression, memory, beyond)


def build_weight_gatherer(
    rank_model: RankModel, plan: Plan, world: World, reduction_groups: Sequence[Group | None], memory: Accounts
) -> WeightGatherer:
    """Return what gathers this rank's sharded weights, with gathers deferred to the next forward where they can be."""
    gatherer = WeightGatherer(rank_model.groups, reduction_groups, memory)
    if defers_gathers(plan, world):
        gatherer.deferred.enable(rank_model.groups, rank_model.lowered, {v.value: v.name for v in rank_model.graph.parameters})
    return gatherer


__all__ = ["build_weight_gatherer", "lent_threads"]


def lent_threads(
    layout: Layout, program: Program, graph: Graph, stages: Sequence[Stage], sizes: Sequence[int], pipeline: Group, world: World
) -> Mapping[int, int]:
    """Return [action index of this rank] -> threads, for its computes that get more threads than the rank has.

    Args:
        sizes: samples of every microbatch. pipeline: this rank's pipeline group.
    """
    if layout.lend != "on" or world.device.type != "cpu" or not world.may_add_threads:
        return {}
    near = next(box for box in world.ranks_by_host(pipeline.ranks) if world.rank in box)  # this pipeline's ranks on this host
    host_ranks = next(box for box in world.ranks_by_host(tuple(range(world.num_ranks))) if world.rank in box)
    positions = {pipeline.ranks.index(rank) for rank in near}
    num_cores = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) * len(near) // len(host_ranks)
    rank_threads = torch.get_num_threads()
    shares = {m: float(size) for m, size in zip(program.microbatches, sizes, strict=True)}
    idle_ranks = concurrent_ranks(program, stage_work(operator_work(graph), [stage.operators for stage in stages]), shares)[pipeline.index]
    by_step = {step: threads_per_rank(1 + len(idle & positions), rank_threads, len(near), num_cores) for step, idle in idle_ranks.items()}
    return {step: threads for step, threads in by_step.items() if threads > rank_threads}
