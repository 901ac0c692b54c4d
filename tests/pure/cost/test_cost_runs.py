"""What runs of layers hold for a moment, against what a backward would do, told step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cost.memory.block_runs import BatchBytes, BatchBytesColumns, BlockRuns, run_starts, saved_by_later
from shardwise.model.graph import Operator, Ref

BIG = 25 * 2**20 / 4  # elements of a bucket
sizes = st.lists(st.floats(1, BIG / 4), min_size=0, max_size=4)  # one bucket a run


def operators(weights: list[list[str]]) -> list[Operator]:
    """One a run, each of which reads what came before it."""
    args = [(Ref(f"x{i}"), *map(Ref, mine)) for i, mine in enumerate(weights)]
    return [Operator(f"o{i}", "aten.mm.default", mine, (), (f"v{i}",), f"h.{i}/mm") for i, mine in enumerate(args)]


def runs_of(weights: list[list[str]], trained: dict[str, float], experts: frozenset[str] = frozenset(), spread: int = 1) -> BlockRuns:
    learns = {f"x{i}" for i in range(len(weights))}
    return BlockRuns.of(operators(weights), list(range(len(weights))), trained, experts, learns, spread)


@given(st.lists(sizes, min_size=1, max_size=5), st.integers(2, 8))
def test_scattering_is_what_a_backward_holds(runs: list[list[float]], data: int) -> None:
    names = [[f"w{k}.{i}" for i in range(len(mine))] for k, mine in enumerate(runs)]
    made = runs_of(names, {name: size for mine, own in zip(names, runs, strict=True) for name, size in zip(mine, own, strict=True)})
    under_way, want = 0.0, []
    for mine in reversed(runs):
        # Its bucket fills while the one before is scattered, and a piece of it comes; when it is full, a piece of its own.
        want.append((sum(mine) + under_way) * (1 + 1 / data))
        under_way = sum(mine) or under_way
    assert made.scattering_bytes(1.0, 1 / data, len(runs)).tolist() == pytest.approx(want[::-1])
    assert made.gathered_bytes(2.0).tolist() == pytest.approx(
        [2 * (sum(mine) + (sum(runs[k - 1]) if k else 0)) for k, mine in enumerate(runs)]
    )


def test_a_layer_of_several_buckets_holds_two_of_them() -> None:
    made = runs_of([["a", "b", "c"]], {"a": BIG, "b": BIG, "c": 1.0})
    assert made.scattering_bytes(4.0, 0.5, 1).tolist() == [4 * (BIG + 1.5 * BIG)]
    assert made.scattering_bytes(4.0, 0.0, 1).tolist() == [4 * (BIG + BIG)]  # in place


def test_a_weight_that_two_runs_read_is_whole_in_both() -> None:
    made = runs_of([["embed"], ["up"], ["embed", "norm"]], {"embed": 100, "up": 10, "norm": 1})
    assert made.gathered_bytes(1.0).tolist() == [100, 110, 111]
    assert made.scattering_bytes(1.0, 0.5, 3).tolist() == [1.5 * (100 + 10), 1.5 * (10 + 101), 1.5 * 101]


def test_weights_of_look_ups_are_whole_until_backward_is_over() -> None:
    those = operators([["first"], ["table"], ["last"]])
    made = BlockRuns.of(those, [0, 1, 2], {"first": 1, "table": 10, "last": 100}, frozenset(), {"x0", "x2"}, 1)
    assert made.gathered_bytes(1.0).tolist() == [1 + 10, 10 + 1, 100 + 10]
    assert (
        made.gathered_bytes(1.0)[0]
        > runs_of([["first"], ["table"], ["last"]], {"first": 1, "table": 10, "last": 100}).gathered_bytes(1.0)[0]
    )


def test_spread_experts_count_their_part() -> None:
    made = runs_of([["experts", "gate"]], {"experts": 80, "gate": 2}, frozenset({"experts"}), 4)
    assert made.gathered_bytes(1.0).tolist() == [22]


def test_what_stands_behind_is_gone() -> None:
    kept = BatchBytesColumns.of([BatchBytes(4, 0, 0), BatchBytes(0, 3, 1), BatchBytes(8, 0, 0)])
    assert saved_by_later(kept.at(1.0, 2)).tolist() == [3 + 1 + 4, 4, 0]
    assert run_starts(["", "a", "a", "b", "a"]) == [0, 1, 3, 4]
    made = BlockRuns.of(operators([[], [], []]), [0, 2], {}, frozenset(), set(), 1)
    assert made.max_by_run(np.array([1.0, 3.0, 2.0])).tolist() == [3.0, 2.0]
    assert made.expand_to_operators(np.array([5.0, 6.0]), 3).tolist() == [5.0, 5.0, 6.0]
