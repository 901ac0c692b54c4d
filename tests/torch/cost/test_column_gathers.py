"""Prices find the gathers that lowering joins with linear layers, and price them so only where an engine runs them so."""

from __future__ import annotations

import operator
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import fx

from shardwise.cli.pricing_context import PricingContext
from shardwise.cluster.cluster import Cluster
from shardwise.cost.operators import column_gathers
from shardwise.cost.step import Pricer
from shardwise.lower.column_linears import apply_column_linears, fuse_column_linears, keeps_pieces
from shardwise.lower.kernels.randomness import DrawState
from shardwise.lower.local import lower
from shardwise.lower.lowering import Lowering, called_function, groups_of
from shardwise.model.graph import Graph
from shardwise.model.sharding.sharding import Sharding
from shardwise.model.stages.stages import split
from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.ir.precision import PRECISIONS
from shardwise.plan.layout import Layout
from shardwise.world.comm.group import Group
from shardwise.world.recorder import CollectiveRecorder

MACHINES = "1xdgx-h100"
LLAMA = "llama:vocabulary=64,sequence=64,hidden=64,layers=2,heads=4,kv_heads=2,inner=96"
WIDE = "llama:vocabulary=1024,sequence=512,hidden=512,layers=2,heads=8,kv_heads=8,inner=1536"
NARROW = LLAMA.replace("inner=96", "inner=100")  # no multiple of 16: not in 8 bits
CASES = (  # and how many gathers are joined with the layers that read them
    (LLAMA, "tensor=2 sequence_parallel=on", 4), (WIDE, "tensor=2 sequence_parallel=on", 5), (WIDE, "tensor=2", 0),
    (WIDE, "tensor=2 sequence_parallel=on precision=bfloat16-mixed", 5),
    ("bert-tiny", "tensor=2 sequence_parallel=on precision=bfloat16", 8),
    (WIDE, "tensor=2x2 sequence_parallel=on", 2), (WIDE, "tensor=2 context=2 attention=gather sequence_parallel=on", 5),
    (WIDE, "tensor=2 sequence_parallel=on precision=float8", 0), (NARROW, "tensor=2 sequence_parallel=on precision=float8", 2),
    (WIDE, "tensor=3 sequence_parallel=on", 5), (WIDE, "tensor=2 sequence_parallel=on loss_chunks=4", 4),
    ("bert-tiny", "tensor=2 sequence_parallel=on", 8), ("t5-tiny", "tensor=2 sequence_parallel=on", 6),
    ("moe-tiny", "tensor=2 sample_parallel=on", 1), ("lstm-tiny", "tensor=2", 1),
)  # fmt: skip


@cache
def context_of(model: str) -> PricingContext:
    return PricingContext(model, Cluster.parse(MACHINES), 8)


def lowered_layers(graph: Graph, sharding: Sharding, layout: Layout) -> set[frozenset[str]]:
    """Names of the linear layers of each call that lowering joins, on the first rank."""
    mesh = Mesh(tuple(sharding.sizes.items()))
    world = SimpleNamespace(rank=0, group=lambda ranks: Group(ranks, 0, CollectiveRecorder(), torch.device("cpu"), lambda *_: None))
    lowering = Lowering(
        graph=graph, sharding=sharding, groups=groups_of(graph, sharding, mesh, world), device=torch.device("cuda"), draw_state=DrawState(),
        precision=PRECISIONS[layout.precision], loss_chunks=layout.loss_chunks,
    )  # fmt: skip
    module = fuse_column_linears(lower(split(graph, ())[0], lowering)).module
    assert isinstance(module, fx.GraphModule)
    calls = [node for node in module.graph.nodes if node.op == "call_function" and called_function(node.target) is apply_column_linears]
    return {
        frozenset(graph.producers[item.meta["value"][0]].name for item in node.users if item.target is operator.getitem) for node in calls
    }


def priced_layers(pricer: Pricer, layout: Layout) -> set[frozenset[str]]:
    gathers = pricer.sharded_inventory(layout).column_gathers
    narrow = bool(PRECISIONS[layout.precision].linear_dtype)
    names: dict[int, set[str]] = {}
    for number, layer in zip(gathers.gather_numbers.tolist(), gathers.layers.tolist(), strict=True):
        if not (narrow and gathers.fits_float8[number]):
            names.setdefault(number, set()).add(pricer.graph.operators[layer].name)
    return {frozenset(of_gather) for of_gather in names.values()}


def both_ways(model: str, text: str) -> tuple[set[frozenset[str]], set[frozenset[str]]]:
    context, layout = context_of(model), Layout.parse(text)
    pricer = Pricer(context.graph, context.cluster, 8)
    sharding = pricer.sharding(layout)
    assert sharding is not None
    return priced_layers(pricer, layout), lowered_layers(context.graph, sharding, layout)


@pytest.mark.parametrize(("model", "text", "count"), CASES)
def test_prices_find_the_layers_that_lowering_joins(model: str, text: str, count: int) -> None:
    priced, lowered = both_ways(model, text)
    assert priced == lowered
    assert len(lowered) == count


def test_a_price_that_joins_other_readers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: whatever reads a gathered tensor counts as linear layers of one block."""
    monkeypatch.setattr(column_gathers, "_run_together", lambda *_: True)
    assert any(priced != lowered for priced, lowered in (both_ways(model, text) for model, text, _ in CASES))


@pytest.mark.parametrize(("machines", "device"), [(MACHINES, "cuda"), ("1xcpu-2", "cpu")])
def test_pieces_are_priced_on_the_devices_that_keep_them(machines: str, device: str) -> None:
    priced = Pricer(context_of(LLAMA).graph, Cluster.parse(machines), 8).gathers_again(Layout.parse("tensor=2 sequence_parallel=on"))
    assert priced is keeps_pieces(torch.device(device))
