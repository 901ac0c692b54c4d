"""Programs of every shape, run and compared with the serial model in float64: several stages a rank, backward in two parts, replicas.

The orders here are written by this file, not by `schedules/`: what runs is the program, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]

from shardwise.model.stages.stages import split, stage_links  # noqa: E402
from shardwise.plan.ir.check import check as prove  # noqa: E402
from shardwise.plan.ir.program import Compute, ComputeOp  # noqa: E402
from shardwise.plan.layout import Layout  # noqa: E402
from shardwise.plan.plan import Plan  # noqa: E402
from shardwise.run.verify.verify import Options, verify_on_rank  # noqa: E402
from shardwise.schedules.lower import pipeline_program  # noqa: E402
from shardwise.world.launch.launch import launch  # noqa: E402
from shardwise.world.world import World  # noqa: E402
from tests.support.verified_models import Subject  # noqa: E402

ODD, AWKWARD = "tests/support/odd_models.py", "tests/support/awkward_models.py"
Rows = Sequence[Sequence[Compute]]


def plan_for(subject: Subject, rows: Rows, layout: Layout) -> Plan:
    """The plan whose stages these rows name, and whose schedule is the rows with their transfers, proven."""
    num_stages = 1 + max(a.stage for row in rows for a in row)
    plan = subject.plan(replace(layout, pipeline=num_stages))
    graph = subject.source.capture(subject.batch, subject.loss, plan.batch_size // layout.microbatches).graph
    program = pipeline_program("test", rows, stage_links(split(graph, plan.stages)))
    prove(program)
    return replace(plan, layout=replace(layout, pipeline=len(rows)).with_schedule("test.txt", str(program)))


def compared(subject: Subject, rows: Rows, layout: str, **options: Any) -> dict[str, Any]:
    """The verification of a run of these rows."""
    plan = plan_for(subject, rows, replace(Layout.parse(layout), precision="float64"))
    subject.source.capture_all(plan, subject.batch, subject.loss)

    def on_rank(world: World) -> dict[str, Any] | None:
        found = verify_on_rank(world, plan, subject.make, subject.batch, subject.loss, subject.source, Options(**options))
        return None if found is None else asdict(found)

    return launch(on_rank, plan.layout.num_ranks, timeout_s=60, show=False)[0]


def one_rank(num_stages: int, num_microbatches: int, late: int = -1) -> list[list[Compute]]:
    """All stages on one rank, a microbatch after the other. `late`: backward is split, and so many weight parts wait for later."""
    row: list[Compute] = []
    waiting: list[Compute] = []
    for m in range(num_microbatches):
        row += [Compute(ComputeOp.F, s, m) for s in range(num_stages)]
        for s in reversed(range(num_stages)):
            if late < 0:
                row.append(Compute(ComputeOp.B, s, m))
                continue
            row.append(Compute(ComputeOp.I, s, m))
            waiting.append(Compute(ComputeOp.W, s, m))
            if len(waiting) > late:
                row.append(waiting.pop(0))
    return [row + waiting]


def folded(num_ranks: int, num_microbatches: int, late: int = -1) -> list[list[Compute]]:
    """Two stages a rank, down the ranks and up again (rank r has r and 2P-1-r), all forwards first."""
    rows: list[list[Compute]] = []
    for r in range(num_ranks):
        low, high = r, 2 * num_ranks - 1 - r
        row = [Compute(ComputeOp.F, s, m) for m in range(num_microbatches) for s in (low, high)]
        ends = [(s, m) for m in range(num_microbatches) for s in (high, low)]
        if late < 0:
            row += [Compute(ComputeOp.B, s, m) for s, m in ends]
        else:
            waiting: list[Compute] = []
            for s, m in ends:
                row.append(Compute(ComputeOp.I, s, m))
                waiting.append(Compute(ComputeOp.W, s, m))
                if len(waiting) > late:
                    row.append(waiting.pop(0))
            row += waiting
        rows.append(row)
    return rows


def both_ways(num_ranks: int, num_microbatches: int, late: int = -1) -> list[list[Compute]]:
    """Two replicas of the pipeline, even microbatches down the ranks and odd ones up, the last forward first in backward."""
    rows: list[list[Compute]] = []
    for r in range(num_ranks):
        places = [(r if m % 2 == 0 else num_ranks - 1 - r, m) for m in range(num_microbatches)]
        row = [Compute(ComputeOp.F, s, m) for s, m in places]
        for s, m in reversed(places):
            row += [Compute(ComputeOp.B, s, m)] if late < 0 else [Compute(ComputeOp.I, s, m), Compute(ComputeOp.W, s, m)]
        rows.append(row)
    return rows


def backwards(num_stages: int, num_microbatches: int) -> list[list[Compute]]:
    """One rank, the last microbatch first."""
    (row,) = one_rank(num_stages, num_microbatches)
    return [sorted(row, key=lambda a: -a.microbatch)]


@pytest.mark.parametrize(
    ("name", "rows", "layout"),
    [
        ("gpt-tiny", one_rank(3, 2), "microbatches=2"),
        ("gpt-tiny", one_rank(3, 2, late=2), "microbatches=2"),
        ("gpt-tiny", folded(2, 4), "microbatches=4 zero=1"),
        ("gpt-tiny", folded(2, 4, late=3), "microbatches=4"),
        ("gpt-tiny", folded(2, 2, late=0), "microbatches=2 recompute=full data=2"),
        ("llama-tiny", folded(2, 2, late=9), "microbatches=2 tensor=2 zero=1"),
        ("unet-tiny", folded(2, 2, late=1), "microbatches=2"),
        ("t5-tiny", folded(2, 2, late=2), "microbatches=2 recompute=full"),
        ("resnet-tiny", folded(2, 2, late=2), "microbatches=2 data=2"),
        ("moe-tiny", one_rank(2, 2, late=1), "microbatches=2 data=2"),
        (f"{ODD}:shared", one_rank(2, 2, late=1), "microbatches=2"),
        (f"{ODD}:losses", one_rank(2, 2, late=1), "microbatches=2"),
        (f"{ODD}:two_inputs", one_rank(2, 2, late=2), "microbatches=2"),
        (f"{ODD}:convnext", one_rank(3, 2, late=2), "microbatches=2"),
        (f"{AWKWARD}:tied", one_rank(2, 2, late=1), "microbatches=2"),
        (f"{AWKWARD}:parametrised", one_rank(2, 2, late=1), "microbatches=2"),
        (f"{AWKWARD}:tables", one_rank(2, 2, late=1), "microbatches=2"),
        ("gpt-tiny", both_ways(2, 4), "microbatches=4"),
        ("gpt-tiny", both_ways(2, 2), "microbatches=2 zero=1 data=2"),
        ("gpt-tiny", both_ways(3, 4, late=1), "microbatches=4 recompute=full"),
        ("t5-tiny", both_ways(2, 4), "microbatches=4 zero=1"),
        ("resnet-tiny", both_ways(2, 4), "microbatches=4"),
        ("resnet-tiny", both_ways(3, 4, late=1), "microbatches=4 recompute=full zero=1"),
        ("unet-tiny", both_ways(2, 4), "microbatches=4 data=2"),
        ("resnet-tiny", both_ways(2, 2), "microbatches=2 data=2"),
        ("resnet-tiny", backwards(2, 4), "microbatches=4"),
        (f"{ODD}:shared", both_ways(2, 2), "microbatches=2 zero=1"),
    ],
)
def test_runs_as_serial(subject: Callable[[str], Subject], name: str, rows: Rows, layout: str) -> None:
    """The same losses, gradients and weights as the serial model's, whatever the order."""
    found = compared(subject(name), rows, layout)
    assert found["ok"], found["first_difference"]
    assert found["tolerance"] <= 1e-9
