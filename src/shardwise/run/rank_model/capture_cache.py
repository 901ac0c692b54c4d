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

from shardwise.capture.capture import Loss
from shardwise.capture.modes import evaluation_modes, training_modes
from shardwise.capture.nesting import BatchSignature, batch_size_of, named_leaves, replace_leaves, tensors_of
from shardwise.errors import Infeasible, ModelError, UsageError
from shardwise.lower.kernels.randomness import DrawState
from shardwise.plan.compatibility import SPLIT_BY_LENGTH, SPLIT_WITH, refuse_incompatible
from shardwise.plan.data_context_splits import Split, Splits, check_split, splits_of, with_split
from shardwise.plan.ir.axis import sample_axes
from shardwise.plan.layout import Layout
from shardwise.plan.microbatches import replica_sizes
from shardwise.run.gradients.deferred_buffers import DeferredBufferUpdates
from shardwise.run.parts.lru_cache import MAX_CAPTURES, LRUCache
from shardwise.run.parts.rank_model import RankModel
from shardwise.run.parts.rows import BatchRows
from shardwise.run.rank_model.build import BuildRequest, build_rank_model
from shardwise.run.rank_model.model_source import CachedModelSource, ModelSource
from shardwise.run.rank_model.runnable_capture import RunnableCapture, StepInputs
from shardwise.run.step.executors import ExecutorCache
from shardwise.run.step.loss_divisors import count_divisors
from shardwise.world.world import Group


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
    def num_samples(self) -> int:
        """Number of samples of all microbatches together."""
        return sum(map(batch_size_of, self.batches))

    def each(self) -> Iterable[tuple[Any, Split | None]]:
        """Return (batch, split) of every microbatch."""
        return zip(self.batches, self.splits or (None,) * len(self.batches), strict=True)


StepPart = tuple[RunnableCapture, Any, BatchRows]  # of a step: capture, batch, row assignment


@dataclass
class CaptureCache:
    """The captures of one rank, in LRU caches by batch form. `loss`: of training and evaluation."""

    training_capture: RunnableCapture
    source: ModelSource
    loss: Loss | None
    variants: LRUCache[RunnableCapture] = field(default_factory=lambda: LRUCache(MAX_CAPTURES))
    sources: LRUCache[ModelSource] = field(default_factory=lambda: LRUCache(MAX_CAPTURES))

    def capture_for(self, batch: Any, trains: bool) -> RunnableCapture:
        """Return the capture that runs a batch: that of training, or a variant, captured if it is not cached."""
        trained, form, plan = self.training_capture, BatchSignature.of(batch), self.training_capture.executors.plan
        if plan.uncaptured:
            trained.form.check_tensors(form)
            return trained
        trained.form.check_objects(form)
        if trains and form.key == trained.form.key:
            return trained
        with trained.executors.world.pace.untimed():
            return self.variants.get_or_build((trains, form.key), lambda: self._build_capture(batch, trains, plan.layout))

    def step_parts(self, microbatches: Microbatches, trains: bool) -> list[StepPart]:
        """Return what runs each microbatch, under its given or its fastest data x context split.

        Raises:
            Infeasible: too few rows for a split, samples that interact, a layout that runs microbatches of one form only.
        """
        plan, world = self.training_capture.executors.plan, self.training_capture.executors.world
        if plan.uncaptured:
            raise Infeasible(f"microbatches of forms of their own need a captured model ({plan.uncaptured}); give one batch")
        if reason := refuse_incompatible(plan.layout, SPLIT_WITH, "microbatches of forms of their own", "one batch"):
            raise Infeasible(reason)
        parts: list[StepPart] = []
        samples, num_before = microbatches.num_samples, 0
        for batch, given_split in microbatches.each():
            split, size = given_split or self._choose_split(batch), batch_size_of(batch)
            check_split(plan.layout, split)
            layout = with_split(plan.layout, split)
            table = (replica_sizes(size, layout),)
            if not all(table[0]):
                raise Infeasible(f"a microbatch of {size} rows under data={split[0]} leaves ranks without any; use {split[0]} rows or more")
            mesh = layout.mesh_of(world.rank)
            place = mesh.index_along(world.rank, sample_axes(mesh.stage_axes))
            capture = self._capture_for_split(batch, layout, trains, samples)
            parts.append((capture, batch, BatchRows(table, place, True, is_planned=True, batch_size=samples, num_before=num_before)))
            num_before += size
        return parts

    def _choose_split(self, batch: Any) -> Split:
        plan = self.training_capture.executors.plan
        length = sequence_length_of(batch, plan.splits)
        return plan.splits.choose_split(batch_size_of(batch), length) if length else (plan.layout.data, plan.layout.context)

    def _capture_for_split(self, batch: Any, layout: Layout, trains: bool, samples: int) -> RunnableCapture:
        form = BatchSignature.of(batch)
        self.training_capture.form.check_objects(form)
        key = (trains, form.key, layout.data, layout.context)
        with self.training_capture.executors.world.pace.untimed():
            capture = self.variants.get_or_build(key, lambda: self._build_capture(batch, trains, layout.with_microbatches(2), samples))
        if capture.rank_model.couplings:
            first = capture.rank_model.couplings[0]
            raise Infeasible(
                f"{first.site} {first.reason}, so that microbatches of forms of their own train something else; give one batch"
            )
        return capture

    def _source_for(self, form: BatchSignature) -> ModelSource:
        """Return the model source for a batch form, since a source caches captures of one form only."""
        if form.key == self.training_capture.form.key:
            return self.source
        return self.sources.get_or_build(form.key, lambda: CachedModelSource(self.source.model, self.source.deferred))

    def _build_capture(self, batch: Any, trains: bool, layout: Layout, samples: int = 0) -> RunnableCapture:
        """Build a capture over the training weights, and connect its groups. `samples`: of a step of which `batch` is one microbatch."""
        base, form, size = self.training_capture.executors, BatchSignature.of(batch), batch_size_of(batch) if samples else 0
        plan, world, source = base.plan, base.world, self._source_for(form)
        if layout != plan.layout:
            plan = replace(plan, layout=layout, batch_size=2 * max(size, layout.data))
        modes = (training_modes if trains else evaluation_modes)(source.model)
        request = BuildRequest(
            plan, source, batch, self.loss, world, modes=modes, runs_backward=trains, microbatch_size=size, batch_size=samples
        )
        try:
            executors = self.build_executors(request)
        except ModelError as error:
            purpose = "trained with this batch" if trains else "evaluated"
            raise ModelError(f"the model is trained, and cannot be {purpose}: {error}") from error
        replicas = DeferredBufferUpdates(executors.rank_model, layout.mesh_of(world.rank), world)
        groups: set[Group] = set(replicas.groups)
        if plan is not base.plan and executors.rank_model.lowering is not None:  # built by all ranks at once, from a batch that all have
            groups.update(executors.rank_model.lowering.groups.values())
        for group in sorted(groups, key=lambda g: g.ranks):
            group.connect()
        return RunnableCapture(form, executors, replicas)

    def build_executors(self, request: BuildRequest, template: RankModel | None = None) -> ExecutorCache:
        """Build the executors of a capture over the training weights, sharded like `template` if it has the same operators."""
        base = self.training_capture.executors
        tensors = replace(template or base.rank_model, draw=DrawState(base.rank_model.draw.seed))
        parts = build_rank_model(request, tensors)
        read = base.gathered.for_capture(parts.lowered, {v.value: v.name for v in parts.graph.parameters})
        return replace(base.for_capture(parts, read, request.runs_backward), plan=request.plan)


