"""What one stage costs whatever the schedule, ZeRO stage, recomputation and offload. In: a pricer, a layout, a stage. Out: `Base`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weft.cost.devices.compute import Seconds
from weft.cost.devices.convolutions import takes
from weft.cost.memory.memory import Moments, StageState
from weft.cost.memory.runs import Runs, behind
from weft.cost.stages.gradients import Sums
from weft.cost.stages.sections import Section, repeated
from weft.model.stages.stages import Stage
from weft.plan.layout import Layout
from weft.plan.precision import PRECISIONS
from weft.plan.residency import Residency
from weft.schedules import schedule_of

if TYPE_CHECKING:
    from weft.cost.step import Pricer

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Load:
    """One layer of a stage: seconds of its forward's compute, bytes that it keeps of a microbatch for backward and that none behind it
    does, bytes that enter it and none before it, which outlive a drop, and seconds of its forward's collectives; the most bytes that its
    backward works on, and that are back at once of what was moved (all, where they are not given)."""

    name: str
    forward_s: float
    saved_bytes: float
    entering_bytes: float
    collectives_s: float = 0.0
    working_bytes: float = 0.0
    back_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Ends:
    """What stands outside of a stage's layers: the most bytes that backward works on before the first and behind the last, and what is
    kept behind the last."""

    first_bytes: float = 0.0
    last_bytes: float = 0.0
    behind_bytes: float = 0.0


NOTHING = Ends()


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
    ends: Callable[[], Ends]
    first: int


def base_of(pricer: Pricer, layout: Layout, stage: Stage, section: Section) -> Base:
    """What a stage of these operators costs under a layout."""
    parts, ops = pricer.parts(layout), section.operators
    times = [one[ops] for one in pricer.operator_seconds(layout)]
    busy, network = Seconds(*(float(t.sum()) for t in times[:2])), Seconds(*(float(t.sum()) for t in times[2:]))

    @cache
    def repeating(which: Residency) -> Seconds:
        again = repeated(parts, ops, which, stage.index)
        return Seconds(float(times[0][again].sum()), float(times[2][again].sum()))

    def block(which: Residency) -> Seconds:
        return repeating(which.of_stage(stage.index))

    scores_s = float(times[0][parts.attention[ops]].sum()) if pricer.devices.keeps_scores else 0.0
    held, scale = section.held, pricer.microbatch(layout)
    elsewhere = held.expert * (1 - 1 / pricer.expert_ways(layout))  # experts of other ranks
    incoming = sum(pricer.crossing(layout, values) for _, values in stage.receives) / layout.data
    learn = pricer.inventory.grads
    leaving = sum(pricer.crossing(layout, [v for v in values if v in learn]) for _, values in stage.sends) / layout.data
    busy, adding = pricer.devices.microbatch(layout, busy, held.trainable - elsewhere)
    if layout.microbatches > 1 and (exposed := pricer.devices.exposed_sends):
        outgoing = sum(handed_s(pricer, layout, stage.index, to, values) for to, values in stage.sends)
        back = sum(handed_s(pricer, layout, source, stage.index, values) for source, values in stage.receives)
        network += Seconds(exposed * outgoing, exposed * back)
    layers_moved = pricer.devices.layers_moved
    scores = 0.0
    if pricer.devices.keeps_scores:
        # Two tensors of scores and a mask (Korthikanti et al. 2022, equation 1: 5as/h of sbh).
        scores = section.score_bytes.at(scale, layout.data) * (1.25 if PRECISIONS[layout.precision].products else 2.25)
    wide = 2.0 if layout.precision == "float64" else 1.0
    works, runs, costs = _moments(pricer, layout, section)
    each_keeps = wide * section.activations.at(scale, layout.data)
    activations, gone = float(each_keeps.sum()), behind(each_keeps)
    state = StageState(
        held.number - elsewhere,
        held.trainable - elsewhere,
        incoming,
        elsewhere,
        activations + scores,
        scores,
        Moments(*(float((works - gone + one).max()) for one in costs)),
        moved_bytes=activations + scores,
        num_unsummed=held.unsummed if layout.weight_ranks > 1 else 0.0,
        leaving_bytes=leaving,
        from_backward=_from_backward(pricer, layout),
    )

    @cache
    def staying(which: Residency) -> StageState:
        mine = section.staying(which, stage.index, layout.num_stages == 1, layers_moved == 1)
        each = scores / mine.num_layers if which.recompute.kind != "selective" else 0.0
        columns = (mine.activations, mine.there, mine.back, mine.forward, mine.at_once)
        stays, there, back, forward, at_once = (wide * one.at(scale, layout.data) for one in columns)
        if layers_moved > 1:  # all of a layer comes back together, and meanwhile the next
            back = runs.over(at_once + (at_once > 0) * (layers_moved - 1) * at_once.max(), len(back))
        # What was dropped or moved is there again beside what works on it, and what those behind it kept is gone by then.
        moments = np.maximum(works + there + back, forward) + runs.over(each * mine.present, len(back)) - behind(stays)
        at = [int((moments + one).argmax()) for one in costs]
        beside = [float(min(works[i], moments[i]) + one[i]) for one, i in zip(costs, at, strict=True)]
        return replace(
            state, kept_bytes=float(stays.sum()) + each * (mine.num_layers - float(mine.away.sum())), scores_bytes=0.0,
            beside=Moments(*beside), there=Moments(*(float(max(0.0, moments[i] - works[i])) for i in at)),
            moved_bytes=mine.moved.at(scale, layout.data) * wide + each * mine.num_moved,
        )  # fmt: skip

    def by_layer(which: Residency) -> StageState:
        return staying(which.of_stage(stage.index))

    @cache
    def loads() -> tuple[Load, ...]:
        groups = section.groups
        each = scores / len(groups.names)
        moved = section.staying(Residency.parse("none", "activations:*"), stage.index, False, layers_moved == 1)
        back, forward = (wide * one.at(scale, layout.data) for one in (moved.back, moved.forward))
        rows = []
        for name in groups.names:
            at = groups.where[name]
            saved, working = groups.adds[name].at(scale, layout.data) * wide + each, float(works[at].max())
            come = saved if layers_moved > 1 else float(np.maximum(works + back, forward)[at].max()) - working
            rows.append(Load(
                name, float(times[0][at].sum()), saved, groups.enters[name].at(scale, layout.data) * wide, float(times[2][at].sum()),
                working, come,
            ))  # fmt: skip
        return tuple(rows)

    @cache
    def ends() -> Ends:
        where = section.groups.where
        first, last = min(int(at[0]) for at in where.values()), max(int(at[-1]) for at in where.values())
        return Ends(float(works[:first].max(initial=0.0)), float((works - gone)[last + 1 :].max(initial=0.0)), float(gone[last]))

    # A product's backward is two products alike, one for its input and one for its weights, and weights' gradients are added up.
    weight_s = 0.5 * float(times[1][pricer.weighted[ops]].sum()) + adding
    sums = Sums(held.sums, held.tied, held.number)
    return Base(busy, network, block, scores_s, weight_s, sums, state, by_layer, loads, ends, stage.index)


def handed_s(pricer: Pricer, layout: Layout, stage: int, to: int, values: Sequence[str]) -> float:
    """Seconds of handing `values` of one microbatch from a stage to another on the same kind of device."""
    places, size = schedule_of(layout).ranks_of, pricer.crossing(layout, values)
    if max(stage, to) >= len(places):  # of parts of stages, of which what they hold is asked
        return pricer.transfer_s(layout, size)
    return pricer.transfer_s(layout, size, places[stage][0], places[to][0])


def like(base: Base, index: int, names: Callable[[], Sequence[str]], make: Callable[[], Base]) -> Base:
    """What stage `index` costs that is like `base`'s; its `make` is worked out where layers, called `names`, are told apart by name."""

    def block(which: Residency) -> Seconds:
        return (make() if which.names else base).block(which.of_stage(index))

    def by_layer(which: Residency) -> StageState:
        return (make() if which.names else base).by_layer(which.of_stage(index))

    def loads() -> tuple[Load, ...]:
        return tuple(replace(load, name=name) for load, name in zip(base.loads(), names(), strict=True))

    return replace(base, block=block, by_layer=by_layer, loads=loads)


