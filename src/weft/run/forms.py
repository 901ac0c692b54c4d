"""Cache of an engine's captures: training, evaluation, other batch shapes, and microbatches with data x context splits of their own.

In: a batch, or `Microbatches`. Out: the capture that runs it. All captures share parameters and gradients, since these do not depend on
how ranks are split into data x context as long as gradients are reduced over all of them.

Not supported: microbatches of different shapes in a pipeline, which would leave bubbles between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from weft.capture.capture import Loss
from weft.capture.modes import evaluation_modes, training_modes
from weft.capture.nesting import BatchForm, batch_size_of, leaves, rebuild, tensors_of
from weft.errors import Infeasible, ModelError, UsageError
from weft.lower.kernels.randomness import Draw
from weft.plan.axis import sample_axes
from weft.plan.beside import LENGTHS, SPLIT_WITH, refuse_beside
from weft.plan.layout import Layout
from weft.plan.microbatches import replica_sizes
from weft.plan.plan import Plan
from weft.plan.splits import Split, Splits, check_split, in_split, splits_of
from weft.run.build import Source, Traced
from weft.run.captured import Capture, StepInputs
from weft.run.captures import Asked, captured_in
from weft.run.recent import MOST_FORMS, Recent
from weft.run.reduce.buffers import Replicas
from weft.run.rows import Rows
from weft.run.step.executors import Executors
from weft.run.step.totals import count
from weft.run.training_parts import Parts
from weft.world.world import Group


@dataclass(frozen=True)
class Microbatches:
    """One batch as separate microbatches, the same on every rank. `splits`: (data, context) of each; None, the default: the engine chooses.

    Raises:
        UsageError: no microbatch, or another number of splits than microbatches.
    """

    batches: tuple[Any, ...]
    splits: tuple[Split | None, ...] = ()

    def __post_init__(self) -> None:
        if not self.batches or (self.splits and len(self.splits) != len(self.batches)):
            raise UsageError(f"{len(self.batches)} microbatches and {len(self.splits)} splits; give one split of each, or none")

    @property
    def samples(self) -> int:
        """Number of samples of all microbatches together."""
        return sum(map(batch_size_of, self.batches))

    def each(self) -> Iterable[tuple[Any, Split | None]]:
        """Return (batch, split) of every microbatch."""
        return zip(self.batches, self.splits or (None,) * len(self.batches), strict=True)


StepPart = tuple[Capture, Any, Rows]  # of a step: capture, batch, row assignment


@dataclass
class Forms:
    """The captures of one rank, in LRU caches by batch form. `loss`: of training and evaluation."""

    trained: Capture
    source: Source
    loss: Loss | None
    others: Recent[Capture] = field(default_factory=lambda: Recent(MOST_FORMS))
    sources: Recent[Source] = field(default_factory=lambda: Recent(MOST_FORMS))

    def of(self, batch: Any, trains: bool) -> Capture:
        """Return the capture that runs a batch: that of training, or a variant, captured if it is not cached."""
        trained, form, plan = self.trained, BatchForm.of(batch), self.trained.executors.plan
        if plan.uncaptured:
            trained.form.check_tensors(form)
            return trained
        trained.form.check_objects(form)
        if trains and form.key == trained.form.key:
            return trained
        with trained.executors.world.pace.long():
            return self.others.of((trains, form.key), lambda: self._captured(self._asked(batch, trains), form, plan.layout))

    def in_parts(self, microbatches: Microbatches, trains: bool) -> list[StepPart]:
        """Return what runs each microbatch, under its given or its fastest data x context split.

        Raises:
            Infeasible: too few rows for a split, samples that interact, a layout that runs microbatches of one form only.
        """
        plan, world = self.trained.executors.plan, self.trained.executors.world
        if plan.uncaptured:
            raise Infeasible(f"microbatches of forms of their own need a captured model ({plan.uncaptured}); give one batch")
        if reason := refuse_beside(plan.layout, SPLIT_WITH, "microbatches of forms of their own", "one batch"):
            raise Infeasible(reason)
        parts: list[StepPart] = []
        samples, num_before = microbatches.samples, 0
        for batch, given_split in microbatches.each():
            split, size = given_split or self._split_of(batch), batch_size_of(batch)
            check_split(plan.layout, split)
            layout = in_split(plan.layout, split)
            table = (replica_sizes(size, layout),)
            if not all(table[0]):
                raise Infeasible(f"a microbatch of {size} rows under data={split[0]} leaves ranks without any; use {split[0]} rows or more")
            mesh = layout.mesh_of(world.rank)
            place = mesh.place(world.rank, sample_axes(mesh.inside))
            capture = self._in_split(batch, layout, trains, samples)
            parts.append((capture, batch, Rows(table, place, True, planned=True, all_samples=samples, before=num_before)))
            num_before += size
        return parts

    def _split_of(self, batch: Any) -> Split:
        plan = self.trained.executors.plan
        length = length_of(batch, plan.splits)
        return plan.splits.chosen(batch_size_of(batch), length) if length else (plan.layout.data, plan.layout.context)

    def _in_split(self, batch: Any, layout: Layout, trains: bool, samples: int) -> Capture:
        form, size = BatchForm.of(batch), batch_size_of(batch)
        self.trained.form.check_objects(form)
        key = (trains, form.key, layout.data, layout.context)

        def build() -> Capture:
            return self._captured(replace(self._asked(batch, trains), size=size, samples=samples), form, layout.with_microbatches(2))

        with self.trained.executors.world.pace.long():
            capture = self.others.of(key, build)
        if capture.parts.coupled:
            first = capture.parts.coupled[0]
            raise Infeasible(f"{first.site} {first.why}, so that microbatches of forms of their own train something else; give one batch")
        return capture

    def _asked(self, batch: Any, trains: bool) -> Asked:
        modes = (training_modes if trains else evaluation_modes)(self.source.model)
        return Asked(modes, batch, self.loss, trains)

    def _source_of(self, form: BatchForm) -> Source:
        """Return the model source for a batch form, since a source caches captures of one form only."""
        if form.key == self.trained.form.key:
            return self.source
        return self.sources.of(form.key, lambda: Traced(self.source.model, self.source.deferred))

    def _captured(self, asked: Asked, form: BatchForm, layout: Layout) -> Capture:
        """Build the requested capture over the training weights, and connect its groups."""
        base, world = self.trained.executors, self.trained.executors.world
        plan = base.plan if layout == base.plan.layout else replace(base.plan, layout=layout, batch_size=2 * max(asked.size, layout.data))
        try:
            executors = self.lowered(asked, self._source_of(form), plan=plan)
        except ModelError as error:
            purpose = "trained with this batch" if asked.trains else "evaluated"
            raise ModelError(f"the model is trained, and cannot be {purpose}: {error}") from error
        replicas = Replicas(executors.parts, layout.mesh_of(world.rank), world)
        groups: set[Group] = set(replicas.groups)
        if plan is not base.plan and executors.parts.lowering is not None:  # built by all ranks at once, from a batch that all have
            groups.update(executors.parts.lowering.groups.values())
        for group in sorted(groups, key=lambda g: g.ranks):
            group.connect()
        return Capture(form, executors, replicas)

    def lowered(self, asked: Asked, source: Source, like: Parts | None = None, plan: Plan | None = None) -> Executors:
        """Build the executors of a capture over the training weights, sharded like `template` if it has the same operators."""
        base = self.trained.executors
        plan = plan or base.plan
        parts = captured_in(asked, replace(like or base.parts, draw=Draw(base.parts.draw.seed)), plan, source, base.world)
        read = base.gathered.read_by(parts.lowered, {v.value: v.name for v in parts.graph.parameters})
        return replace(base.of_other(parts, read, asked.trains), plan=plan)


def inputs_of_parts(parts: Sequence[StepPart]) -> list[StepInputs]:
    """Prepare the inputs of all parts of a step, with loss divisors counted over all of them; every rank has all rows.

    Raises:
        Infeasible: parts count different divisors, or only some of them count any.
    """
    prepared = [capture.before_totals(tensors_of(batch), rows) for capture, batch, rows in parts]
    counting = [microbatch_count for _, counts in prepared for microbatch_count in counts]
    if counting and len(counting) < sum(len(inputs.inputs) for inputs, _ in prepared):
        raise Infeasible("the loss divides by a count in one microbatch and not in another of the same step; make them of one kind")
    totals = count(counting, True, parts[0][0].parts.arrival) if counting else []
    for (capture, _, _), (inputs, counts) in zip(parts, prepared, strict=True):
        if counts:
            capture.add_totals(inputs, counts, totals)
    return [inputs for inputs, _ in prepared]


def length_of(batch: Any, splits: Splits) -> int:
    """Return the sequence length of a batch's rows; 0 if it is unknown."""
    tensors = tensors_of(batch)
    return next((tensors[path].shape[dim] for path, dim in splits.positions if path in tensors and tensors[path].dim() > dim), 0)


