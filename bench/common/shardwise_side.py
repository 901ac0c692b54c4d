"""shardwise as a contender: plans, launches its own ranks, and lets each answer the same orders as a peer's.

Started by bench.common.processes as `python -m bench.common.shardwise_side SOCKET SPEC`. Options of the contender: `layout` (text; empty:
shardwise chooses),
`constraints` on that choice, `exchange` (False: gradients are not summed, to see what their sum costs), `allocator` (False: the C
library's settings stay as they are), `transport` between the ranks.
"""

from __future__ import annotations

import sys

import shardwise
from bench.common.case import Case, Contender, from_text
from bench.common.rank import Line, serve
from bench.training.split_models import batch_of
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import format_plan, parse_plan
from shardwise.run.recovery.fingerprints import Fingerprints
from shardwise.world.matmul_backend import PRODUCTS
from shardwise.world.world import World


def make_plan(case: Case, contender: Contender) -> Plan:
    """The plan for a layout by hand, or the one that shardwise chooses for this machine."""
    layout, constraints = contender.options.get("layout") or None, contender.options.get("constraints", ())
    made: Plan = shardwise.plan(case.model, case.batch, layout=layout, constraints=constraints)
    return made


def rank_main(world: World, path: str, text: str, plan_text: str) -> None:
    """One rank: an engine that takes a step at every order."""
    case, contender = from_text(text)
    line = Line(path, world.rank, world.num_ranks)
    try:
        plan = parse_plan(plan_text)
        optimizer = {"name": "adamw", "lr": case.lr}
        engine = shardwise.parallelize(case.model, case.batch, plan=plan, world=world, seed=case.seed, optimizer=optimizer)
        if not contender.options.get("exchange", True):  # every rank then has weights of its own, which a step would find
            engine.gradients.is_reducing, engine._fingerprints = False, Fingerprints([], world)
        about = {"plan": str(plan.layout), "precision": plan.layout.precision, "predicted_s": _predicted(plan, contender)}
        serve(line, case, lambda tokens: engine.step(batch_of(case, tokens)).loss, world.world_group.barrier, about)
    except Exception as error:
        line.send({"error": f"{type(error).__name__}: {error}"})
        raise


def _predicted(plan: Plan, contender: Contender) -> float:
    """Seconds a step by the plan; 0 where an option of the contender's makes it another machine than the one that was planned for."""
    others = {"exchange", "allocator", "transport", "products"} & contender.options.keys()
    return plan.prediction.step_time_s if plan.prediction and not others else 0.0


def main(path: str, text: str) -> None:
    case, contender = from_text(text)
    plan = make_plan(case, contender)
    options = {"SHARDWISE_TRANSPORT": contender.options.get("transport", ""), PRODUCTS: contender.options.get("products", "")}
    shardwise.launch(
        rank_main, plan.layout.num_ranks, path, text, format_plan(plan), threads=plan.layout.threads,
        allocator=contender.options.get("allocator", True), env={key: value for key, value in options.items() if value},
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
