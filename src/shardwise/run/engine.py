"""The engine that `shardwise.parallelize` returns: runs training steps, evaluation and checkpoints of one rank of a parallelised model.

In: a plan, a model, a batch, a loss. Out: losses, gradients, updated parameters, in the serial model's terms and under its names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture.capture import Loss
from shardwise.capture.modes import evaluation_modes, in_modes
from shardwise.capture.nesting import BatchSignature
from shardwise.errors import Infeasible, UsageError
from shardwise.model.work import model_flops
from shardwise.plan.ir.axis import DATA, sample_axes
from shardwise.plan.ir.timeline import Timeline
from shardwise.plan.plan import MemoryBreakdown, Plan
from shardwise.run.checkpoint import StateShard
from shardwise.run.checkpointing import CheckpointMixin
from shardwise.run.gradients.deferred_buffers import DeferredBufferUpdates
from shardwise.run.gradients.error_feedback import ErrorFeedbackState
from shardwise.run.gradients.parameter_servers import ParameterServers, ServerState
from shardwise.run.gradients.stale_updates import StaleUpdates
from shardwise.run.parts.microbatch_variants import explain_coupled_microbatch, warn_of_coupled_microbatches
from shardwise.run.rank_agreement import check_batch_agrees
from shardwise.run.rank_model.batch_plans import BatchPlans
from shardwise.run.rank_model.build import BuildRequest, build_rank_model
from shardwise.run.rank_model.capture_cache import CaptureCache, Microbatches, by_length, prepare_step_inputs
from shardwise.run.rank_model.model_source import CachedModelSource, ModelSource
from shardwise.run.rank_model.runnable_capture import RunnableCapture, StepInputs
from shardwise.run.recovery.fingerprints import Fingerprints, SuspectStep
from shardwise.run.residency.host_store import HostStore
from shardwise.run.sharded_state import full_tensors, gradient_shards, input_gradients
from shardwise.run.state.optimizer import Optimizer, OptimizerSpec
from shardwise.run.state.parameters import shard_groups_of, share_gradient_memory
from shardwise.run.state.precision import INITIAL_SCALE, LossScale, set_matmul_precision
from shardwise.run.step.dispatch import StepCheck, StepResult, mean_loss
from shardwise.run.step.executor import RunResult
from shardwise.run.step.executors import (
    ExecutorCache,
    agree_on_tensor_products,
    build_gradient_reducer,
    build_weight_gatherer,
    describe_tensor_collectives,
)
from shardwise.run.step.resumption import StepResumption
from shardwise.run.step.stage_resharding import pipeline_group_of
from shardwise.run.uncaptured.replicated import build_replicated
from shardwise.world.memory import HOST, PARTS, accounts_of
from shardwise.world.world import CollectiveWork, Group, World


@dataclass(frozen=True)
class DeviceOptions:
    """Device options of an engine. `memory_limit_bytes`: 0 for all memory of the device. `initial_loss_scale`: of float16.
    `scales_loss`: in any precision, as a proof of float16 on exact numbers does."""

    memory_limit_bytes: float = 0.0
    initial_loss_scale: float = INITIAL_SCALE
    scales_loss: bool = False


class Engine(CheckpointMixin):
    """Trains one rank's shard of a model under a plan. Every rank builds one and calls the same methods in the same order.

    `collectives_beside_products`: why products run beside plain collectives of tensor ranks, "" if fused with them, None if none are."""

    _judge: StepCheck | None = None
    _has_skipped = False  # whether a step left parameters alone

    def __init__(
        self,
        plan: Plan,
        model: nn.Module | Callable[[], nn.Module] | ModelSource,
        batch: Any,
        loss: Loss | None,
        world: World,
        optimizer: OptimizerSpec | str | Mapping[str, Any] = "adamw",
        *,
        seed: int | None = None,
        device: DeviceOptions = DeviceOptions(),
    ) -> None:
        """`model`: a module or factory that is not a `ModelSource` yet is initialised with `seed`.

        Raises:
            OutOfMemory: parameters, gradients and optimizer state alone exceed the memory of `device`; steps raise it too.
        """
        self.plan, self.world = plan, world
        set_matmul_precision(plan.layout.precision, world.device)
        self.memory, self.optimizer_spec = accounts_of(world.device, device.memory_limit_bytes), OptimizerSpec.of(optimizer)
        if not isinstance(model, ModelSource) and seed is not None:
            torch.manual_seed(seed)
        source = model if isinstance(model, ModelSource) else CachedModelSource.from_model(model)
        request = BuildRequest(plan, source, batch, loss, world, self.optimizer_spec, torch.initial_seed() if seed is None else seed)
        with self.memory.with_out_of_memory_error(world.rank):
            self.rank_model = build_replicated(request) if plan.uncaptured else build_rank_model(request)
        warn_of_coupled_microbatches(plan.layout, self.rank_model.couplings, world.rank)
        self.mesh = plan.layout.mesh_of(world.rank)
        sharing = self.mesh.group(world.rank, *(cut := sample_axes(self.mesh.stage_axes)))  # ranks with different samples
        self.data_index, self.data_size, self._sample_group = self.mesh.index_along(world.rank, cut), len(sharing), world.group(sharing)
        self._counters = {"step": torch.zeros((), dtype=torch.int64)}
        self._world_group = world.group(tuple(range(world.num_ranks)))
        replicas = DeferredBufferUpdates(self.rank_model, self.mesh, world)
        sums, beyond = shard_groups_of(world, self.rank_model.groups)
        self._connect_groups([*sums, *beyond], replicas.groups)
        share_gradient_memory(self.rank_model.groups, sums, plan.layout.staleness + 1, keeps_gradients=plan.layout.servers > 0)
        self._weight_gatherer = build_weight_gatherer(self.rank_model, plan, world, sums, self.memory)
        self._host_store = HostStore(world.device, self.memory, self.rank_model.variables.values())
        self._loss_divisor: Tensor | None = None  # this rank's summand of a divisor that is reduced along with the loss
        self.gradients = build_gradient_reducer(plan.layout, self.rank_model, sums, beyond, self.memory)
        self.resumption = StepResumption(world, self.rank_model, plan.layout, self.gradients)
        self._residuals = ErrorFeedbackState(self.gradients.compressed.values(), plan.layout, world.rank)
        self.loss_scale = LossScale(world.device, plan.layout.precision, device.initial_loss_scale, device.scales_loss)
        compiles, weights, host = plan.layout.compile == "on", self._weight_gatherer, self._host_store
        self._executors = ExecutorCache(self.rank_model, plan, world, self.memory, self.gradients, weights, host, compiles, self.loss_scale)
        self.executor = self._executors.executor_for(plan.microbatch_sizes)
        self._captures = CaptureCache(RunnableCapture(BatchSignature.of(batch), self._executors, replicas), source, loss)
        self._batch_plans = BatchPlans(plan, world, self.mesh, self._captures, self._sample_group)
        self._optimizer, self._stale = self._build_optimizer(sums)
        self._optimizer.defer_gather = self._weight_gatherer.deferred.add
        self._optimizer.load_parameters()
        self.owner_of, self.source = self._optimizer.owner_of, source
        self._fingerprints = Fingerprints(self.rank_model.groups, world)
        self._account_for_state()
        self._timed_step = world.pace.time_steps(is_regular=not compiles)
        self.timeline: Timeline | None = None
        self.phase_times_s: dict[str, float] = {}  # last step: "program", "gradients" (reduction after it), "optimizer"
        self.model_flops = model_flops(self.rank_model.graph) * plan.batch_size / self.rank_model.graph.batch_size

    def _connect_groups(self, reduction_groups: Sequence[Group | None], replica_groups: Sequence[Group]) -> None:
        """Connect every group of this rank, in one order on every rank: different orders would deadlock."""
        axes = [self.world.group(self.mesh.group(self.world.rank, axis)) for axis in self.rank_model.sharding.sizes]
        axes += self.rank_model.lowering.groups.values() if self.rank_model.lowering is not None else ()
        axes += [self.world.group(self.plan.layout.replica_of(self.world.rank))] if self.plan.layout.staleness else []
        axes += [self._world_group, pipeline_group_of(self.plan.layout, self.world), self._sample_group, *replica_groups]
        groups = {*axes, *(g for g in reduction_groups if g is not None)}
        for group in sorted(groups, key=lambda g: g.ranks):
            group.connect()
        self.collectives_beside_products = agree_on_tensor_products(self.plan.layout, self.world, self.rank_model)
        self.tensor_collectives_notice = describe_tensor_collectives(self.world.device, self.collectives_beside_products)

    def _build_optimizer(self, reduction_groups: Sequence[Group | None]) -> tuple[Optimizer, StaleUpdates | ParameterServers | None]:
        """Build the optimizer of this rank's parameters, and what delays updates (staleness) or makes them for all replicas (servers)."""
        groups, layout = self.rank_model.groups, self.plan.layout
        if layout.servers:
            served = ServerState.connect(self.optimizer_spec, groups, layout, self.world)
            replicas = self.world.group(self.mesh.group(self.world.rank, DATA))
            servers = ParameterServers(layout.staleness, self.gradients, served, groups, replicas)
            return served.optimizer, servers
        stale, zero = layout.staleness > 0, layout.zero > 0
        counting = self.world.group(layout.replica_of(self.world.rank)) if stale else self._world_group
        optimizer = Optimizer(
            self.optimizer_spec, groups, reduction_groups, counting, zero, layout.offloads_optimizer, stale, self.loss_scale
        )
        return optimizer, StaleUpdates(layout.staleness, self.gradients, optimizer) if stale else None

    def _account_for_state(self) -> None:
        """Account for the memory that persists from the first step to the last, and check that it fits."""
        parts, optimizer = self.rank_model, self._optimizer
        self.memory.assign("buffers", parts.buffers.values())
        self.memory.assign(HOST if optimizer.offload else "optimizer", optimizer.state_tensors())
        rooms, weights = (self._stale.receive_buffers, self._stale.weights) if self._stale is not None else ([], [])
        self.memory.assign("gradients", [*(g for group in parts.groups for g in group.gradient_buffers), *self._residuals.tensors, *rooms])
        self.memory.assign("parameters", [*parts.parameters.values(), *(group.data for group in parts.groups), *weights])
        self.memory.reset_peak()
        self.memory.check(self.world.rank)

    def peak_memory(self) -> MemoryBreakdown | None:
        """Return the peak memory of this rank's device since the engine was built; None where it is not measured."""
        return self.memory.peak() if self.memory.is_counting else None

    def peak_memory_over_ranks(self) -> dict[str, float]:
        """Return the peak bytes over all ranks' devices, by part and in `total`; empty where not measured. Every rank calls it."""
        if not self.memory.is_counting:
            return {}
        peak = self.memory.peak()
        peaks = self.world.all_reduce_max([int(getattr(peak, part)) for part in PARTS] + [int(peak.total)])
        return dict(zip((*PARTS, "total"), map(float, peaks), strict=True))

    @property
    def step_index(self) -> int:
        """Number of completed steps."""
        return int(self._counters["step"])

    @step_index.setter
    def step_index(self, value: int) -> None:
        self._counters["step"].fill_(value)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's shards of the parameters, by the model's own names.

        Raises:
            UsageError: with zero=3 parameters are gathered only while a layer uses them.
        """
        if self._weight_gatherer.buckets_by_layer:
            raise UsageError("with zero=3 full weights exist only while a layer uses them; use full_state_dict(), or zero=2")
        self._weight_gatherer.deferred.disable()
        return self.rank_model.parameters

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model; tied parameters count once."""
        return self.rank_model.graph.num_parameters

    def step(
        self, batch: Any, lr: float | None = None, record: bool = False, is_global_batch: bool | None = None, samples: int = 0
    ) -> StepResult:
        """Run one training step on the global batch (the same on every rank; also as `Microbatches`), or on this rank's rows of it.

        A batch may have fewer samples than the plan's, like the last one of an epoch. It may have other tensors or shapes: the model is
        captured once for each form of batch, and the most recent captures are cached (`MAX_CAPTURES`).

        Args:
            is_global_batch: whether `batch` is the global batch; by default if it has more samples than one replica's share of the plan's.
            samples: size of the global batch, where every rank passes its own rows. Known for rows from `shardwise.shard`; otherwise, if
                omitted, ranks all-gather their row counts, which may then be unequal and of any form.

        Raises:
            Infeasible: more samples than the plan's, or unequal shares of a batch whose samples interact in the model.
            StateDiverged, SuspectStep: corrupted state, or the check given to `watch` objects; on every rank, before any update.
        """
        with self._timed_step:
            return self._step(batch, lr, record, is_global_batch, samples)

    def _step(self, batch: Any, lr: float | None, record: bool, is_global_batch: bool | None, samples: int) -> StepResult:
        began = time.perf_counter()
        result = self.forward_backward(batch, record=record, is_global_batch=is_global_batch, samples=samples)
        summed = time.perf_counter()
        if self._stale is None:
            self._fingerprints.check()
            if self._judge is not None and (why := self._judge(result, self._fingerprints.norms)):
                raise SuspectStep(why)
        norm = self._update(lr)
        waited = self._stale.waited_s if self._stale else 0.0
        self.phase_times_s["optimizer"] = time.perf_counter() - summed - waited
        self.phase_times_s["gradients"] += waited
        assert result.pending_loss is not None
        total, work = result.pending_loss
        if self._stale is None:
            work.wait()
        return StepResult(norm, time.perf_counter() - began, total, work, self.loss_scale.factor if self.loss_scale.is_scaled else None)

    def forward_backward(
        self, batch: Any, record: bool = False, wants_input_gradients: bool = False, is_global_batch: bool | None = None, samples: int = 0
    ) -> RunResult:
        """Run forward and backward of all microbatches; reduce gradients into the flat groups (with staleness, asynchronously)."""
        self.whole_steps.check()
        try:
            return self._forward_backward(batch, record, wants_input_gradients, is_global_batch, samples)
        except BaseException as error:
            self.whole_steps.mark_half(error)
            raise

    def _forward_backward(
        self, batch: Any, record: bool, wants_input_gradients: bool, is_global_batch: bool | None, samples: int
    ) -> RunResult:
        parts = self._step_parts(batch, is_global_batch, samples, trains=True)
        self._loss_divisor = parts[0][1].divisor
        self._skip_untrained([capture for capture, _ in parts])
        if self._stale is not None:
            self._stale.start()
        self.gradients.start()
        step = self.step_index
        if record:
            self._world_group.barrier()  # spans start here, on every rank
        began = time.perf_counter()
        with self.memory.with_out_of_memory_error(self.world.rank):
            result = self._run_parts(parts, record=record, wants_input_gradients=wants_input_gradients)
            ended = time.perf_counter()
            self.gradients.finish()
            for capture, inputs in parts:
                capture.replicas.finish(inputs.executor.program.microbatches)
            if result.pending_loss is None:
                result.pending_loss = self._send_message(result, self.gradients.norms)
            if self._stale is None:
                self.gradients.wait()
                self._optimizer.unscale()
            else:
                total, work = result.pending_loss
                self._stale.begin_update(work, total[1] if total.dim() else None, self._loss_divisor)
        for capture, _ in parts:
            capture.executors.gathered.release_all()
        self.phase_times_s = {"program": ended - began, "gradients": time.perf_counter() - ended}
        if record:
            name = f"{self.plan.model} {self.plan.layout}, step {step}"
            self.timeline = Timeline(name, self.plan.layout.pipeline, tuple(result.spans))
        return result

    def _skip_untrained(self, captures: Sequence[RunnableCapture]) -> None:
        """Let the optimizer leave alone what no capture of this step trains, as torch's does with a parameter without a gradient."""
        if all(capture is self._captures.training_capture for capture in captures) and not self._has_skipped:
            return
        trained = frozenset[str]().union(*(capture.rank_model.trained_names for capture in captures))
        skipped = self.rank_model.trained_names - trained
        if skipped and self._stale is not None:
            raise Infeasible(
                f"a batch of this form does not train {min(skipped)}, and late updates move it all the same; use staleness=0 and "
                "servers=0, or batches from which every parameter learns"
            )
        self._has_skipped = self._has_skipped or bool(skipped)
        self._optimizer.skip_parameters(skipped)

    def _run_parts(
        self,
        parts: Sequence[tuple[RunnableCapture, StepInputs]],
        train: bool = True,
        record: bool = False,
        wants_input_gradients: bool = False,
    ) -> RunResult:
        """Run the programs of a step in order; return the last one's result, with the losses and spans of all."""
        began, step = time.perf_counter(), self.step_index
        result = RunResult()
        for number, (capture, inputs) in enumerate(parts):
            draw, start_s = capture.rank_model.draw, time.perf_counter() - began
            draw.step, draw.samples, ends = step, inputs.samples, number == len(parts) - 1
            capture.replicas.start()
            run, done, after = self.resumption.begin(inputs.executor, step, train and len(parts) == 1 and not wants_input_gradients)
            run.after_forwards = partial(self._end_forwards, capture, result.loss_summand) if train and ends else None
            try:
                latest = run.run(
                    inputs.inputs,
                    is_training=train,
                    record=record,
                    wants_input_gradients=wants_input_gradients,
                    is_last_program=ends,
                    run_after=after,
                    result=done,
                )
            except (IndexError, ValueError, RuntimeError) as error:
                if (explained := explain_coupled_microbatch(error, self.plan.layout, capture.rank_model.couplings)) is error:
                    raise
                raise explained from error
            if latest.loss_summand is None:
                self._add_loss(capture, result.loss_summand, latest)
            if record:
                spans = (span._replace(start_s=span.start_s + start_s, end_s=span.end_s + start_s) for span in latest.spans)
                latest.spans = [*result.spans, *spans]
            result = latest
        return result

    def _add_loss(self, capture: RunnableCapture, earlier: Tensor | None, result: RunResult) -> None:
        """Add up this rank's part of the loss, after `earlier` programs of the step."""
        summand = capture.loss_summand(result)
        result.loss_summand = summand if earlier is None else earlier + summand

    def _end_forwards(self, capture: RunnableCapture, earlier: Tensor | None, result: RunResult) -> None:
        """Send the step's message beside the backwards that follow, where it has nothing of these: a rank then waits for others once.

        In a pipeline ranks would start it and reductions of tied weights in different orders."""
        self._add_loss(capture, earlier, result)
        if self._stale is None and self._judge is None and self.plan.layout.pipeline == 1:
            self._weight_gatherer.deferred.wait()  # of weights that no forward has read
            result.pending_loss = self._send_message(result)

    def by_length(self, batch: Any, lengths: Sequence[int] | Tensor | str, multiple: int = 0) -> Microbatches:
        """Group the rows of a global batch into microbatches of similar length (layouts with split=lengths), for `step` and `evaluate`.

        Each microbatch is truncated to its longest row, rounded up to a `multiple` (default: an eighth of the plan's sequence length), and
        uses the fastest data x context split. `lengths`: length of each row, or the path of a mask from which they follow."""
        return by_length(batch, lengths, self.plan.splits, multiple)

    def update(self, lr: float | None = None) -> float | None:
        """Clip the reduced gradients and update the parameters. Returns the gradient norm if clipping is on.

        With staleness=K the gradients applied are those of K steps ago, and `lr` is stored for those of this step.
        """
        norm = self._update(lr)
        return norm.item() if isinstance(norm, Tensor) else norm

    def _update(self, lr: float | None) -> Tensor | float | None:
        with self.whole_steps.guard_update(), self.memory.with_out_of_memory_error(self.world.rank):
            norm: Tensor | float | None = self._optimizer.step(lr) if self._stale is None else self._stale.push(lr)
            self._counters["step"] += 1
        return norm

    def evaluate(self, batch: Any, is_global_batch: bool | None = None, samples: int = 0) -> float:
        """Return the loss on a batch in evaluation mode, which is captured at the first call. `is_global_batch`, `samples`: as for `step`.

        Raises:
            ModelError: the model cannot be captured in evaluation mode.
        """
        self.whole_steps.check()
        self.drain()
        parts = self._step_parts(batch, is_global_batch, samples, trains=False)
        self._loss_divisor = None
        module = (
            self.rank_model.single_stage.module if self.plan.uncaptured else nn.Module()
        )  # an uncaptured model is the user's module, with modes
        with in_modes(module, evaluation_modes(module)), torch.no_grad(), self.memory.with_out_of_memory_error(self.world.rank):
            result = self._run_parts(parts, train=False)
            for capture, inputs in parts:
                capture.replicas.finish(inputs.executor.program.microbatches)
            total, work = self._sum_over_ranks(result)
            work.wait()
            return float(total)

    def _step_parts(self, batch: Any, is_global_batch: bool | None, samples: int, trains: bool) -> list[tuple[RunnableCapture, StepInputs]]:
        """Return the captures that run a batch, with their inputs: several if microbatches have shapes of their own."""
        is_first = self.step_index == 0
        if not isinstance(batch, Microbatches):
            planned = self._batch_plans.plan_batch(batch, is_global_batch, samples, trains, is_first)
            if not isinstance(planned, Microbatches):
                return [planned.prepare_inputs(is_stale=trains and self._stale is not None)]
            batch = planned
        elif batch.num_samples > self.plan.batch_size:
            raise Infeasible(f"the batch has {batch.num_samples} samples; the plan is for {self.plan.batch_size}")
        elif is_first and self.world.num_ranks > 1:
            check_batch_agrees(batch.batches, self.world)
        parts = self._captures.step_parts(batch, trains)
        return list(zip((capture for capture, _, _ in parts), prepare_step_inputs(parts), strict=True))

    def loss_of(self, result: RunResult) -> float:
        """Return the loss of the global batch, reduced over ranks and microbatches."""
        total, work = result.pending_loss or self._sum_over_ranks(result)
        work.wait()
        return mean_loss(total)

    def _send_message(self, result: RunResult, norms: Sequence[Tensor] = ()) -> tuple[Tensor, CollectiveWork]:
        """Start to sum the loss over ranks and to exchange fingerprints, in one message where it can carry the loss."""
        if self._stale is not None:
            return self._sum_over_ranks(result)
        total = self._own_loss(result)
        if self._fingerprints.carries(total):
            return total, self._fingerprints.start(self.step_index, norms, total)
        self._fingerprints.start(self.step_index, norms)
        return self._sum_over_ranks(result)

    def _sum_over_ranks(self, result: RunResult) -> tuple[Tensor, CollectiveWork]:
        """Start the all-reduce of the loss over ranks; return its buffer and the pending work."""
        total = self._own_loss(result)
        return total, self._world_group.all_reduce(total, wait=False).without_timing()  # a loss need not be read

    def _own_loss(self, result: RunResult) -> Tensor:
        """Return this rank's summand of the loss [], or of it and of its divisor [2]."""
        total = result.loss_summand
        assert total is not None
        return total if self._loss_divisor is None else torch.stack((total, self._loss_divisor))

    def _local_inputs(self, batch: Any) -> list[dict[str, Tensor]]:
        """Return this rank's input tensors of every microbatch, by graph value."""
        return self._step_parts(batch, None, 0, trains=True)[0][1].inputs

    def sizes_of(self, samples: int) -> tuple[int, ...]:
        """Return the samples of each microbatch (over all data replicas) of a batch of `samples`.

        Raises:
            Infeasible: they do not divide over data, or are too few.
        """
        return self._batch_plans.sizes_of(samples)

    @property
    def build_executors(self) -> Callable[..., ExecutorCache]:
        """The builder of executors of other captures, over the training weights."""
        return self._captures.build_executors

    def rows_of(self, size: int) -> tuple[int, int]:
        """Return (first row, number of rows) of a microbatch of `size` samples that this rank computes."""
        return self._batch_plans.replica.row_range(size)

    def watch(self, judge: StepCheck) -> Fingerprints:
        """Check in every step that only updates change weights and optimizer state, and call `judge` before each update (no staleness).

        Returns the fingerprints, whose `record_expected` is to be called after each update."""
        if self._stale is None:
            self._judge, self.gradients.records_norms = judge, True
            self._fingerprints.watch([*self._optimizer.state_changed_by_update(), *self.state().constant], self.step_index)
        return self._fingerprints

    def gradient(self, name: str) -> Tensor | None:
        """Return this rank's shard of a parameter's reduced gradient after `forward_backward`; None on other stages. With ZeRO only this
        rank's flat shard of it is reduced, until `full_gradients` has been called; from zero=2 on only that shard is returned."""
        self._wait_for_stale_updates()
        return next((x for group in self.rank_model.groups if (x := group.gradient(name)) is not None), None)

    def _wait_for_stale_updates(self) -> None:
        if self._stale is not None:
            self._stale.synchronize_gradients()

    def full_gradients(self) -> dict[str, Tensor] | None:
        """Return the full reduced gradients by parameter name on rank 0, after `forward_backward`; None elsewhere."""
        return full_tensors({v.name: v for v in self.rank_model.graph.parameters}, self.local_gradients(), self._world_group)

    def local_gradients(self) -> list[StateShard]:
        """Return this rank's shards of the reduced gradients, after `forward_backward`. Every rank calls it."""
        self._wait_for_stale_updates()
        self.gradients.gather()
        return gradient_shards(self.rank_model)

    def full_input_gradients(self, result: RunResult) -> dict[str, Tensor] | None:
        """Return the gradients of the global batch's floating-point inputs by path on rank 0; None elsewhere."""
        return input_gradients(self.rank_model, self.plan, result, self.mesh.coordinates(self.world.rank), self._world_group)
