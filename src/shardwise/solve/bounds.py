"""Lower bounds for branch and bound: step time and memory that no layout of a base can beat.

A base is everything that operators' seconds depend on. Bounded are the seconds of any schedule, stages, ZeRO stage, recomputation and
offload of it, or of one choice of these (`layout_lower_bound_s`), and the bytes of its fullest rank. Nothing here is an estimate: a base is
pruned only where its bound is already beaten. Not counted: waits beyond filling the pipeline, and costs of only some variants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from shardwise.cost.memory.memory import state_bytes
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.heterogeneous import HeterogeneousPricer, stage_device_memory, stage_pricer
from shardwise.cost.step_time.lending import PipelineHosts, may_lend
from shardwise.cost.step_time.send_bounds import send_lower_bound_s
from shardwise.errors import Infeasible, LayoutError
from shardwise.plan.ir.axis import DATA, EXPERT
from shardwise.plan.layout import Layout

T = TypeVar("T")
DIVIDED = "zb-h1"  # a schedule with a divided backward and one stage a rank


def balanced_work_s(pricer: Pricer, base: Layout, with_recompute: bool = False) -> float:
    """Seconds that the busiest rank computes, runs collectives and waits for sends, if work were divided evenly over the pipeline.

    `with_recompute`: what full recomputation recomputes is counted twice.
    """
    if isinstance(pricer, HeterogeneousPricer):
        pricer.sharding(base)
        if pricer.has_aligned_stages(base):
            # Every part has so many layers that all parts take equally long.
            width = base.stage_ranks
            return base.microbatches / sum(
                part.cluster.num_devices / width / _microbatch_s(part, base, with_recompute) for part in pricer.part_pricers
            )
    return base.microbatches * (_microbatch_s(pricer, base, with_recompute) + send_lower_bound_s(pricer, base)) / base.pipeline


def _microbatch_s(pricer: Pricer, base: Layout, with_recompute: bool) -> float:
    """Seconds of one microbatch through all layers, at the least of all schedules."""
    times = pricer.operator_seconds(with_cheapest_backward(pricer, base))
    total = sum(float(part.sum()) for part in times)
    if with_recompute:
        recomputed = pricer.sharded_inventory(base).recomputed
        total += float(times[0][recomputed].sum()) + float(times[2][recomputed].sum())
    return total


def with_cheapest_backward(pricer: Pricer, base: Layout) -> Layout:
    """Return the base, or the same with a divided backward where that shows less of its collectives: it repeats no gather."""
    if base.pipeline == 1 or base.schedule != "1f1b" or not pricer.gathers_again(base):
        return base
    try:
        divided = replace(base, schedule=DIVIDED)
    except LayoutError:  # not with another key of the base, and so none is searched
        return base
    return min((base, divided), key=lambda each: float(pricer.operator_seconds(each)[3].sum()))


def collective_fraction(pricer: Pricer, base: Layout) -> float:
    """Fraction of a microbatch's time that is spent in collectives of tensor ranks."""
    forward, backward, out, back = (float(part.sum()) for part in pricer.operator_seconds(base))
    return (out + back) / (forward + backward + out + back)


def pipeline_fill_factor(base: Layout) -> float:
    """Ratio of a step to its work with one stage a rank: the least that filling and draining the pipeline costs.

    Stage s works for m·T_s, and before and after that one microbatch passes through the earlier stages: the step is at least
    T_0 + ... + T_(s-1) + m·T_s for every s. Of all divisions of T the one that makes these equal has the smallest maximum:
    T / (1 - (1 - 1/m)^p), where the work is m·T/p.

    >>> pipeline_fill_factor(Layout(pipeline=2, microbatches=1)), round(pipeline_fill_factor(Layout(pipeline=2, microbatches=2)), 6)
    (2.0, 1.333333)
    """
    m, p = base.microbatches, base.pipeline
    return p / m / (1 - (1 - 1 / m) ** p)


