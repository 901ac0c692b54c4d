"""Stages that are alike are priced once, against pricing every one by itself; and what differs anywhere is not taken for alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from shardwise.cluster.cluster import Cluster
from shardwise.cost.stages.section_cache import SectionCache
from shardwise.cost.step import Pricer, StageCost
from shardwise.model.graph import Graph, Ref, Variable
from shardwise.plan.layout import Layout
from tests.support.gpt_graph import gpt

LAYERS = 12
A100, CPU = Cluster.parse("4xdgx-a100-80"), Cluster.parse("2xcpu-8")


def sections(pricer: Pricer) -> SectionCache:
    (found,) = pricer._sections.values()
    return found


def apart(like: Pricer, layout: Layout, sites: tuple[str, ...]) -> Pricer:
    """A pricer that takes no stage for like another."""
    made = Pricer(like.graph, like.cluster, like.batch_size)
    made._sections_of(layout, sites).__dict__["first"] = tuple(range(layout.num_stages))
    return made


def by_itself(pricer: Pricer, layout: Layout, sites: tuple[str, ...]) -> tuple[StageCost, ...]:
    return tuple(apart(pricer, layout, sites).stages(layout, sites, only=(i,))[0] for i in range(layout.num_stages))


@pytest.mark.parametrize("cluster", [A100, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize(
    "words",
    [
        "data=2 pipeline=4 microbatches=2",
        "tensor=2 pipeline=4 microbatches=2 schedule=gpipe sequence_parallel=on recompute=full",
        "data=2 pipeline=4 microbatches=2 zero=3 recompute=selective offload=all",
        "data=2 pipeline=4 microbatches=2 recompute=full:1 offload=activations:1",
        "data=2 pipeline=4 microbatches=2 recompute=full:h.4+h.8",
        "pipeline=4 microbatches=8 schedule=interleaved chunks=3 precision=bfloat16",
        "pipeline=4 microbatches=2 schedule=chimera",
    ],
)
def test_sharing_changes_no_price(cluster: Cluster, words: str) -> None:
    layout = Layout.parse(words)
    pricer = Pricer(gpt(LAYERS), cluster, 16)
    sites = sites_of(pricer.graph, layout.num_stages)
    found = pricer.stages(layout, sites)
    assert set(sections(pricer).first_equal) == {0, 1, layout.num_stages - 1}
    assert found == by_itself(pricer, layout, sites)
    for stage in range(layout.num_stages):
        assert pricer.layer_costs(layout, sites, stage) == apart(pricer, layout, sites).layer_costs(layout, sites, stage)


def test_the_stages_of_a_deep_model_are_three_kinds() -> None:
    pricer = Pricer(gpt(LAYERS), A100, 16)
    layout = Layout.parse("pipeline=4 microbatches=4")
    pricer.stages(layout, sites_of(pricer.graph, 4))
    assert sections(pricer).first_equal == (0, 1, 1, 3)


def sites_of(graph: Graph, num_stages: int) -> tuple[str, ...]:
    """Where stages of equally many layers begin."""
    starts = range(LAYERS // num_stages, LAYERS, LAYERS // num_stages)
    return tuple(next(op.site for op in graph.operators if op.site.startswith(f"h.{layer}.ln1/")) for layer in starts)


def frozen(graph: Graph) -> Graph:
    return replace(graph, parameters=tuple(replace(v, trainable="h.7" not in v.name) for v in graph.parameters))


def wider(graph: Graph) -> Graph:
    """One layer's inner matrices have other sizes."""
    twice = {op.outputs[0] for op in graph.operators if op.site.startswith("h.7.up/")}
    names = {v.value for v in graph.parameters if v.name in ("h.7.up.weight", "h.7.up.bias")}

    def tensor(value: str) -> object:
        t = graph.tensors[value]
        if value in names:
            return replace(t, shape=(2 * t.shape[0], *t.shape[1:]))
        return replace(t, shape=(*t.shape[:-1], 2 * t.shape[-1])) if value in twice else t

    return with_tensors(graph, {value: tensor(value) for value in graph.tensors})


def with_tensors(graph: Graph, tensors: dict[str, object]) -> Graph:
    def group(variables: tuple[Variable, ...]) -> tuple[Variable, ...]:
        return tuple(replace(v, tensor=tensors[v.value]) for v in variables)  # type: ignore[arg-type]

    return replace(graph, parameters=group(graph.parameters), inputs=group(graph.inputs), tensors=tensors)  # type: ignore[arg-type]


def shared(graph: Graph) -> Graph:
    """A layer of the third stage reads a weight of the last one."""
    names = {v.name: v.value for v in graph.parameters}
    old, new = names["h.7.q.weight"], names["h.11.q.weight"]

    def arg(a: object) -> object:
        return Ref(new) if a == Ref(old) else a

    return replace(graph, operators=tuple(replace(op, args=tuple(map(arg, op.args))) for op in graph.operators))


@pytest.mark.parametrize("change", [frozen, wider, shared])
def test_what_differs_is_not_alike(change: Callable[[Graph], Graph]) -> None:
    graph = gpt(LAYERS)
    sites = sites_of(graph, 4)
    pricer = Pricer(change(graph), A100, 16)
    layout = Layout.parse("data=2 pipeline=4 microbatches=4")
    found = pricer.stages(layout, sites)
    assert sections(pricer).first_equal == (0, 1, 2, 3)
    assert found == by_itself(pricer, layout, sites)
