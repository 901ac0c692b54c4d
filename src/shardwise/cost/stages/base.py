"""Cost of one stage independent of schedule, ZeRO stage, recomputation and offload (`StageBaseCost`). In: a pricer, a layout, a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.devices.compute import Seconds
from shardwise.cost.devices.convolutions import uses_torch_kernel
from shardwise.cost.memory.block_runs import DEFAULT_BUCKET_ELEMENTS, BlockRuns, saved_by_later
from shardwise.cost.memory.memory import PeakByZeroStage, StageState
from shardwise.cost.operators.layer_saving import without_last_products
from shardwise.cost.operators.sharded_inventory import ShardedInventory
from shardwise.cost.shard_counts import num_shards
from shardwise.cost.stages.gradients import GradientVolume
from shardwise.cost.stages.sections import StageSection, is_recomputed
from shardwise.model.stages.stages import Stage
from shardwise.plan.ir.precision import PRECISIONS
from shardwise.plan.layout import Layout
from shardwise.plan.residency import CHEAP, Residency
from shardwise.schedules import schedule_of

if TYPE_CHECKING:
    from shardwise.cost.step import Pricer

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer of a stage: seconds of its forward's compute, bytes of a microbatch that it saves for backward and no later layer does,
    bytes that enter it and no earlier layer, which recomputation retains, and seconds of its forward's collectives; peak workspace of its
    backward, and the most offloaded bytes that are loaded at once (all of them if None). `cheap_s`, `cheap_bytes`: seconds of
    recomputing its cheap operators, and saved bytes that this frees."""

    name: str
    forward_s: float
    saved_bytes: float
    entering_bytes: float
    collectives_s: float = 0.0
    working_bytes: float = 0.0
    loaded_bytes: float | None = None
    cheap_s: float = 0.0
    cheap_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class UnlayeredCost:
    """Memory outside of a stage's layers: peak workspace of backward before the first and after the last layer, and bytes saved
    after the last."""

    first_bytes: float = 0.0
    last_bytes: float = 0.0
    saved_after_bytes: float = 0.0


ALL_CHEAP = Residency.parse(CHEAP, "none")
NO_UNLAYERED_COST = UnlayeredCost()


@dataclass(frozen=True, slots=True)
class StageBaseCost:
    """Base cost of a stage. `recomputed`: seconds of recomputing layers, `scores_s` of selective recomputation; `weight_s`: backward
    seconds of weight gradients. `first_equal`: the first equal stage. `state`: with buckets of the default size; `state_with` is given the
    elements of a bucket. `hidden_s`: seconds of collectives inside layers that run beside products of backward."""

    compute: Seconds
    collectives: Seconds
    recomputed: Callable[[Residency], Seconds]  # forward: compute, backward: collectives
    scores_s: float
    weight_s: float
    gradient_volume: GradientVolume
    state: StageState
    state_with: Callable[[float], StageState]
    by_layer: Callable[[Residency, float], StageState]  # the same under recomputation and offload of its layers
    layer_costs: Callable[[], tuple[LayerCost, ...]]  # its layers, in order
    unlayered_cost: Callable[[], UnlayeredCost]
    first_equal: int
    hidden_s: float = 0.0


