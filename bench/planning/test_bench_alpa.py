"""`scripts/bench alpa`: its configurations are the paper's, its grids are legal, its page says who is faster."""

from __future__ import annotations

import pytest

from bench.planning.alpa import CASES, Case, Found, Result, alpas, grid, markdown, run
from shardwise.zoo.names import find


def test_there_are_21_configurations_seven_of_each_family() -> None:
    assert len(CASES) == 21
    for family in ("gpt", "moe", "wide-resnet"):
        assert [c.num_devices for c in CASES if c.family == family] == [1, 2, 4, 8, 16, 32, 64]


def test_sequences_and_sizes_are_the_papers() -> None:
    for case in CASES:
        _, config = find(case.model)
        if case.family != "wide-resnet":
            assert config.sequence == 1024
        assert case.batch == (1536 if case.family == "wide-resnet" else 1024)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.key)
def test_every_layout_is_of_this_many_devices_and_divides_the_batch(case: Case) -> None:
    for layouts in (list(grid(case)), list(alpas(case))):
        assert layouts
        for layout in layouts:
            assert layout.num_ranks == case.num_devices
            assert case.batch % (layout.data * layout.microbatches) == 0
            assert layout.precision == case.precision
    assert {layout.pipeline for layout in alpas(case)} == {case.stages}


def test_the_page_counts_who_is_faster() -> None:
    results = [
        Result("a on 1", "gpt", 1, Found("data=1", 10.0), Found("data=1", 9.0), Found("data=1", 8.0), True, 1.0),
        Result("b on 2", "gpt", 2, Found("data=2", 10.0), Found("data=2", 12.0), Found(note="no"), False, 1.0),
    ]
    text = markdown(results)
    assert "in 1 of 2 configurations" in text
    assert "It is not in: b on 2." in text
    assert "1.11x" in text
    assert "~that does not fit" in text


def test_a_small_configuration_is_planned_and_priced() -> None:
    found = run(Case("gpt", "gpt-tiny", 2, 8, "float16", 2, 4, 1))
    assert found.shardwise.samples_per_s > 0
    assert found.grid.samples_per_s > 0
    assert found.alpa.layout.startswith("data=1 tensor=1 pipeline=2")