def reduction_lower_bound_s(pricer: Pricer, base: Layout) -> float:
    """Seconds of the network to reduce gradients over the replicas, overlapped or not: each rank's share of them once, in 16 bits."""
    otherwise = base.compress != "none" or base.staleness or base.servers or base.expert > 1
    if base.data == 1 or otherwise or pricer.cluster.kind.prices_programs or pricer.cluster.parts:
        return 0.0
    share = 2.0 * pricer.graph.num_trainable / (base.tensor * base.pipeline * base.branch)
    # A bucket or a faster algorithm may still save half of it, and the latency.
    return 0.5 * pricer.collective("reduce_scatter", share, pricer.group(base, DATA, EXPERT))


def base_lower_bound_s(pricer: Pricer, base: Layout, is_interleaved: bool, with_recompute: bool = False) -> float:
    """Return a lower bound of a step of the base: of its interleaved schedules or of the others, with full recomputation or without."""
    if base.inner:
        return _unequal_stages_lower_bound_s(
            base, _map_stages(pricer, base, lambda one, inner: _microbatch_s(one, inner, with_recompute)), is_interleaved
        )
    even = is_interleaved or isinstance(pricer, HeterogeneousPricer)  # where stages differ in speed, the fill may cost next to nothing
    busy = balanced_work_s(pricer, base, with_recompute) * wait_factor(pricer, base, even)
    return max(busy, reduction_lower_bound_s(pricer, base))


def _map_stages(pricer: Pricer, base: Layout, seconds: Callable[[Pricer, Layout], T]) -> list[T]:
    """Compute `seconds` for the devices and the layout of every stage, once for stages that are alike."""
    cache: dict[tuple[int, int, int], T] = {}
    by_stage = []
    for stage, (data, tensor) in enumerate(base.stage_sizes):
        pricer_here = stage_pricer(pricer, base, stage)
        if (key := (id(pricer_here), data, tensor)) not in cache:
            inner = base.of_stage(stage)
            pricer.sharding(inner)  # cached once, and shared by the pricers of all parts
            cache[key] = seconds(pricer_here, inner)
        by_stage.append(cache[key])
    return by_stage


def _unequal_stages_lower_bound_s(base: Layout, whole_model_s: Sequence[float], ignores_fill: bool) -> float:
    """Return a lower bound of a step where stages arrange their ranks differently, whichever layers each has. `whole_model_s`: seconds of
    one microbatch through all layers on each stage. `ignores_fill` as for `wait_factor`.

    All layers take T_s on stage s; it has some of them and works t_s a microbatch, and the t_s / T_s add up to 1. A step takes at least
    m·t_s plus t_0 + ... + t_(s-1) (see `pipeline_fill_factor`). The smallest maximum of these is 1 / Z, where Z grows from the last
    stage to the first by (1 / T_s - Z) / m where that is above zero: the dual of that linear program.
    """
    if ignores_fill:
        return base.microbatches / sum(1 / seconds for seconds in whole_model_s)
    reached = 0.0
    for seconds in reversed(whole_model_s):
        reached += max(0.0, 1 / seconds - reached) / base.microbatches
    return 1 / reached


def wait_factor(pricer: Pricer, base: Layout, ignores_fill: bool) -> float:
    """Ratio of a step to its work, at the least. `ignores_fill`: filling the pipeline may cost nothing.

    Where waiting ranks lend their cores, filling costs nothing either, and a rank that computes alone with all cores may be faster than
    all ranks at once.
    """
    if may_lend(pricer.cluster, base):
        host = PipelineHosts.from_layout(pricer.cluster, base)
        return min(1.0, base.pipeline * _microbatch_s(host.pricer_under_load(pricer, 1), base, False) / _microbatch_s(pricer, base, False))
    if not ignores_fill:
        return pipeline_fill_factor(base)
    return 1.0 if isinstance(pricer, HeterogeneousPricer) else max(1.0, base.pipeline / base.microbatches * _serial_fraction(pricer, base))


def _serial_fraction(pricer: Pricer, base: Layout) -> float:
    """Fraction of its work that one microbatch passes serially from the first stage to the last and back, whatever the schedule: all but
    the gradients of weights, which are at most half of the compute of backward."""
    times = pricer.operator_seconds(with_cheapest_backward(pricer, base))
    forward, backward, out, back = (float(part.sum()) for part in times)
    return 1.0 - 0.5 * backward / (forward + backward + out + back)


