"""The pipeline benchmark's own parts: where the peer's stages lie, tables as Markdown, and figures that follow from known timelines."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]

from bench.common.arithmetic import Row, wrong  # noqa: E402
from bench.common.document import lines_of  # noqa: E402
from bench.peers.pipelining import stages_of  # noqa: E402
from bench.training.executor import Overhead, _compared  # noqa: E402
from bench.training.pipeline import CASES, PAIRS, SCHEDULES  # noqa: E402
from shardwise.plan.ir.program import Compute  # noqa: E402
from shardwise.plan.ir.schedule_sizes import SCHEDULES as ALL  # noqa: E402
from shardwise.plan.ir.timeline import Timeline  # noqa: E402
from shardwise.plan.layout import Layout  # noqa: E402
from shardwise.schedules import build  # noqa: E402
from shardwise.simulate.clock import simulate  # noqa: E402


@pytest.mark.parametrize(("schedule", "chunks"), [("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)])
def test_the_peers_stages_are_each_on_one_rank(schedule: str, chunks: int) -> None:
    for num_ranks in (2, 4):
        found = [stage for rank in range(num_ranks) for stage in stages_of(rank, num_ranks, chunks, schedule)]
        assert sorted(found) == list(range(num_ranks * chunks))


def test_layouts_are_ones_that_run() -> None:
    for case in CASES.values():
        for ours, _, chunks in PAIRS:
            layout = Layout.parse(f"pipeline=2 microbatches={case.microbatches} schedule={ours}" + (" chunks=2" * (ours == "interleaved")))
            assert layout.chunks == chunks
    assert {words.split()[0] for words in SCHEDULES} == set(ALL) - {"gems-mast"}


def test_a_simulation_of_measured_times_is_the_measurement() -> None:
    """Where every compute of a kind takes the same and transfers nothing, the simulated step is the measured one."""
    program = build("1f1b", 2, 4)
    seconds = {"F": 1.0, "B": 2.5}

    def compute_s(action: Compute) -> float:
        return seconds[action.op.value] * (1 + action.stage)

    measured = simulate(program, compute_s, lambda *_: 0.0)
    found = _compared("1f1b", measured, [measured], str(program), set())
    assert found.difference == pytest.approx(0.0)
    assert found.farthest_share == pytest.approx(0.0)
    late = Timeline("late", 2, tuple(s._replace(start_s=s.start_s * 2, end_s=s.end_s * 2) for s in measured.spans))
    assert _compared("1f1b", late, [measured], str(program), set()).difference == pytest.approx(1.0)


def test_tables_and_what_is_wrong() -> None:
    table = Table(title="Name")
    table.add_column("a")
    table.add_column("b")
    table.add_row("[green]1[/]", "x")
    assert lines_of(table) == ["## Name", "", "| a | b |", "| --- | --- |", "| 1 | x |", ""]
    assert Overhead("1f1b", 8, 3e-6, 1e-6).overhead_us == pytest.approx(2.0)
    same, parted = (Row("small", 1.0, 1.0, "torch", 1.0, loss_difference=x) for x in (1e-7, 0.1))
    assert wrong([same], {"torch GPipe (small)": "reason"}) == []
    assert len(wrong([parted], {"shardwise gpipe (small)": "reason"})) == 2
