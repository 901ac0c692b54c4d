"""Random graphs under random layouts equal their serial runs in float64: sizes, kernels, strides, masks, loads of experts and meshes that
nobody chose.

Thousands are proven without ranks (`tests/torch/run/test_prove_graphs.py`); here one of each kind stays: an image, a text, experts,
halos, a ring. The long run has 2,000 numbers; SHARDWISE_RANDOM=FIRST:LAST runs others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from tests.support.random_graphs import check

# 9039: of two branches one alone has weights that its tensor ranks gather.
SAMPLE, LONG = (0, 1, 10, 11, 9039), range(1000, 3000)


def test_random_graphs_equal_serial() -> None:
    first, _, last = os.environ.get("SHARDWISE_RANDOM", "").partition(":")
    seeds: Sequence[int] = range(int(first), int(last)) if first else SAMPLE
    number, found = check(seeds)
    assert not found, "\n".join(found)
    assert number >= len(seeds) // 2, f"only {number} of {len(seeds)} layouts are not refused"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(20))
def test_two_thousand_random_graphs_equal_serial(part: int) -> None:
    number, found = check(LONG[part * 100 : part * 100 + 100])
    assert not found, "\n".join(found)
    assert number >= 50
