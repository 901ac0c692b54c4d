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

from weft.cost.memory.memory import state_bytes
from weft.cost.step import Pricer
from weft.errors import Infeasible, LayoutError
from weft.plan.axis import DATA, EXPERT
from weft.plan.layout import Layout
from weft.solve.handing import least_handed_s
from weft.solve.lending import Host, may_lend
from weft.solve.mixed import MixedPricer, memory_of, owner

T = TypeVar("T")


def work_s(pricer: Pricer, base: Layout, again: bool = False) -> float:
    """Seconds that the busiest rank computes, runs collectives and waits for sends, if work were divided evenly over the pipeline.

    `with_recompute`: what full recomputation recomputes is counted twice.
    """
    if isinstance(pricer, MixedPricer):
        pricer.sharding(base)
        if pricer.aligned(base):
            # Every part has so many layers that all parts take equally long.
            width = base.stage_ranks
            return base.microbatches / sum(part.cluster.num_devices / width / _once_s(part, base, again) for part in pricer.pricers)
    return base.microbatches * (_once_s(pricer, base, again) + least_handed_s(pricer, base)) / base.pipeline


def _once_s(pricer: Pricer, base: Layout, again: bool) -> float:
    """Seconds of one microbatch through all layers."""
    times = pricer.operator_seconds(base)
    total = sum(float(part.sum()) for part in times)
    if again:
        recomputed = pricer.parts(base).again
        total += float(times[0][recomputed].sum()) + float(times[2][recomputed].sum())
    return total


def sent_share(pricer: Pricer, base: Layout) -> float:
    """Fraction of a microbatch's time that is spent in collectives of tensor ranks."""
    forward, backward, out, back = (float(part.sum()) for part in pricer.operator_seconds(base))
    return (out + back) / (forward + backward + out + back)


def filled(base: Layout) -> float:
    """Ratio of a step to its work with one stage a rank: the least that filling and draining the pipeline costs.

    Stage s works for m·T_s, and before and after that one microbatch passes through the earlier stages: the step is at least
    T_0 + ... + T_(s-1) + m·T_s for every s. Of all divisions of T the one that makes these equal has the smallest maximum:
    T / (1 - (1 - 1/m)^p), where the work is m·T/p.

    >>> filled(Layout(pipeline=2, microbatches=1)), round(filled(Layout(pipeline=2, microbatches=2)), 6)
    (2.0, 1.333333)
    """
    m, p = base.microbatches, base.pipeline
    return p / m / (1 - (1 - 1 / m) ** p)


def summing_s(pricer: Pricer, base: Layout) -> float:
    """Seconds of the network to reduce gradients over the replicas, overlapped or not: each rank's share of them once, in 16 bits."""
    otherwise = base.compress != "none" or base.staleness or base.servers or base.expert > 1
    if base.data == 1 or otherwise or pricer.cluster.kind.times_programs or pricer.cluster.parts:
        return 0.0
    share = 2.0 * pricer.graph.num_trainable / (base.tensor * base.pipeline * base.branch)
    # A bucket or a faster algorithm may still save half of it, and the latency.
    return 0.5 * pricer.collective("reduce_scatter", share, pricer.group(base, DATA, EXPERT))


def least_s(pricer: Pricer, base: Layout, interleaved: bool, again: bool = False) -> float:
    """Return a lower bound of a step of the base: of its interleaved schedules or of the others, with full recomputation or without."""
    if base.inner:
        return _differing_s(base, _on_each(pricer, base, lambda one, inner: _once_s(one, inner, again)), interleaved)
    even = interleaved or isinstance(pricer, MixedPricer)  # where stages differ in speed, the fill may cost next to nothing
    busy = work_s(pricer, base, again) * waiting(pricer, base, even)
    return max(busy, summing_s(pricer, base))


def _on_each(pricer: Pricer, base: Layout, seconds: Callable[[Pricer, Layout], T]) -> list[T]:
    """Compute `seconds` for the devices and the layout of every stage, once for stages that are alike."""
    cache: dict[tuple[int, int, int], T] = {}
    by_stage = []
    for stage, (data, tensor) in enumerate(base.inner_sizes):
        pricer_here = owner(pricer, base, stage)
        if (key := (id(pricer_here), data, tensor)) not in cache:
            inner = base.of_stage(stage)
            pricer.sharding(inner)  # cached once, and shared by the pricers of all parts
            cache[key] = seconds(pricer_here, inner)
        by_stage.append(cache[key])
    return by_stage


def _differing_s(base: Layout, alone_s: Sequence[float], even: bool) -> float:
    """Return a lower bound of a step where stages arrange their ranks differently, whichever layers each has. `whole_model_s`: seconds of
    one microbatch through all layers on each stage. `ignores_fill` as for `wait_factor`.

    All layers take T_s on stage s; it has some of them and works t_s a microbatch, and the t_s / T_s add up to 1. A step takes at least
    m·t_s plus t_0 + ... + t_(s-1) (see `pipeline_fill_factor`). The smallest maximum of these is 1 / Z, where Z grows from the last
    stage to the first by (1 / T_s - Z) / m where that is above zero: the dual of that linear program.
    """
    if even:
        return base.microbatches / sum(1 / seconds for seconds in alone_s)
    reached = 0.0
    for seconds in reversed(alone_s):
        reached += max(0.0, 1 / seconds - reached) / base.microbatches
    return 1 / reached


