"""What one stage costs whatever the schedule, ZeRO stage, recomputation and offload. In: a pricer, a layout, a stage. Out: `Base`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from weft.cost.compute import Seconds
from weft.cost.gradients import Sums
from weft.cost.memory import Moments, StageState
from weft.cost.parts import Section, repeated
from weft.model.stages import Stage
from weft.plan.layout import Layout
from weft.plan.residency import Residency

if TYPE_CHECKING:
    from weft.cost.step import Pricer

MICROBATCH_S = 3e-4  # the executor's own time for one microbatch of one stage of a pipeline, on processors


@dataclass(frozen=True, slots=True)
class Load:
    """One layer of a stage: seconds of its forward's compute, bytes that it keeps of a microbatch for backward and that none behind it
    does, bytes that enter it, which outlive a drop, and seconds of its forward's collectives."""

    name: str
    forward_s: float
    saved_bytes: float
    entering_bytes: float
    collectives_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Base:
    """`block` is what recomputing layers repeats, `scores_s` what selective does; `weight_s` are for the gradients of weights. `first`:
    the first stage that is like it."""

    compute: Seconds
    tensor: Seconds
    block: Callable[[Residency], Seconds]  # forward: compute, backward: collectives
    scores_s: float
    weight_s: float
    sums: Sums
    state: StageState
    by_layer: Callable[[Residency], StageState]  # the same with what its layers keep
    loads: Callable[[], tuple[Load, ...]]  # its layers, in order
    first: int


def base_of(pricer: Pricer, layout: Layout, stage: Stage, section: Section) -> Base:
    """What a stage of these operators costs under a layout."""
    parts, ops = pricer.parts(layout), section.operators
    times = [one[ops] for one in pricer.operator_seconds(layout)]
    busy, network = Seconds(*(float(t.sum()) for t in times[:2])), Seconds(*(float(t.sum()) for t in times[2:]))

    @cache
    def block(which: Residency) -> Seconds:
        again = repeated(parts, ops, which, stage.index)
        return Seconds(float(times[0][again].sum()), float(times[2][again].sum()))

    scores_s = float(times[0][parts.attention[ops]].sum()) if pricer.keeps_scores else 0.0
    held, scale = section.held, pricer.microbatch(layout)
    widths = pricer.widths(layout)
    elsewhere = held.expert * (1 - 1 / layout.expert)  # experts of other ranks
    incoming = sum(pricer.crossing(layout, values) for _, values in stage.receives) / layout.data
    if pricer.cluster.is_cpu:
        if layout.num_ranks * layout.microbatches > 1:
            busy += Seconds(MICROBATCH_S / 2, MICROBATCH_S / 2)
        # Every microbatch but the first reads, adds to and writes the gradients that are there.
        adding = 3 * widths.gradient * (held.trainable - elsewhere) / pricer.speed(layout).memory_bandwidth_bytes_per_s
        busy += Seconds(0.0, adding * (layout.microbatches - 1) / layout.microbatches)
    else:
        stack, device = pricer.efficiency, pricer.cluster.device
        # Wider gradients are read and written wider.
        moved = stack.accumulate_bytes + 2 * max(0.0, widths.gradient - stack.gradient_bytes)
        adding = moved * (held.trainable - elsewhere) / (device.memory_bandwidth_bytes_per_s * stack.bandwidth)
        busy += Seconds(stack.microbatch_s / 2, stack.microbatch_s / 2 + adding * (layout.microbatches > 1))
        outgoing = sum(pricer.transfer_s(layout, pricer.crossing(layout, values)) for _, values in stage.sends)
        back = sum(pricer.transfer_s(layout, pricer.crossing(layout, values)) for _, values in stage.receives)
        if layout.microbatches > 1:
            network += Seconds(stack.exposed_sends * outgoing, stack.exposed_sends * back)
    kept = section.kept.at(scale, layout.data)
    scores = 0.0
    if pricer.keeps_scores:
        # Two tensors of scores and a mask (Korthikanti et al. 2022, equation 1: 5as/h of sbh).
        scores = section.score_bytes.at(scale, layout.data) * (1.25 if layout.precision in ("float16", "bfloat16") else 2.25)
    wide = 2.0 if layout.precision == "float64" else 1.0
    moments, beside = _moments(pricer, layout, section)
    state = StageState(
        held.number - elsewhere,
        held.trainable - elsewhere,
        incoming,
        elsewhere,
        0.0,
        kept * wide + scores,
        scores,
        moments,
        beside,
        moved_bytes=kept * wide + scores,
    )

    @cache
    def by_layer(which: Residency) -> StageState:
        blocks = section.by_block(which, stage.index)
        inside = pricer.layer_bytes(layout) if blocks.count > 1 or parts.repeated[ops].any() else incoming
        amounts = (blocks.fullest, blocks.outside, blocks.fullest_again, blocks.fullest_moved, blocks.others, blocks.behind)
        fullest, outside, again, moved, others, behind = (amount.at(scale, layout.data) * wide for amount in amounts)
        each = scores / blocks.count if which.recompute.kind != "selective" else 0.0
        return replace(
            state, layer_bytes=inside, fullest_bytes=fullest + scores / blocks.count, outside_bytes=outside,
            layers_again=blocks.again, fullest_again_bytes=again + each if blocks.again else 0.0,
            fullest_moved_bytes=moved + each if blocks.num_moved else 0.0,
            moved_bytes=blocks.moved.at(scale, layout.data) * wide + each * blocks.num_moved if which.offload.picks else state.moved_bytes,
            others_bytes=others + each * (blocks.count - blocks.again - blocks.num_moved), behind_bytes=behind,
        )  # fmt: skip

    def loads() -> tuple[Load, ...]:
        inside = by_layer(Residency()).layer_bytes
        each = scores / len(section.groups.names)
        return tuple(
            Load(
                name,
                float(times[0][section.groups.where[name]].sum()),
                section.groups.adds[name].at(scale, layout.data) * wide + each,
                inside,
                float(times[2][section.groups.where[name]].sum()),
            )
            for name in section.groups.names
        )

    # A product's backward is two products alike, one for its input and one for its weights, and weights' gradients are added up.
    weight_s = 0.5 * float(times[1][pricer.weighted[ops]].sum()) + adding * (layout.microbatches > 1)
    return Base(busy, network, block, scores_s, weight_s, Sums(held.sums, held.tied, held.number), state, by_layer, loads, stage.index)


