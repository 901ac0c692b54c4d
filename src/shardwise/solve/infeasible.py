"""Explain why no layout fits, and find what would: an `Infeasible` with the numbers and the nearest feasible alternatives.

Tried: each constraint left out alone, and the same machines in greater number. Each try asks only whether something fits, of the bases with
the least state, with everything that saves memory. Not tried: other devices, and two constraints left out at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from shardwise.cluster.cluster import Cluster, ClusterLevel
from shardwise.cluster.heterogeneous import mix_clusters
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.heterogeneous import build_pricer
from shardwise.cost.step_time.timing import PricedLayout, price
from shardwise.errors import Infeasible, LayoutError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import LayoutCandidate
from shardwise.solve.axis_candidates import context_candidates, spatial_candidates
from shardwise.solve.bounds import check_state_fits, state_bytes_lower_bound
from shardwise.solve.constraints import Constraint, parse_constraints
from shardwise.solve.space import SearchSpace
from shardwise.units import format_bytes

MAX_BASES = 4  # bases that each try prices
CLUSTER_FACTORS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)


def infeasible_error(
    pricer: Pricer, space: SearchSpace, constraints: str, lowest_memory: PricedLayout | None, refused: Sequence[LayoutCandidate]
) -> Infeasible:
    """Return the error to raise where a search found nothing. `lowest_memory`: the priced layout that needs least memory."""
    cluster, batch = space.cluster, space.batch_size
    under = f" under {constraints!r}" if constraints else ""
    parsed = parse_constraints(constraints)
    hints = _find_remedies(pricer, space, parsed)
    if lowest_memory is None:
        lowest_memory = _lowest_memory_layout(pricer, space)
    if lowest_memory is None:
        why = f": {refused[0].note}" if refused else "; the constraints exclude every one" if parsed else ""
        leave_out = f"leave out more than one of {', '.join(map(str, parsed))}, or " if len(parsed) > 1 else ""
        remedy = "; ".join(hints) or f"{leave_out}change the batch or the number of devices"
        return Infeasible(f"no layout of {cluster.num_devices} devices for a batch of {batch}{under}{why}. What would do: {remedy}")
    have, need = cluster.memory_of(lowest_memory.layout.num_ranks), lowest_memory.prediction.memory
    state = need.parameters + need.gradients + need.optimizer
    if not hints and cluster.memory_limit_bytes:
        enough = need.total - cluster.device.scratch_bytes
        hints = [f"a limit of {format_bytes(1.005 * enough)}"]  # three digits, rounded up
    remedy = "; ".join(hints) or f"devices of {format_bytes(1.005 * need.total)} each, or a smaller batch or model"
    scratch = cluster.device.scratch_bytes
    parts_text = ", ".join(
        f"{format_bytes(size)} for {part}"
        for part, size in (
            ("weights, gradients and optimizer", state),
            ("activations", need.activations),
            ("kernels and messages", need.buffers),
            ("margin", need.margin - scratch),
            *([("what a process holds before it has any", scratch)] if scratch else []),
        )
    )
    tried = f"none of {len(refused)} layouts" if len(refused) > 1 else "no layout"
    return Infeasible(
        f"{tried} fits {cluster.name}{under}: the leanest, {lowest_memory.layout}, needs {format_bytes(need.total)} on its fullest device "
        f"({parts_text}), which has {format_bytes(have)}. What would do: {remedy}"
    )


def _find_remedies(pricer: Pricer, space: SearchSpace, constraints: Sequence[Constraint]) -> list[str]:
    """Return alternatives, each proven by a layout that fits. `constraints`: those that may be left out; others follow from the model."""
    hints = []
    for constraint in constraints:
        remaining = [c for c in space.constraints if c != constraint]
        layout = find_feasible_layout(pricer, replace(space, constraints=remaining))
        if layout is not None:
            hints.append(f"without {constraint}, for example {layout}")
    if not hints:
        for times in CLUSTER_FACTORS:
            larger = scale_cluster(space.cluster, times)
            larger_pricer = replace_cluster(pricer, larger)
            larger_space = replace(
                space,
                cluster=larger,
                spatial_words=spatial_candidates(pricer.graph, larger),
                context_sizes=context_candidates(pricer.graph, larger),
            )
            layout = find_feasible_layout(larger_pricer, larger_space) if _state_may_fit(larger_pricer, larger_space) else None
            if layout is not None:
                hints.append(f"{larger.num_devices} such {larger.kind.noun} ({times} times as many), for example {layout}")
                break
    return hints


def _state_may_fit(pricer: Pricer, space: SearchSpace) -> bool:
    """Return whether weights, gradients and optimizer would fit if divided among all devices, with the optimizer's state offloaded."""
    for precision in space.precisions():
        with suppress(Infeasible):
            check_state_fits(pricer, Layout(tensor=space.cluster.num_devices, precision=precision, offload="all"))
            return True
    return False


