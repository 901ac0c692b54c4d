"""Explain why no layout fits, and find what would: an `Infeasible` with the numbers and the nearest feasible alternatives.

Tried: each constraint left out alone, and the same machines in greater number. Each try asks only whether something fits, of the bases with
the least state, with everything that saves memory. Not tried: other devices, and two constraints left out at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from weft.cluster.cluster import Cluster, Level
from weft.cluster.mixed import mixed
from weft.cost.step import Pricer
from weft.errors import Infeasible, LayoutError
from weft.plan.layout import Layout
from weft.plan.plan import Candidate
from weft.solve.bounds import check_state, least_state_bytes
from weft.solve.images import contexts, ways
from weft.solve.mixed import pricer_of
from weft.solve.space import Constraint, Space, parse_constraints
from weft.solve.timing import Priced, price
from weft.units import format_bytes

TRIED = 4  # bases that each try prices
TIMES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)


def nothing_fits(pricer: Pricer, space: Space, constraints: str, leanest: Priced | None, refused: Sequence[Candidate]) -> Infeasible:
    """Return the error to raise where a search found nothing. `lowest_memory`: the priced layout that needs least memory."""
    cluster, batch = space.cluster, space.batch_size
    under = f" under {constraints!r}" if constraints else ""
    parsed = parse_constraints(constraints)
    hints = _hints(pricer, space, parsed)
    if leanest is None:
        leanest = _leanest(pricer, space)
    if leanest is None:
        why = f": {refused[0].note}" if refused else "; the constraints exclude every one" if parsed else ""
        leave_out = f"leave out more than one of {', '.join(map(str, parsed))}, or " if len(parsed) > 1 else ""
        remedy = "; ".join(hints) or f"{leave_out}change the batch or the number of devices"
        return Infeasible(f"no layout of {cluster.num_devices} devices for a batch of {batch}{under}{why}. What would do: {remedy}")
    have, need = cluster.memory_of(leanest.layout.num_ranks), leanest.prediction.memory
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
        f"{tried} fits {cluster.name}{under}: the leanest, {leanest.layout}, needs {format_bytes(need.total)} on its fullest device "
        f"({parts_text}), which has {format_bytes(have)}. What would do: {remedy}"
    )


def _hints(pricer: Pricer, space: Space, constraints: Sequence[Constraint]) -> list[str]:
    """Return alternatives, each proven by a layout that fits. `constraints`: those that may be left out; others follow from the model."""
    hints = []
    for constraint in constraints:
        remaining = [c for c in space.constraints if c != constraint]
        layout = feasible(pricer, replace(space, constraints=remaining))
        if layout is not None:
            hints.append(f"without {constraint}, for example {layout}")
    if not hints:
        for times in TIMES:
            larger = enlarged(space.cluster, times)
            larger_pricer = replace_cluster(pricer, larger)
            larger_space = replace(space, cluster=larger, images=ways(pricer.graph, larger), contexts=contexts(pricer.graph, larger))
            layout = feasible(larger_pricer, larger_space) if _may_fit(larger_pricer, larger_space) else None
            if layout is not None:
                hints.append(f"{larger.num_devices} such {larger.kind.noun} ({times} times as many), for example {layout}")
                break
    return hints


def _may_fit(pricer: Pricer, space: Space) -> bool:
    """Return whether weights, gradients and optimizer would fit if divided among all devices, with the optimizer's state offloaded."""
    for precision in space.precisions():
        with suppress(Infeasible):
            check_state(pricer, Layout(tensor=space.cluster.num_devices, precision=precision, offload="all"))
            return True
    return False


def feasible(pricer: Pricer, space: Space) -> Layout | None:
    """Return a layout that fits, of the bases with the least state; None where none of these does."""
    for layout in _lean(pricer, space):
        try:
            check_state(pricer, layout)
            pricer.check_memory(layout, price(pricer, layout).prediction)
        except (Infeasible, LayoutError):
            continue
        return layout
    return None


def _lean(pricer: Pricer, space: Space) -> list[Layout]:
    """Return the leanest layout of each base with the least state, and its plainest one."""
    bases = sorted(islice(space.bases(), 5000), key=lambda f: (least_state_bytes(pricer, replace(f, zero=0)), -f.microbatches))
    with_zero = [(replace(f, zero=3, compress="none", staleness=0, servers=0), f) for f in bases]
    lean = [f for _, f in sorted(with_zero, key=lambda both: (least_state_bytes(pricer, both[0]), -both[1].microbatches))]
    # With large images and long sequences activations dominate, and are least where most ranks share one.
    by_position_ranks = sorted((f for f in bases if f.position_ranks > 1), key=lambda f: (-f.position_ranks, -f.microbatches))
    layouts: dict[Layout, None] = {}
    for group in (lean, bases, by_position_ranks):
        # The constraints leave nothing of some bases: ZeRO without replicas.
        for variants in islice(filter(None, (list(space.variants(base)) for base in group)), TRIED):
            simple = [v for v in variants if v.schedule != "gpipe" and v.offload == "none"] or variants
            layouts[simple[0]] = None
            layouts[max(simple, key=lambda v: (v.zero, v.recompute == "full"))] = None
            for segment in {v.segment for v in simple} - {1}:
                layouts[max((v for v in simple if v.segment == segment), key=lambda v: (v.recompute == "full", v.zero))] = None
            layouts[max(variants, key=lambda v: (v.offload == "all", v.zero, v.recompute == "full", v.schedule == "1f1b"))] = None
    return list(layouts)


def _leanest(pricer: Pricer, space: Space) -> Priced | None:
    """Return the layout that needs least memory, of those with the least state, to report how far from fitting it is."""
    priced = []
    for layout in _lean(pricer, space):
        with suppress(Infeasible, LayoutError):
            priced.append(price(pricer, layout))
    return min(priced, key=lambda one: one.prediction.memory.total, default=None)


def enlarged(cluster: Cluster, times: int) -> Cluster:
    """Return `times` as many of the same machines, on the same network."""
    if cluster.parts and cluster.between is not None:
        return mixed(f"{times} times {cluster.name}", [enlarged(part, times) for part in cluster.parts], cluster.between)
    *inner, last = cluster.levels
    return replace(cluster, levels=(*inner, Level(last.name, last.size * times, last.link)))


def replace_cluster(pricer: Pricer, cluster: Cluster) -> Pricer:
    """Return a pricer of the same graph on another cluster."""
    return pricer_of(pricer.graph, cluster, pricer.batch_size, pricer.optimizer_states, pricer.shards)
