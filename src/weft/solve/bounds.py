"""What no layout can beat. In: a pricer and a base (everything that operators' seconds depend on). Out: seconds below which no schedule,
stages, ZeRO stage, recomputation or offload of that base can come, or of one way of saving memory (`least_saving_s`), and bytes that
its fullest rank holds at least.

Nothing here is an estimate: a base is left out of the search only where its bound is already beaten. Not modelled, so never counted:
what stages wait for beyond the pipeline's filling, and what only some variants pay.
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
    """Seconds that the busiest rank computes, talks inside layers and waits for what it hands on, were that divided evenly over all ranks
    of the pipeline.

    `again`: what full recomputation repeats is counted twice.
    """
    if isinstance(pricer, MixedPricer):
        pricer.sharding(base)
        if pricer.aligned(base):
            # Every part does its share of the layers in the time that all of them take.
            width = base.stage_ranks
            return base.microbatches / sum(one.cluster.num_devices / width / _once_s(one, base, again) for one in pricer.pricers)
    return base.microbatches * (_once_s(pricer, base, again) + least_handed_s(pricer, base)) / base.pipeline


def _once_s(pricer: Pricer, base: Layout, again: bool) -> float:
    """Seconds of one microbatch through all layers."""
    times = pricer.operator_seconds(base)
    total = sum(float(part.sum()) for part in times)
    if again:
        twice = pricer.parts(base).again
        total += float(times[0][twice].sum()) + float(times[2][twice].sum())
    return total


def sent_share(pricer: Pricer, base: Layout) -> float:
    """What part of its time one microbatch takes for the collectives of tensor ranks."""
    forward, backward, out, back = (float(part.sum()) for part in pricer.operator_seconds(base))
    return (out + back) / (forward + backward + out + back)


def filled(base: Layout) -> float:
    """How much longer a step is than its work, with one stage a rank: filling and draining the pipeline, at the least.

    Stage s works for m·T_s, and before and after that one microbatch passes the stages before it: the step is at least
    T_0 + ... + T_(s-1) + m·T_s for every s. Of all divisions of T the one that makes these equal has the least largest:
    T / (1 - (1 - 1/m)^p), where the work is m·T/p.

    >>> filled(Layout(pipeline=2, microbatches=1)), round(filled(Layout(pipeline=2, microbatches=2)), 6)
    (2.0, 1.333333)
    """
    m, p = base.microbatches, base.pipeline
    return p / m / (1 - (1 - 1 / m) ** p)


def summing_s(pricer: Pricer, base: Layout) -> float:
    """Seconds of the network for summing gradients over the replicas, hidden or not: each rank's share of them once, in 16 bits."""
    otherwise = base.compress != "none" or base.staleness or base.servers or base.expert > 1
    if base.data == 1 or otherwise or pricer.cluster.kind.times_programs or pricer.cluster.parts:
        return 0.0
    share = 2.0 * pricer.graph.num_trainable / (base.tensor * base.pipeline * base.branch)
    # What a bucket or a faster algorithm may still save: half of it, and the latency.
    return 0.5 * pricer.collective("reduce_scatter", share, pricer.group(base, DATA, EXPERT))


def least_s(pricer: Pricer, base: Layout, interleaved: bool, again: bool = False) -> float:
    """No step of the base takes less: of its interleaved schedules or of its others, with full recomputation (`again`) or without."""
    if base.inner:
        return _differing_s(base, _on_each(pricer, base, lambda one, inner: _once_s(one, inner, again)), interleaved)
    even = interleaved or isinstance(pricer, MixedPricer)  # where stages differ in speed, filling may cost next to nothing
    busy = work_s(pricer, base, again) * waiting(pricer, base, even)
    return max(busy, summing_s(pricer, base))


def _on_each(pricer: Pricer, base: Layout, seconds: Callable[[Pricer, Layout], T]) -> list[T]:
    """What `seconds` says of every stage's devices and its own layout, of stages that are alike once."""
    cache: dict[tuple[int, int, int], T] = {}
    by_stage = []
    for stage, (data, tensor) in enumerate(base.inner_sizes):
        one = owner(pricer, base, stage)
        if (key := (id(one), data, tensor)) not in cache:
            inner = base.of_stage(stage)
            pricer.sharding(inner)  # which parts share
            cache[key] = seconds(one, inner)
        by_stage.append(cache[key])
    return by_stage


def _differing_s(base: Layout, alone_s: Sequence[float], even: bool) -> float:
    """No step of stages that each arrange their ranks in their own way takes less, whichever layers each has. `alone_s`: seconds of one
    microbatch through all layers on each stage. `even` as for `waiting`.

    All layers take T_s on stage s; it has a part of them, and works t_s a microbatch: the sum of t_s / T_s is 1. A step takes m·t_s at
    least, and t_0 + ... + t_(s-1) besides (see `filled`). The least that the largest of these can be is 1 / Z, where Z grows from the last
    stage to the first by (1 / T_s - Z) / m where that is above zero: the dual of that linear program.
    """
    if even:
        return base.microbatches / sum(1 / seconds for seconds in alone_s)
    reached = 0.0
    for seconds in reversed(alone_s):
        reached += max(0.0, 1 / seconds - reached) / base.microbatches
    return 1 / reached


