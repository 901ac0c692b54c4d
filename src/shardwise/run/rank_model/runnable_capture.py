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


@dataclass(frozen=True, slots=True)
class InputRecipe:
    """The recipe of a step's inputs from batches of one form: for each microbatch (graph value, path, ranges to narrow to, dtype or None);
    None in place of both where a batch's tensor is the input as it is.

    It holds for captures whose loss counts nothing: all else follows from the shapes. `constants`: by microbatch what does not change.
    """

    executor: Executor
    microbatches: tuple[tuple[tuple[str, str, tuple[tuple[int, int, int], ...] | None, torch.dtype | None], ...], ...]
    constants: tuple[dict[str, Tensor], ...]
    samples: tuple[MicrobatchSamples, ...]
    device: torch.device

    def apply(self, tensors: Mapping[str, Tensor]) -> StepInputs:
        """Return the inputs of a step on a batch's `tensors` by path."""
        device, inputs = self.device, []
        for microbatch, constants in zip(self.microbatches, self.constants, strict=True):
            local = constants.copy()
            for value, name, ranges, dtype in microbatch:
                x = tensors[name]
                local[value] = x if ranges is None else narrow_to(x, ranges).to(device=device, dtype=dtype, non_blocking=True)
            inputs.append(local)
        return StepInputs(self.executor, inputs, self.samples)


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
        if result.losses and self._counts_loss:
            if len(result.losses) == 1 and result.weights[0] == 1.0:
                loss = result.losses[0].to(torch.float64, copy=True)  # it becomes the sum over ranks
                return loss.view(()) if loss.dim() else loss
            return torch.stack([x.double() * weight for x, weight in zip(result.losses, result.weights, strict=True)]).sum()
        return torch.zeros((), dtype=torch.float64, device=self.executors.world.device)

    @cached_property
    def _counts_loss(self) -> bool:
        """True if this rank's losses are summands of the whole loss: of ranks with equal losses only the first one's are."""
        loss, at = self.rank_model.graph.loss, self.mesh_coordinates
        forms = next(local.placements[loss] for local in self.rank_model.lowered.values() if loss in local.results)
        return all(form is P or at[axis] == 0 for axis, form in forms.items())

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

    def recipe_for(self, tensors: Mapping[str, Tensor], rows: BatchRows) -> InputRecipe | None:
        """Return the recipe of a step's inputs from tensors of these shapes; None if its loss counts what is in them."""
        parts = self.rank_model
        if not rows.is_planned:
            return None
        needed, device = {value for local in parts.lowered.values() for value in local.variables}, self.executors.world.device
        microbatches, constants = [], []
        for m, size in enumerate(rows.sizes):
            sized = parts.microbatch_variant(size, rows.num_samples)
            if sized.loss_graph.totals:
                return None
            entries = []
            for v in sized.loss_graph.graph.inputs:
                if v.value in needed:
                    x = tensors[v.name]
                    first, count = rows.replica_range(m)
                    ranges = [(0, first, count)] if v.batched and (first or count != len(x)) else []
                    ranges += self._local_ranges((count, *x.shape[1:]) if v.batched else tuple(x.shape), v, sized)
                    dtype = getattr(torch, v.tensor.dtype) if x.is_floating_point() else None
                    is_input = not ranges and x.device == device and dtype in (None, x.dtype)
                    entries.append((v.value, v.name, None if is_input else tuple(ranges), dtype))
            microbatches.append(tuple(entries))
            constants.append(self._share_constant(sized, rows, m))
        executor = self.executors.executor_for(rows.sizes, rows.num_samples)
        return InputRecipe(executor, tuple(microbatches), tuple(constants), rows.sample_positions, device)

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
            share = self._share_constant(sized, rows, m)
            inputs_of.update(share)
            count_inputs.update(share)
            inputs_by_microbatch.append(inputs_of)
        return StepInputs(self.executors.executor_for(rows.sizes, samples), inputs_by_microbatch, rows.sample_positions), counting

    def _share_constant(self, sized: MicrobatchVariant, rows: BatchRows, m: int) -> dict[str, Tensor]:
        """Return microbatch `m`'s share of the samples [] by graph value; empty if its loss reads none."""
        if not (name := sized.loss_graph.share_constant):
            return {}
        dtype = getattr(torch, sized.loss_graph.graph.tensors[name].dtype)
        return {name: torch.full((), rows.share(m), dtype=dtype, device=self.executors.world.device)}

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
        return narrow_to(x, self._local_ranges(tuple(x.shape), v, sized))

    def _local_ranges(self, shape: tuple[int, ...], v: Variable, sized: MicrobatchVariant) -> list[tuple[int, int, int]]:
        """Return the ranges of this rank's shard, along the other axes, of the rows of this data rank."""
        sharding, coordinates = sized.sharding, self.mesh_coordinates
        expected = sharding.sample_shape(v.value, v.tensor.shape, coordinates)
        if shape != expected and not self.executors.plan.uncaptured:
            raise AssertionError(f"{v.name} has shape {list(shape)} in a microbatch of this rank, and its capture is of {list(expected)}")
        return sharding.stored(v.value, shape, coordinates, excluded_axes=sharding.sample_axes)

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
