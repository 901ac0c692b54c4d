"""Swap, drop or keep: against trying everything, and by hand where the answer is plain."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import Infeasible
from weft.plan.check import check
from weft.solve import residency
from weft.solve.residency import CHOICES, DROP, KEEP, SWAP, Load, choose, seconds_of

EQUAL = (Load(1.0, 2.0, 4.0),) * 6


def test_what_fits_is_kept() -> None:
    found = choose(EQUAL, 24.0, 1.0)
    assert found.choices == (KEEP,) * 6
    assert found.seconds == 18.0


def test_copies_that_hide_cost_nothing_and_those_that_do_not_are_recomputed() -> None:
    """At 4 bytes a second a stage's copy takes as long as a forward; at a hundredth of that every copy shows."""
    fast = choose(EQUAL, 12.0, 4.0)
    assert fast.seconds == 18.0
    assert set(fast.choices) == {KEEP, SWAP}
    slow = choose(EQUAL, 12.0, 0.04)
    assert DROP in slow.choices
    assert SWAP not in slow.choices
    assert slow.seconds == 18.0 + slow.choices.count(DROP)


def test_without_overlap_a_copy_is_weighed_against_a_forward() -> None:
    """There and back a copy takes 2 x 4 bytes: less than a forward above 8 bytes a second, more below."""
    assert DROP not in choose(EQUAL, 12.0, 9.0, overlaps=False).choices
    assert SWAP not in choose(EQUAL, 12.0, 7.0, overlaps=False).choices


def test_what_never_fits_is_said() -> None:
    with pytest.raises(Infeasible, match="the largest saves 4"):
        choose(EQUAL, 3.0, 1.0)


sizes = st.floats(0.5, 8.0)
stages = st.builds(Load, sizes, sizes, sizes, st.floats(0.0, 0.4))


@settings(max_examples=60, deadline=None)
@given(st.lists(stages, min_size=6, max_size=7), st.floats(0.2, 1.1), st.floats(0.1, 20.0), st.booleans())
def test_the_search_is_as_fast_as_trying_everything(loads: list[Load], share: float, speed: float, overlaps: bool) -> None:
    limit = share * sum(load.saved_bytes for load in loads)
    least = min(seconds_of(loads, choices, limit, speed, overlaps) for choices in product(CHOICES, repeat=len(loads)))
    if least == inf:
        with pytest.raises(Infeasible):
            choose(loads, limit, speed, overlaps)
        return
    found = choose(loads, limit, speed, overlaps)
    assert found.seconds == seconds_of(loads, found.choices, limit, speed, overlaps)
    assert found.seconds <= 1.02 * least


@settings(max_examples=60, deadline=None)
@given(st.lists(stages, min_size=1, max_size=6), st.floats(0.3, 1.2), st.floats(0.1, 20.0))
def test_less_memory_is_never_faster_and_nothing_beats_the_compute(loads: list[Load], share: float, speed: float) -> None:
    compute = sum(load.forward_s + load.backward_s for load in loads)
    limit = share * sum(load.saved_bytes for load in loads)
    try:
        tight = choose(loads, limit, speed).seconds
    except Infeasible:
        return
    assert tight >= compute * (1 - 1e-9)
    assert choose(loads, 2 * limit, speed).seconds <= tight * 1.02


@pytest.mark.parametrize("choices", [(SWAP, DROP, KEEP), (DROP, SWAP, SWAP), (KEEP, KEEP, KEEP)])
def test_its_programs_are_proven(choices: tuple[str, ...]) -> None:
    program = residency.Residency(choices, 1.0).program(2)
    check(program)
    text = str(program)
    assert ("0OFFLOAD1" in text) == (choices[0] == SWAP)
    assert ("0R1" in text) == (choices[0] == DROP)


def test_a_clock_without_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were there room always, a smaller device would cost nothing."""
    assert choose(EQUAL, 8.0, 0.5).seconds > 18.0
    monkeypatch.setattr(residency._Clock, "room", lambda self, size: True)
    assert choose(EQUAL, 8.0, 0.5).seconds == 18.0