def stage_base_cost(pricer: Pricer, layout: Layout, stage: Stage, section: StageSection) -> StageBaseCost:
    """Return the base cost of a stage under a layout."""
    parts, ops = pricer.with_layer_saving(layout, pricer.sharded_inventory(layout)), section.operators
    times = [x[ops] for x in pricer.operator_seconds(layout)]
    busy, network = Seconds(*(float(t.sum()) for t in times[:2])), Seconds(*(float(t.sum()) for t in times[2:]))

    @cache
    def recomputed_s(residency: Residency) -> Seconds:
        return _recomputed_seconds(pricer, layout, parts, ops, residency, stage.index)

    def block(residency: Residency) -> Seconds:
        return recomputed_s(residency.of_stage(stage.index))

    scores_s = float(times[0][parts.attention[ops]].sum()) if pricer.devices.saves_scores else 0.0
    parameters, scale = section.parameters, pricer.microbatch(layout)
    elsewhere = parameters.num_expert * (1 - 1 / pricer.expert_divisor(layout))  # experts of other ranks
    learn = pricer.inventory.grads
    incoming = _rank_boundary_bytes(pricer, layout, (v for _, values in stage.receives for v in values))
    leaving = _rank_boundary_bytes(pricer, layout, (v for _, values in stage.sends for v in values if v in learn))
    busy, adding = pricer.devices.with_microbatch_overhead(layout, busy, parameters.num_trainable - elsewhere)
    if layout.microbatches > 1 and (exposed := pricer.devices.exposed_send_fraction(layout)):
        outgoing = sum(stage_send_s(pricer, layout, stage.index, to, values) for to, values in stage.sends)
        back = sum(stage_send_s(pricer, layout, source, stage.index, values) for source, values in stage.receives)
        network += Seconds(exposed * outgoing, exposed * back)
    layers_moved, scores = pricer.devices.num_layers_loaded, 0.0
    if pricer.devices.saves_scores:
        # Two tensors of scores and a mask (Korthikanti et al. 2022, equation 1: 5as/h of sbh).
        scores = section.score_bytes.at(scale, layout.data) * (1.25 if PRECISIONS[layout.precision].product_dtype else 2.25)
    wide = 2.0 if layout.precision == "float64" else 1.0
    works, runs, costs_with = _backward_bytes(pricer, layout, section)
    each_keeps = wide * section.activations.at(scale, layout.data)
    activations, gone = float(each_keeps.sum()), saved_by_later(each_keeps)
    state = StageState(
        parameters.num_parameters - elsewhere,
        parameters.num_trainable - elsewhere,
        incoming,
        elsewhere,
        activations + scores,
        scores,
        _peaks_by_zero_stage(works - gone, costs_with(DEFAULT_BUCKET_ELEMENTS)),
        offloaded_bytes=activations + scores,
        num_unreduced=parameters.num_unreduced if layout.weight_ranks > 1 else 0.0,
        leaving_bytes=leaving,
        has_late_gradients=_has_late_gradients(pricer, layout),
        buffer_bytes=parameters.buffer_bytes * wide,
        num_largest=runs.largest_parameter,
    )

    @cache
    def state_with(bucket: float) -> StageState:
        return replace(state, transient=_peaks_by_zero_stage(works - gone, costs_with(bucket)))

    @cache
    def layered_state(residency: Residency, bucket: float) -> StageState:
        amounts = section.residency_bytes(residency, stage.index, layout.num_stages == 1, layers_moved == 1)
        each = scores / amounts.num_layers if residency.recompute.kind != "selective" else 0.0
        columns = (amounts.activations, amounts.rematerialized, amounts.loaded, amounts.forward_transient, amounts.loaded_by_run)
        stays, there, back, forward, at_once = (wide * x.at(scale, layout.data) for x in columns)
        if layers_moved > 1:  # a layer is loaded as a whole, and meanwhile the next
            back = runs.expand_to_operators(at_once + (at_once > 0) * (layers_moved - 1) * at_once.max(), len(back))
        # Recomputed or loaded tensors add to the workspace; tensors saved by later operators are freed by then.
        present = runs.expand_to_operators(each * amounts.layers_present, len(back))
        moments = np.maximum(works + there + back, forward) + present - saved_by_later(stays)
        costs = costs_with(bucket)
        at = [int((moments + x).argmax()) for x in costs]
        transient = PeakByZeroStage(*(float(min(works[i], moments[i]) + x[i]) for x, i in zip(costs, at, strict=True)))
        return replace(
            state, saved_bytes=float(stays.sum()) + each * (amounts.num_layers - float(amounts.layers_away.sum())), score_bytes=0.0,
            transient=transient,
            rematerialized=PeakByZeroStage(*(float(max(0.0, moments[i] - works[i])) for i in at)),
            offloaded_bytes=amounts.offloaded.at(scale, layout.data) * wide + each * amounts.num_offloaded,
        )  # fmt: skip

    def by_layer(residency: Residency, bucket: float) -> StageState:
        return layered_state(residency.of_stage(stage.index), bucket)

    @cache
    def loads() -> tuple[LayerCost, ...]:
        groups = section.groups
        each = scores / len(groups.names)
        moved = section.residency_bytes(Residency.parse("none", "activations:*"), stage.index, False, layers_moved == 1)
        back, forward = (wide * x.at(scale, layout.data) for x in (moved.loaded, moved.forward_transient))
        rows = []
        for name in groups.names:
            at = groups.positions[name]
            saved, working = groups.saved_by_block[name].at(scale, layout.data) * wide + each, float(works[at].max())
            come = saved if layers_moved > 1 else float(np.maximum(works + back, forward)[at].max()) - working
            rows.append(LayerCost(
                name, float(times[0][at].sum()), saved, groups.entering_by_block[name].at(scale, layout.data) * wide,
                    float(times[2][at].sum()), working, come,
            ))  # fmt: skip
        return _with_cheap_costs(rows, section, times[0], is_recomputed(parts, ops, ALL_CHEAP, stage.index), each_keeps - wide * (
            section.residency_bytes(ALL_CHEAP, stage.index, False, False).activations.at(scale, layout.data)
        ))  # fmt: skip

    @cache
    def ends() -> UnlayeredCost:
        where = section.groups.positions
        first, last = min(int(at[0]) for at in where.values()), max(int(at[-1]) for at in where.values())
        return UnlayeredCost(float(works[:first].max(initial=0.0)), float((works - gone)[last + 1 :].max(initial=0.0)), float(gone[last]))

    # A product's backward is two equal products, for its input and for its weights; weight gradients are accumulated.
    weight_s = 0.5 * float(times[1][pricer.weighted_under(layout)[ops]].sum()) + adding
    by_run = tuple(runs.parameters.tolist())
    sums = GradientVolume(parameters.reductions, parameters.num_tied, parameters.num_parameters, by_run)
    hidden_s = float(pricer.hidden_seconds(layout)[ops].sum())
    return StageBaseCost(busy, network, block, scores_s, weight_s, sums, state, state_with, by_layer, loads, ends, stage.index, hidden_s)


