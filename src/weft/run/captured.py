"""One capture of the model at work: what runs its steps, and a batch as its microbatches read it.

In: a rank's parts of the capture, and a batch with whose rows are whose. Out: an executor, and by microbatch this rank's tensors by graph
value: rows of the batch, shares of it, and totals that are counted over all of it.
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

Counting = tuple[Counter, dict[str, Tensor], bool]  # of a microbatch: what counts, what it reads, whether this rank has rows of it


@dataclass
class StepInputs:
    """A batch of one step. `inputs`: by microbatch, by graph value. `drawn`: which samples each has. `counted`: what its loss is
    still to be divided by, where it is so."""

    executor: Executor
    inputs: list[dict[str, Tensor]]
    drawn: tuple[Samples, ...]
    counted: Tensor | None = None


@dataclass
class Capture:
    """`form`: of the batches that it is for. `replicas`: buffers that it writes after a step."""

    form: BatchForm
    executors: Executors
    replicas: Replicas
    counters: Recent[Counter] = field(default_factory=lambda: Recent(MOST_SIZES))

    @property
    def parts(self) -> Parts:
        """What runs."""
        return self.executors.parts

    def summand(self, result: Result) -> Tensor:
        """What microbatches of this rank add to the loss."""
        total = torch.zeros((), dtype=torch.float64, device=self.executors.world.device)
        if result.losses:
            lowered, loss = self.parts.lowered, self.parts.graph.loss
            forms = next(local.forms[loss] for local in lowered.values() if loss in local.results)
            at = self.place
            if all(form is P or at[axis] == 0 for axis, form in forms.items()):
                total += torch.stack([x.double() * weight for x, weight in zip(result.losses, result.weights, strict=True)]).sum()
        return total

    def step_inputs(self, tensors: Mapping[str, Tensor], rows: Rows, is_stale: bool) -> StepInputs:
        """A batch's `tensors` by path. `is_stale`: nobody waits for what other ranks count, since updates come late.

        Raises:
            Infeasible: shares that differ where samples meet, or a microbatch with so many samples computes something else.
        """
        arguments, counting = self.before_totals(tensors, rows)
        if counting:
            together = rows.counts_all
            alone = is_stale and not together and len(rows.table[0]) > 1
            totals = count(counting, together, self.parts.arrival, alone)
            if alone:
                counter = counting[0][0]
                named = counter.named(totals)
                arguments.counted, named = self._divisor_after_sum(named, counter.sized.normal.divisor)
                totals = list(named.values())
            self.add_totals(arguments, counting, totals)
        return arguments

    def before_totals(self, tensors: Mapping[str, Tensor], rows: Rows) -> tuple[StepInputs, list[Counting]]:
        """All but what is counted over the whole batch; and by microbatch what counts it, empty where nothing is counted."""
        parts, samples = self.parts, rows.samples
        if not rows.planned:
            self._check_apart(rows)
        needed = {value for local in parts.lowered.values() for value in local.variables}
        out: list[dict[str, Tensor]] = []
        counting: list[Counting] = []
        for m, size in enumerate(rows.sizes):
            sized = parts.of_size(size or len(rows.table[m]), samples)
            normal = sized.normal
            inputs = [v for v in normal.graph.inputs if v.value in needed]
            rows_here = {v.value: rows.of_replica(tensors[v.name], m) if v.batched else tensors[v.name] for v in inputs}
            inputs_of = {v.value: self._taken(self._held(rows_here[v.value], v, sized), v) for v in inputs}
            counter = self._counter_of(sized, size, samples) if normal.totals else None
            counted = inputs_of
            if counter is not None:  # what is counted is of whole rows
                read = [v for v in inputs if v.value in counter.variables]
                full = {v.value: rows.of_all(tensors[v.name], m) if rows.counts_all and v.batched else rows_here[v.value] for v in read}
                counted = {v.value: self._taken(full[v.value], v) for v in read}
                counting.append((counter, counted, bool(size)))
            if name := normal.share:
                kind = getattr(torch, normal.graph.tensors[name].dtype)
                inputs_of[name] = counted[name] = torch.full((), rows.share(m), dtype=kind, device=self.executors.world.device)
            out.append(inputs_of)
        return StepInputs(self.executors.of(rows.sizes, samples), out, rows.drawn), counting

    def add_totals(self, arguments: StepInputs, counting: Sequence[Counting], totals: Sequence[Tensor]) -> None:
        """Give every microbatch what was counted."""
        if self.executors.compile:
            self.parts.arrival.wait()  # compiled code does not
        for inputs_of, (counter, _, _) in zip(arguments.inputs, counting, strict=True):
            inputs_of.update(counter.named(totals))

    def _check_apart(self, rows: Rows) -> None:
        """Raise where ranks with unequal shares would compute something else than all samples at once."""
        parts, layout = self.parts, self.executors.plan.layout
        meets = [f"{one.site} {one.why}" for one in parts.coupled]
        moves = (move for move in parts.sharding.moves if axis_of(move.axis).cuts_samples and move.forward not in LOCAL)
        meets += [f"{move.value} moves between data ranks" for move in moves]
        if parts.lowering is None:
            meets.append("the model could not be captured")
        if layout.inner or layout.shares or layout.replicas != layout.data or layout.expert > 1 or layout.sample_parallel == "on":
            meets.append(f"the parts of ranks follow from {layout}")
        if meets:
            each = [sum(row[i] for row in rows.table) for i in range(len(rows.table[0]))]
            raise Infeasible(
                f"the batch has {rows.samples} samples, which data={len(each)} ranks share as {', '.join(map(str, each))}"
                f"{'' if rows.one_form else ', of different shapes'}, and {meets[0]}: use batches that divide into data={len(each)} equal "
                "shares, or drop the rest"
            )

    def _counter_of(self, sized: Sized, size: int, samples: int) -> Counter:
        """What counts a microbatch's totals on this rank."""

        def made() -> Counter:
            world, mesh = self.executors.world, self._mesh
            return Counter(self.parts, sized, world.group(mesh.group(world.rank, *sample_axes(mesh.inside))))

        return self.counters.of((size, samples), made)

    @cached_property
    def _mesh(self) -> Mesh:
        return self.executors.plan.layout.mesh_of(self.executors.world.rank)

    @cached_property
    def place(self) -> dict[str, int]:
        """This rank's place in its mesh."""
        return self._mesh.coordinates(self.executors.world.rank)

    def _held(self, x: Tensor, v: Variable, sized: Sized) -> Tensor:
        """Of the rows of this data rank, what this rank computes with."""
        sharding, at = sized.sharding, self.place
        want = sharding.rows(v.value, v.tensor.shape, at)
        if tuple(x.shape) != want and not self.executors.plan.uncaptured:
            raise AssertionError(f"{v.name} has shape {list(x.shape)} in a microbatch of this rank, and its capture is of {list(want)}")
        return narrowed(x, sharding.held(v.value, x.shape, at, but=sharding.sample_axes))

    def _taken(self, x: Tensor, v: Variable) -> Tensor:
        """A tensor of the batch as it is computed with."""
        dtype = getattr(torch, v.tensor.dtype)
        return x.to(device=self.executors.world.device, dtype=dtype if x.is_floating_point() else x.dtype, non_blocking=True)

    def _divisor_after_sum(self, totals: Mapping[str, Tensor], divisor: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Totals of this rank's rows, where nobody waits for those of the others: what divides is summed beside the loss."""
        if not divisor:
            raise Infeasible(
                f"{self.executors.plan.layout}: parts of the loss are divided by what is counted over all ranks' rows, for which ranks "
                "would wait for one another; give every rank the whole batch"
            )
        return totals[divisor].double(), {divisor: torch.ones_like(totals[divisor])}
