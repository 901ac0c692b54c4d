"""Prices against closed forms: the ring, the roofline, ZeRO's bytes, a pipeline's time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, MeasuredTable, NetworkLink, Speed
from shardwise.cost.devices.compute import RankRates, Seconds, optimizer_s
from shardwise.cost.devices.processors import MICROBATCH_S
from shardwise.cost.memory.memory import Inventory, state_bytes
from shardwise.cost.network.network import FACTORS, RankGroup, collective_s, ring_s, send_s
from shardwise.cost.operators.build_inventory import OperatorFacts, build_sharded_inventory
from shardwise.cost.operators.sharded_inventory import total_saved
from shardwise.cost.step import Pricer
from shardwise.errors import Infeasible, UsageError
from shardwise.model.sharding.propagate import propagate
from shardwise.model.work import OperatorWork
from shardwise.plan.layout import Layout
from tests.support.gpt_graph import gpt

GPU = Device("gpu", "gpu", (("float32", 1e12), ("bfloat16", 4e12)), 1e9, 1e11, 1.0, 0.0)
FAST, SLOW = NetworkLink(0.0, 1e9), NetworkLink(0.0, 1e8)
TWO = Cluster("two", GPU, (ClusterLevel("node", 4, FAST), ClusterLevel("cluster", 4, SLOW)))
ONE = Cluster("one", GPU, (ClusterLevel("node", 16, FAST),))


@given(st.integers(2, 16), st.floats(1e3, 1e9))
def test_all_reduce_in_a_node_is_the_ring(n: int, size: float) -> None:
    """2(n-1)/n·S/B: Patarasuk and Yuan 2009."""
    assert collective_s(ONE, "all_reduce", size, RankGroup(n)) == pytest.approx(2 * (n - 1) / n * size / 1e9)


@given(st.integers(2, 16))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(n: int) -> None:
    parts = collective_s(ONE, "reduce_scatter", 1e6, RankGroup(n)) + collective_s(ONE, "all_gather", 1e6, RankGroup(n))
    assert collective_s(ONE, "all_reduce", 1e6, RankGroup(n)) == pytest.approx(parts)


def test_latency_counts_the_steps_of_the_ring() -> None:
    link = NetworkLink(1e-3, 1e15)
    assert ring_s("all_reduce", 1.0, 8, link) == pytest.approx(14e-3)
    assert ring_s("all_gather", 1.0, 8, link) == pytest.approx(7e-3)


def test_between_nodes_the_port_is_the_limit() -> None:
    # One ring through 4 nodes of 4: 2·15/16 of the bytes leave each node through its one port.
    assert collective_s(TWO, "all_reduce", 1e6, RankGroup(16)) == pytest.approx(2 * 15 / 16 * 1e6 / 1e8)
    # 4 rings, one a device of every node, share the port.
    assert collective_s(TWO, "all_reduce", 1e6, RankGroup(4, 4, 16)) == pytest.approx(4 * 2 * 3 / 4 * 1e6 / 1e8)
    # Groups inside the nodes do not use it.
    assert collective_s(TWO, "all_reduce", 1e6, RankGroup(4, 1, 16)) == pytest.approx(2 * 3 / 4 * 1e6 / 1e9)


def test_all_to_all_moves_a_quarter_of_an_all_gathers_bytes_on_4_ranks() -> None:
    assert collective_s(ONE, "all_gather", 1e6, RankGroup(4)) == pytest.approx(4 * collective_s(ONE, "all_to_all", 1e6, RankGroup(4)))


def test_what_moves_nothing_costs_nothing() -> None:
    for name in ("", "slice", "pad"):
        assert collective_s(TWO, name, 1e9, RankGroup(4)) == 0
    for name in FACTORS:
        assert collective_s(TWO, name, 1e9, RankGroup(1)) == 0
    assert send_s(TWO, 0, 1) == 0
    with pytest.raises(UsageError, match="unknown collective all_reduse"):
        collective_s(TWO, "all_reduse", 1.0, RankGroup(2))


def test_a_message_takes_one_port_and_shares_it() -> None:
    assert send_s(TWO, 1e6, 1) == pytest.approx(1e-3)
    assert send_s(TWO, 1e6, 4) == pytest.approx(1e-2)
    assert send_s(TWO, 1e6, 4, flows=4) == pytest.approx(4e-2)


def test_measured_tables_win() -> None:
    cpu = Device("core", "cpu", (("float32", 1e11),), 1e9, 1e10)
    cluster = Cluster("m", cpu, (ClusterLevel("node", 2, FAST),), tables=(MeasuredTable("all_reduce", 2, ((1e3, 1.0), (1e6, 2.0))),))
    assert collective_s(cluster, "all_reduce", 1e6, RankGroup(2)) == pytest.approx(2.0)
    assert collective_s(cluster, "all_gather", 2e6, RankGroup(2)) == pytest.approx(2.0)


SPEED = Speed(1, 0, (("float32", 1e12), ("bfloat16", 4e12)), 1e11, 0.0)
LAUNCHED = Speed(1, 0, (("float32", 1e12),), 1e11, 1e-6)


def test_roofline() -> None:
    rates = RankRates.of(SPEED, "float32")
    assert rates.seconds(OperatorWork("linear", 1e12, 2e12, 1e6, 1e6)) == Seconds(1.0, 2.0)
    assert rates.seconds(OperatorWork("linear", 1e6, 2e6, 1e11, 1e11)) == Seconds(1.0, 1.0)
    assert rates.seconds(OperatorWork("elementwise", 0, 0, 1e11, 2e11)) == Seconds(1.0, 2.0)
    # Launches come on top, one forward and two backward; a view is a launch and nothing else.
    launched = RankRates.of(LAUNCHED, "float32")
    assert launched.seconds(OperatorWork("elementwise", 0, 0, 1e11, 2e11)) == Seconds(1.0 + 1e-6, 2.0 + 2e-6)
    assert launched.seconds(OperatorWork("view")) == Seconds(1e-6, 2e-6)


def test_a_product_packs_its_weights_in_every_microbatch() -> None:
    """Three passes at the measured rate, however few samples there are."""
    gb = 1e9
    speed = replace(SPEED, rates=(("weights.linear", 10 * gb), ("start.linear", 1e3)))
    rates = RankRates.of(speed, "float32")
    alone, few = OperatorWork("linear", 1e12, 2e12, 1e6, 1e6), OperatorWork("linear", 1e12, 2e12, 1e6, 1e6, weight_bytes=20 * gb)
    assert rates.seconds(alone) == Seconds(1.0 + 1e-3, 2.0 + 2e-3)
    assert rates.seconds(few) == Seconds(1.0 + 1e-3 + 2.0, 2.0 + 2e-3 + 4.0)
    # Fewer samples are no fewer weights; fewer weights are.
    assert rates.seconds(few).forward - rates.seconds(few, scale=0.5).forward == pytest.approx(0.5)
    assert rates.seconds(few, 2).forward == pytest.approx(0.5 * (1.0 + 2.0) + 1e-3)
    assert RankRates.of(SPEED, "float32").seconds(few) == Seconds(1.0, 2.0), "where it was not measured nothing is known of it"
    assert rates.seconds(replace(few, kind="convolution")) == Seconds(1.0, 2.0)


def test_convolutions_in_narrow_groups_run_at_their_own_rate() -> None:
    """Of one channel and of four as measured, of eight four times the latter's, and never faster than whole ones; other FLOPs as before."""
    measured = (("convolution.float32", 1e12), ("grouped.1.float32", 5e10), ("grouped.4.float32", 1e11))
    rates = RankRates.of(replace(SPEED, rates=measured), "float32")
    whole = OperatorWork("convolution", 1e12, 2e12, 1e6, 1e6)
    assert rates.seconds(whole) == Seconds(1.0, 2.0)
    for channels, rate in ((1, 5e10), (2, 5e10), (4, 1e11), (8, 4e11), (15, 1e12)):
        assert rates.seconds(replace(whole, channels=channels)) == Seconds(pytest.approx(1e12 / rate), pytest.approx(2e12 / rate)), channels
    assumed = RankRates.of(replace(SPEED, rates=measured[:1]), "float32").seconds(replace(whole, channels=4.0))
    assert 5 < assumed.forward < 20, "known to be slow where it was not measured"


