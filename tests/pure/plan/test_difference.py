"""Timelines compared action by action: against what was changed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.plan.ir.program import Compute
from shardwise.plan.ir.timeline import Span, Timeline
from shardwise.plan.ir.timeline_difference import compare_by_action
from shardwise.schedules import build


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_what_was_changed_is_found(data: st.DataObject) -> None:
    """One span made longer is the largest difference, by as much; the others are as they were."""
    before = Timeline("a", 4, tuple(_spans()))
    number = data.draw(st.integers(0, len(before.spans) - 1))
    by = data.draw(st.floats(0.1, 9.0))
    span = before.spans[number]
    after = replace(before, spans=(*before.spans[:number], span._replace(end_s=span.end_s + by), *before.spans[number + 1 :]))
    found = compare_by_action(before, after)
    first, *rest = found.largest(len(found.actions))
    assert (first.rank, first.name) == (span.rank, span.name)
    assert first.added_duration_s == pytest.approx(by)
    assert first.delay_s == pytest.approx(by)
    assert all(d.added_duration_s == d.delay_s == 0 for d in rest)
    assert found.total_b_s - found.total_a_s == after.total_s - before.total_s
    assert (found.only_a, found.only_b) == (0, 0)


def _spans(shift_s: float = 0.0, devices: int = 1) -> list[Span]:
    """Every compute of 1F1B, of 4 ranks, one after the other, on `devices` devices each; the later ones run longer."""
    out = []
    for rank, row in enumerate(build("1f1b", 4, 3).actions):
        for i, action in enumerate(a for a in row if isinstance(a, Compute)):
            out += [
                Span(rank * devices + d, "compute", str(action), shift_s + i, shift_s + i + 1 + 100.0 * d, action.op.value)
                for d in range(devices)
            ]
    return out


def test_times_count_from_each_start() -> None:
    """The same timeline later is the same."""
    found = compare_by_action(Timeline("a", 4, tuple(_spans())), Timeline("b", 4, tuple(_spans(7.0))))
    assert found.relative_difference == 0
    assert all(d.added_duration_s == d.delay_s == 0 for d in found.actions)


def test_the_first_device_stands_for_its_pipeline_rank() -> None:
    found = compare_by_action(Timeline("a", 4, tuple(_spans())), Timeline("b", 8, tuple(_spans(devices=2))))
    assert len(found.actions) == len(_spans())
    assert all(d.added_duration_s == 0 for d in found.actions)


def test_what_only_one_has_is_counted() -> None:
    """A lost compute, transfers that are no computes, a name that comes twice, and ranks that do not fit."""
    whole = Timeline("a", 4, tuple(_spans()))
    less = replace(whole, spans=(*whole.spans[1:], Span(0, "send", "x(0,1,0)>1", 0.0, 1.0, "send")))
    twice = replace(whole, spans=(*whole.spans, whole.spans[0]._replace(start_s=50.0, end_s=51.0)))
    assert (compare_by_action(whole, less).only_a, compare_by_action(whole, less).only_b) == (1, 0)
    assert (compare_by_action(whole, twice).only_a, compare_by_action(whole, twice).only_b) == (0, 1)
    odd = compare_by_action(whole, Timeline("b", 3, ()))
    assert odd.actions == ()
    assert odd.only_a == len(whole.spans)
