"""Cost of one stage independent of schedule, ZeRO stage, recomputation and offload (`StageBaseCost`). In: a pricer, a layout, a stage."""

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
    """One layer of a stage: seconds of its forward's compute, bytes of a microbatch that it saves for backward and no later layer does,
    bytes that enter it and no earlier layer, which recomputation retains, and seconds of its forward's collectives; peak workspace of its
    backward, and the most offloaded bytes that are loaded at once (all of them if None)."""

    name: str
    forward_s: float
    saved_bytes: float
    entering_bytes: float
    collectives_s: float = 0.0
    working_bytes: float = 0.0
    back_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Ends:
    """Memory outside of a stage's layers: peak workspace of backward before the first and after the last layer, and bytes saved
    after the last."""

    first_bytes: float = 0.0
    last_bytes: float = 0.0
    behind_bytes: float = 0.0


NOTHING = Ends()


@dataclass(frozen=True, slots=True)
class Base:
    """Base cost of a stage. `recomputed`: seconds of recomputing layers, `scores_s` of selective recomputation; `weight_s`: backward
    seconds of weight gradients. `first_equal`: the first equal stage."""

    compute: Seconds
    tensor: Seconds
    block: Callable[[Residency], Seconds]  # forward: compute, backward: collectives
    scores_s: float
    weight_s: float
    sums: Sums
    state: StageState
    by_layer: Callable[[Residency], StageState]  # the same under recomputation and offload of its layers
    loads: Callable[[], tuple[Load, ...]]  # its layers, in order
    ends: Callable[[], Ends]
    first: int


def base_of(pricer: Pricer, layout: Layout, stage: Stage, section: Section) -> Base:
    """Return the base cost of a stage under a layout."""
    parts, ops = pricer.parts(layout), section.operators
    times = [x[ops] for x in pricer.operator_seconds(layout)]
    busy, network = Seconds(*(float(t.sum()) for t in times[:2])), Seconds(*(float(t.sum()) for t in times[2:]))

    @cache
    def recomputed_s(residency: Residency) -> Seconds:
        is_rerun = repeated(parts, ops, residency, stage.index)
        return Seconds(float(times[0][is_rerun].sum()), float(times[2][is_rerun].sum()))

    def block(residency: Residency) -> Seconds:
        return recomputed_s(residency.of_stage(stage.index))

    scores_s = float(times[0][parts.attention[ops]].sum()) if pricer.devices.keeps_scores else 0.0
    parameters, scale = section.held, pricer.microbatch(layout)
    elsewhere = parameters.expert * (1 - 1 / pricer.expert_ways(layout))  # experts of other ranks
    incoming = sum(pricer.crossing(layout, values) for _, values in stage.receives) / layout.data
    learn = pricer.inventory.grads
    leaving = sum(pricer.crossing(layout, [v for v in values if v in learn]) for _, values in stage.sends) / layout.data
    busy, adding = pricer.devices.microbatch(layout, busy, parameters.trainable - elsewhere)
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
        parameters.number - elsewhere,
        parameters.trainable - elsewhere,
        incoming,
        elsewhere,
        activations + scores,
        scores,
        Moments(*(float((works - gone + x).max()) for x in costs)),
        moved_bytes=activations + scores,
        num_unsummed=parameters.unsummed if layout.weight_ranks > 1 else 0.0,
        leaving_bytes=leaving,
        from_backward=_from_backward(pricer, layout),
    )

    @cache
    def layered_state(residency: Residency) -> StageState:
        amounts = section.staying(residency, stage.index, layout.num_stages == 1, layers_moved == 1)
        each = scores / amounts.num_layers if residency.recompute.kind != "selective" else 0.0
        columns = (amounts.activations, amounts.there, amounts.back, amounts.forward, amounts.at_once)
        stays, there, back, forward, at_once = (wide * x.at(scale, layout.data) for x in columns)
        if layers_moved > 1:  # a layer is loaded as a whole, and meanwhile the next
            back = runs.over(at_once + (at_once > 0) * (layers_moved - 1) * at_once.max(), len(back))
        # Recomputed or loaded tensors add to the workspace; tensors saved by later operators are freed by then.
        moments = np.maximum(works + there + back, forward) + runs.over(each * amounts.present, len(back)) - behind(stays)
        at = [int((moments + x).argmax()) for x in costs]
        beside = [float(min(works[i], moments[i]) + x[i]) for x, i in zip(costs, at, strict=True)]
        return replace(
            state, kept_bytes=float(stays.sum()) + each * (amounts.num_layers - float(amounts.away.sum())), scores_bytes=0.0,
            beside=Moments(*beside), there=Moments(*(float(max(0.0, moments[i] - works[i])) for i in at)),
            moved_bytes=amounts.moved.at(scale, layout.data) * wide + each * amounts.num_moved,
        )  # fmt: skip

    def by_layer(residency: Residency) -> StageState:
        return layered_state(residency.of_stage(stage.index))

    @cache
    def loads() -> tuple[Load, ...]:
        groups = section.groups
        each = scores / len(groups.names)
        moved = section.staying(Residency.parse("none", "activations:*"), stage.index, False, layers_moved == 1)
        back, forward = (wide * x.at(scale, layout.data) for x in (moved.back, moved.forward))
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

    # A product's backward is two equal products, for its input and for its weights; weight gradients are accumulated.
    weight_s = 0.5 * float(times[1][pricer.weighted[ops]].sum()) + adding
    sums = Sums(parameters.sums, parameters.tied, parameters.number)
    return Base(busy, network, block, scores_s, weight_s, sums, state, by_layer, loads, ends, stage.index)