def test_steps_that_run_one_by_one_cost_their_beginning() -> None:
    """As many as there are, at the measured rate, however few samples; one way forward and two backward."""
    rates = RankRates.of(replace(SPEED, rates=(("stepped", 100.0),)), "float32")
    plain = OperatorWork("recurrent", 1e12, 2e12, 1e6, 1e6)
    stepped = replace(plain, steps=50.0)
    assert rates.seconds(stepped) == Seconds(1.0 + 0.5, 2.0 + 1.0)
    assert rates.seconds(stepped, scale=0.5).forward == pytest.approx(0.5 + 0.5)
    assert RankRates.of(LAUNCHED, "float32").seconds(stepped).forward > RankRates.of(LAUNCHED, "float32").seconds(plain).forward


@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_gradients_are_copied_by_the_first_microbatch_and_added_by_the_others(microbatches: int) -> None:
    """A copy reads and writes, an addition reads twice and writes: once each, also where it is known what packing weights costs."""
    cpu = replace(GPU, kind="cpu")
    for rates in ((), (("weights.linear", 1e10),)):
        p = Pricer(gpt(2), Cluster("c", cpu, (ClusterLevel("node", 1, FAST),), speeds=(replace(SPEED, threads=1, rates=rates),)), 16)
        layout = Layout(microbatches=microbatches)
        (stage,) = p.stages(layout, ())
        apart = stage.backward_s - p.operator_seconds(layout)[1].sum() - (MICROBATCH_S / 2 if microbatches > 1 else 0.0)
        passes = 2 + 3 * (microbatches - 1)
        assert microbatches * apart == pytest.approx(passes * 4 * p.graph.num_parameters / SPEED.memory_bandwidth_bytes_per_s)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_are_what_does_not_follow_the_samples(ranks: int) -> None:
    """Of a GPT 12 h^2 of matrices and 9 h of biases a layer, and the head; all but the biases of what is summed are divided."""
    layers, h, vocabulary = 3, 64, 512
    graph = gpt(layers, h, vocabulary=vocabulary)
    sharding = propagate(graph, {"data": 1, "tensor": ranks}) if ranks > 1 else None
    parts = build_sharded_inventory(OperatorFacts(Inventory.of(graph), frozenset()), sharding)
    found = sum(parts.compute[i].kernel.weight_bytes for i in parts.index)
    whole = 2 * h
    assert found == 4 * (layers * ((12 * h**2 + 7 * h) / ranks + whole) + vocabulary * h / ranks)


