"""Plans with pieces that differ: found where the devices, the batch or their speeds want it, and priced by what the slowest does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.cluster.heterogeneous import mix_clusters
from shardwise.cost.step_time.heterogeneous import HeterogeneousPricer, balance_shares, build_pricer
from shardwise.cost.step_time.timing import price
from shardwise.plan.ir.placement import apportion_units
from shardwise.plan.layout import Layout
from shardwise.plan.microbatches import layout_microbatch_sizes
from shardwise.solve.search import search
from tests.support.gpt_graph import gpt

MIXED = Cluster.parse("2xdgx-h100+4xdgx-a100-80")


def wide(batch: int = 8, heads: int = 8) -> object:
    return gpt(layers=4, hidden=1024, heads=heads, sequence=512, vocabulary=50257, batch=batch)


def seconds(layout: Layout, batch: int, cluster: Cluster = MIXED) -> float:
    return price(build_pricer(wide(), cluster, batch), layout).prediction.step_time_s


def test_shares_are_the_best_of_all_that_there_are() -> None:
    """Against every pair of samples for the replicas of the two parts."""
    layout, size = Layout(data=48, precision="bfloat16"), 480
    found = balance_shares(build_pricer(wide(), MIXED, size), layout)
    assert found is not None
    every = []
    for fast in range(1, size // 16):
        slow, rest = divmod(size - 16 * fast, 32)
        if slow > 0 and not rest:
            every.append((seconds(replace(layout, shares=f"{fast}x16/{slow}x32" if fast != slow else ""), size), fast, slow))
    assert len(every) > 10
    mine = seconds(found, size)
    assert mine <= min(every)[0] * 1.02
    assert mine < 0.9 * seconds(layout, size)


def test_a_part_is_priced_with_the_samples_of_its_own_replicas() -> None:
    layout = Layout(data=48, precision="bfloat16", shares="4x16/1x32")
    pricer = build_pricer(wide(), MIXED, 960)
    assert isinstance(pricer, HeterogeneousPricer)
    assert [one.samples(layout) for one in pricer.replica_pricers(layout)] == [40, 10]
    alone = build_pricer(wide(), Cluster.parse("2xdgx-h100"), 16 * 40)
    times, own = pricer.operator_seconds(layout), alone.operator_seconds(Layout(data=16, precision="bfloat16"))
    assert sum(map(sum, times)) == pytest.approx(sum(map(sum, own)), rel=0.02)  # of what takes longest here
    assert "40 samples of a microbatch on each replica of 2xdgx-h100" in pricer.describe_parts(layout)


def test_the_planner_gives_faster_devices_more_samples() -> None:
    plan = search(wide(), MIXED, 960, "gpt", "pipeline=1 tensor=1")
    assert plan.layout.shares
    assert plan.prediction is not None
    counts = apportion_units(layout_microbatch_sizes(960, plan.layout)[0], plan.layout.replica_shares)
    assert counts[0] > 1.5 * counts[-1]
    equal = seconds(replace(plan.layout, shares=""), 960)
    assert plan.prediction.step_time_s < 0.9 * equal


def two_hosts(part: float) -> Cluster:
    """A host of one core, and one of which somebody else has the rest."""
    link = NetworkLink(2e-5, 2.5e9)

    def host(name: str, part: float) -> Cluster:
        core = Device(name, "cpu", (("float32", part * 1e11),), 8e9, part * 1e10)
        return Cluster(name, core, (ClusterLevel("node", 1, link),))

    return mix_clusters("two", (host("whole", 1.0), host("busy", part)), link)


@pytest.mark.parametrize(("part", "shares"), [(0.5, "2/1"), (1 / 3, "3/1"), (1.0, "")])
def test_a_slow_processor_gets_less_of_a_batch(part: float, shares: str) -> None:
    """By how much it is slower, and by itself; a rank has its own host's speed."""
    cluster = two_hosts(part)
    whole, busy = (dict(one.speed(2).flops)["float32"] for one in cluster.parts)
    assert busy == pytest.approx(part * whole)
    plan = search(gpt(4, hidden=256, batch=12), cluster, 12, "gpt", "data=2 zero=0")
    assert plan.layout.shares == shares
    assert plan.prediction is not None
    equal = search(gpt(4, hidden=256, batch=12), cluster, 12, "gpt", layout=Layout(data=2)).prediction
    assert equal is not None
    if part < 1:
        assert plan.prediction.step_time_s < 0.8 * equal.step_time_s


def test_ranks_that_neither_heads_nor_features_divide_by_are_used() -> None:
    """A model that needs all of six devices' memory: tensor=3 or 6 cuts all of it, in pieces that differ."""
    six = replace(Cluster.parse("dgx-a100-40"), levels=(replace(Cluster.parse("dgx-a100-40").levels[0], size=6),))
    plan = search(wide(6), six, 6, "gpt", "ranks=6 pipeline=1 tensor>=3 zero=0")
    assert plan.layout.tensor in (3, 6)
    cut = dict(plan.shards)["tensor"]
    assert any(name.endswith(("q.weight", "up.weight")) for name, _ in cut)


@pytest.mark.parametrize(("batch", "data"), [(15, 8), (17, 16), (9, 8)])
def test_a_batch_that_does_not_divide_is_spread_where_little_is_wasted(batch: int, data: int) -> None:
    """The rank with most samples sets the pace; so many ranks are worth it where that is little more than an equal part."""
    cluster = Cluster.parse("dgx-a100-80") if data == 8 else Cluster.parse("2xdgx-a100-80")
    plan = search(wide(), cluster, batch, "gpt", "pipeline=1 tensor=1")
    most = -(-batch // data) * data
    assert (plan.layout.data == data) == (most <= batch * 9 / 8)
    if plan.layout.data == data:
        whole = search(wide(), cluster, most, "gpt", layout=plan.layout)
        assert plan.prediction is not None
        assert whole.prediction is not None
        assert plan.prediction.step_time_s == pytest.approx(whole.prediction.step_time_s)