def waiting(pricer: Pricer, base: Layout, even: bool) -> float:
    """Ratio of a step to its work, at the least. `ignores_fill`: filling the pipeline may cost nothing.

    Where waiting ranks lend their cores, filling costs nothing either, and a rank that computes alone with all cores may be faster than
    all ranks at once.
    """
    if may_lend(pricer.cluster, base):
        host = Host.of(pricer.cluster, base)
        return min(1.0, base.pipeline * _once_s(host.pricer(pricer, 1), base, False) / _once_s(pricer, base, False))
    if not even:
        return filled(base)
    return 1.0 if isinstance(pricer, MixedPricer) else max(1.0, base.pipeline / base.microbatches * _way(pricer, base))


def _way(pricer: Pricer, base: Layout) -> float:
    """Fraction of its work that one microbatch passes serially from the first stage to the last and back, whatever the schedule: all but
    the gradients of weights, which are at most half of the compute of backward."""
    forward, backward, out, back = (float(part.sum()) for part in pricer.operator_seconds(base))
    return 1.0 - 0.5 * backward / (forward + backward + out + back)


def least_saving_s(pricer: Pricer, layout: Layout, interleaved: bool) -> float:
    """Return a lower bound of a step with the layout's own ZeRO stage, recomputation and offload, whatever its schedule and its stages.

    The whole model is priced as one stage: stages together cost that or more, and the busiest rank has at least an even share of it.
    Without a pipeline this is the price itself.
    """
    if layout.inner:
        singles = _on_each(pricer, layout, lambda one, inner: one.single_stage(inner))
        busy = _differing_s(layout, [single.forward_s + single.backward_s for single in singles], interleaved)
        update_s = 1 / sum(1 / single.optimizer_s for single in singles)
        return busy + update_s + pricer.devices.overhead_s(layout, busy)
    if isinstance(pricer, MixedPricer):
        return least_s(pricer, layout, interleaved, layout.recompute == "full")
    single = pricer.single_stage(layout)
    _, remainder = pricer.smaller(layout)
    if layout.pipeline == 1:
        return pricer.predict(layout, (single,), (), smaller=(remainder.single_stage(layout),) if remainder is not None else ()).step_time_s
    if remainder is not None:  # as if all microbatches were as small as the smallest
        single = remainder.single_stage(layout)
    microbatch_s = single.forward_s + single.backward_s + least_handed_s(pricer, layout)
    busy = layout.microbatches * microbatch_s / layout.pipeline * waiting(pricer, layout, interleaved)
    step = busy + single.optimizer_s / layout.pipeline + pricer.devices.overhead_s(layout, busy)
    return max(step, summing_s(pricer, layout))


def least_state_bytes(pricer: Pricer, layout: Layout) -> float:
    """Bytes of weights, gradients and optimizer on the fullest rank, at the least: those of an even division."""
    widths = pricer.devices.widths(layout.precision)
    copies = 0.0 if layout.moves_optimizer else widths.copies + widths.moment * pricer.optimizer_states
    count = pricer.graph.num_parameters / (sum(tensor for _, tensor in layout.inner_sizes) * layout.branch)
    if layout.expert > 1:
        count /= layout.expert
    return state_bytes(count, layout.zero, layout.replicas if layout.inner else layout.data, widths.weight, widths.gradient, copies)


def most_memory(pricer: Pricer, layout: Layout) -> float:
    """Bytes of the largest device that a rank of the layout is on."""
    return max(memory_of(pricer, layout, rank) for rank in (range(layout.pipeline) if pricer.cluster.parts else range(1)))


def most_room(pricer: Pricer, layout: Layout) -> float:
    """Bytes for tensors on the largest device that a rank of the layout is on, without what a process needs before it has any."""
    ranks = range(layout.pipeline) if pricer.cluster.parts else range(1)
    return max(memory_of(pricer, layout, k) - owner(pricer, layout, k).cluster.device.scratch_bytes for k in ranks)


def check_room(pricer: Pricer, base: Layout, zeros: Sequence[int], offloads: Sequence[str]) -> None:
    """Refuse, before anything is propagated or priced, a base whose state alone cannot fit under any of these ZeRO stages and offloads.

    Raises:
        Infeasible: with the numbers.
    """
    zero = max(zeros, default=0) if base.replicas > 1 else 0
    offload = next((o for o in ("all", "optimizer") if o in offloads), "none")
    with suppress(LayoutError):  # variants of incompatible keys refuse themselves
        check_state(pricer, replace(base, zero=zero, offload=offload))


def check_state(pricer: Pricer, layout: Layout) -> None:
    """Refuse, before anything is priced, a layout whose weights, gradients and optimizer alone cannot fit.

    Raises:
        Infeasible: with the numbers.
    """
    least, have = least_state_bytes(pricer, layout), most_room(pricer, layout)
    if least > have:
        raise Infeasible(
            f"{layout}: weights, gradients and optimizer need at least {least / 2**30:.2f} GiB a device, "
            f"which has {max(have, 0.0) / 2**30:.2f} GiB"
        )