@given(st.integers(1, 64))
def test_cutting_a_label_divides_the_work(ways: int) -> None:
    rates = RankRates.of(SPEED, "float32")
    big = OperatorWork("linear", 1e14, 2e14, 1e6, 1e6)
    assert rates.seconds(big, ways).forward == pytest.approx(rates.seconds(big).forward / ways)


def test_bfloat16_is_faster_where_the_device_has_it() -> None:
    done = OperatorWork("linear", 1e14, 2e14, 1e9, 1e9)
    assert RankRates.of(SPEED, "bfloat16").seconds(done).total < 0.3 * RankRates.of(SPEED, "float32").seconds(done).total


def test_adamw_reads_four_tensors_and_writes_three() -> None:
    assert optimizer_s(SPEED, 1e9) == pytest.approx(7 * 4e9 / 1e11)
    assert optimizer_s(SPEED, 1e9, states=1) == pytest.approx(5 * 4e9 / 1e11)


@given(st.integers(1, 1024), st.floats(1e6, 1e12))
def test_zero_is_rajbhandaris(n: int, phi: float) -> None:
    """Section 5 of Rajbhandari et al. 2020: mixed precision, 2 + 2 + 12 bytes a parameter."""
    mixed = {"weight": 2, "gradient": 2, "optimizer": 12}
    assert state_bytes(phi, 0, n, **mixed) == pytest.approx(16 * phi)
    assert state_bytes(phi, 1, n, **mixed) == pytest.approx(4 * phi + 12 * phi / n)
    assert state_bytes(phi, 2, n, **mixed) == pytest.approx(2 * phi + 14 * phi / n)
    assert state_bytes(phi, 3, n, **mixed) == pytest.approx(16 * phi / n)


