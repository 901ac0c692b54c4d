"""The integer programme on captured models: against trying everything where that can be done, against the beam search elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.capture.capture import capture
from shardwise.model.graph import Graph
from shardwise.model.sharding.axis_values import FixedShards, OtherAxes
from shardwise.model.sharding.propagate import propagate
from shardwise.model.sharding.sharding import Prices
from shardwise.plan.ir.placement import Shard
from shardwise.zoo.resolve import resolve
from tests.support.enumeration import Everything
from tests.support.placements_oracle import Assignment, Budget, exceptions, solve_placements
from tests.support.placements_oracle.repeats import runs
from tests.support.placements_oracle.tables import Axis

pytest.importorskip("highspy")

SLOW = Prices(flops_per_s=1e9, memory_bytes_per_s=1e10, link_bytes_per_s=1e9, latency_s=1e-7)
FAST = Prices(flops_per_s=1e9, memory_bytes_per_s=1e10, link_bytes_per_s=1e11, latency_s=1e-7)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x).split(8, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Tied(nn.Module):
    """One table for the look-up and the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.inner = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.inner(self.tokens(ids))), self.tokens.weight)


def perceptron() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), torch.zeros(4, 8)


def convolution() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)), torch.zeros(
        4, 2, 4, 4
    )


def attention() -> tuple[nn.Module, Tensor]:
    return Attention(), torch.zeros(2, 4, 8)


def tied() -> tuple[nn.Module, Tensor]:
    return Tied(), torch.zeros(4, 4, dtype=torch.int64)


MODELS = {make.__name__: make for make in (perceptron, convolution, attention, tied)}


def graph_of(make: Callable[[], tuple[nn.Module, Tensor]]) -> Graph:
    module, x = make()
    return capture(module, (x,), lambda output, batch: output.square().mean()).graph


def stored_of(graph: Graph, found: Assignment) -> dict[str, Shard]:
    values = {v.name: v.value for v in (*graph.parameters, *graph.buffers)}
    return {values[name]: Shard(dim) for name, dim in found.shards["tensor"]}


@pytest.mark.parametrize("prices", [SLOW, FAST], ids=["slow links", "fast links"])
@pytest.mark.parametrize("way", ["features", "sequence", "anything"])
@pytest.mark.parametrize("name", MODELS)
def test_the_optimum_is_that_of_the_enumeration(name: str, way: str, prices: Prices) -> None:
    graph = graph_of(MODELS[name])
    cut = ("tensor",) if way == "anything" else ()
    found = solve_placements(graph, {"tensor": 2}, prices=prices, sequence=way != "features", batch_cut=cut, gap=0.0)
    axis = Axis(graph, "tensor", 2, prices, FixedShards(), OtherAxes(), way != "features")
    if way == "anything":
        axis.weight_label_meanings = None
    everything = Everything(axis)
    mine = everything.cost_of(dict(found.labels["tensor"]), stored_of(graph, found))
    assert found.cost_s == pytest.approx(mine, rel=1e-9)
    # Nothing is cheaper than what was found, and it is found again where a little more may be spent.
    assert everything.cheapest(mine * (1 - 1e-6)) == mine * (1 - 1e-6)
    assert everything.cheapest(mine * (1 + 1e-6)) == pytest.approx(mine, rel=1e-6)


@pytest.mark.parametrize(
    "name", ["gpt-tiny", "llama-tiny", "moe-tiny", "t5-tiny", "bert-tiny", "vit-tiny", "lstm-tiny", "unet-tiny", "resnet-tiny"]
)
def test_no_worse_than_the_beam_and_reproduced(name: str) -> None:
    model = resolve(name, 8)
    graph = capture(model.make(), model.example(), model.loss).graph
    found = solve_placements(graph, {"tensor": 2}, prices=SLOW)
    assert found.gap < 1e-5
    given = solve_placements(graph, {"tensor": 2}, prices=SLOW, shards=propagate(graph, {"tensor": 2}, prices=SLOW).shards)
    assert found.cost_s <= given.cost_s * (1 + 1e-6), "free cuts are no worse than the best use of the beam's"
    said = exceptions(graph, {"tensor": 2}, found)
    again = propagate(graph, {"tensor": 2}, found.shards, labels=said)
    assert (again.labels, again.placements, again.input_placements) == (
        found.sharding.labels,
        found.sharding.placements,
        found.sharding.input_placements,
    )
    tight = solve_placements(graph, {"tensor": 2}, prices=SLOW, budget=Budget(found.memory.total))
    assert tight.memory.total <= found.memory.total
    assert tight.cost_s == pytest.approx(found.cost_s, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "counts"),
    [("gpt-tiny", [4]), ("llama-tiny", [4]), ("moe-tiny", [2]), ("t5-tiny", [2, 2]), ("resnet-18", [2]), ("unet-tiny", [])],
)
def test_layers_that_repeat_are_found(name: str, counts: list[int]) -> None:
    model = resolve(name, 8)
    graph = capture(model.make(), model.example(), model.loss).graph
    found = runs(graph)
    assert [run.count for run in found] == counts
    for run in found:
        layers = {op.layer.split("layers.")[1].split(".")[0] for op in graph.operators[run.start : run.stop] if "layers." in op.layer}
        assert name == "resnet-18" or len(layers) in (run.count, 2 * run.count)
