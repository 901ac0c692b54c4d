"""A few rows of the blind test, of each kind of software: they fit, and take about as long as published."""

from __future__ import annotations

import pytest

from bench.validate.blind import BlindOutcome, format_page, read_rows
from bench.validate.training import price_runs

ROWS = {(row.run.source.name, row.run.title, row.run.devices): row for row in reversed(read_rows())}
KEPT = [
    (("NeMo 24.03 long sequences", "llama2-7b 32K", 32), 0.08), (("llm-foundry A100-40", "mpt-350m 2048", 128), 0.05),
]  # fmt: skip


@pytest.mark.parametrize(("key", "error"), KEPT, ids=[key[0] for key, _ in KEPT])
def test_a_row_fits_and_takes_about_as_long(key: tuple[str, str, int], error: float) -> None:
    [outcome] = price_runs([ROWS[key].run])
    assert outcome.fits
    assert abs(outcome.error) < error


def test_seconds_and_memory_are_near_what_was_measured() -> None:
    row = ROWS["torchtitan 2025-06 H200", "llama3-8b fp8", 32]
    [outcome] = price_runs([row.run])
    assert abs(outcome.error) < 0.05
    assert 0.9 * row.run.memory_bytes < outcome.memory_bytes < row.run.memory_bytes  # which an allocator reserved
    page = format_page([BlindOutcome(row, outcome)])
    assert "| torchtitan 2025-06 H200 | 1 | 29.6 | -29.6 |" in page  # what was predicted first stays


def test_every_row_has_what_was_predicted_first() -> None:
    assert len(read_rows()) == 100
    assert all(row.first_s > 0 and row.first_bytes > 0 for row in read_rows())