def test_activations_follow_the_batch_and_the_width() -> None:
    graph = gpt(2)
    parts = build_sharded_inventory(OperatorFacts(Inventory.of(graph), frozenset()), None)
    kept = total_saved(parts, range(len(graph.operators)))
    assert kept.at(2.0, 1) - kept.fixed == pytest.approx(2 * (kept.at(1.0, 1) - kept.fixed))
    # Losses' logarithms stay float32, the rest is half as wide.
    half = total_saved(parts, range(len(graph.operators)), "all")
    losses = 4.0 * graph.tensors[graph.operators[-1].inputs[0]].size
    assert half.at(1.0, 1) - losses == pytest.approx((kept.at(1.0, 1) - losses) / 2, rel=0.01)


def pricer(cluster: Cluster = ONE, batch: int = 16) -> Pricer:
    return Pricer(gpt(4), cluster, batch)


def test_a_step_is_the_sum_of_its_parts() -> None:
    p = pricer()
    for layout in (Layout(), Layout(data=4), Layout(tensor=2), Layout(data=2, microbatches=4, zero=1)):
        prediction = p.predict(layout, p.stages(layout), [])
        assert sum(s for _, s in prediction.parts) == pytest.approx(prediction.step_time_s)
        assert 0 < prediction.mfu <= 1


def test_equal_stages_have_gpipes_bubble() -> None:
    """Huang et al. 2019: (p - 1)/(m + p - 1) of the pipeline's time, for equal stages and free transfers."""
    p = pricer()
    layout = Layout(pipeline=4, microbatches=8)
    one = replace(p.stages(Layout(pipeline=1, microbatches=8))[0], gradients_s=0.0, optimizer_s=0.0)
    prediction = p.predict(layout, [one] * 4, [0.0] * 3)
    parts = dict(prediction.parts)
    assert parts["pipeline"] / (parts["pipeline"] + parts["compute"] + parts["tensor"]) == pytest.approx(3 / 11)


def test_data_parallelism_divides_compute_and_sums_gradients() -> None:
    p = pricer(batch=512)
    one, four = (p.predict(layout, p.stages(layout), []) for layout in (Layout(), Layout(data=4)))
    assert dict(four.parts)["compute"] == pytest.approx(dict(one.parts)["compute"] / 4, rel=0.05)
    number = p.graph.num_parameters
    cpu = replace(GPU, kind="cpu")
    on_cpu = Pricer(p.graph, Cluster("c", cpu, (ClusterLevel("node", 4, FAST),)), 512)
    summed = on_cpu.stages(Layout(data=4))[0].gradients_s
    assert summed == pytest.approx(2 * 3 / 4 * 4 * number / 1e9)


