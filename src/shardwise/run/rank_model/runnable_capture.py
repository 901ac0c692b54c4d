"""Prepare the inputs of a step for one capture of the model: slice a batch into this rank's microbatches and count loss divisors.

In: a rank's model for the capture, and a batch with the assignment of its rows. Out: an executor, and for each microbatch this rank's
tensors by graph value: rows of the batch, the microbatch's share of the samples, and divisors counted over the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from shardwise.capture.nesting import BatchSignature
from shardwise.errors import Infeasible
from shardwise.lower.kernels.sample_positions import MicrobatchSamples
from shardwise.model.graph import Variable
from shardwise.plan.ir.axis import axis_of, sample_axes
from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.ir.placement import P
from shardwise.plan.ir.transition import LOCAL_COLLECTIVES
from shardwise.run.gradients.deferred_buffers import DeferredBufferUpdates
from shardwise.run.parts.lru_cache import MAX_MICROBATCH_SIZES, LRUCache
from shardwise.run.parts.microbatch_variants import MicrobatchVariant
from shardwise.run.parts.rank_model import RankModel
from shardwise.run.parts.rows import BatchRows
from shardwise.run.sharded_state import narrow_to
from shardwise.run.step.executor import Executor, RunResult
from shardwise.run.step.executors import ExecutorCache
from shardwise.run.step.loss_divisors import DivisorCounter, count_divisors

MicrobatchCount = tuple[DivisorCounter, dict[str, Tensor], bool]  # of a microbatch: counter, its inputs, whether this rank has rows of it


@dataclass
class StepInputs:
    """Inputs of one step. `inputs`: tensors by graph value, for each microbatch. `samples`: positions of its samples, for randomness.
    `divisor`: this rank's summand of a loss divisor that is reduced with the loss, if any."""

    executor: Executor
    inputs: list[dict[str, Tensor]]
    samples: tuple[MicrobatchSamples, ...]
    divisor: Tensor | None = None