def find_feasible_layout(pricer: Pricer, space: SearchSpace) -> Layout | None:
    """Return a layout that fits, of the bases with the least state; None where none of these does."""
    for layout in _low_memory_layouts(pricer, space):
        try:
            check_state_fits(pricer, layout)
            pricer.check_memory(layout, price(pricer, layout).prediction)
        except (Infeasible, LayoutError):
            continue
        return layout
    return None


def _low_memory_layouts(pricer: Pricer, space: SearchSpace) -> list[Layout]:
    """Return the leanest layout of each base with the least state, and its plainest one."""
    bases = sorted(islice(space.bases(), 5000), key=lambda f: (state_bytes_lower_bound(pricer, replace(f, zero=0)), -f.microbatches))
    with_zero = [(replace(f, zero=3, compress="none", staleness=0, servers=0), f) for f in bases]
    lean = [f for _, f in sorted(with_zero, key=lambda both: (state_bytes_lower_bound(pricer, both[0]), -both[1].microbatches))]
    # With large images and long sequences activations dominate, and are least where most ranks share one.
    by_position_ranks = sorted((f for f in bases if f.position_ranks > 1), key=lambda f: (-f.position_ranks, -f.microbatches))
    layouts: dict[Layout, None] = {}
    for group in (lean, bases, by_position_ranks):
        # The constraints leave nothing of some bases: ZeRO without replicas.
        for variants in islice(filter(None, (list(space.variants(base)) for base in group)), MAX_BASES):
            simple = [v for v in variants if v.schedule != "gpipe" and v.offload == "none"] or variants
            layouts[simple[0]] = None
            layouts[max(simple, key=lambda v: (v.zero, v.recompute == "full"))] = None
            for segment in {v.segment for v in simple} - {1}:
                layouts[max((v for v in simple if v.segment == segment), key=lambda v: (v.recompute == "full", v.zero))] = None
            layouts[max(variants, key=lambda v: (v.offload == "all", v.zero, v.recompute == "full", v.schedule == "1f1b"))] = None
    return list(layouts)


def _lowest_memory_layout(pricer: Pricer, space: SearchSpace) -> PricedLayout | None:
    """Return the layout that needs least memory, of those with the least state, to report how far from fitting it is."""
    priced = []
    for layout in _low_memory_layouts(pricer, space):
        with suppress(Infeasible, LayoutError):
            priced.append(price(pricer, layout))
    return min(priced, key=lambda one: one.prediction.memory.total, default=None)


def scale_cluster(cluster: Cluster, times: int) -> Cluster:
    """Return `times` as many of the same machines, on the same network."""
    if cluster.parts and cluster.between is not None:
        return mix_clusters(f"{times} times {cluster.name}", [scale_cluster(part, times) for part in cluster.parts], cluster.between)
    *inner, last = cluster.levels
    return replace(cluster, levels=(*inner, ClusterLevel(last.name, last.size * times, last.link)))


def replace_cluster(pricer: Pricer, cluster: Cluster) -> Pricer:
    """Return a pricer of the same graph on another cluster."""
    return build_pricer(pricer.graph, cluster, pricer.batch_size, pricer.optimizer_states, pricer.shards)