def prepare_step_inputs(parts: Sequence[StepPart]) -> list[StepInputs]:
    """Prepare the inputs of all parts of a step, with loss divisors counted over all of them; every rank has all rows.

    Raises:
        Infeasible: parts count different divisors, or only some of them count any.
    """
    prepared = [capture.prepare_inputs(tensors_of(batch), rows) for capture, batch, rows in parts]
    counting = [microbatch_count for _, counts in prepared for microbatch_count in counts]
    if counting and len(counting) < sum(len(inputs.inputs) for inputs, _ in prepared):
        raise Infeasible("the loss divides by a count in one microbatch and not in another of the same step; make them of one kind")
    totals = count_divisors(counting, True, parts[0][0].rank_model.pending_constants) if counting else []
    for (capture, _, _), (inputs, counts) in zip(parts, prepared, strict=True):
        if counts:
            capture.add_totals(inputs, counts, totals)
    return [inputs for inputs, _ in prepared]


def sequence_length_of(batch: Any, splits: Splits) -> int:
    """Return the sequence length of a batch's rows; 0 if it is unknown."""
    tensors = tensors_of(batch)
    return next((tensors[path].shape[dim] for path, dim in splits.positions if path in tensors and tensors[path].dim() > dim), 0)


def truncate_batch(batch: Any, positions: Sequence[tuple[str, int]], length: int) -> Any:
    """Truncate the rows of a batch to their first `length` positions."""
    dims: dict[str, list[int]] = {}
    for path, dim in positions:
        dims.setdefault(path, []).append(dim)
    leaves_by_path = {}
    for path, leaf in named_leaves(batch):
        for dim in dims.get(path, ()):
            leaf = leaf.narrow(dim, 0, min(length, leaf.shape[dim]))
        leaves_by_path[path] = leaf
    return replace_leaves(batch, leaves_by_path)


def one_microbatch_per_split(batch: Any, layout: Layout) -> Microbatches:
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
        batches.append(replace_leaves(batch, {path: sliced.get(path, leaf) for path, leaf in named_leaves(batch)}))
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
        raise UsageError(f"{reason}; give the length of each row, and plan the model with split={SPLIT_BY_LENGTH} in its layout")
    longest = sequence_length_of(batch, splits)
    batches, splits_of_batches = [], []
    for rows, length, split in splits.group_rows([min(n, longest) for n in lengths], multiple):
        index = torch.tensor(rows)
        sliced = {path: x.index_select(0, index.to(x.device)) for path, x in tensors.items() if x.dim() and x.shape[0] == samples}
        for path, dim in splits.positions:
            x = sliced.get(path, tensors.get(path))
            if x is not None and x.shape[dim] == longest > length:
                _check_padding(path, x.narrow(dim, length, longest - length))
                sliced[path] = x.narrow(dim, 0, length)
        batches.append(replace_leaves(batch, {path: sliced.get(path, leaf) for path, leaf in named_leaves(batch)}))
        splits_of_batches.append(split)
    return Microbatches(tuple(batches), tuple(splits_of_batches))


def _check_padding(path: str, padding: Tensor) -> None:
    """Raise UsageError if the entries to be truncated are not all equal, so that they are not padding."""
    if padding.numel() and not bool((padding == padding.flatten()[0]).all()):
        raise UsageError(f"{path} has other entries than padding behind the lengths of its rows; give the lengths at which padding begins")