def like(base: Base, own: Callable[[], Base]) -> Base:
    """What a stage costs that is like `base`'s; its `own` is worked out where layers are told apart, by name or by how many of a stage."""

    def block(which: Residency) -> Seconds:
        return (own() if which.picks else base).block(which)

    def by_layer(which: Residency) -> StageState:
        return (own() if which.picks else base).by_layer(which)

    return replace(base, block=block, by_layer=by_layer, loads=lambda: own().loads())


def _moments(pricer: Pricer, layout: Layout, section: Section) -> tuple[Moments, Moments]:
    """The most that is there for a moment of backward, and the most of that less what of the kept bytes is gone by then."""
    parts, ops, runs, widths = pricer.parts(layout), section.operators, section.runs(layout.expert), pricer.widths(layout)
    scale = pricer.microbatch(layout)
    wide = 2.0 if layout.precision == "float64" else 1.0
    narrow = {"float64": 2.0, "float16": 0.5, "bfloat16": 1.0 if pricer.cluster.is_cpu else 0.5}.get(layout.precision, 1.0)
    tensors = parts.working_bytes[ops] * np.where(parts.shared[ops], scale / layout.data, scale)
    whole = runs.working(narrow * (tensors + parts.weight_bytes[ops]))
    scattered = whole + runs.scattering(widths.gradient, layout.data)
    every = (whole, scattered, scattered + runs.gathered(widths.weight))
    gone = wide * runs.gone(scale, layout.data)
    return Moments(*(float(one.max()) for one in every)), Moments(*(float((one - gone).max()) for one in every))
