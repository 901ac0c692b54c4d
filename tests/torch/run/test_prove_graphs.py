"""Random graphs under random layouts are proven equal to their serial runs, without ranks and without a tolerance.

What only floating point can show stays with `tests/ranks/run/test_random_graphs.py`. The long run has 2,000 numbers;
`scripts/verify_all --prove --random N --seed FIRST` proves others and tells of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shardwise.run.prove import rank_threads
from tests.support.random_graphs import prove_graph

# Numbers that prove fast, which between them have every axis, schedules, ZeRO, recomputation and experts.
SAMPLE, LONG = (41, 45, 47, 51, 55, 56, 57, 59, 30015), range(5000, 7000)


def check(seeds: Sequence[int]) -> int:
    """Prove numbers; return how many layouts are not refused."""
    torch.set_num_threads(1)
    rows = [prove_graph(seed) for seed in seeds]
    wrong = [f"{row.model}, {row.layout}: {row.status} {row.note}" for row in rows if row.status not in ("equal", "refused")]
    assert not wrong, "\n".join(wrong)
    return sum(row.status == "equal" for row in rows)


def test_random_graphs_are_proven() -> None:
    assert check(SAMPLE) == len(SAMPLE)


@pytest.mark.parametrize("collective", ["add_up", "join_flat"])
def test_what_is_off_by_rounding_is_found_in_random_graphs(collective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    combine = getattr(rank_threads, collective)

    def combine_wrongly(parts: Sequence[Tensor]) -> Tensor:
        return combine(parts) * (1 + 1e-15) if parts[0].is_floating_point() else combine(parts)

    monkeypatch.setattr(rank_threads, collective, combine_wrongly)
    seed = {"add_up": 55, "join_flat": 41}[collective]
    assert prove_graph(seed).status == "differs"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(20))
def test_two_thousand_random_graphs_are_proven(part: int) -> None:
    assert check(LONG[part * 100 : part * 100 + 100]) >= 50