def _from_backward(pricer: Pricer, layout: Layout) -> bool:
    """Whether forward finds no gradients: of a rank that makes one backward, and sums them with no other (`run/reduce/overlapped`).

    Of tensor ranks, those of norms and the like that are summed are too few to count.
    """
    alone = layout.num_ranks == layout.pipeline * layout.tensor
    return not pricer.devices.keeps_gradients and layout.microbatches == 1 and alone


def _moments(pricer: Pricer, layout: Layout, section: Section) -> tuple[Array, Runs, tuple[Array, Array, Array]]:
    """By operator the bytes that its backward works on; the runs; by operator what else is there for a moment, by stage of ZeRO: where
    gradients and weights are whole nothing, or less than nothing for gradients that have not come yet; then whole gradients on their way,
    then gathered weights as well."""
    parts, ops, runs = pricer.held_parts(layout), section.operators, section.runs(pricer.expert_ways(layout))
    devices, scale = pricer.devices, pricer.microbatch(layout)
    widths = devices.widths(layout.precision)
    narrow = 2.0 if layout.precision == "float64" else 0.5 if devices.is_half(layout) else 1.0
    follows = np.where(parts.shared[ops], scale / layout.data, np.where(parts.batched[ops], scale, 1.0))
    threads = pricer.cluster.threads_of(layout.num_ranks, layout.threads)
    samples, alone, thin = (which[ops] for which in parts.torch_kernels)
    each, batch_size = pricer.samples(layout), pricer.graph.batch_size
    exact = samples * np.where(parts.shared[ops], each, np.where(parts.batched[ops], each * layout.data, batch_size)) / batch_size
    by_torch = (layout.precision == "float64") | takes(exact, alone, thin, threads)
    tensors = follows * np.where(by_torch, parts.torch_bytes[ops], parts.working_bytes[ops])
    works = tensors + parts.weight_bytes[ops] + parts.waiting.of_some(ops).at(scale, layout.data)
    scattered = runs.scattering(widths.gradient, layout.weight_ranks, len(works))
    coming = -widths.gradient * runs.missing * _from_backward(pricer, layout)
    return narrow * works, runs, (coming, scattered, scattered + runs.over(runs.gathered(widths.weight), len(works)))
