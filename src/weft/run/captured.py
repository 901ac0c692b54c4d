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

from weft.capture.nesting import BatchForm
from weft.errors import Infeasible
from weft.lower.kernels.sample_positions import Samples
from weft.model.graph import Variable
from weft.plan.axis import axis_of, sample_axes
from weft.plan.mesh import Mesh
from weft.plan.placement import P
from weft.plan.transition import LOCAL
from weft.run.recent import MOST_SIZES, Recent
from weft.run.reduce.buffers import Replicas
from weft.run.resized import Sized
from weft.run.rows import Rows
from weft.run.sharded_state import narrowed
from weft.run.step.executor import Executor, Result
from weft.run.step.executors import Executors
from weft.run.step.totals import Counter, count
from weft.run.training_parts import Parts

Counting = tuple[Counter, dict[str, Tensor], bool]  # of a microbatch: counter, its inputs, whether this rank has rows of it


@dataclass
class StepInputs:
    """Inputs of one step. `inputs`: tensors by graph value, for each microbatch. `samples`: positions of its samples, for randomness.
    `divisor`: this rank's summand of a loss divisor that is reduced with the loss, if any."""

    executor: Executor
    inputs: list[dict[str, Tensor]]
    drawn: tuple[Samples, ...]
    counted: Tensor | None = None