def shortened(batch: Any, positions: Sequence[tuple[str, int]], length: int) -> Any:
    """Truncate the rows of a batch to their first `length` positions."""
    dims: dict[str, list[int]] = {}
    for path, dim in positions:
        dims.setdefault(path, []).append(dim)
    leaves_by_path = {}
    for path, leaf in leaves(batch):
        for dim in dims.get(path, ()):
            leaf = leaf.narrow(dim, 0, min(length, leaf.shape[dim]))
        leaves_by_path[path] = leaf
    return rebuild(batch, leaves_by_path)


def of_every_split(batch: Any, layout: Layout) -> Microbatches:
    """Divide the rows of a batch, in order, into one microbatch for each split that has rows for all its replicas."""
    samples, tensors = batch_size_of(batch), tensors_of(batch)
    splits = [(layout_of_split.data, layout_of_split.context) for layout_of_split in reversed(splits_of(layout))]
    while sum(data for data, _ in splits) > samples:
        splits.pop()
    batches, start = [], 0
    for number, (data, _) in enumerate(splits):
        rows = slice(start, start + data if number < len(splits) - 1 else samples)
        start = rows.stop
        sliced = {path: x[rows] for path, x in tensors.items() if x.dim() and x.shape[0] == samples}
        batches.append(rebuild(batch, {path: sliced.get(path, leaf) for path, leaf in leaves(batch)}))
    return Microbatches(tuple(batches), tuple(splits))


