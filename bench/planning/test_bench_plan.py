"""`scripts/bench plan`: rows and page from answers, and one real call of the planner in its own process."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from bench.planning.plan import CASES, LLAMA_8B, SWEEPS, Told, Work, growth, markdown, rows_of, run
from shardwise.cluster.cluster import Cluster
from shardwise.zoo.names import find

WORK = Work("a case", "gpt-tiny", "1xp4d.24xlarge", 8, target_s=10, peer=("a peer", 100.0))
ANSWER = {"layout": "data=8", "planning_time_s": 1.0, "step_time_s": 0.5, "mfu": 0.4, "bound_gap": None}


def told(wall_s: float) -> Told:
    return Told(wall_s, wall_s, 10**9, ANSWER)


def test_a_row_has_what_the_interface_names() -> None:
    time_row, memory_row = rows_of(WORK, [told(s) for s in (5.0, 4.0, 50.0)])
    assert {"case", "shardwise", "peer", "peer_name", "ratio", "unit"} <= set(asdict(time_row))
    assert (time_row.shardwise, time_row.ratio, time_row.unit, time_row.met) == (5.0, 20.0, "s", True)
    assert (memory_row.unit, memory_row.met) == ("bytes", True)


def test_a_target_that_is_missed_is_said() -> None:
    time_row, memory_row = rows_of(WORK, [Told(11.0, 11.0, 3 * 10**9, ANSWER)])
    assert (time_row.met, memory_row.met) == (False, False)
    assert "10 s missed" in markdown({}, [time_row, memory_row])
    failed, _ = rows_of(WORK, [Told(1.0, 1.0, 0, {"error": "none of 40 layouts fits"})])
    assert (failed.met, failed.note) == (False, "none of 40 layouts fits")


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_growth_is_the_power_between_the_ends(power: float) -> None:
    works = [Work(f"{n:,} layers", "m", "c", 8, sweep="layers") for n in (12, 1200)]
    rows = [row for work, n in zip(works, (1.0, 100.0), strict=True) for row in rows_of(work, [told(n**power)])]
    assert growth(rows) == pytest.approx(power)
    assert growth(rows_of(WORK, [told(1.0)])) is None


def test_cases_name_models_and_machines_that_are_there() -> None:
    for work in (*CASES, *SWEEPS):
        Cluster.parse(work.cluster)
        if not work.model.startswith("hf:"):
            find(work.model, work.sequence)


def test_the_configuration_is_an_8_b_llama() -> None:
    hidden, inner, layers = LLAMA_8B["hidden_size"], LLAMA_8B["intermediate_size"], LLAMA_8B["num_hidden_layers"]
    layer = hidden * hidden * 2 + 2 * hidden * hidden // 4 + 3 * hidden * inner + 2 * hidden
    assert layers * layer + 2 * LLAMA_8B["vocab_size"] * hidden + hidden == 8_030_261_248


def test_one_call_plans_in_a_process_of_its_own(tmp_path: Path) -> None:
    found = run(WORK, tmp_path)
    assert found.answer["model"] == "gpt-tiny"
    assert 0 < found.answer["planning_time_s"] < found.wall_s
    assert found.cpu_s > 0
    assert 1e8 < found.memory_bytes < 4e9
    refused = run(Work("another", "gpt-tiny", "1xno-such-machine", 8), tmp_path)
    assert "no-such-machine" in refused.answer["error"]