def _recomputed_seconds(
    pricer: Pricer, layout: Layout, parts: ShardedInventory, operators: NDArray[np.intp], residency: Residency, stage: int
) -> Seconds:
    """Return seconds of recomputing a stage's layers: of compute (forward) and of collectives (backward)."""
    forward_s, _, collectives_s, _ = (x[operators] for x in pricer.operator_seconds(layout))
    is_rerun, saving = is_recomputed(parts, operators, residency, stage), pricer.devices.layer_saving(layout)
    is_gathered = is_rerun
    if residency.recompute.kind == CHEAP:  # a product that is not saved needs what is gathered for it
        is_gathered = parts.products[operators] & parts.in_block[operators] & (saving.saved_products < 1 and bool(is_rerun.any()))
    elif saving.stops_early and residency.segment == 1:
        is_gathered = is_rerun = without_last_products(parts, operators, is_rerun)
    return Seconds(float(forward_s[is_rerun].sum()), float(collectives_s[is_gathered].sum()))


def _rank_boundary_bytes(pricer: Pricer, layout: Layout, values: Iterable[str]) -> float:
    """Return the bytes of `values` of one microbatch that one rank receives or sends: its shard of each."""
    sharding = pricer.sharding(layout)
    return sum(pricer.boundary_bytes(layout, [v]) / num_shards(sharding, v) for v in values) / layout.data


def _with_cheap_costs(
    layers: Sequence[LayerCost], section: StageSection, forward_s: Array, is_rerun: NDArray[np.bool_], freed_bytes: Array
) -> tuple[LayerCost, ...]:
    """Return the layers with what recomputing their cheap operators costs and frees, given by operator."""
    at = section.groups.positions
    return tuple(
        replace(
            one, cheap_s=float((forward_s * is_rerun)[at[one.name]].sum()), cheap_bytes=max(0.0, float(freed_bytes[at[one.name]].sum()))
        )
        for one in layers
    )


def stage_send_s(pricer: Pricer, layout: Layout, stage: int, to: int, values: Sequence[str]) -> float:
    """Seconds of sending `values` of one microbatch from a stage to another on the same kind of device."""
    places, size = schedule_of(layout).ranks_of, pricer.boundary_bytes(layout, values)
    if max(stage, to) >= len(places):  # a pipeline of sub-stages, priced for their memory
        return pricer.transfer_s(layout, size)
    return pricer.transfer_s(layout, size, places[stage][0], places[to][0])


