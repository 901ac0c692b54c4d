"""Units: known conversions, round trips, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import units
from shardwise.errors import UsageError


@pytest.mark.parametrize(
    ("parse", "text", "number"),
    [
        (units.parse_bytes, "2GiB", 2 * 2**30),
        (units.parse_bytes, "40 GB", 40e9),
        (units.parse_bytes, "1.5e3", 1500),
        (units.parse_bytes, " 7 B ", 7),
        (units.parse_bytes, "1_000 kB", 1e6),
        (units.parse_rate, "25 GB/s", 25e9),
        (units.parse_rate, "100 Gb/s", 12.5e9),
        (units.parse_rate, "400Gbit/s", 50e9),
        (units.parse_rate, "1 GiB/s", 2**30),
        (units.parse_seconds, "3 us", 3e-6),
        (units.parse_seconds, "3 µs", 3e-6),
        (units.parse_seconds, "2 min", 120),
        (units.parse_count, "1.3B", 1.3e9),
        (units.parse_count, "10m", 10e6),
        (units.parse_count, 12, 12),
    ],
)
def test_known_conversions(parse, text, number) -> None:  # type: ignore[no-untyped-def]
    assert parse(text) == pytest.approx(number)


@pytest.mark.parametrize(
    ("parse", "text", "reason"),
    [
        (units.parse_bytes, "2 GX", "unknown unit 'GX'"),
        (units.parse_bytes, "GiB", "is not a number with a unit, for example 2 GiB"),
        (units.parse_bytes, "-1 GB", "not negative"),
        (units.parse_bytes, "1e999", "finite"),
        (units.parse_bytes, True, "is not a number"),
        (units.parse_bytes, "100 Gb", "unknown unit 'Gb'.*did you mean"),
        (units.parse_rate, "25 GB", "unknown unit 'GB'.*did you mean"),
        (units.parse_seconds, "3 hours", "unknown unit 'hours'"),
        (units.parse_count, "", "is not a number"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_hint(parse, text, reason) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=reason):
        parse(text)


@given(st.floats(0, 1e18))
def test_what_is_formatted_reads_back_to_three_digits(number: float) -> None:
    assert units.parse_bytes(units.format_bytes(number)) == pytest.approx(number, rel=6e-3, abs=6e-3)
    assert units.parse_rate(units.format_rate(number)) == pytest.approx(number, rel=6e-3, abs=6e-3)


@given(st.floats(1e-9, 59))
def test_short_times_read_back_to_three_digits(seconds: float) -> None:
    assert units.parse_seconds(units.format_seconds(seconds)) == pytest.approx(seconds, rel=6e-3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.9999, "1.00 s"),
        (59.994, "60.0 s"),
        (60, "1 min"),
        (3599.6, "1 h"),
        (3660, "1 h 1 min"),
        (1e-12, "0.00 ns"),
        (-75, "-1 min 15 s"),
    ],
)
def test_times_at_the_edges(seconds: float, text: str) -> None:
    assert units.format_seconds(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(999, "999"), (1000, "1.00k"), (999_999, "1.00M"), (124e6, "124M"), (0.5, "0.50")])
def test_counts_at_the_edges(count: float, text: str) -> None:
    assert units.format_count(count) == text