@dataclass
class RunnableCapture:
    """A capture and what runs it. `form`: of the batches that it accepts. `replicas`: buffers that it synchronises after a step."""

    form: BatchSignature
    executors: ExecutorCache
    replicas: DeferredBufferUpdates
    counters: LRUCache[DivisorCounter] = field(default_factory=lambda: LRUCache(MAX_MICROBATCH_SIZES))

    @property
    def rank_model(self) -> RankModel:
        """This rank's model under this capture."""
        return self.executors.rank_model

    def loss_summand(self, result: RunResult) -> Tensor:
        """Return what the microbatches of this rank add to the loss."""
        total = torch.zeros((), dtype=torch.float64, device=self.executors.world.device)
        if result.losses:
            lowered, loss = self.rank_model.lowered, self.rank_model.graph.loss
            forms = next(local.placements[loss] for local in lowered.values() if loss in local.results)
            at = self.mesh_coordinates
            if all(form is P or at[axis] == 0 for axis, form in forms.items()):
                total += torch.stack([x.double() * weight for x, weight in zip(result.losses, result.weights, strict=True)]).sum()
        return total

    def step_inputs(self, tensors: Mapping[str, Tensor], rows: BatchRows, is_stale: bool) -> StepInputs:
        """Prepare a step from a batch's `tensors` by path. `is_stale`: do not wait for other ranks' counts, since updates are asynchronous.

        Raises:
            Infeasible: unequal shares of samples that interact, or a microbatch size with which the model computes something else.
        """
        arguments, counting = self.prepare_inputs(tensors, rows)
        if counting:
            counts_whole_batch = rows.counts_whole_batch
            is_deferred = is_stale and not counts_whole_batch and len(rows.table[0]) > 1
            totals = count_divisors(counting, counts_whole_batch, self.rank_model.pending_constants, is_deferred)
            if is_deferred:
                counter = counting[0][0]
                by_value = counter.by_graph_value(totals)
                arguments.divisor, by_value = self._defer_divisor(by_value, counter.variant.loss_graph.divisor)
                totals = list(by_value.values())
            self.add_totals(arguments, counting, totals)
        return arguments

    def prepare_inputs(self, tensors: Mapping[str, Tensor], rows: BatchRows) -> tuple[StepInputs, list[MicrobatchCount]]:
        """Prepare all inputs but the divisors counted over the whole batch; also return their counters by microbatch, if any."""
        parts, samples = self.rank_model, rows.num_samples
        if not rows.is_planned:
            self._check_unequal_shares(rows)
        needed = {value for local in parts.lowered.values() for value in local.variables}
        inputs_by_microbatch: list[dict[str, Tensor]] = []
        counting: list[MicrobatchCount] = []
        for m, size in enumerate(rows.sizes):
            sized = parts.microbatch_variant(size or len(rows.table[m]), samples)
            normal = sized.loss_graph
            inputs = [v for v in normal.graph.inputs if v.value in needed]
            rows_here = {v.value: rows.slice_replica(tensors[v.name], m) if v.batched else tensors[v.name] for v in inputs}
            inputs_of = {v.value: self._to_compute_dtype(self._local_part(rows_here[v.value], v, sized), v) for v in inputs}
            counter = self._divisor_counter(sized, size, samples) if normal.totals else None
            count_inputs = inputs_of
            if counter is not None:  # divisors are counted over whole rows
                read = [v for v in inputs if v.value in counter.variables]
                full = {
                    v.value: rows.slice_microbatch(tensors[v.name], m) if rows.counts_whole_batch and v.batched else rows_here[v.value]
                    for v in read
                }
                count_inputs = {v.value: self._to_compute_dtype(full[v.value], v) for v in read}
                counting.append((counter, count_inputs, bool(size)))
            if name := normal.share_constant:
                dtype = getattr(torch, normal.graph.tensors[name].dtype)
                inputs_of[name] = count_inputs[name] = torch.full((), rows.share(m), dtype=dtype, device=self.executors.world.device)
            inputs_by_microbatch.append(inputs_of)
        return StepInputs(self.executors.executor_for(rows.sizes, samples), inputs_by_microbatch, rows.sample_positions), counting

    def add_totals(self, arguments: StepInputs, counts: Sequence[MicrobatchCount], totals: Sequence[Tensor]) -> None:
        """Add the counted divisors to every microbatch's inputs."""
        if self.executors.compile:
            self.rank_model.pending_constants.wait()  # compiled code cannot wait
        for inputs_of, (counter, _, _) in zip(arguments.inputs, counts, strict=True):
            inputs_of.update(counter.by_graph_value(totals))

    def _check_unequal_shares(self, rows: BatchRows) -> None:
        """Raise Infeasible if ranks with unequal shares would compute something else than one process on all samples."""
        parts, layout = self.rank_model, self.executors.plan.layout
        reasons = [f"{coupling.site} {coupling.reason}" for coupling in parts.couplings]
        transfers = (
            move for move in parts.sharding.redistributions if axis_of(move.axis).shards_samples and move.forward not in LOCAL_COLLECTIVES
        )
        reasons += [f"{move.value} moves between data ranks" for move in transfers]
        if parts.lowering is None:
            reasons.append("the model could not be captured")
        if layout.inner or layout.shares or layout.replicas != layout.data or layout.expert > 1 or layout.sample_parallel == "on":
            reasons.append(f"{layout} fixes the shares of ranks")
        if reasons:
            shares = [sum(row[i] for row in rows.table) for i in range(len(rows.table[0]))]
            raise Infeasible(
                f"the batch has {rows.num_samples} samples, which data={len(shares)} ranks share as {', '.join(map(str, shares))}"
                f"{'' if rows.same_shapes else ', of different shapes'}, and {reasons[0]}: use batches that divide into data={len(shares)} "
                "equal shares, or drop the rest"
            )

    def _divisor_counter(self, sized: MicrobatchVariant, size: int, samples: int) -> DivisorCounter:
        """Return the counter of a microbatch's divisors on this rank, cached by size."""

        def build() -> DivisorCounter:
            world, mesh = self.executors.world, self._mesh
            return DivisorCounter(self.rank_model, sized, world.group(mesh.group(world.rank, *sample_axes(mesh.stage_axes))))

        return self.counters.get_or_build((size, samples), build)

    @cached_property
    def _mesh(self) -> Mesh:
        return self.executors.plan.layout.mesh_of(self.executors.world.rank)

    @cached_property
    def mesh_coordinates(self) -> dict[str, int]:
        """This rank's mesh coordinates by axis."""
        return self._mesh.coordinates(self.executors.world.rank)

    def _local_part(self, x: Tensor, v: Variable, sized: MicrobatchVariant) -> Tensor:
        """Slice the rows of this data rank to this rank's shard along the other axes."""
        sharding, coordinates = sized.sharding, self.mesh_coordinates
        expected = sharding.sample_shape(v.value, v.tensor.shape, coordinates)
        if tuple(x.shape) != expected and not self.executors.plan.uncaptured:
            raise AssertionError(f"{v.name} has shape {list(x.shape)} in a microbatch of this rank, and its capture is of {list(expected)}")
        return narrow_to(x, sharding.stored(v.value, x.shape, coordinates, excluded_axes=sharding.sample_axes))

    def _to_compute_dtype(self, x: Tensor, v: Variable) -> Tensor:
        """Copy a tensor of the batch to the device, in the dtype that the graph expects."""
        dtype = getattr(torch, v.tensor.dtype)
        return x.to(device=self.executors.world.device, dtype=dtype if x.is_floating_point() else x.dtype, non_blocking=True)

    def _defer_divisor(self, totals: Mapping[str, Tensor], divisor: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Replace the divisor by 1 and return this rank's count of it, which is reduced together with the loss."""
        if not divisor:
            raise Infeasible(
                f"{self.executors.plan.layout}: parts of the loss are divided by counts over all ranks' rows, which asynchronous updates "
                "cannot wait for; give every rank the whole batch"
            )
        return totals[divisor].double(), {divisor: torch.ones_like(totals[divisor])}