def copy_for_stage(
    base: StageBaseCost, index: int, names: Callable[[], Sequence[str]], build: Callable[[], StageBaseCost]
) -> StageBaseCost:
    """Return the cost of stage `index`, reusing that of a structurally equal stage. `build` computes its own cost, needed only if layers,
    called `names`, are selected by name."""

    def block(residency: Residency) -> Seconds:
        return (build() if residency.selects_by_name else base).recomputed(residency.of_stage(index))

    def by_layer(residency: Residency, bucket: float) -> StageState:
        return (build() if residency.selects_by_name else base).by_layer(residency.of_stage(index), bucket)

    def loads() -> tuple[LayerCost, ...]:
        return tuple(replace(layer, name=name) for layer, name in zip(base.layer_costs(), names(), strict=True))

    return replace(base, recomputed=block, by_layer=by_layer, layer_costs=loads)


def _peaks_by_zero_stage(bytes_by_operator: Array, costs: Sequence[Array]) -> PeakByZeroStage:
    full, scattered, gathered, first = (float((bytes_by_operator + x).max()) for x in costs)
    return PeakByZeroStage(full, scattered, gathered, first)


def _has_late_gradients(pricer: Pricer, layout: Layout) -> bool:
    """Return whether no gradients exist before a step's first backward: without gradient reduction (`run/gradients/gradient_reducer`).

    Reduced gradients of norms and the like on tensor ranks are too few to count.
    """
    alone = layout.num_ranks == layout.pipeline * layout.tensor and not schedule_of(layout).has_replicas
    return not pricer.devices.has_persistent_gradients and alone and not layout.staleness


def _backward_bytes(
    pricer: Pricer, layout: Layout, section: StageSection
) -> tuple[Array, BlockRuns, Callable[[float], tuple[Array, Array, Array, Array]]]:
    """Return (workspace of backward by operator, the runs, additional transient bytes by operator for each field of `PeakByZeroStage`,
    given the elements of a bucket): with full gradients and weights 0; then full gradients in reduction; then all-gathered weights as well;
    and negative for gradients not yet computed."""
    divisor = pricer.expert_divisor(layout)
    parts = pricer.with_layer_saving(layout, pricer.cast_sharded_inventory(layout))
    ops, runs = section.operators, section.runs(divisor, DEFAULT_BUCKET_ELEMENTS)
    devices, scale = pricer.devices, pricer.microbatch(layout)
    widths = devices.widths(layout)
    width_factor = 2.0 if layout.precision == "float64" else 0.5 if devices.is_half(layout) else 1.0
    batch_factor = np.where(parts.data_sharded[ops], scale / layout.data, np.where(parts.batched[ops], scale, 1.0))
    threads = pricer.cluster.threads_of(layout.num_ranks, layout.threads)
    samples, single, thin = (which[ops] for which in parts.torch_kernels)
    local, batch_size = pricer.samples(layout), pricer.graph.batch_size
    exact = samples * np.where(parts.data_sharded[ops], local, np.where(parts.batched[ops], local * layout.data, batch_size)) / batch_size
    by_torch = (layout.precision == "float64") | uses_torch_kernel(exact, single, thin, threads)
    tensors = batch_factor * np.where(by_torch, parts.torch_bytes[ops], parts.working_bytes[ops])
    workspace = tensors + parts.weight_bytes[ops] + parts.waiting_gradients.take(ops).at(scale, layout.data)
    missing = -widths.gradient * runs.missing_gradients
    gathered = runs.expand_to_operators(runs.gathered_bytes(widths.weight), len(workspace))

    def costs_with(bucket: float) -> tuple[Array, Array, Array, Array]:
        arriving = devices.receives_beside(layout) / (layout.weight_ranks // layout.zero_groups)
        scattered = section.runs(divisor, bucket).scattering_bytes(widths.gradient, arriving, len(workspace))
        return np.zeros_like(workspace), scattered, scattered + gathered, missing

    return width_factor * workspace, runs, costs_with
