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
from shardwise.cost.operators.column_gathers import find_column_gathers
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
from shardwise.plan.ir.program import Compute, ComputeOp
from shardwise.plan.ir.schedule_sizes import SCHEDULES
from shardwise.plan.layout import Layout
from shardwise.schedules import program_of
from shardwise.world.comm.group import Group
from shardwise.world.recorder import CollectiveRecorder

MACHINES = "1xdgx-h100"
LLAMA = "llama:vocabulary=64,sequence=64,hidden=64,layers=2,heads=4,kv_heads=2,inner=96"
WIDE = "llama:vocabulary=1024,sequence=512,hidden=512,layers=2,heads=8,kv_heads=8,inner=1536"
CASES = (
    (LLAMA, "tensor=2 sequence_parallel=on"), (WIDE, "tensor=2 sequence_parallel=on"), (WIDE, "tensor=2"),
    (WIDE, "data=2 tensor=2 sequence_parallel=on"), (WIDE, "tensor=2x2 sequence_parallel=on"), (WIDE, "tensor=2x2"),
    (WIDE, "tensor=2 context=2 sequence_parallel=on"), (WIDE, "tensor=2 context=2 attention=gather sequence_parallel=on"),
    (WIDE, "tensor=2 sequence_parallel=on precision=float8"), (LLAMA.replace("inner=96", "inner=100"), "tensor=2 sequence_parallel=on precision=float8"),
    (WIDE, "tensor=3 sequence_parallel=on"), (WIDE, "tensor=2 sequence_parallel=on loss_chunks=4"),
    ("gpt-tiny", "tensor=2 sequence_parallel=on"), ("bert-tiny", "tensor=2 sequence_parallel=on"), ("t5-tiny", "tensor=2 sequence_parallel=on"),
    ("vit-tiny", "tensor=2 sequence_parallel=on"), ("moe-tiny", "tensor=2 expert=2 data=2 sequence_parallel=on"),
    ("moe-tiny", "tensor=2 sample_parallel=on"), ("lstm-tiny", "tensor=2"),
)  # fmt: skip


@cache
def context_of(model: str) -> PricingContext:
    return PricingContext(model, Cluster.parse(MACHINES), 8)


def lowered_layers(graph: Graph, sharding: Sharding, layout: Layout) -> set[frozenset[str]]:
    """Names of the linear layers of each call that lowering joins, on the first rank."""
    mesh = Mesh(tuple(sharding.sizes.items()))
    world = SimpleNamespace(rank=0, group=lambda ranks: Group(ranks, 0, CollectiveRecorder(), torch.device("cpu"), lambda *_: None))
    lowering = Lowering(
        graph=graph, sharding=sharding, groups=groups_of(graph, sharding, mesh, world), device=torch.device("cpu"), draw_state=DrawState(),
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


@pytest.mark.parametrize(("model", "text"), CASES)
def test_prices_find_the_layers_that_lowering_joins(model: str, text: str) -> None:
    context, layout = context_of(model), Layout.parse(text)
    pricer = Pricer(context.graph, context.cluster, 8)
    sharding = pricer.sharding(layout)
    assert sharding is not None
    lowered = lowered_layers(context.graph, sharding, layout)
    print(model, text, len(lowered))
    assert priced_layers(pricer, layout) == lowered
