"""Plan for a model that could not be captured as a graph: data parallelism alone, from its number of parameters, a cluster and a batch.

Whether parts of the batch train the same as the whole can only be tried; the caller, who can run the model, passes the trial. Nothing is
known of its compute, so nothing is predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwise.cluster.cluster import Cluster
from shardwise.cost.memory.memory import state_bytes
from shardwise.errors import Infeasible
from shardwise.plan.ir.precision import PRECISIONS
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan, check_uncaptured
from shardwise.solve.checks import check_layout
from shardwise.solve.constraints import parse_constraints
from shardwise.solve.moves.all_reduce_choice import choose_gradient_all_reduce
from shardwise.solve.space import iterate_layouts

NO_GRAPH = "the model is no graph, in which it could be seen whether microbatches change what is trained: losses count by their samples"


def plan_without_graph(
    num_parameters: int,
    reason: str,
    cluster: Cluster,
    batch_size: int,
    model: str,
    constraints: str = "",
    layout: Layout | None = None,
    trial: Callable[[Plan], None] = lambda plan: None,
) -> Plan:
    """Plan a model that could not be captured, for the given `reason`: data parallelism, ZeRO-1 where replicas do not fit.

    Chosen are as many data replicas as divide the batch and pass `trial`, which raises Infeasible where so many parts would train
    something else than the whole batch.

    Raises:
        Infeasible: constraints or a layout that ask for tensor or pipeline, a model that does not fit, or none that passes the trial.
    """
    limits = parse_constraints(constraints)
    defaults = {"tensor": 1, "pipeline": 1, "microbatches": 1, "recompute": "none", "offload": "none"}
    found = (one for one in iterate_layouts(cluster, batch_size, limits) if one.zero <= 1 and batch_size % one.data == 0)
    searched = (replace(one, precision=PRECISIONS[one.precision].product_precision) for one in found)  # it runs whole, on its own weights
    allowed = [one for one in searched if all(getattr(one, k) == v for k, v in defaults.items())] if layout is None else [layout]
    if not allowed:
        raise Infeasible(
            f"{model} could not be captured ({reason}), so only data and zero apply, and {constraints!r} leaves nothing of them"
        )
    refused: dict[int, Infeasible] = {}  # by data
    for one in allowed:
        if one.data in refused:
            continue
        check_uncaptured(one, reason)
        check_layout(one, cluster, batch_size)
        if state_bytes(num_parameters, one.zero, one.data) < cluster.memory_of(one.num_ranks):
            why_data = f"data={one.data}: as many replicas as there are devices and divide the batch of {batch_size}; nothing else applies"
            plan = Plan(one, model, cluster.source_text, batch_size, uncaptured=reason, sums=choose_gradient_all_reduce(cluster, one))
            try:
                trial(plan)
            except Infeasible as error:
                refused[one.data] = error
                continue
            if refused:
                first = str(next(iter(refused.values()))).replace(f" ({reason})", "")
                why_data = f"data={one.data}: more replicas would train something else; {first}"
            microbatch_reason = (("whole batch", NO_GRAPH),) if one.microbatches > 1 else ()
            return replace(plan, reasons=(("data", why_data), ("capture", reason), *microbatch_reason))
    if refused:
        raise next(iter(refused.values()))
    needed, available = 8.0 * num_parameters, cluster.memory_of(1)
    raise Infeasible(
        f"{model} could not be captured ({reason}), and by data parallelism it does not fit: its state needs at least {needed / 2**30:.2f} "
        f"GiB a device, which has {available / 2**30:.2f} GiB"
    )