def test_recomputing_is_one_more_forward_and_less_memory() -> None:
    """But for what stands in no layer: embeddings and the loss are not repeated, and are kept."""
    cpu = Cluster("c", replace(GPU, kind="cpu"), (ClusterLevel("node", 4, FAST),))
    for p in (Pricer(gpt(4), cpu, 16), pricer()):
        plain, again = (p.stages(Layout(recompute=r), ())[0] for r in ("none", "full"))
        assert plain.backward_s < again.backward_s < plain.backward_s + plain.forward_s
    on_cpu = Pricer(gpt(16), cpu, 16)
    sites = [on_cpu.cuts[i * len(on_cpu.cuts) // 4].site for i in (1, 2, 3)]
    layout = Layout(pipeline=4, microbatches=8)
    plain, again = (on_cpu.stages(replace(layout, recompute=r), sites)[0] for r in ("none", "full"))
    assert again.memory.alone.activations < 0.5 * plain.memory.alone.activations


def test_zero_divides_the_optimizer() -> None:
    p = pricer()
    plain, sharded = (p.stages(Layout(data=4, zero=z))[0].memory.alone for z in (0, 1))
    assert plain.optimizer == pytest.approx(8 * p.graph.num_parameters)
    assert sharded.optimizer == pytest.approx(plain.optimizer / 4)
    assert (sharded.parameters, sharded.gradients) == (plain.parameters, plain.gradients)


def test_too_little_memory_is_said_with_numbers() -> None:
    small = Cluster("small", replace(GPU, memory_bytes=1e5), (ClusterLevel("node", 2, FAST),))
    p = pricer(small)
    with pytest.raises(Infeasible, match=r"needs .* GiB \(parameters .*has 0.00 GiB"):
        p.check_memory(Layout(), p.predict(Layout(), p.stages(Layout()), []))


@pytest.mark.parametrize(
    ("layout", "advice"),
    [
        (Layout(data=2), "recompute=full, zero=1, or more devices"),
        (Layout(data=2, zero=2, recompute="full"), "microbatches, zero=3, or more devices"),
        (Layout(data=2, zero=3, recompute="full"), "microbatches, or more devices"),
        (Layout(), "recompute=full, or more devices"),
    ],
)
def test_what_would_need_less_memory_is_something_else_than_the_layout_has(layout: Layout, advice: str) -> None:
    p = pricer(Cluster("small", replace(GPU, memory_bytes=1e3), (ClusterLevel("node", 2, FAST),)))
    with pytest.raises(Infeasible, match=advice):
        p.check_memory(layout, p.predict(layout, p.stages(layout), []))


def test_broken_twin_a_cluster_without_a_slow_network_hides_the_difference() -> None:
    """The port test above would pass on any cluster if contention were ignored; on one node it must not hold."""
    assert collective_s(ONE, "all_reduce", 1e6, RankGroup(4, 4, 16)) == collective_s(ONE, "all_reduce", 1e6, RankGroup(4, 1, 16))
    assert collective_s(TWO, "all_reduce", 1e6, RankGroup(4, 4, 16)) > 10 * collective_s(TWO, "all_reduce", 1e6, RankGroup(4, 1, 16))


def test_between_processors_collectives_are_gloos_and_hide_behind_the_backward_between_hosts_only() -> None:
    """Two latencies a hop of the ring and a third to start; sums hide where gloo's threads move them, not within a host."""
    cpu = replace(GPU, kind="cpu")
    link = NetworkLink(1e-3, 1e9)
    one, two = (
        Cluster("one", cpu, (ClusterLevel("node", 2, link),)),
        Cluster("two", cpu, (ClusterLevel("node", 1, link), ClusterLevel("network", 2, link))),
    )
    for cluster, rate in ((one, 1.0), (two, 0.95)):
        assert collective_s(cluster, "all_reduce", 1e6, RankGroup(2)) == pytest.approx(1e-3 * (0.33 + 2) + 1e6 / (rate * 1e9))
    slow = {}
    for cluster in (one, two):
        p = Pricer(pricer().graph, cluster, 512)
        slow[cluster.name] = p.stages(Layout(data=2))[0].gradients_s
    number = pricer().graph.num_parameters
    assert slow["one"] == pytest.approx(collective_s(one, "all_reduce", 4.0 * number, RankGroup(2)))
    assert slow["two"] <= collective_s(two, "all_reduce", 4.0 * number, RankGroup(2))


def test_zero_on_processors_scatters_every_microbatch_and_gathers_what_it_uses() -> None:
    """ZeRO-1 moves what an all-reduce does; stage 2 scatters in every microbatch, stage 3 gathers weights twice in each as well."""
    cpu = replace(GPU, kind="cpu")
    p = Pricer(pricer().graph, Cluster("c", cpu, (ClusterLevel("node", 2, FAST),)), 512)
    m = 4
    plain, one, two, three = (p.stages(Layout(data=2, microbatches=m, zero=zero))[0] for zero in range(4))
    half = plain.gradients_s / 2
    assert one.gradients_s == pytest.approx(2 * half)
    assert two.gradients_s + m * two.collectives.total == pytest.approx((1 + m) * half)
    assert three.gradients_s + m * three.collectives.total == pytest.approx(3 * m * half)
    assert one.optimizer_s == pytest.approx(plain.optimizer_s / 2)


def test_a_rank_has_no_more_threads_than_its_node_has_cores() -> None:
    cpu = replace(GPU, kind="cpu")
    cluster = Cluster("two nodes", cpu, (ClusterLevel("node", 4, FAST), ClusterLevel("network", 2, FAST)))
    assert [cluster.threads_of(n) for n in (1, 2, 4, 8)] == [4, 4, 2, 1]


def test_an_optimizer_on_the_host_costs_processors_the_copies_besides() -> None:
    cpu = replace(GPU, kind="cpu")
    p = Pricer(pricer().graph, Cluster("c", cpu, (ClusterLevel("node", 2, FAST),)), 512)
    here, there = (p.stages(Layout(offload=offload))[0].optimizer_s for offload in ("none", "optimizer"))
    assert there - here == pytest.approx(2 * 8 * p.graph.num_parameters / 2e11), "one rank has both cores"
