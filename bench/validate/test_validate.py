"""scripts/validate: its arithmetic against hand-made tables, its fits against known constants, its bubbles against closed forms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.validate.bubbles import bubble, bubbles
from bench.validate.collectives import MIB, NETWORK, NODE, cluster_of, constants, errors, fitted, predicted
from bench.validate.document import table as markdown
from bench.validate.rows import Row, table
from shardwise.cost.calibration.efficiency import protocols_named
from shardwise.errors import UsageError

COLUMNS = "model,p,m,T_F_ms,T_B_ms,T_W_ms,T_comm_ms,bubble_1F1B"


def test_a_row_is_the_mean_and_the_largest_error() -> None:
    row = Row.of("t", "p", [0.1, -0.3, 0.2])
    assert (row.mean_abs_error_pct, row.max_abs_error_pct, row.n) == (20.0, 30.0, 3)
    assert "| t | p | 20.00 | 30.0 | 3 |" in markdown([row])


def test_missing_data_is_said_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--data DIR"):
        table(tmp_path, "zero_bubble_stage_times_and_bubbles.csv")


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 24)])
def test_bubbles_without_transfers_are_the_closed_form(p: int, m: int) -> None:
    """Huang et al. 2019: (p - 1)/(m + p - 1)."""
    assert bubble(p, m, 1.0, 2.0, 0.0) == pytest.approx((p - 1) / (m + p - 1))
    assert bubble(p, m, 1.0, 2.0, 0.1) > bubble(p, m, 1.0, 2.0, 0.0)


def test_bubbles_are_read_with_both_parts_of_backward(tmp_path: Path) -> None:
    path = tmp_path / "zero_bubble_stage_times_and_bubbles.csv"
    path.write_text(f"# a comment\n{COLUMNS}\nsmall,4,8,1.0,1.25,0.75,0.0,0.2727\n")
    (_, published, simulated) = bubbles(tmp_path)[0]
    assert published == 0.2727
    assert simulated == pytest.approx(3 / 11)


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    """Times made with other constants are fitted to within a percent, by what they predict; unfitted they are far off."""
    name = "dgx-a100-40"
    start = constants(protocols_named("nccl"), cluster_of(name, 16), (*NODE, *NETWORK))
    other = {k: v * (1.3 if k.endswith("start") else 0.8) for k, v in start.items()}
    sizes = [(n, 4.0**i) for n in (2, 8, 16, 64) for i in range(3, 17)]
    made = predicted(name, protocols_named("nccl"), other, [(n, size, 1.0) for n, size in sizes])
    points = [(n, size, seconds) for (n, size), seconds in zip(sizes, made, strict=True)]
    assert max(map(abs, errors(name, start, points))) > 0.1
    found = fitted(name, points, start)
    mean = sum(map(abs, errors(name, found, points))) / len(points)
    assert mean < 0.01


def test_the_catalogues_constants_are_the_ones_that_are_priced_with() -> None:
    name, points = "dgx-a100-40", [(16, 64 * MIB, 1e-3), (2, 1024.0, 1e-5)]
    start = constants(protocols_named("nccl"), cluster_of(name, 16), (*NODE, *NETWORK))
    frozen = predicted(name, protocols_named("nccl"), start, points)
    slower = predicted(name, protocols_named("nccl"), {**start, "network": start["network"] / 2}, points)
    assert slower[0] > 1.5 * frozen[0]
    assert slower[1] == frozen[1]
    assert replace(Row.of("t", "p", [0.0]), note="n").record()["note"] == "n"
