"""Collectives beside products of column-cut layers: a layer by closed form, the product as bound, and only where an engine runs them so."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from shardwise.cluster.catalogue import catalogue_section
from shardwise.cluster.cluster import Cluster
from shardwise.cost.calibration.efficiency import OWN, stack_of
from shardwise.cost.operators.column_gathers import ColumnGathers
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.timing import computes_by_rank, price, simulate_time
from shardwise.plan.ir.program import ComputeOp
from shardwise.plan.ir.schedule_sizes import CHUNKED, SCHEDULES, chunks_of
from shardwise.plan.layout import Layout
from shardwise.schedules import schedule_of
from shardwise.solve import bounds
from tests.support.gpt_graph import gpt

MACHINES = Cluster.parse("4xdgx-h100")
HIDDEN, SEQUENCE = 8192, 2048
GRAPH = gpt(4, hidden=HIDDEN, heads=64, sequence=SEQUENCE, batch=8)
RUNS = "tensor=8 sequence_parallel=on precision=bfloat16-mixed"
BYTES = 8 * SEQUENCE * HIDDEN * 2.0  # of one residual stream


@cache
def pricer_of(name: str = "torch", contention: float = 0.25) -> Pricer:
    """A pricer with a set of the catalogue, which takes so much of hidden collectives from compute."""
    return Pricer(GRAPH, MACHINES, 8, stack=replace(stack_of(MACHINES.device, name), contention=contention))


def layer_s(pricer: Pricer, text: str = RUNS, block: str = "h.1.") -> tuple[float, float, float]:
    """Seconds of a layer's collectives: forward, backward, and beside products."""
    layout, ops = Layout.parse(text), [i for i, op in enumerate(GRAPH.operators) if (op.site + ".").replace("/", ".").startswith(block)]
    _, _, forward, backward = pricer.operator_seconds(layout)
    return float(forward[ops].sum()), float(backward[ops].sum()), float(pricer.hidden_seconds(layout)[ops].sum())


def halves_s(pricer: Pricer) -> tuple[float, float]:
    """Seconds of a gather and of a scatter of one residual stream."""
    group = pricer.group(Layout.parse(RUNS), "tensor")
    return pricer.collective("all_gather", BYTES, group), pricer.collective("reduce_scatter", BYTES, group)


@pytest.mark.parametrize("contention", [0.0, 0.12, 0.691])
def test_of_a_layer_six_eighths_show_and_four_take_their_contention(contention: float) -> None:
    """By hand: two gathers and two scatters each way; of backward the scatters, and two gathers more, run beside products."""
    pricer = pricer_of(contention=contention)
    gather, scatter = halves_s(pricer)
    whole = 4 * (gather + scatter)
    forward, backward, beside = layer_s(pricer)
    assert forward == pytest.approx(whole / 2)
    assert beside == pytest.approx(2 * gather + 2 * scatter)
    assert backward == pytest.approx(2 * gather + contention * beside)
    assert forward + backward == pytest.approx((6 + 4 * contention) / 8 * whole, rel=0.005)  # a gather takes 1 % longer than a scatter


def test_without_overlap_ten_eighths_show() -> None:
    """`whatif stack=serial`: the same step, and nothing of it beside compute."""
    gather, scatter = halves_s(pricer_of())
    forward, backward, beside = layer_s(pricer_of("serial", 0.0))
    assert forward + backward == pytest.approx(6 * gather + 4 * scatter)
    assert beside == 0.0


def windows_s(pricer: Pricer, layout: Layout) -> list[float]:
    """Seconds of the products beside each of a layer's gathers: half of the backward of the layers that read it."""
    backward = pricer.operator_seconds(layout)[1]
    at = {op.site.split("/")[0]: float(backward[i]) for i, op in enumerate(GRAPH.operators)}
    return [sum(at[f"h.1.{name}"] for name in readers) / 2 for readers in ("qkv", ["up"])]


def test_a_collective_shows_what_lasts_longer_than_its_product() -> None:
    """Over the network of four hosts each is longer than the products beside it."""
    pricer, layout = pricer_of(), Layout.parse(RUNS.replace("tensor=8", "tensor=32"))
    group = pricer.group(layout, "tensor")
    gather, scatter = (pricer.collective(name, BYTES, group) for name in ("all_gather", "reduce_scatter"))
    share = pricer.devices.zero_overlap
    products = windows_s(pricer, layout)
    assert max(products) < min(gather, scatter)
    beside = 2 * share * sum(products)  # a gather and a scatter beside each
    found = layer_s(pricer, str(layout))
    assert found[2] == pytest.approx(beside)
    assert found[1] == pytest.approx(4 * gather + 2 * scatter - 0.75 * beside)