def by_length(batch: Any, lengths: Sequence[int] | Tensor | str, splits: Splits, multiple: int = 0) -> Microbatches:
    """Group the rows of a batch into microbatches of similar length, each truncated to its longest row, rounded up to a `multiple`.

    Each microbatch gets the data x context split with which the total time is least. `lengths`: of each row, beyond which it is padding; or
    the path of a mask whose last nonzero entry ends a row.

    Raises:
        UsageError: the sequence dimensions of the batch are unknown, or what would be truncated is not padding.
    """
    tensors, samples = tensors_of(batch), batch_size_of(batch)
    if isinstance(lengths, str):
        if lengths not in tensors:
            raise UsageError(f"the batch has no tensor {lengths}, which was to give the lengths of rows; it has {', '.join(tensors)}")
        is_valid = tensors[lengths].flatten(1) != 0
        lengths = torch.where(is_valid, torch.arange(1, is_valid.shape[1] + 1, device=is_valid.device), 0).amax(1)
    lengths = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    if len(lengths) != samples or not splits.prices:
        reason = f"{len(lengths)} lengths of {samples} rows" if splits.prices else "the plan has no prices of splits"
        raise UsageError(f"{reason}; give the length of each row, and plan the model with split={LENGTHS} in its layout")
    longest = length_of(batch, splits)
    batches, splits_of_batches = [], []
    for rows, length, split in splits.grouped([min(n, longest) for n in lengths], multiple):
        index = torch.tensor(rows)
        sliced = {path: x.index_select(0, index.to(x.device)) for path, x in tensors.items() if x.dim() and x.shape[0] == samples}
        for path, dim in splits.positions:
            x = sliced.get(path, tensors.get(path))
            if x is not None and x.shape[dim] == longest > length:
                _check_padding(path, x.narrow(dim, length, longest - length))
                sliced[path] = x.narrow(dim, 0, length)
        batches.append(rebuild(batch, {path: sliced.get(path, leaf) for path, leaf in leaves(batch)}))
        splits_of_batches.append(split)
    return Microbatches(tuple(batches), tuple(splits_of_batches))


def _check_padding(path: str, behind: Tensor) -> None:
    """Raise UsageError if the entries to be truncated are not all equal, so that they are not padding."""
    if behind.numel() and not bool((behind == behind.flatten()[0]).all()):
        raise UsageError(f"{path} has other entries than padding behind the lengths of its rows; give the lengths at which padding begins")
