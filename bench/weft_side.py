"""weft as a contender: plans, launches its own ranks, and lets each answer the same orders as a peer's.

Started by bench.processes as `python -m bench.weft_side SOCKET SPEC`. Options of the contender: `layout` (text; empty: weft chooses) and
`constraints` on that choice.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from bench.case import Case, Contender, from_text
from bench.rank import Line, serve
from weft.cluster.probe import probe
from weft.plan.layout import Layout
from weft.plan.plan import Plan
from weft.plan.store import format_plan, parse_plan
from weft.run.build import Source
from weft.run.engine import Engine
from weft.solve.search import search
from weft.world.launch import launch
from weft.world.world import World
from weft.zoo import gpt


def _batch(tokens: Tensor) -> dict[str, Tensor]:
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def make_plan(case: Case, contender: Contender) -> Plan:
    """The plan for a layout by hand, or the one that weft chooses for this machine."""
    sizes = gpt.SIZES[case.model]
    graph = Source.of(lambda: gpt.Model(sizes)).capture(gpt.example_batch(sizes, case.batch), gpt.loss, None).graph
    text = contender.options.get("layout", "")
    constraints = " ".join(contender.options.get("constraints", ()))
    return search(graph, probe(), case.batch, case.model, constraints, Layout.parse(text) if text else None)


def rank_main(world: World, path: str, text: str, plan_text: str) -> None:
    """One rank: an engine that takes a step at every order."""
    case, _ = from_text(text)
    line = Line(path, world.rank, world.num_ranks)
    try:
        torch.manual_seed(case.seed)
        plan = parse_plan(plan_text)
        sizes = gpt.SIZES[case.model]
        engine = Engine(
            plan,
            lambda: gpt.Model(sizes),
            gpt.example_batch(sizes, case.batch),
            gpt.loss,
            world,
            {"name": "adamw", "lr": case.lr},
            seed=case.seed,
        )
        everyone = world.group(tuple(range(world.num_ranks)))
        about: dict[str, Any] = {"plan": str(plan.layout), "precision": plan.layout.precision}
        serve(line, case, lambda tokens: engine.step(_batch(tokens)).loss, everyone.barrier, about)
    except Exception as error:
        line.send({"error": f"{type(error).__name__}: {error}"})
        raise


def main(path: str, text: str) -> None:
    case, contender = from_text(text)
    plan = make_plan(case, contender)
    launch(rank_main, plan.layout.num_ranks, path, text, format_plan(plan), threads=plan.layout.threads)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
