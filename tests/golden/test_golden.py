"""Prices, plans, programs and runs, equal to the byte to those recorded before the tree was renamed and rearranged."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import PLANS, PROGRAMS
from records import NUMBER, plan_of, program_of, read, run_of


@pytest.mark.parametrize("case", PLANS, ids=lambda case: " ".join(map(str, case)))
def test_plans_have_the_recorded_numbers(case: tuple[str, int, str, str]) -> None:
    assert plan_of(*case) == read("plans.json")[" | ".join(map(str, case))]


@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: " ".join(map(str, case)))
def test_programs_have_the_recorded_actions(case: tuple[str, int, int, int]) -> None:
    assert program_of(*case) == read("programs.json")[" ".join(map(str, case))]


def test_a_launch_and_a_recovery_give_the_recorded_transcript(tmp_path: Path) -> None:
    recorded = read("runs.json")
    assert run_of(tmp_path / "calm") == recorded["calm"]
    assert run_of(tmp_path / "killed", 3) == recorded["killed"]
    assert recorded["killed"]["losses"] == recorded["calm"]["losses"]


def test_a_record_with_another_number_is_told() -> None:
    changed = read("plans.json")[" | ".join(map(str, PLANS[0]))] | {"step_time_s": 0.0065}
    assert plan_of(*PLANS[0]) != changed
    assert NUMBER.findall("6.53 ms of 1,024 at 3e-4, h2o") == ["6.53", "1,024", "3e-4"]