def test_a_price_without_that_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: products hide all."""
    bounded = ColumnGathers.backward_seconds
    twin = lambda self, costs, *given: bounded(self, replace(costs, product_overlap=np.inf), *given)  # noqa: E731
    monkeypatch.setattr(ColumnGathers, "backward_seconds", twin)
    pricer_of.cache_clear()
    with pytest.raises(AssertionError):
        test_a_collective_shows_what_lasts_longer_than_its_product()
    pricer_of.cache_clear()


def plain_s(pricer: Pricer, layout: Layout) -> float:
    """Seconds of backward's collectives where each is waited for, and none is repeated."""
    parts, costs = pricer.sharded_inventory(layout), pricer.devices.layer_collectives(layout)
    seconds = [pricer.collective(one.name, size, pricer.collective_group(layout, one)) if size else 0.0 for one, size in zip(
        parts.collectives, pricer.collective_bytes(layout), strict=True
    )]  # fmt: skip
    return costs.slowdown * costs.exposed_backward * sum(seconds[i] for i in parts.backward[1].tolist())


@pytest.mark.parametrize("name", sorted({*catalogue_section("stack")} - {*OWN}))
def test_sets_of_other_software_keep_their_own_overlap(name: str) -> None:
    stack = replace(stack_of(MACHINES.device, name), copies_pieces=False, scatters_alone=False, gathers_keys=False)
    pricer, layout = Pricer(GRAPH, MACHINES, 8, stack=stack), Layout.parse(RUNS)
    assert float(pricer.operator_seconds(layout)[3].sum()) == pytest.approx(plain_s(pricer, layout))
    assert not pricer.hidden_seconds(layout).any()


PLAIN = (  # whole sequences between layers; a divided backward; products of 8 bits
    RUNS.replace(" sequence_parallel=on", ""), RUNS.replace("bfloat16-mixed", "float8"),
    RUNS + " pipeline=2 microbatches=4 schedule=zb-h1", RUNS + " pipeline=2 microbatches=4 schedule=zb-v",
)  # fmt: skip


@pytest.mark.parametrize("text", PLAIN)
def test_where_an_engine_does_not_each_is_waited_for_once(text: str) -> None:
    pricer, layout = pricer_of(), Layout.parse(text)
    assert float(pricer.operator_seconds(layout)[3].sum()) == pytest.approx(plain_s(pricer, layout))
    assert not pricer.hidden_seconds(layout).any()


@pytest.mark.parametrize("kind", ["plain loop", "processors"])
def test_plain_loops_and_processors_keep_what_was_gathered(kind: str) -> None:
    """On processors a gather takes the cores that compute, and a loop of the user's waits for all."""
    cluster = MACHINES if kind == "plain loop" else Cluster.parse("4xcpu-2")
    layout = Layout.parse("tensor=8 sequence_parallel=on")
    pricer = Pricer(GRAPH, cluster, 8, is_plain_loop=kind == "plain loop")
    assert not pricer.hidden_seconds(layout).any()
    if kind == "plain loop":
        assert float(pricer.operator_seconds(layout)[3].sum()) == pytest.approx(plain_s(pricer, layout))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_backward_is_divided_where_its_program_says_so(schedule: str) -> None:
    """An engine joins layers with their gathers but for weight gradients of their own in the program, prices but for such a schedule."""
    chunks = chunks_of(schedule, 2 if schedule in CHUNKED else 1)
    layout = Layout(pipeline=2, microbatches=2, schedule=schedule, chunks=chunks)
    links = tuple((i, i + 1) for i in range(layout.num_stages - 1))
    actions = (action for row in computes_by_rank(layout, links) for action in row)
    assert any(action.op is ComputeOp.W for action in actions) is schedule_of(layout).splits_backward
    assert pricer_of().gathers_again(layout) is not schedule_of(layout).splits_backward


def assert_bounded(contention: float) -> None:
    """Compare bounds of a base with prices of its schedules of a divided backward."""
    pricer, base = pricer_of(contention=contention).with_changes(batch_size=32), Layout.parse(RUNS + " pipeline=2 microbatches=32")
    least = [bounds.base_lower_bound_s(pricer, base, True), bounds.layout_lower_bound_s(pricer, base, True)]
    for schedule in ("zb-h1", "zb-h2", "zb-v"):
        layout = replace(base, schedule=schedule, chunks=chunks_of(schedule, 1))
        assert max(least) <= simulate_time(pricer, price(pricer, layout)).prediction.step_time_s


@pytest.mark.parametrize("contention", [0.0, 0.691, 1.0])
def test_bounds_hold_for_a_divided_backward_too(contention: float) -> None:
    """With a contention near 1 what repeats its gathers takes longer: the bound of a base is that of its cheapest schedule."""
    assert_bounded(contention)


def test_a_bound_of_an_undivided_backward_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin."""
    monkeypatch.setattr(bounds, "with_cheapest_backward", lambda pricer, base: base)
    with pytest.raises(AssertionError):
        assert_bounded(1.0)
