"""Plan what runs a batch: its capture, and which of its rows this rank computes; kept for batches of one form.

In: a batch of an engine's step, global or this rank's rows of it. Out: a `PlannedBatch`, or `Microbatches` where its rows have splits of
their own. A step on a batch of a known form walks it once, and slices it by a kept recipe.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shardwise.capture.nesting import BatchLeaves, BatchSignature
from shardwise.errors import Infeasible
from shardwise.plan.ir.axis import PIPELINE, sample_axes
from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.microbatches import check_equal_shares, num_microbatches, partial_batch_sizes, replica_sizes
from shardwise.plan.plan import Plan
from shardwise.run.parts.lru_cache import MAX_MICROBATCH_SIZES, LRUCache
from shardwise.run.parts.rows import BatchRows, StageReplica
from shardwise.run.rank_agreement import check_batch_agrees
from shardwise.run.rank_model.capture_cache import CaptureCache, Microbatches, by_length, sequence_length_of
from shardwise.run.rank_model.runnable_capture import InputRecipe, RunnableCapture, StepInputs
from shardwise.schedules import schedule_of
from shardwise.world.world import Group, World


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A batch's leaves, the capture that runs it, and this rank's rows. `recipe`: of its inputs, if they follow from its form."""

    leaves: BatchLeaves
    capture: RunnableCapture
    rows: BatchRows
    recipe: InputRecipe | None

    def prepare_inputs(self, is_stale: bool) -> tuple[RunnableCapture, StepInputs]:
        """Return the capture and the inputs of a step. `is_stale`: do not wait for other ranks' counts."""
        if self.recipe is not None:
            return self.capture, self.recipe.apply(self.leaves.tensors)
        return self.capture, self.capture.step_inputs(self.leaves.tensors, self.rows, is_stale)


class BatchPlans:
    """Plans of one rank's batches. `sample_group`: the ranks with different samples."""

    def __init__(self, plan: Plan, world: World, mesh: Mesh, captures: CaptureCache, sample_group: Group) -> None:
        self._plan, self._world, self._mesh, self._captures, self._sample_group = plan, world, mesh, captures, sample_group
        cut = sample_axes(mesh.stage_axes)
        self._data_index, self._data_size = mesh.index_along(world.rank, cut), len(mesh.group(world.rank, *cut))
        self._kept: LRUCache[tuple[RunnableCapture, BatchRows, InputRecipe | None]] = LRUCache(MAX_MICROBATCH_SIZES)

    @cached_property
    def replica(self) -> StageReplica:
        """This rank's replica of its pipeline stage, which determines its rows of a batch."""
        layout = self._plan.layout.of_stage(self._mesh.coordinates(self._world.rank)[PIPELINE])
        return StageReplica(self._plan, layout, self._data_index)

    def plan_batch(
        self, batch: Any, is_global_batch: bool | None, samples: int, trains: bool, is_first: bool
    ) -> PlannedBatch | Microbatches:
        """Plan a batch. `is_first`: of the first step, before which ranks compare their batches.

        Raises:
            Infeasible: more samples than the plan's, or shares that the model cannot compute.
        """
        leaves = BatchLeaves(batch)
        samples = samples or leaves.num_samples
        key: Hashable | None = None
        if trains and not (is_first and self._world.num_ranks > 1) and (form := leaves.key) is not None:
            key = form, is_global_batch, samples
            if (kept := self._kept.find(key)) is not None:
                capture, rows, recipe = kept
                return PlannedBatch(leaves, capture, rows, recipe)
        rows, is_lasting = self._assign_rows(leaves, is_global_batch, samples, is_first)
        length = sequence_length_of(leaves.tensors, self._plan.splits) if rows.is_global_batch or len(rows.table[0]) == 1 else 0
        if length:
            return by_length(batch, [length] * rows.num_samples, self._plan.splits)
        capture = self._captures.capture_for(batch, trains)
        if key is None or not is_lasting or capture is not self._captures.training_capture:
            return PlannedBatch(leaves, capture, rows, None)
        _, _, recipe = self._kept.get_or_build(key, lambda: (capture, rows, capture.recipe_for(leaves.tensors, rows)))
        return PlannedBatch(leaves, capture, rows, recipe)

    def sizes_of(self, samples: int) -> tuple[int, ...]:
        """Return the samples of each microbatch (over all data replicas) of a batch of `samples`.

        Raises:
            Infeasible: they do not divide over data, or are too few.
        """
        plan, layout = self._plan, self._plan.layout
        if plan.uncaptured:
            check_equal_shares(samples, layout, "this model runs whole")
        return partial_batch_sizes(samples, layout, plan.batch_size, schedule_of(layout).min_microbatches)

    def _assign_rows(self, leaves: BatchLeaves, is_global_batch: bool | None, samples: int, is_first: bool) -> tuple[BatchRows, bool]:
        """Assign the rows of a batch, global or local, to replicas and microbatches; also return whether all batches of its form have the
        same."""
        plan, each, have = self._plan, self.replica.rows_per_replica, leaves.num_rows
        is_global = have > max(each) if is_global_batch is None else is_global_batch
        row_counts, one_form, is_lasting = [have], True, True
        by_rows = is_global_batch is False or samples > 0  # with per-stage meshes only some stages have all rows then
        shared = is_global or self._data_size == 1
        if shared:
            samples = have
        elif not samples:
            row_counts, one_form = self._gather_row_counts(have, BatchSignature.of_leaves(leaves))
            samples, is_lasting = sum(row_counts), False
        if samples > plan.batch_size:
            per_replica = f"{max(each)} for each" if len(set(each)) == 1 else f"{'/'.join(map(str, each))} for the ranks"
            raise Infeasible(
                f"the batch has {have} samples; the plan is for {plan.batch_size} in all, which is {per_replica} of data={self._data_size}"
            )
        if shared and not (plan.layout.inner and by_rows) and is_first and self._world.num_ranks > 1:
            check_batch_agrees(leaves.by_path, self._world)
        planned_rows = self.replica.assign_planned(self.sizes_of(samples), is_global)
        if len(row_counts) == 1 or (one_form and [sum(column) for column in zip(*planned_rows.table, strict=True)] == row_counts):
            return planned_rows, is_lasting
        most, fewest = max(replica_sizes(plan.microbatch_sizes[0], plan.layout)), schedule_of(plan.layout).min_microbatches
        return self.replica.assign_unplanned(row_counts, num_microbatches(max(row_counts), most, plan.layout, fewest), one_form), is_lasting

    def _gather_row_counts(self, rows: int, form: BatchSignature) -> tuple[list[int], bool]:
        """Gather from every rank how many rows each replica has of this step's batch, and whether all batches have the same form."""
        count_and_form = torch.tensor([[rows, form.checksum]], dtype=torch.int64, device=self._world.device)
        row_counts, forms = self._sample_group.all_gather(count_and_form, 0).T.tolist()
        return row_counts, len(set(forms)) == 1