def waiting(pricer: Pricer, base: Layout, even: bool) -> float:
    """How much longer a step is than its work, at the least. `even`: filling the pipeline may cost nothing.

    Where ranks that wait lend their cores, it costs nothing either, and a rank that computes alone with all of them may be quicker by
    itself than all ranks beside one another.
    """
    if may_lend(pricer.cluster, base):
        host = Host.of(pricer.cluster, base)
        return min(1.0, base.pipeline * _once_s(host.pricer(pricer, 1), base, False) / _once_s(pricer, base, False))
    if not even:
        return filled(base)
    return 1.0 if isinstance(pricer, MixedPricer) else max(1.0, base.pipeline / base.microbatches * _way(pricer, base))


def _way(pricer: Pricer, base: Layout) -> float:
    """What part of its work one microbatch passes from the first stage to the last and back, one after another, whatever the schedule: all
    but the gradients of weights, which at most half of the compute of backward is for."""
    forward, backward, out, back = (float(part.sum()) for part in pricer.operator_seconds(base))
    return 1.0 - 0.5 * backward / (forward + backward + out + back)


def least_saving_s(pricer: Pricer, layout: Layout, interleaved: bool) -> float:
    """No step with the layout's own ZeRO stage, recomputation and offload takes less, whatever its schedule and its stages.

    The whole model is priced as one stage: what stages cost adds up to that or more, and the busiest rank has its share at least.
    Without a pipeline this is the price itself.
    """
    if layout.inner:
        singles = _on_each(pricer, layout, lambda one, inner: one.single_stage(inner))
        busy = _differing_s(layout, [single.forward_s + single.backward_s for single in singles], interleaved)
        updated = 1 / sum(1 / single.optimizer_s for single in singles)
        return busy + updated + pricer.devices.overhead_s(layout, busy)
    if isinstance(pricer, MixedPricer):
        return least_s(pricer, layout, interleaved, layout.recompute == "full")
    single = pricer.single_stage(layout)
    _, lesser = pricer.smaller(layout)
    if layout.pipeline == 1:
        return pricer.predict(layout, (single,), (), smaller=(lesser.single_stage(layout),) if lesser is not None else ()).step_time_s
    if lesser is not None:  # as if all microbatches were the smaller
        single = lesser.single_stage(layout)
    once = single.forward_s + single.backward_s + least_handed_s(pricer, layout)
    busy = layout.microbatches * once / layout.pipeline * waiting(pricer, layout, interleaved)
    step = busy + single.optimizer_s / layout.pipeline + pricer.devices.overhead_s(layout, busy)
    return max(step, summing_s(pricer, layout))


def least_state_bytes(pricer: Pricer, layout: Layout) -> float:
    """Bytes of weights, gradients and optimizer on the fullest rank, at the least: those of an even division."""
    widths = pricer.devices.widths(layout.precision)
    copies = 0.0 if layout.moves_optimizer else widths.copies + widths.moment * pricer.optimizer_states
    number = pricer.graph.num_parameters / (sum(tensor for _, tensor in layout.inner_sizes) * layout.branch)
    if layout.expert > 1:
        number /= layout.expert
    return state_bytes(number, layout.zero, layout.replicas if layout.inner else layout.data, widths.weight, widths.gradient, copies)


def most_memory(pricer: Pricer, layout: Layout) -> float:
    """Bytes of the largest device that a rank of the layout lies on."""
    return max(memory_of(pricer, layout, rank) for rank in (range(layout.pipeline) if pricer.cluster.parts else range(1)))


def most_room(pricer: Pricer, layout: Layout) -> float:
    """Bytes for tensors on the roomiest device that a rank of the layout lies on: what a process holds before it has any is taken off."""
    ranks = range(layout.pipeline) if pricer.cluster.parts else range(1)
    return max(memory_of(pricer, layout, k) - owner(pricer, layout, k).cluster.device.scratch_bytes for k in ranks)


def check_room(pricer: Pricer, base: Layout, zeros: Sequence[int], offloads: Sequence[str]) -> None:
    """Refuse, before anything is propagated or priced, a base whose state alone cannot fit under any of these ZeRO stages and offloads.

    Raises:
        Infeasible: with the numbers.
    """
    zero = max(zeros, default=0) if base.replicas > 1 else 0
    offload = next((o for o in ("all", "optimizer") if o in offloads), "none")
    with suppress(LayoutError):  # what does not go together, its variants refuse themselves
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
