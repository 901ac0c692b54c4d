"""Places where stages may begin: enough of them where activations shrink, and no more than layers where they do not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shardwise.cluster.cluster import Cluster
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.balance import balance_stages, select_cuts
from shardwise.cost.step_time.timing import boundary_times_s, cut_candidates, unit_seconds
from shardwise.model.graph import Graph, Ref
from shardwise.model.stages.stages import StageCut
from shardwise.plan.layout import Layout
from tests.support.gpt_graph import gpt
from tests.support.small_graphs import Builder


def shrinking(stages: int = 6, batch: int = 8) -> Graph:
    """Pairs of convolutions at half the size each time, as many channels: least crosses between the last ones, where least is computed."""
    b = Builder(x=(batch, 512, 128, 128))
    x, image = Ref("x"), 128
    for i in range(stages):
        for k in range(2):
            x = b.call("conv2d.default", (batch, 512, image, image), x, b.parameter(f"c{i}.{k}", 512, 512, 1, 1))
            x = b.call("relu.default", (batch, 512, image, image), x)
        image //= 2
        x = b.call("max_pool2d.default", (batch, 512, image, image), x, (2, 2))
    return b.graph(x, batch)


def slowest(pricer: Pricer, layout: Layout, tried: Sequence[StageCut]) -> float:
    """Seconds of the slowest of the most balanced stages, what crosses at their borders included."""
    return balance_stages(
        unit_seconds(pricer, layout, tried).sum(axis=0).tolist(), boundary_times_s(pricer, layout, tried), layout.pipeline
    )[1]


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("cluster", ["1xcpu-8", "dgx-a100-80"])
def test_stages_of_shrinking_layers_are_balanced(p: int, cluster: str) -> None:
    """All but one stage of a ResNet began behind its last layers: 8.5, 4.6, 0.3 and 0.3 ms where 4.1, 3.4, 3.0 and 3.1 were possible."""
    pricer = Pricer(shrinking(), Cluster.parse(cluster), 8)
    layout = Layout(pipeline=p)
    assert slowest(pricer, layout, cut_candidates(pricer, layout)) <= 1.1 * slowest(pricer, layout, pricer.cuts)
    nearest = select_cuts(pricer.cuts, p - 1)  # by what crosses alone
    assert p == 2 or slowest(pricer, layout, nearest) > 1.3 * slowest(pricer, layout, pricer.cuts)


def test_layers_that_are_alike_are_cut_between_alone() -> None:
    pricer = Pricer(gpt(8), Cluster.parse("1xcpu-8"), 8)
    for p in (2, 4, 8):
        assert len({cut.size_bytes for cut in cut_candidates(pricer, Layout(pipeline=p))}) == 1


def test_work_between_two_places_is_divided_where_least_crosses() -> None:
    cuts = [StageCut(i, f"{i}", (), size) for i, size in ((1, 9.0), (2, 7.0), (3, 9.0), *((k, 1.0) for k in range(4, 13)))]
    work = [4.0, 4.0, 4.0, 4.0, *[0.1] * 10]
    assert [cut.index for cut in select_cuts(cuts, 3)] == list(range(4, 13))
    assert [cut.index for cut in select_cuts(cuts, 3, work)] == list(range(1, 13))
    assert [cut.index for cut in select_cuts(cuts, 3, [1.0, 1.0, 1.0, 1.0, *[4.0] * 10])] == list(range(4, 13))
