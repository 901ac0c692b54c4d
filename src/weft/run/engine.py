"""The engine that `weft.parallelize` returns: runs training steps, evaluation and checkpoints of one rank of a parallelised model.

In: a plan, a model, a batch, a loss. Out: losses, gradients, updated parameters, in the serial model's terms and under its names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.capture.capture import Loss
from weft.capture.modes import evaluation_modes, in_modes
from weft.capture.nesting import BatchForm, batch_size_of, count_samples, tensors_of
from weft.errors import Infeasible, UsageError
from weft.model.work import model_flops
from weft.plan.axis import DATA, PIPELINE, sample_axes
from weft.plan.compression import Compression
from weft.plan.microbatches import check_equal, num_microbatches, replica_sizes, sizes_of_part
from weft.plan.plan import Memory, Plan
from weft.plan.program import Manage, ManageOp
from weft.plan.timeline import Timeline
from weft.run.build import Source, Traced, build
from weft.run.captured import Capture, StepInputs
from weft.run.forms import Forms, Microbatches, by_length, inputs_of_parts, length_of
from weft.run.published import Address, send_pieces
from weft.run.rank_agreement import check_batch_agrees
from weft.run.reduce.buffers import Replicas
from weft.run.reduce.error_feedback import Residuals
from weft.run.reduce.overlapped import Gradients
from weft.run.reduce.servers import Served, Servers
from weft.run.reduce.stale import Stale
from weft.run.residency.gathered import Gathered
from weft.run.residency.host import HostStore
from weft.run.rows import Replica, Rows
from weft.run.saves import Saves
from weft.run.sharded_state import full_state, full_tensors, gradient_pieces, input_gradients, pieces_of, state_of
from weft.run.state import checkpoint
from weft.run.state.checkpoint import Piece
from weft.run.state.fingerprints import Doubted, Fingerprints
from weft.run.state.optimizer import Optimizer, OptimizerSpec
from weft.run.state.parameters import share
from weft.run.state.precision import FIRST, LossScale, set_products
from weft.run.state.snapshots import State
from weft.run.step.executor import Result
from weft.run.step.executors import Executors
from weft.run.step.finishing import Finishing
from weft.run.step.resharded import line_of
from weft.run.step.result import Judge, StepResult, mean_of
from weft.run.uncaptured.replicated import build_replicated
from weft.schedules import schedule_of
from weft.world.memory import HOST, PARTS, accounts_of
from weft.world.world import Group, Work, World


@dataclass(frozen=True)
class OnDevice:
    """Device options of an engine. `memory_limit_bytes`: 0 for all memory of the device. `initial_loss_scale`: of float16."""

    memory: float = 0.0
    scale: float = FIRST


class Engine(Saves):
    """Trains one rank's shard of a model under a plan. Every rank builds one and calls the same methods in the same order."""

    _judge: Judge | None = None

    def __init__(
        self,
        plan: Plan,
        model: nn.Module | Callable[[], nn.Module] | Source,
        batch: Any,
        loss: Loss | None,
        world: World,
        optimizer: OptimizerSpec | str | Mapping[str, Any] = "adamw",
        *,
        seed: int | None = None,
        device: OnDevice = OnDevice(),
    ) -> None:
        """`model`: a module or factory that is not a `ModelSource` yet is initialised with `seed`.

        Raises:
            OutOfMemory: parameters, gradients and optimizer state alone exceed the memory of `device`; steps raise it too.
        """
        self.plan, self.world = plan, world
        set_products(plan.layout.precision, world.device)
        self.memory = accounts_of(world.device, device.memory)
        self.spec = OptimizerSpec.of(optimizer)
        if not isinstance(model, Source) and seed is not None:
            torch.manual_seed(seed)
        source = model if isinstance(model, Source) else Traced.of(model)
        seed = torch.initial_seed() if seed is None else seed
        if plan.uncaptured:
            self.parts = build_replicated(plan, source, batch, loss, world, self.spec, seed)
        else:
            self.parts = build(plan, source, batch, loss, world, self.spec, seed)
        self.mesh = plan.layout.mesh_of(world.rank)
        sharing = self.mesh.group(world.rank, *(cut := sample_axes(self.mesh.inside)))  # ranks with different samples
        self.data_index, self.data_size, self._rows = self.mesh.place(world.rank, cut), len(sharing), world.group(sharing)
        self._counters = {"step": torch.zeros((), dtype=torch.int64)}
        self._everyone = world.group(tuple(range(world.num_ranks)))
        replicas = Replicas(self.parts, self.mesh, world)
        sums = [world.group(g.sum_ranks) if len(g.sum_ranks) > 1 else None for g in self.parts.groups]
        self._connect(sums, replicas.groups)
        staleness = plan.layout.staleness
        share(self.parts.groups, sums, staleness + 1, keep=plan.layout.servers > 0)
        self._gathered = Gathered(self.parts.groups, sums, self.memory)
        self._host = HostStore(world.device, self.memory, self.parts.variables.values())
        self._counted: Tensor | None = None  # this rank's summand of a divisor that is reduced along with the loss
        self.gradients = self._sums_of_gradients(sums)
        self.finishing = Finishing(world, self.parts, plan.layout, self.gradients)
        self._residuals = Residuals(self.gradients.compressed.values(), plan.layout, world.rank)
        self.scale = LossScale(world.device, plan.layout.precision, device.scale)
        compiles = plan.layout.compile == "on"
        self._executors = Executors(
            self.parts, plan, world, self.memory, self.gradients, self._gathered, self._host, compile=compiles, scale=self.scale
        )
        self._executor = self._executors.of(plan.microbatch_sizes)
        self._forms, self.source = Forms(Capture(BatchForm.of(batch), self._executors, replicas), source, loss), source
        self.lowered = self._forms.lowered  # for other captures
        self._optimizer, self._stale = self._updates(sums)
        self._optimizer.load_parameters()
        self.owner_of = self._optimizer.owner_of
        self._fingerprints = Fingerprints(self.parts.groups, world)
        self._count_state()
        world.pace.regular = plan.layout.compile != "on"
        self.timeline: Timeline | None = None
        self.seconds: dict[str, float] = {}  # last step: "program", "gradients" (reduction after it), "optimizer"
        self.model_flops = model_flops(self.parts.graph) * plan.batch_size / self.parts.graph.batch_size

    def _connect(self, sums: Sequence[Group | None], others: Sequence[Group]) -> None:
        """Connect every group of this rank, in one order on every rank: different orders would deadlock."""
        axes = [self.world.group(self.mesh.group(self.world.rank, axis)) for axis in self.parts.sharding.sizes]
        axes += self.parts.lowering.groups.values() if self.parts.lowering is not None else ()
        axes += [self.world.group(self.plan.layout.replica_of(self.world.rank))] if self.plan.layout.staleness else []
        groups = {self._everyone, line_of(self.plan.layout, self.world), self._rows, *axes, *others, *(g for g in sums if g is not None)}
        for group in sorted(groups, key=lambda g: g.ranks):
            group.connect()

    def _sums_of_gradients(self, sums: Sequence[Group | None]) -> Gradients:
        parts, layout = self.parts, self.plan.layout
        reduces = any(isinstance(a, Manage) and a.op is ManageOp.REDUCE_GRAD for row in parts.program.actions for a in row)
        return Gradients(parts.groups, parts.parameters, sums, layout.zero > 0, reduces, Compression.parse(layout.compress), self.memory)

    def _updates(self, sums: Sequence[Group | None]) -> tuple[Optimizer, Stale | Servers | None]:
        """Build the optimizer of this rank's parameters, and what delays updates (staleness) or makes them for all replicas (servers)."""
        groups, layout = self.parts.groups, self.plan.layout
        if layout.servers:
            served = Served.of(self.spec, groups, layout, self.world)
            replicas = self.world.group(self.mesh.group(self.world.rank, DATA))
            servers = Servers(layout.staleness, self.gradients, served, groups, replicas)
            return served.optimizer, servers
        stale, zero = layout.staleness > 0, layout.zero > 0
        counting = self.world.group(layout.replica_of(self.world.rank)) if stale else self._everyone
        optimizer = Optimizer(self.spec, groups, sums, counting, zero, layout.moves_optimizer, stale, self.scale)
        return optimizer, Stale(layout.staleness, self.gradients, optimizer) if stale else None

    def _count_state(self) -> None:
        """Account for the memory that persists from the first step to the last, and check that it fits."""
        parts, optimizer = self.parts, self._optimizer
        self.memory.assign("buffers", parts.buffers.values())
        self.memory.assign(HOST if optimizer.offload else "optimizer", optimizer.state_tensors())
        rooms, weights = (self._stale.rooms, self._stale.weights) if self._stale is not None else ([], [])
        self.memory.assign("gradients", [*(g for group in parts.groups for g in group.rooms), *self._residuals.tensors, *rooms])
        self.memory.assign("parameters", [*parts.parameters.values(), *(group.data for group in parts.groups), *weights])
        self.memory.forget_peak()
        self.memory.check(self.world.rank)

    def peak_memory(self) -> Memory | None:
        """Return the peak memory of this rank's device since the engine was built; None where it is not measured."""
        return self.memory.peak() if self.memory.counts else None

    def fullest_memory(self) -> dict[str, float]:
        """Return the peak bytes over all ranks' devices, by part and in `total`; empty where not measured. Every rank calls it."""
        if not self.memory.counts:
            return {}
        peak = self.memory.peak()
        peaks = self.world.maximum([int(getattr(peak, part)) for part in PARTS] + [int(peak.total)])
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
        if self._gathered.units:
            raise UsageError("with zero=3 full weights exist only while a layer uses them; use full_state_dict(), or zero=2")
        return self.parts.parameters

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model; tied parameters count once."""
        return self.parts.graph.num_parameters

    def step(self, batch: Any, lr: float | None = None, record: bool = False, whole: bool | None = None, samples: int = 0) -> StepResult:
        """Run one training step on the global batch (the same on every rank; also as `Microbatches`), or on this rank's rows of it.

        A batch may have fewer samples than the plan's, like the last one of an epoch. It may have other tensors or shapes: the model is
        captured once for each form of batch, and the most recent captures are cached (`MAX_CAPTURES`).

        Args:
            is_global_batch: whether `batch` is the global batch; by default if it has more samples than one replica's share of the plan's.
            samples: size of the global batch, where every rank passes its own rows. Known for rows from `weft.shard`; otherwise, if
                omitted, ranks all-gather their row counts, which may then be unequal and of any form.

        Raises:
            Infeasible: more samples than the plan's, or unequal shares of a batch whose samples interact in the model.
            StateDiverged, SuspectStep: corrupted state, or the check given to `watch` objects; on every rank, before any update.
        """
        with self.world.pace.step():
            return self._step(batch, lr, record, whole, samples)

    def _step(self, batch: Any, lr: float | None, record: bool, is_global: bool | None, samples: int) -> StepResult:
        began = time.perf_counter()
        result = self.forward_backward(batch, record=record, whole=is_global, samples=samples)
        summed = time.perf_counter()
        if self._stale is None:
            self._fingerprints.check()
            if self._judge is not None and (why := self._judge(result, self._fingerprints.norms)):
                raise Doubted(why)
        norm = self.update(lr)
        waited = self._stale.waited_s if self._stale else 0.0
        self.seconds["optimizer"] = time.perf_counter() - summed - waited
        self.seconds["gradients"] += waited
        total, work = result.mean or self._sum_over_ranks(result)
        if self._stale is None:
            work.wait()
        return StepResult(norm, time.perf_counter() - began, total, work, self.scale.factor if self.scale.scaled else None)

    def forward_backward(
        self, batch: Any, record: bool = False, want_inputs: bool = False, whole: bool | None = None, samples: int = 0
    ) -> Result:
        """Run forward and backward of all microbatches; reduce gradients into the flat groups (with staleness, asynchronously)."""
        parts = self._parts_of(batch, whole, samples, trains=True)
        self._counted = parts[0][1].counted
        if self._stale is not None:
            self._stale.start()
        self.gradients.start()
        if record:
            self._everyone.barrier()  # spans start here, on every rank
        began = time.perf_counter()
        with self.memory.guarded(self.world.rank):
            result = self._run(parts, record=record, want_inputs=want_inputs)
            ended = time.perf_counter()
            self.gradients.finish()
            for capture, inputs in parts:
                capture.replicas.finish(inputs.executor.program.microbatches)
            result.mean = self._sum_over_ranks(result)  # all-reduced concurrently with the gradients
            if self._stale is None:
                self._fingerprints.start(self.step_index, self.gradients.norms)
                self.gradients.wait()
                self._optimizer.unscale()
            else:
                total, work = result.mean
                self._stale.take(work, total[1] if total.dim() else None, self._counted)
        for capture, _ in parts:
            capture.executors.gathered.release()
        self.seconds = {"program": ended - began, "gradients": time.perf_counter() - ended}
        if record:
            name = f"{self.plan.model} {self.plan.layout}, step {self.step_index}"
            self.timeline = Timeline(name, self.plan.layout.pipeline, tuple(result.spans))
        return result

    def _run(
        self, parts: Sequence[tuple[Capture, StepInputs]], train: bool = True, record: bool = False, want_inputs: bool = False
    ) -> Result:
        """Run the programs of a step in order; return the last one's result, with the losses and spans of all."""
        began = time.perf_counter()
        result = Result()
        for number, (capture, inputs) in enumerate(parts):
            draw, start_s = capture.parts.draw, time.perf_counter() - began
            draw.step, draw.samples, ends = self.step_index, inputs.drawn, number == len(parts) - 1
            capture.replicas.start()
            run, done, after = self.finishing.begin(inputs.executor, self.step_index, train and len(parts) == 1 and not want_inputs)
            latest = run.run(inputs.inputs, train=train, record=record, want_inputs=want_inputs, ends=ends, after=after, result=done)
            latest.summand = (0.0 if result.summand is None else result.summand) + capture.summand(latest)
            spans = (span._replace(start_s=span.start_s + start_s, end_s=span.end_s + start_s) for span in latest.spans)
            latest.spans = [*result.spans, *spans]
            result = latest
        return result

    def by_length(self, batch: Any, lengths: Sequence[int] | Tensor | str, multiple: int = 0) -> Microbatches:
        """Group the rows of a global batch into microbatches of similar length (layouts with split=lengths), for `step` and `evaluate`.

        Each microbatch is truncated to its longest row, rounded up to a `multiple` (default: an eighth of the plan's sequence length), and
        uses the fastest data x context split. `lengths`: length of each row, or the path of a mask from which they follow."""
        return by_length(batch, lengths, self.plan.splits, multiple)

    def update(self, lr: float | None = None) -> float | None:
        """Clip the reduced gradients and update the parameters. Returns the gradient norm if clipping is on.

        With staleness=K the gradients applied are those of K steps ago, and `lr` is stored for those of this step.
        """
        with self.memory.guarded(self.world.rank):
            norm = self._optimizer.step(lr) if self._stale is None else self._stale.push(lr)
        self.step_index += 1
        return norm

    def drain(self) -> None:
        """With staleness: apply all pending updates, so that weights include all completed steps. Every rank calls it, or none."""
        if self._stale is not None:
            with self.memory.guarded(self.world.rank):
                self._stale.drain()

    def evaluate(self, batch: Any, whole: bool | None = None, samples: int = 0) -> float:
        """Return the loss on a batch in evaluation mode, which is captured at the first call. `is_global_batch`, `samples`: as for `step`.

        Raises:
            ModelError: the model cannot be captured in evaluation mode.
        """
        self.drain()
        parts = self._parts_of(batch, whole, samples, trains=False)
        self._counted = None
        module = self.parts.only.module if self.plan.uncaptured else nn.Module()  # an uncaptured model is the user's module, with modes
        with in_modes(module, evaluation_modes(module)), torch.no_grad(), self.memory.guarded(self.world.rank):
            result = self._run(parts, train=False)
            for capture, inputs in parts:
                capture.replicas.finish(inputs.executor.program.microbatches)
            total, work = self._sum_over_ranks(result)
            work.wait()
            return float(total)

    def _parts_of(self, batch: Any, whole: bool | None, samples: int, trains: bool) -> list[tuple[Capture, StepInputs]]:
        """Return the captures that run a batch, with their inputs: several if microbatches have shapes of their own."""
        if not isinstance(batch, Microbatches):
            rows = self._rows_of(batch, whole, samples)
            length = length_of(batch, self.plan.splits) if rows.is_global or len(rows.table[0]) == 1 else 0
            if not length:
                capture = self._forms.of(batch, trains)
                return [(capture, capture.step_inputs(tensors_of(batch), rows, is_stale=trains and self._stale is not None))]
            batch = self.by_length(batch, [length] * rows.samples)
        elif batch.samples > self.plan.batch_size:
            raise Infeasible(f"the batch has {batch.samples} samples; the plan is for {self.plan.batch_size}")
        elif self.step_index == 0 and self.world.num_ranks > 1:
            check_batch_agrees(batch.batches, self.world)
        parts = self._forms.in_parts(batch, trains)
        return list(zip((capture for capture, _, _ in parts), inputs_of_parts(parts), strict=True))

    def loss_of(self, result: Result) -> float:
        """Return the loss of the global batch, reduced over ranks and microbatches."""
        total, work = result.mean or self._sum_over_ranks(result)
        work.wait()
        return mean_of(total)

    def _sum_over_ranks(self, result: Result) -> tuple[Tensor, Work]:
        """Start the all-reduce of the loss over ranks; return its buffer and the pending work."""
        total = result.summand
        assert total is not None
        if self._counted is not None:
            total = torch.stack((total, self._counted))
        return total, self._everyone.all_reduce(total, wait=False).untimed()  # a loss need not be read

    def _local(self, batch: Any) -> list[dict[str, Tensor]]:
        """Return this rank's input tensors of every microbatch, by graph value."""
        return self._parts_of(batch, None, 0, trains=True)[0][1].inputs

    def sizes_of(self, samples: int) -> tuple[int, ...]:
        """Return the samples of each microbatch (over all data replicas) of a batch of `samples`.

        Raises:
            Infeasible: they do not divide over data, or are too few.
        """
        layout = self.plan.layout
        if self.plan.uncaptured:
            check_equal(samples, layout, "this model runs whole")
        return sizes_of_part(samples, layout, self.plan.batch_size, schedule_of(layout).fewest)

    def rows_of(self, size: int) -> tuple[int, int]:
        """Return (first row, number of rows) of a microbatch of `size` samples that this rank computes."""
        return self._replica.of(size)

    @cached_property
    def _replica(self) -> Replica:
        """This rank's replica of its pipeline stage, which determines its rows of a batch."""
        return Replica(self.plan, self.plan.layout.of_stage(self.mesh.coordinates(self.world.rank)[PIPELINE]), self.data_index)

    def _rows_of(self, batch: Any, global_batch: bool | None, samples: int) -> Rows:
        """Assign the rows of a batch, global or local, to replicas and microbatches."""
        plan, each, have = self.plan, self._replica.each, batch_size_of(batch)
        is_global = have > max(each) if global_batch is None else global_batch
        row_counts, one_form, samples = [have], True, samples or count_samples(batch)
        by_rows = global_batch is False or samples > 0  # with per-stage meshes only some stages have all rows then
        shared = is_global or self.data_size == 1
        if shared:
            samples = have
        elif not samples:
            row_counts, one_form = self._told_rows(have, BatchForm.of(batch))
            samples = sum(row_counts)
        if samples > plan.batch_size:
            per_replica = f"{max(each)} for each" if len(set(each)) == 1 else f"{'/'.join(map(str, each))} for the ranks"
            raise Infeasible(
                f"the batch has {have} samples; the plan is for {plan.batch_size} in all, which is {per_replica} of data={self.data_size}"
            )
        if shared and not (plan.layout.inner and by_rows) and self.step_index == 0 and self.world.num_ranks > 1:
            check_batch_agrees(batch, self.world)
        planned_rows = self._replica.rows(self.sizes_of(samples), is_global)
        if len(row_counts) == 1 or (one_form and [sum(column) for column in zip(*planned_rows.table, strict=True)] == row_counts):
            return planned_rows
        most, fewest = max(replica_sizes(plan.microbatch_sizes[0], plan.layout)), schedule_of(plan.layout).fewest
        return self._replica.given(row_counts, num_microbatches(max(row_counts), most, plan.layout, fewest), one_form)

    def _told_rows(self, rows: int, form: BatchForm) -> tuple[list[int], bool]:
        """All-gather how many rows each replica has of this step's batch, and whether all batches have the same form."""
        count_and_form = torch.tensor([[rows, form.number]], dtype=torch.int64, device=self.world.device)
        row_counts, forms = self._rows.all_gather(count_and_form, 0).T.tolist()
        return row_counts, len(set(forms)) == 1

    def pieces(self, drain: bool = True) -> list[Piece]:
        """Return this rank's parameters, buffers, optimizer state, counters and compression residuals, for checkpoints.

        Pending updates are applied first, unless `drain` is False.
        """
        if drain:
            self.drain()
        pieces = pieces_of(self.parts, self._optimizer, self.mesh.coordinates(self.world.rank), self._counters | self._optimizer.counters)
        if self.plan.layout.servers and not drain:  # whose state is ahead of the weights
            pieces = [piece for piece in pieces if piece.kind != "optimizer" or not self.plan.layout.staleness]
        return [*pieces, *self._residuals.pieces(self.step_index), *self.scale.pieces(self.step_index, self.world.rank == 0)]

    def state(self) -> State:
        """Return this rank's state: the tensors themselves, not copies."""
        other_tensors = (*self._residuals.tensors, *self.scale.tensors, *self._counters.values())
        return state_of(self.parts, self._optimizer, other_tensors, is_served=self.plan.layout.servers > 0)

    def watch(self, judge: Judge) -> Fingerprints:
        """Check in every step that only updates change weights and optimizer state, and call `judge` before each update (no staleness).

        Returns the fingerprints, whose `record_expected` is to be called after each update."""
        if self._stale is None:
            self._judge, self.gradients.has_norms = judge, True
            self._fingerprints.watch([*self._optimizer.state_of_update(), *self.state().fixed], self.step_index)
        return self._fingerprints

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """Return the full state dict under the model's own names (tied tensors under each of theirs) on rank 0; None elsewhere."""
        return full_state(self.parts, self.pieces(), self._everyone)

    def gradient(self, name: str) -> Tensor | None:
        """Return this rank's shard of a parameter's reduced gradient after `forward_backward`; None on other stages. With ZeRO only this
        rank's flat shard of it is reduced, until `full_gradients` has been called; from zero=2 on only that shard is returned."""
        self._settle()
        gradients = (group.gradient(name) for group in self.parts.groups)
        return next((x for x in gradients if x is not None), None)

    def _settle(self) -> None:
        if self._stale is not None:
            self._stale.settle()

    def full_gradients(self) -> dict[str, Tensor] | None:
        """Return the full reduced gradients by parameter name on rank 0, after `forward_backward`; None elsewhere."""
        self._settle()
        self.gradients.gather()
        pieces = gradient_pieces(self.parts)
        return full_tensors({v.name: v for v in self.parts.graph.parameters}, pieces, self._everyone)

    def full_input_gradients(self, result: Result) -> dict[str, Tensor] | None:
        """Return the gradients of the global batch's floating-point inputs by path on rank 0; None elsewhere."""
        return input_gradients(self.parts, self.plan, result, self.mesh.coordinates(self.world.rank), self._everyone)

    def publish(self, to: Sequence[Address]) -> int:
        """Send the weights to serving replicas, without a file; every rank calls it. Returns bytes sent. See `run/publish`."""
        return send_pieces(self.pieces(), to, self._everyone, self.step_index)

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint (or the newest good one of a folder), whatever layout wrote it. Returns its `extra`.

        Raises:
            CheckpointError: nothing to load, damaged, or of another model; then nothing has been changed.
        """
        if self.plan.layout.servers:  # which may be updating
            self.drain()
        wanted = pieces_of(self.parts, self._optimizer, self.mesh.coordinates(self.world.rank), self._counters | self._optimizer.counters)
        optional = [*self._residuals.pieces(-1), *self.scale.pieces(-1, self.world.rank == 0)]
        extra = checkpoint.load(folder, [*wanted, *optional], self.world)
        if self._stale is not None:
            self._stale.forget()
        self._optimizer.load_parameters()
        self.step_index = int(self._counters["step"])
        self._residuals.loaded(self.step_index)
        self.scale.loaded(self.step_index)
        self._optimizer.set_steps(self.step_index - self.scale.skipped)
        return extra