def layout_lower_bound_s(pricer: Pricer, layout: Layout, is_interleaved: bool) -> float:
    """Return a lower bound of a step with the layout's own ZeRO stage, recomputation and offload, whatever its schedule and its stages.

    The whole model is priced as one stage: stages together cost that or more, and the busiest rank has at least an even share of it.
    Without a pipeline this is the price itself.
    """
    if layout.inner:
        singles = _map_stages(pricer, layout, lambda one, inner: one.single_stage(with_cheapest_backward(one, inner)))
        busy = _unequal_stages_lower_bound_s(layout, [single.forward_s + single.backward_s for single in singles], is_interleaved)
        update_s = 1 / sum(1 / single.optimizer_s for single in singles)
        return busy + update_s + pricer.devices.overhead_s(layout, busy)
    if isinstance(pricer, HeterogeneousPricer):
        return base_lower_bound_s(pricer, layout, is_interleaved, layout.recompute == "full")
    cheapest = with_cheapest_backward(pricer, layout)
    single = pricer.single_stage(cheapest)
    _, remainder = pricer.remainder_pricer(layout)
    if layout.pipeline == 1:
        smaller = (remainder.with_buckets_of(pricer, layout).single_stage(layout),) if remainder is not None else ()
        return pricer.predict(layout, (single,), (), remainder_costs=smaller).step_time_s
    if remainder is not None:  # as if all microbatches were as small as the smallest
        single = remainder.single_stage(cheapest)
    microbatch_s = single.forward_s + single.backward_s + send_lower_bound_s(pricer, layout)
    busy = layout.microbatches * microbatch_s / layout.pipeline * wait_factor(pricer, layout, is_interleaved)
    step = busy + single.optimizer_s / layout.pipeline + pricer.devices.overhead_s(layout, busy)
    return max(step, reduction_lower_bound_s(pricer, layout))


def state_bytes_lower_bound(pricer: Pricer, layout: Layout) -> float:
    """Bytes of weights, gradients and optimizer on the fullest rank, at the least: those of an even division."""
    widths = pricer.devices.widths(layout)
    copies = 0.0 if layout.offloads_optimizer else widths.copies + widths.moment * pricer.optimizer_states
    count = pricer.graph.num_parameters / (sum(tensor for _, tensor in layout.stage_sizes) * layout.branch)
    if layout.expert > 1:
        count /= layout.expert
    return state_bytes(
        count, layout.zero, layout.replicas if layout.inner else layout.data // layout.zero_groups, widths.weight, widths.gradient, copies
    )


def largest_device_memory(pricer: Pricer, layout: Layout) -> float:
    """Bytes of the largest device that a rank of the layout is on."""
    return max(stage_device_memory(pricer, layout, rank) for rank in (range(layout.pipeline) if pricer.cluster.parts else range(1)))


def largest_tensor_memory(pricer: Pricer, layout: Layout) -> float:
    """Bytes for tensors on the largest device that a rank of the layout is on, without what a process needs before it has any."""
    ranks = range(layout.pipeline) if pricer.cluster.parts else range(1)
    return max(stage_device_memory(pricer, layout, k) - stage_pricer(pricer, layout, k).cluster.device.scratch_bytes for k in ranks)


def check_base_state_fits(pricer: Pricer, base: Layout, zeros: Sequence[int], offloads: Sequence[str]) -> None:
    """Refuse, before anything is propagated or priced, a base whose state alone cannot fit under any of these ZeRO stages and offloads.

    Raises:
        Infeasible: with the numbers.
    """
    zero = max(zeros, default=0) if base.replicas > 1 else 0
    offload = next((o for o in ("all", "optimizer") if o in offloads), "none")
    with suppress(LayoutError):  # variants of incompatible keys refuse themselves
        check_state_fits(pricer, replace(base, zero=zero, offload=offload))


def check_state_fits(pricer: Pricer, layout: Layout) -> None:
    """Refuse, before anything is priced, a layout whose weights, gradients and optimizer alone cannot fit.

    Raises:
        Infeasible: with the numbers.
    """
    least, have = state_bytes_lower_bound(pricer, layout), largest_tensor_memory(pricer, layout)
    if least > have:
        raise Infeasible(
            f"{layout}: weights, gradients and optimizer need at least {least / 2**30:.2f} GiB a device, "
            f"which has {max(have, 0.0) / 2**30:.2f} GiB"
        )