def handed_s(pricer: Pricer, layout: Layout, stage: int, to: int, values: Sequence[str]) -> float:
    """Seconds of sending `values` of one microbatch from a stage to another on the same kind of device."""
    places, size = schedule_of(layout).ranks_of, pricer.crossing(layout, values)
    if max(stage, to) >= len(places):  # a pipeline of sub-stages, priced for their memory
        return pricer.transfer_s(layout, size)
    return pricer.transfer_s(layout, size, places[stage][0], places[to][0])


def like(base: Base, index: int, names: Callable[[], Sequence[str]], make: Callable[[], Base]) -> Base:
    """Return the cost of stage `index`, reusing that of a structurally equal stage. `build` computes its own cost, needed only if layers,
    called `names`, are selected by name."""

    def block(residency: Residency) -> Seconds:
        return (make() if residency.names else base).block(residency.of_stage(index))

    def by_layer(residency: Residency) -> StageState:
        return (make() if residency.names else base).by_layer(residency.of_stage(index))

    def loads() -> tuple[Load, ...]:
        return tuple(replace(layer, name=name) for layer, name in zip(base.loads(), names(), strict=True))

    return replace(base, block=block, by_layer=by_layer, loads=loads)


def _from_backward(pricer: Pricer, layout: Layout) -> bool:
    """Return whether no gradients exist during forward: for one backward per step without gradient reduction (`run/reduce/overlapped`).

    Reduced gradients of norms and the like on tensor ranks are too few to count.
    """
    alone = layout.num_ranks == layout.pipeline * layout.tensor
    return not pricer.devices.keeps_gradients and layout.microbatches == 1 and alone


def _moments(pricer: Pricer, layout: Layout, section: Section) -> tuple[Array, Runs, tuple[Array, Array, Array]]:
    """Return (workspace of backward by operator, the runs, additional transient bytes by operator for each ZeRO stage): with full gradients
    and weights 0, or negative for gradients not yet computed; then full gradients in reduction; then all-gathered weights as well."""
    parts, ops, runs = pricer.held_parts(layout), section.operators, section.runs(pricer.expert_ways(layout))
    devices, scale = pricer.devices, pricer.microbatch(layout)
    widths = devices.widths(layout.precision)
    width_factor = 2.0 if layout.precision == "float64" else 0.5 if devices.is_half(layout) else 1.0
    batch_factor = np.where(parts.shared[ops], scale / layout.data, np.where(parts.batched[ops], scale, 1.0))
    threads = pricer.cluster.threads_of(layout.num_ranks, layout.threads)
    samples, single, thin = (which[ops] for which in parts.torch_kernels)
    local, batch_size = pricer.samples(layout), pricer.graph.batch_size
    exact = samples * np.where(parts.shared[ops], local, np.where(parts.batched[ops], local * layout.data, batch_size)) / batch_size
    by_torch = (layout.precision == "float64") | takes(exact, single, thin, threads)
    tensors = batch_factor * np.where(by_torch, parts.torch_bytes[ops], parts.working_bytes[ops])
    workspace = tensors + parts.weight_bytes[ops] + parts.waiting.of_some(ops).at(scale, layout.data)
    scattered = runs.scattering(widths.gradient, layout.weight_ranks, len(workspace))
    missing = -widths.gradient * runs.missing * _from_backward(pricer, layout)
    return width_factor * workspace, runs, (missing, scattered, scattered + runs.over(runs.gathered(widths.weight), len(workspace)))
