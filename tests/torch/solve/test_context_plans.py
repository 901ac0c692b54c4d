"""Long sequences are shared by themselves: prices that say so, and what they stand on."""

from __future__ import annotations

import pytest

import shardwise
from shardwise.cost.network.network import FACTORS
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.timing import price
from shardwise.model.dims.sequence_dims import find_sequence_dims
from shardwise.model.sharding.propagate import propagate
from shardwise.model.sharding.sharding import Prices
from shardwise.ops import record_of
from shardwise.ops.vocabulary import CostKind
from shardwise.plan.ir.placement import dual_of
from shardwise.plan.ir.transition import sent_fraction
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.rank_model.model_source import ModelSource
from shardwise.solve.axis_candidates import context_candidates
from shardwise.zoo.resolve import resolve

LLAMA = "llama:sequence=131072,layers=2"  # layers of Llama-8B


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return ModelSource.from_model(resolve(LLAMA).make)


def priced(layout: str, model: str = LLAMA) -> Plan:
    found = resolve(model)
    return shardwise.plan(found.make, found.batch(8), loss=found.loss, cluster="8xdgx-h100", layout=f"{layout} precision=bfloat16")


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


def test_sharing_a_sequence_sends_fewer_bytes_than_tensor_ranks(source: ModelSource) -> None:
    """Heads and positions exchanged, and gradients of weights summed, are fewer bytes than activations summed twice a layer, both ways."""
    model = resolve(LLAMA)
    graph = source.capture(model.batch(1), model.loss, 1).graph

    def sent(axis: str) -> float:
        found = propagate(graph, {axis: 8}, prices=Prices(4e14, 3e12, 4e11, 1e-5))
        moves = sum(
            (sent_fraction(m.source, m.target, 8) + (sent_fraction(dual_of(m.target), dual_of(m.source), 8) if m.backward else 0.0))
            * graph.tensors[m.value].size_bytes
            for m in found.redistributions
        )
        return moves + sum(2 * 7 / 8 * graph.tensors[value].size_bytes for value, axes in found.gradient_axes.items() if axis in axes)

    tensor, context = sent("tensor"), sent("context")
    layer = 4 * 131072 * 4096  # bytes of what lies between products
    assert tensor > 2 * 4 * 2 * 7 / 8 * layer  # two layers, four sums each
    assert context < tensor / 2  # most of it gradients of the two tables of the vocabulary


def test_long_sequences_are_shared_and_short_ones_are_not(source: ModelSource) -> None:
    model, cluster = resolve(LLAMA), shardwise.Cluster.parse("8xdgx-h100")
    graph = source.capture(model.batch(1), model.loss, 1).graph
    assert context_candidates(graph, cluster) == (2, 4, 8, 16, 32, 64)
    short = resolve("gpt-tiny")
    graph = ModelSource.from_model(short.make).capture(short.batch(1), short.loss, 1).graph
    assert context_candidates(graph, cluster) == ()
    assert max(run.size for run in find_sequence_dims(graph, graph.rules).values()) == 32


def test_a_long_sequence_gets_a_plan_with_context_by_itself() -> None:
    model = resolve("llama:sequence=131072")
    plan = shardwise.plan(model.make, model.batch(8), loss=model.loss, cluster="8xdgx-h100")
    assert plan.layout.context > 1, plan.layout
    assert plan.prediction is not None
    given = str(plan.layout)
    others = [
        given.replace("context=8", f"context=8 attention={word}") for word in ("ulysses:4+ring", "ring")
    ]  # 32 heads, 8 ranks a machine
    others.append("data=8 tensor=8 zero=3 recompute=full precision=bfloat16-mixed sequence_parallel=on")
    for layout in others:
        other = shardwise.plan(model.make, model.batch(8), loss=model.loss, cluster="8xdgx-h100", layout=layout).prediction
        assert other is not None
        assert plan.prediction.step_time_s <= other.step_time_s


def test_a_ring_hides_what_it_sends_and_keeps_no_gathered_keys() -> None:
    """Of two layers over 131,072 positions, 16 ranks each: less time inside layers and less memory than with gathered keys; compute takes
    longer by the merging of blocks."""
    ring, gather = (priced(f"data=4 context=16 zero=1 microbatches=2 attention={word}").prediction for word in ("ring", "gather"))
    assert ring is not None
    assert gather is not None
    inside, compute = ([dict(one.parts)[key] for one in (ring, gather)] for key in ("tensor", "compute"))
    assert inside[0] < 0.1 * inside[1]
    assert compute[1] < compute[0] < 1.05 * compute[1]
    keys = 2 * 2 * 131072 * 1024 * 2  # bytes of keys and values of two layers in bfloat16, of which a rank has a sixteenth
    assert gather.memory.activations - ring.memory.activations == pytest.approx(keys * 15 / 16, rel=0.05)


def test_prices_do_not_follow_from_what_was_priced_before(source: ModelSource) -> None:
    """A pricer keeps what layouts share: not how pieces of a sequence attend to one another."""
    model, cluster = resolve(LLAMA), shardwise.Cluster.parse("8xdgx-h100")
    graph = source.capture(model.batch(1), model.loss, 1).graph
    ways = [Layout.parse(f"data=8 context=8 attention={word}") for word in ("gather", "ulysses")]
    one = Pricer(graph, cluster, 64)
    together = [price(one, layout).prediction.step_time_s for layout in ways]
    assert together[0] != together[1]
    assert together == [price(Pricer(graph, cluster, 64), layout).prediction.step_time_s for layout in ways]


KEYS = 2.0 * 4 * 32 * 64 * 4  # bytes of keys and values of a layer of gpt-tiny: 4 samples, 32 positions, 64 features
SHARES = {"ring": (3 / 4, 3 / 2), "gather": (3 / 4, 3 / 4), "ulysses": (3 / 8, 3 / 8), "ulysses:2+ring": (1 / 2, 3 / 4)}  # sent, each way


@pytest.mark.parametrize("word", SHARES)
def test_what_attention_sends_is_counted_as_the_formula_says(word: str) -> None:
    """Of 4 ranks: keys and values passed round or gathered, 3/4 of them; queries, keys, values and results exchanged, 3/16 of each. Passed
    round they go backward too, with gradients as large; a narrow value's gradient is as wide as without. Exchanged by two, 1/8 of each, and
    then 1/4 of keys and values goes on."""
    model = resolve("gpt-tiny")
    graph = ModelSource.from_model(model.make).capture(model.batch(4), model.loss, 4).graph
    pricer, layout = Pricer(graph, shardwise.Cluster.parse("2xcpu-2"), 4), Layout.parse(f"context=4 attention={word}")
    parts, moved = pricer.sharded_inventory(layout), pricer.collective_bytes(layout)
    sent = [
        sum(
            FACTORS[one.name][0](pricer.collective_group(layout, one).size) * size
            for one, size in ((parts.collectives[j], moved[j]) for j in way[1])
            if one.axis == "context"
        )
        for way in (parts.forward, parts.backward)
    ]
    layers = sum(record_of(op).kind == CostKind.ATTENTION for op in graph.operators)
    assert sent == pytest.approx([share * KEYS * layers for share in SHARES[word]])
