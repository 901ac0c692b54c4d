"""What does not divide is cut all the same: at borders of heads, everywhere alike, priced by the longest piece."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shardwise.model.dims.labels import num_units_by_dim
from shardwise.model.sharding.fold import propagate_with_folding
from shardwise.model.sharding.sharding import Prices
from shardwise.plan.ir.placement import P, R, Shard, even_shard_ranges, is_shard, shard
from shardwise.plan.ir.transition import sent_fraction
from tests.support.gpt_graph import gpt

FAST = Prices(1e12, 1e12, 1e10, 1e-7)  # where cuts pay, and imbalance less than what would be sent


@pytest.mark.parametrize("layers", [1, 6])
def test_heads_features_and_vocabulary_that_do_not_divide_are_cut(layers: int) -> None:
    """8 heads of 16 over 3 ranks are 3, 3 and 2; rows of q, k and v follow them, features and vocabulary differ by one."""
    graph = gpt(layers=layers, hidden=128, heads=8, vocabulary=50257)
    found = propagate_with_folding(graph, {"tensor": 3}, prices=FAST)
    placed = {v.name: found.placements[v.value]["tensor"] for v in graph.parameters}
    assert placed["h.0.q.weight"] == placed["h.0.k.bias"] == Shard(0, (48, 48, 32))
    assert placed["h.0.proj.weight"] == Shard(1, (48, 48, 32))
    assert placed["h.0.up.weight"] == Shard(0, (171, 171, 170))
    assert placed["head.weight"] == Shard(0, (16753, 16752, 16752))
    attention = next(op for op in graph.operators if "attention" in op.target)
    assert {row["tensor"] for row in found.input_placements[attention.name]} == {Shard(1, (3, 3, 2))}
    assert found.work_split(attention, "tensor") == 8 / 3
    assert found.local_shape(attention.outputs[0], (8, 8, 32, 16), coordinates={"tensor": 2}) == (8, 2, 32, 16)
    even = propagate_with_folding(gpt(layers=layers, hidden=128, heads=8, vocabulary=50256), {"tensor": 2}, prices=FAST)
    assert [(m.op, m.forward, m.backward) for m in found.redistributions] == [(m.op, m.forward, m.backward) for m in even.redistributions]


def test_what_divides_is_cut_equally() -> None:
    graph = gpt(layers=1, hidden=96, heads=6)
    found = propagate_with_folding(graph, {"data": 4, "tensor": 2}, prices=FAST)
    forms = [form for by in found.placements.values() for form in by.values() if is_shard(form)]
    assert forms
    assert not any(form.lengths for form in forms)


def test_units_go_through_every_shape() -> None:
    graph = gpt(layers=1, hidden=96, heads=6, batch=5)
    by_products, by_all = num_units_by_dim(graph, True), num_units_by_dim(graph, False)
    weights = {v.name: v.value for v in graph.parameters}
    assert by_products[weights["h.0.q.weight"], 0] == by_products[weights["h.0.proj.weight"], 1] == 6
    assert by_products[weights["h.0.up.weight"], 0] == 384
    assert by_all["x", 0] == by_all["y", 0] == 5, "rows of a loss over all positions are samples"


def test_more_ranks_than_heads_cut_what_they_can() -> None:
    """Heads are put together, features and vocabulary are cut."""
    graph = gpt(layers=1, hidden=64, heads=4)
    found = propagate_with_folding(graph, {"tensor": 6}, prices=FAST)
    placed = {v.name: found.placements[v.value]["tensor"] for v in graph.parameters}
    assert placed["h.0.up.weight"] == Shard(0, (43, 43, 43, 43, 42, 42))
    attention = next(op for op in graph.operators if "attention" in op.target)
    assert not found.labels[attention.name]["tensor"]


@pytest.mark.parametrize(("length", "n", "unit"), [(8, 3, 1), (512, 3, 64), (50257, 3, 1), (7, 7, 1), (12, 5, 2)])
def test_pieces_are_whole_units_and_all_of_it(length: int, n: int, unit: int) -> None:
    form = shard(1, length, n, unit)
    ranges = form.ranges(length, n)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == length
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert all((stop - start) % unit == 0 for start, stop in ranges)
    longest = max(stop - start for start, stop in ranges)
    assert longest - min(stop - start for start, stop in ranges) <= unit
    assert form.split_factor(n) == pytest.approx(length / longest)
    assert [form.local_range(length, n, i) for i in range(n)] == [(start, stop - start) for start, stop in ranges]


def test_the_busiest_rank_sends_what_its_row_says() -> None:
    """Counted element by element: a gather sends one's piece to all others, an exchange what is not one's own of the other dimension."""
    rows, columns = shard(0, 8, 3), shard(1, 7, 3)
    held = zip(rows.ranges(8, 3), columns.ranges(7, 3), strict=True)
    sent = [(b - a) * (7 - (d - c)) for (a, b), (c, d) in held]
    assert sent_fraction(rows, columns, 3) == pytest.approx(max(sent) / 56)
    assert sent_fraction(rows, R, 3) == sent_fraction(P, rows, 3) == pytest.approx(max(b - a for a, b in even_shard_ranges(8, 3)) * 2 / 8)
    assert sent_fraction(Shard(0), R, 4) == 0.75
