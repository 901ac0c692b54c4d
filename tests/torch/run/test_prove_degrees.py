"""Degrees of a proof: against the degrees of polynomials that are written out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from shardwise.run.prove import order_rules, rules  # noqa: F401 - they register the rules of operators
from shardwise.run.prove.degrees import CERTAINTY, HIGH_LEVEL, LINEAR, Degree
from shardwise.run.prove.field_tensor import FieldMode, degree_of, have_equal_numbers, random_numbers
from shardwise.run.prove.finite_field import LARGEST_WEIGHT
from shardwise.run.prove.rank_threads import add_up


def test_a_quotient_is_multiplied_by_its_own_divisors_alone() -> None:
    CERTAINTY.reset()
    x, y = random_numbers((4,), "x", 0), random_numbers((4,), "y", 0)
    product = x * x * x
    quotient: torch.Tensor = (product / (y * y)).sum()
    # x^3 / y^2 summed over four elements: the common denominator has degree 8, a term's numerator 3 + 6, which 3 + 1 + 8 bounds.
    assert CERTAINTY.wrong_point_probability(degree_of(product)) == 3 * LARGEST_WEIGHT
    assert CERTAINTY.wrong_point_probability(degree_of(quotient)) == 12 * LARGEST_WEIGHT


def test_divisors_within_divisors_count_as_often_as_they_occur() -> None:
    CERTAINTY.reset()
    x, y = random_numbers((2,), "x", 0), random_numbers((2,), "y", 0)
    nested = x / (1.0 + x / y)
    # Two elements y within two elements 1 + x / y of degree 2: x (1 + x / y)^-1, times both sums, times every y as often as it occurs.
    assert CERTAINTY.wrong_point_probability(degree_of(nested)) == (2 + 2 * 2 + 2 * 2) * LARGEST_WEIGHT


def test_the_reciprocal_of_a_reciprocal_is_the_number() -> None:
    CERTAINTY.reset()
    x = random_numbers((3,), "x", 0)
    inverse = (x * x).rsqrt()
    variance = inverse.square().reciprocal()
    assert torch.equal(variance.a, (x * x).a)
    assert degree_of(variance).total == 2
    assert not degree_of(variance).reciprocals


def test_parts_of_a_joined_tensor_have_their_own_degrees() -> None:
    CERTAINTY.reset()
    x = random_numbers((3,), "x", 0)
    with FieldMode():  # type: ignore[no-untyped-call]
        whole = torch.empty(2, 1, 3, dtype=torch.float64)
        whole.view(-1).copy_(torch.cat([torch.stack((x, x * x * x)).reshape(-1)]))
        first, second = whole
    assert degree_of(whole).total == 3
    assert degree_of(first) == LINEAR
    assert degree_of(second) == Degree(3)
    assert degree_of(whole * 2.0).total == 3
    sum_of_both = whole + whole.flip(0)
    assert degree_of(sum_of_both[0]).total == 3  # new numbers, whose own degrees nobody knows


def test_buffers_of_a_trial_stay_fake() -> None:
    with FieldMode(), FakeTensorMode():  # type: ignore[no-untyped-call]
        assert isinstance(torch.empty(2, dtype=torch.float64), FakeTensor)


def test_rows_of_a_buffer_keep_their_degrees() -> None:
    """Rows that are computed of the rows before, as in the delta rule; twin: one degree for the buffer, which doubles."""

    def last_row(writes_in_place: bool) -> int:
        CERTAINTY.reset()
        rows: Any = random_numbers((24, 3), "rows", 0).clone()
        for i in range(1, 24):
            row = rows[i] + rows[i] * rows[:i].sum(0)
            if writes_in_place:
                rows[i] = row
            else:
                rows = rows.select_scatter(row, 0, i)
        return degree_of(rows[23]).total

    assert last_row(True) <= 24 * 256
    assert last_row(False) <= 24 * 256


def test_one_degree_for_a_buffer_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin of the last test."""
    monkeypatch.setattr(type(CERTAINTY), "degree_after_write", lambda self, before, buffer, written, numbers: before | written)
    CERTAINTY.reset()
    rows: Any = random_numbers((24, 3), "rows", 0).clone()
    for i in range(1, 24):
        rows[i] = rows[i] + rows[i] * rows[:i].sum(0)
    assert degree_of(rows[23]).total == 2**23


def test_sums_of_members_keep_the_degrees_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sums in one all-reduce, of which one has a high degree, as those of a loss whose classes are cut; twin: nothing noted."""

    def first_row() -> int:
        CERTAINTY.reset()
        members = []
        for rank in range(2):
            x: Any = random_numbers((3,), f"x {rank}", 0)
            members.append(torch.stack([x, x**100]))
        return degree_of(add_up(members)[0]).total

    assert first_row() == 1
    monkeypatch.setattr(type(CERTAINTY), "note_sums", lambda self, parts, sums: None)
    assert first_row() == 100


def test_deep_reciprocals_are_random_functions_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alternating normalisations of rows and columns, whose degree is too high; what is equal stays equal, and what is not does not."""

    def normalise(x: Any) -> Any:
        for step in range(40):
            x = x / x.sum(step % 2, True)
        return x

    x: Any = random_numbers((4, 4), "x", 0)
    CERTAINTY.reset()
    assert CERTAINTY.wrong_point_probability(degree_of(normalise(x))) == 1
    monkeypatch.setattr(CERTAINTY, "max_level", HIGH_LEVEL)
    CERTAINTY.reset()
    whole, again = normalise(x), normalise(x.t().contiguous().t())
    assert CERTAINTY.wrong_point_probability(degree_of(whole)) < 1e-3
    assert have_equal_numbers(whole, again)
    assert not have_equal_numbers(whole, normalise(x * (1 + torch.eye(4, dtype=torch.float64) * 1e-12)))
