"""Long sequences are shared by themselves: prices that say so, and what they stand on."""

from __future__ import annotations

import pytest

import weft
from weft.cost.step import Pricer
from weft.model.dims.sequences import sequences
from weft.model.sharding.propagate import propagate
from weft.model.sharding.sharding import Prices
from weft.plan.layout import Layout
from weft.plan.placement import dual
from weft.plan.plan import Plan
from weft.plan.transition import sent_part
from weft.run.build import Source
from weft.solve.images import contexts
from weft.solve.timing import price
from weft.zoo.resolve import resolve

LLAMA = "llama:sequence=131072,layers=2"  # layers of Llama-8B


@pytest.fixture(scope="module")
def source() -> Source:
    return Source.of(resolve(LLAMA).make)


def priced(layout: str, model: str = LLAMA) -> Plan:
    found = resolve(model)
    return weft.plan(found.make, found.batch(8), loss=found.loss, cluster="8xdgx-h100", layout=f"{layout} precision=bfloat16")


def test_sharing_a_sequence_costs_less_than_tensor_ranks() -> None:
    """Of Llama-8B's layers over 131,072 positions, 8 ranks each: less time, and what backward keeps is an eighth of all of it, not of what
    lies inside of products alone."""
    eight = "llama:sequence=131072,layers=8"
    shared, tensor = (priced(f"data=8 {axis} zero=3 recompute=full", eight).prediction for axis in ("context=8", "tensor=8"))
    assert shared is not None
    assert tensor is not None
    assert shared.step_time_s < tensor.step_time_s
    assert shared.memory.activations < 0.6 * tensor.memory.activations
    assert shared.memory.total < tensor.memory.total
    inside = [dict(one.parts)["tensor"] for one in (shared, tensor)]
    assert inside[0] < inside[1]


def test_sharing_a_sequence_sends_fewer_bytes_than_tensor_ranks(source: Source) -> None:
    """Heads and positions exchanged, and gradients of weights summed, are fewer bytes than activations summed twice a layer, both ways."""
    model = resolve(LLAMA)
    graph = source.capture(model.batch(1), model.loss, 1).graph

    def sent(axis: str) -> float:
        found = propagate(graph, {axis: 8}, prices=Prices(4e14, 3e12, 4e11, 1e-5))
        moves = sum(
            (sent_part(m.source, m.target, 8) + (sent_part(dual(m.target), dual(m.source), 8) if m.backward else 0.0))
            * graph.tensors[m.value].size_bytes
            for m in found.moves
        )
        return moves + sum(2 * 7 / 8 * graph.tensors[value].size_bytes for value, axes in found.gradients.items() if axis in axes)

    tensor, context = sent("tensor"), sent("context")
    layer = 4 * 131072 * 4096  # bytes of what lies between products
    assert tensor > 2 * 4 * 2 * 7 / 8 * layer  # two layers, four sums each
    assert context < tensor / 2  # most of it gradients of the two tables of the vocabulary


def test_long_sequences_are_shared_and_short_ones_are_not(source: Source) -> None:
    model, cluster = resolve(LLAMA), weft.Cluster.parse("8xdgx-h100")
    graph = source.capture(model.batch(1), model.loss, 1).graph
    assert contexts(graph, cluster) == (2, 4, 8, 16, 32, 64)
    short = resolve("gpt-tiny")
    graph = Source.of(short.make).capture(short.batch(1), short.loss, 1).graph
    assert contexts(graph, cluster) == ()
    assert max(run.size for run in sequences(graph, graph.rules).values()) == 32


def test_a_long_sequence_gets_a_plan_with_context_by_itself() -> None:
    model = resolve("llama:sequence=131072")
    plan = weft.plan(model.make, model.batch(8), loss=model.loss, cluster="8xdgx-h100")
    assert plan.layout.context > 1, plan.layout
    assert plan.prediction is not None
    other = priced("data=8 tensor=8 zero=3 recompute=full", "llama:sequence=131072").prediction
    assert other is not None
    assert plan.prediction.step_time_s < other.step_time_s


def test_prices_do_not_follow_from_what_was_priced_before(source: Source) -> None:
    """A pricer keeps what layouts share: not how pieces of a sequence attend to one another."""
    model, cluster = resolve(LLAMA), weft.Cluster.parse("8xdgx-h100")
    graph = source.capture(model.batch(1), model.loss, 1).graph
    ways = [Layout.parse(f"data=8 context=8 attention={word}") for word in ("gather", "ulysses")]
    one = Pricer(graph, cluster, 64)
    together = [price(one, layout).prediction.step_time_s for layout in ways]
    assert together[0] != together[1]
    assert together == [price(Pricer(graph, cluster, 64), layout).prediction.step_time_s for layout in ways]
