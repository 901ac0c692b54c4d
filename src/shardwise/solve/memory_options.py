"""Ways to trade time for memory (ZeRO stage, recomputation, offload, segment) under which a base may fit, with bounds of their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardwise.cost.step import Pricer, combine_stage_memory
from shardwise.cost.step_time.timing import balanced_sites
from shardwise.errors import Infeasible, LayoutError
from shardwise.plan.layout import Layout
from shardwise.plan.residency import CHEAP, RECOMPUTE_KINDS
from shardwise.schedules import schedule_of
from shardwise.solve.bounds import largest_device_memory, largest_tensor_memory, layout_lower_bound_s, state_bytes_lower_bound
from shardwise.solve.space import SearchSpace

FIRST_STAGE_TOLERANCE = 1.2  # of the memory: need of the first balanced stage up to which other stages could still fit
MemoryOptions = tuple[int, str, str, int]  # ZeRO stage, recomputation, offload, segment


@dataclass
class MemoryOptionTable:
    """The memory options of the bases of a search, each computed once. `tries_all`: segments also where single layers fit."""

    pricer: Pricer
    space: SearchSpace
    tries_all: bool
    bounds_s: dict[tuple[Layout, bool], dict[MemoryOptions, float]] = field(default_factory=dict)
    _fitting: dict[Layout, dict[MemoryOptions, Layout]] = field(default_factory=dict)

    def lower_bounds_s(self, base: Layout, is_interleaved: bool) -> dict[MemoryOptions, float]:
        """Return every memory option under which the base may fit, with a lower bound in seconds: the same for any segment."""
        key = (base, is_interleaved)
        if key not in self.bounds_s:
            seconds: dict[Layout, float] = {}
            for option in map(with_segment_of_one, self.fitting_layouts(base).values()):
                if option not in seconds:
                    seconds[option] = layout_lower_bound_s(self.pricer, option, is_interleaved)
            self.bounds_s[key] = {options: seconds[with_segment_of_one(option)] for options, option in self.fitting_layouts(base).items()}
        return self.bounds_s[key]

    def fitting_layouts(self, base: Layout) -> dict[MemoryOptions, Layout]:
        """Return the memory options under which the base may fit, with the layout: under which the first stage of 1F1B nearly does, or the
        first rank of a schedule of one stage a rank that a constraint names, which may need less. GPipe holds as many microbatches or more,
        and chunks (p - 1)/v more. Without a pipeline segments are tried only where single layers do not fit, since they take as long.
        """
        if base not in self._fitting:
            pricer, layouts = self.pricer, {}
            available, tensor_bytes = largest_device_memory(pricer, base), largest_tensor_memory(pricer, base)
            try:
                sites = balanced_sites(pricer, base) if base.pipeline > 1 else ()  # the same for all
                fitting: set[Layout] = set()
                named = [s for s in self.space.schedules(base) if s.chunks == 1 and self.space.is_requested("schedule", s.schedule)]
                for option in self.space.memory_options(base):
                    fits_without = option.segment > 1 and with_segment_of_one(option) in fitting
                    if state_bytes_lower_bound(pricer, option) > tensor_bytes or fits_without:
                        continue
                    needed = first_rank_bytes(pricer, replace(option, schedule=named[0].schedule) if named else option, sites)
                    if needed <= available and base.pipeline == 1 and not self.tries_all:
                        fitting.add(with_segment_of_one(option))
                    if needed <= FIRST_STAGE_TOLERANCE * available:
                        layouts[option.zero, option.recompute, option.offload, option.segment] = option
            except (Infeasible, LayoutError):  # the model has too few places for so many stages
                pass
            self._fitting[base] = layouts
        return self._fitting[base]


def first_rank_bytes(pricer: Pricer, layout: Layout, sites: Sequence[str]) -> float:
    """Bytes that the first rank of a pipeline holds."""
    schedule = schedule_of(layout)
    return combine_stage_memory(pricer.stage_memories(layout, sites, schedule.stages_of[0]), schedule, 0).total


def with_memory_options(layout: Layout, options: MemoryOptions) -> Layout:
    """Return the layout under a memory option."""
    zero, recompute, offload, segment = options
    return replace(layout, zero=zero, recompute=recompute, offload=offload, segment=segment)


def with_segment_of_one(layout: Layout) -> Layout:
    """Return the layout with layers recomputed one at a time."""
    return replace(layout, segment=1) if layout.segment > 1 else layout


def is_dominated_by(layout: Layout, other: Layout) -> bool:
    """Return whether `layout` only saves memory where `other` does not, at no less time: it recomputes more, or offloads activations.

    ZeRO stages and an optimizer on the host may each be the faster, so none of them dominates another.
    """
    at_least_offloaded = {"none": ("none", "activations"), "optimizer": ("optimizer", "all")}.get(other.offload, (other.offload,))
    kinds = other.residency.recompute.kind, layout.residency.recompute.kind
    recomputes_more = RECOMPUTE_KINDS.index(kinds[0]) <= RECOMPUTE_KINDS.index(kinds[1]) and kinds != ("selective", CHEAP)
    return recomputes_more and layout.offload in at_least_offloaded and other.zero == layout.zero
