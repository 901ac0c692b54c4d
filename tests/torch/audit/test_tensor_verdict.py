"""How shards of one tensor differ, against closed forms: the shards are made from a known tensor by a known fault."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.audit.match import GatheredShard
from shardwise.audit.tensor_verdict import judge_tensor

TOLERANCE = 1e-6
WHOLE = torch.arange(8)
SERIAL = torch.tensor([3.0, -1.0, 4.0, 1.0, -5.0, 9.0, 2.0, 6.0], dtype=torch.float64)


def replicas(*values: Tensor, partial: bool = False) -> list[GatheredShard]:
    return [GatheredShard(rank, WHOLE, x, partial) for rank, x in enumerate(values)]


def halves(first: Tensor, second: Tensor) -> list[GatheredShard]:
    return [GatheredShard(0, WHOLE[:4], first, False), GatheredShard(1, WHOLE[4:], second, False)]


OTHER = SERIAL.roll(1)
CASES = {
    "equal replicas": (replicas(SERIAL, SERIAL), "equal", ()),
    "equal halves": (halves(SERIAL[:4], SERIAL[4:]), "equal", ()),
    "summands of one tensor": (replicas(0.25 * SERIAL, 0.75 * SERIAL, partial=True), "equal", ()),
    "below the tolerance": (replicas(SERIAL * (1 + 1e-7), SERIAL), "equal", ()),
    "twice on every rank": (replicas(2 * SERIAL, 2 * SERIAL), "factor", (0, 1)),
    "half on every shard": (halves(SERIAL[:4] / 2, SERIAL[4:] / 2), "factor", (0, 1)),
    "a factor of each shard": (halves(1.5 * SERIAL[:4], 2 * SERIAL[4:]), "rank factors", (0, 1)),
    "parts whose sum is right": (replicas(OTHER, SERIAL - OTHER), "sum", (0, 1)),
    "parts whose mean is right": (replicas(SERIAL + OTHER, SERIAL - OTHER), "mean", (0, 1)),
    "one rank is wrong": (replicas(SERIAL, OTHER), "replicas differ", (1,)),
    "both are wrong alike": (replicas(OTHER, OTHER), "wrong", (0, 1)),
    "one half is on no rank": ([GatheredShard(0, WHOLE[:4], SERIAL[:4], False)], "missing", ()),
    "no number": (replicas(SERIAL, SERIAL * float("nan")), "replicas differ", (1,)),
}


@pytest.mark.parametrize("name", CASES)
def test_each_fault_has_its_verdict(name: str) -> None:
    shards, kind, ranks = CASES[name]
    verdict = judge_tensor(shards, SERIAL, TOLERANCE)
    assert (verdict.kind, verdict.ranks) == (kind, ranks)


def test_the_factor_is_the_one_that_was_made() -> None:
    assert judge_tensor(replicas(2.5 * SERIAL, 2.5 * SERIAL), SERIAL, TOLERANCE).factor == pytest.approx(2.5, abs=1e-12)


def test_an_error_is_relative_to_the_serial_tensor() -> None:
    error = torch.zeros(8, dtype=torch.float64)
    error[0] = 1e-3 * float(SERIAL.norm())
    assert judge_tensor(replicas(SERIAL + error, SERIAL), SERIAL, TOLERANCE).error == pytest.approx(1e-3)