@dataclass
class Capture:
    """A capture and what runs it. `form`: of the batches that it accepts. `replicas`: buffers that it synchronises after a step."""

    form: BatchForm
    executors: Executors
    replicas: Replicas
    counters: Recent[Counter] = field(default_factory=lambda: Recent(MOST_SIZES))

    @property
    def parts(self) -> Parts:
        """This rank's model under this capture."""
        return self.executors.parts

    def summand(self, result: Result) -> Tensor:
        """Return what the microbatches of this rank add to the loss."""
        total = torch.zeros((), dtype=torch.float64, device=self.executors.world.device)
        if result.losses:
            lowered, loss = self.parts.lowered, self.parts.graph.loss
            forms = next(local.forms[loss] for local in lowered.values() if loss in local.results)
            at = self.place
            if all(form is P or at[axis] == 0 for axis, form in forms.items()):
                total += torch.stack([x.double() * weight for x, weight in zip(result.losses, result.weights, strict=True)]).sum()
        return total

    def step_inputs(self, tensors: Mapping[str, Tensor], rows: Rows, is_stale: bool) -> StepInputs:
        """Prepare a step from a batch's `tensors` by path. `is_stale`: do not wait for other ranks' counts, since updates are asynchronous.

        Raises:
            Infeasible: unequal shares of samples that interact, or a microbatch size with which the model computes something else.
        """
        arguments, counting = self.before_totals(tensors, rows)
        if counting:
            counts_whole_batch = rows.counts_all
            is_deferred = is_stale and not counts_whole_batch and len(rows.table[0]) > 1
            totals = count(counting, counts_whole_batch, self.parts.arrival, is_deferred)
            if is_deferred:
                counter = counting[0][0]
                by_value = counter.named(totals)
                arguments.counted, by_value = self._divisor_after_sum(by_value, counter.sized.normal.divisor)
                totals = list(by_value.values())
            self.add_totals(arguments, counting, totals)
        return arguments

    def before_totals(self, tensors: Mapping[str, Tensor], rows: Rows) -> tuple[StepInputs, list[Counting]]:
        """Prepare all inputs but the divisors counted over the whole batch; also return their counters by microbatch, if any."""
        parts, samples = self.parts, rows.samples
        if not rows.planned:
            self._check_apart(rows)
        needed = {value for local in parts.lowered.values() for value in local.variables}
        inputs_by_microbatch: list[dict[str, Tensor]] = []
        counting: list[Counting] = []
        for m, size in enumerate(rows.sizes):
            sized = parts.of_size(size or len(rows.table[m]), samples)
            normal = sized.normal
            inputs = [v for v in normal.graph.inputs if v.value in needed]
            rows_here = {v.value: rows.of_replica(tensors[v.name], m) if v.batched else tensors[v.name] for v in inputs}
            inputs_of = {v.value: self._taken(self._held(rows_here[v.value], v, sized), v) for v in inputs}
            counter = self._counter_of(sized, size, samples) if normal.totals else None
            count_inputs = inputs_of
            if counter is not None:  # divisors are counted over whole rows
                read = [v for v in inputs if v.value in counter.variables]
                full = {v.value: rows.of_all(tensors[v.name], m) if rows.counts_all and v.batched else rows_here[v.value] for v in read}
                count_inputs = {v.value: self._taken(full[v.value], v) for v in read}
                counting.append((counter, count_inputs, bool(size)))
            if name := normal.share:
                dtype = getattr(torch, normal.graph.tensors[name].dtype)
                inputs_of[name] = count_inputs[name] = torch.full((), rows.share(m), dtype=dtype, device=self.executors.world.device)
            inputs_by_microbatch.append(inputs_of)
        return StepInputs(self.executors.of(rows.sizes, samples), inputs_by_microbatch, rows.drawn), counting

    def add_totals(self, arguments: StepInputs, counting: Sequence[Counting], totals: Sequence[Tensor]) -> None:
        """Add the counted divisors to every microbatch's inputs."""
        if self.executors.compile:
            self.parts.arrival.wait()  # compiled code cannot wait
        for inputs_of, (counter, _, _) in zip(arguments.inputs, counting, strict=True):
            inputs_of.update(counter.named(totals))

    def _check_apart(self, rows: Rows) -> None:
        """Raise Infeasible if ranks with unequal shares would compute something else than one process on all samples."""
        parts, layout = self.parts, self.executors.plan.layout
        reasons = [f"{coupling.site} {coupling.why}" for coupling in parts.coupled]
        transfers = (move for move in parts.sharding.moves if axis_of(move.axis).cuts_samples and move.forward not in LOCAL)
        reasons += [f"{move.value} moves between data ranks" for move in transfers]
        if parts.lowering is None:
            reasons.append("the model could not be captured")
        if layout.inner or layout.shares or layout.replicas != layout.data or layout.expert > 1 or layout.sample_parallel == "on":
            reasons.append(f"{layout} fixes the shares of ranks")
        if reasons:
            shares = [sum(row[i] for row in rows.table) for i in range(len(rows.table[0]))]
            raise Infeasible(
                f"the batch has {rows.samples} samples, which data={len(shares)} ranks share as {', '.join(map(str, shares))}"
                f"{'' if rows.one_form else ', of different shapes'}, and {reasons[0]}: use batches that divide into data={len(shares)} "
                "equal shares, or drop the rest"
            )

    def _counter_of(self, sized: Sized, size: int, samples: int) -> Counter:
        """Return the counter of a microbatch's divisors on this rank, cached by size."""

        def build() -> Counter:
            world, mesh = self.executors.world, self._mesh
            return Counter(self.parts, sized, world.group(mesh.group(world.rank, *sample_axes(mesh.inside))))

        return self.counters.of((size, samples), build)

    @cached_property
    def _mesh(self) -> Mesh:
        return self.executors.plan.layout.mesh_of(self.executors.world.rank)

    @cached_property
    def place(self) -> dict[str, int]:
        """This rank's mesh coordinates by axis."""
        return self._mesh.coordinates(self.executors.world.rank)

    def _held(self, x: Tensor, v: Variable, sized: Sized) -> Tensor:
        """Slice the rows of this data rank to this rank's shard along the other axes."""
        sharding, coordinates = sized.sharding, self.place
        expected = sharding.rows(v.value, v.tensor.shape, coordinates)
        if tuple(x.shape) != expected and not self.executors.plan.uncaptured:
            raise AssertionError(f"{v.name} has shape {list(x.shape)} in a microbatch of this rank, and its capture is of {list(expected)}")
        return narrowed(x, sharding.held(v.value, x.shape, coordinates, but=sharding.sample_axes))

    def _taken(self, x: Tensor, v: Variable) -> Tensor:
        """Copy a tensor of the batch to the device, in the dtype that the graph expects."""
        dtype = getattr(torch, v.tensor.dtype)
        return x.to(device=self.executors.world.device, dtype=dtype if x.is_floating_point() else x.dtype, non_blocking=True)

    def _divisor_after_sum(self, totals: Mapping[str, Tensor], divisor: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Replace the divisor by 1 and return this rank's count of it, which is reduced together with the loss."""
        if not divisor:
            raise Infeasible(
                f"{self.executors.plan.layout}: parts of the loss are divided by counts over all ranks' rows, which asynchronous updates "
                "cannot wait for; give every rank the whole batch"
            )
        return totals[divisor].double(), {divisor: torch.ones_like(totals[divisor])}
