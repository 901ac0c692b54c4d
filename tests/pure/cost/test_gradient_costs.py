"""What sums of gradients cost: compressed ones by the bytes of their messages, and buckets against trying every size on a queue."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.cost.calibration.efficiency import stack_of
from shardwise.cost.devices.compute import Seconds
from shardwise.cost.devices.devices import Widths
from shardwise.cost.network.collectives import algorithm_times
from shardwise.cost.network.network import RankGroup, collective_s
from shardwise.cost.stages.gradients import (
    ADD_BYTES,
    BUCKETS,
    ENCODE_BYTES,
    GradientVolume,
    compressed_reduction_s,
    gradient_reduction_s,
)
from shardwise.cost.step import Pricer
from shardwise.errors import Infeasible, LayoutError
from shardwise.plan.ir.axis import DATA
from shardwise.plan.ir.compression import Compression
from shardwise.plan.layout import Layout
from shardwise.plan.plan import BUCKET_BYTES, Plan, Prediction
from shardwise.plan.plan_file import format_plan, parse_plan
from shardwise.solve.constraints import parse_constraints
from shardwise.solve.search import search
from shardwise.units import format_bytes, format_seconds
from tests.support.gpt_graph import gpt

CPU = Device("c", "cpu", (("float32", 1e11), ("bfloat16", 1e11), ("float64", 5e10)), 64e9, 20e9)
GRAPH = gpt(3, hidden=64, batch=8)


def hosts(latency_s: float, bandwidth_bytes_per_s: float, num: int = 2) -> Cluster:
    """One rank a host."""
    link = NetworkLink(latency_s, bandwidth_bytes_per_s, protocol="gloo")
    return Cluster("hosts", CPU, (ClusterLevel("node", 1, NetworkLink(1e-6, 1e10)), ClusterLevel("network", num, link)))


def test_the_word_is_read_and_written_back() -> None:
    for word, printed in (("int8", "int8"), ("topk", "topk:0.01"), ("topk:0.5", "topk:0.5"), ("bfloat16", "bfloat16")):
        layout = Layout.parse(f"data=2 compress={word}")
        assert str(layout) == f"data=2 tensor=1 pipeline=1 compress={printed}"
        assert Layout.parse(str(layout)) == layout
    assert str(Layout.parse("data=2 compress=none")) == "data=2 tensor=1 pipeline=1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data=2 compress=int7", "did you mean int8"),
        ("data=2 compress=int8:2", "is unknown"),
        ("data=2 compress=topk:0", "fraction"),
        ("data=2 compress=topk:1.5", "fraction"),
        ("data=2 compress=topk:nan", "fraction"),
        ("compress=int8", "data=1 has none"),
        ("data=2 zero=2 compress=int8", "zero=1"),
        ("data=2 zero=3 compress=bfloat16", "zero=3"),
        ("data=2 all_reduce=ring compress=int8", "all_reduce=auto"),
    ],
)
def test_what_cannot_be_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        Layout.parse(text)


@given(st.integers(1, 5000), st.floats(0.001, 1.0))
def test_bytes_of_messages(size: int, fraction: float) -> None:
    """int8: a byte each and four a block of 512; top-k: at least one number with its place, and never fewer than were asked for."""
    assert Compression("int8").message_bytes(size) == size + 4 * ceil(size / 512)
    assert Compression("bfloat16").message_bytes(size) == 2 * size
    chosen = Compression("topk", fraction).num_sent(size)
    assert fraction * size <= chosen < fraction * size + 1 or chosen == 1
    assert Compression("topk", fraction).message_bytes(size) == 8 * chosen


def _summing(cluster: Cluster, layout: str) -> float:
    (cost,) = Pricer(GRAPH, cluster, 8).stages(Layout.parse(layout))
    return cost.gradients_s


@pytest.mark.parametrize("num", [2, 4])
def test_compressed_sums_cost_their_messages_and_their_packing(num: int) -> None:
    """Without a backward to hide behind: a message to every member, and the sums back to all; both packed and unpacked."""
    cluster = replace(hosts(1e-5, 1e9, num), levels=(ClusterLevel("node", num, NetworkLink(1e-5, 1e9)),))
    count = GRAPH.num_trainable
    assert 4 * count < BUCKET_BYTES
    piece, group = -(-count // num), RankGroup(num, 1, num)
    of_int8, of_half = piece + 4 * ceil(piece / 512), 2 * piece
    bandwidth = Pricer(GRAPH, cluster, 8).devices.speed(Layout(data=num)).memory_bandwidth_bytes_per_s
    for kind, message in (("int8", of_int8), ("bfloat16", of_half)):
        moved = collective_s(cluster, "all_to_all", num * num * message, group)
        back = collective_s(cluster, "all_gather", num * message, group)
        first = ENCODE_BYTES[kind] * count + ADD_BYTES[kind] * num * piece
        second = ENCODE_BYTES[kind] * piece + ADD_BYTES[kind] * count
        assert _summing(cluster, f"data={num} compress={kind}") == pytest.approx(moved + back + (first + second) / bandwidth)
        weights = collective_s(cluster, "all_gather", 4 * count, group)
        assert _summing(cluster, f"data={num} zero=1 compress={kind}") == pytest.approx(moved + weights + first / bandwidth)
    chosen = ceil(0.02 * count)
    gathered = collective_s(cluster, "all_gather", num * 8 * chosen, group)
    touched = ENCODE_BYTES["topk"] * count + ADD_BYTES["topk"] * num * chosen
    assert _summing(cluster, f"data={num} compress=topk:0.02") == pytest.approx(gathered + touched / bandwidth)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_host_compresses_once(zero: int) -> None:
    """Two hosts of four: their sums inside, a quarter of the bucket packed and sent by each rank, and a quarter kept back."""
    node = ClusterLevel("node", 4, NetworkLink(1e-6, 1e10))
    cluster = Cluster("hosts", CPU, (node, ClusterLevel("network", 2, NetworkLink(1e-5, 1e8))))
    count, layout = GRAPH.num_trainable, Layout(data=8, compress="int8", zero=zero)
    quarter = ceil(count / 4)
    message = -(-quarter // 2) + 4 * ceil(-(-quarter // 2) / 512)
    host, rail, inside = replace(cluster, levels=(node,)), RankGroup(2, 4, 8), RankGroup(4)
    found, touched = compressed_reduction_s(
        Pricer(GRAPH, cluster, 8), Compression("int8"), count, RankGroup(8), zero, Widths(4.0, 4.0, 4.0)
    )
    want = collective_s(host, "reduce_scatter", 4 * count, inside) + collective_s(cluster, "all_to_all", 4 * message, rail)
    if not zero:
        want += collective_s(host, "all_gather", 4 * count, inside) + collective_s(cluster, "all_gather", 2 * message, rail)
    assert found == pytest.approx(want)
    assert touched == pytest.approx(
        ENCODE_BYTES["int8"] * quarter + ADD_BYTES["int8"] * 2 * -(-quarter // 2)
        + (0 if zero else ENCODE_BYTES["int8"] * -(-quarter // 2) + ADD_BYTES["int8"] * quarter)
    )  # fmt: skip
    pricer = Pricer(GRAPH, cluster, 8)
    kept = pricer.predict(layout, pricer.stages(layout), ()).memory.gradients / (4 * count) - 1
    assert kept == pytest.approx(1 / 4 + (0 if zero else 1 / 8))


def test_compressing_pays_where_the_network_is_slow_and_only_there() -> None:
    slow, fast = hosts(1e-6, 1e7), hosts(1e-6, 1e11)
    assert _summing(slow, "data=2 compress=int8") < 0.35 * _summing(slow, "data=2")
    assert _summing(fast, "data=2 compress=int8") > _summing(fast, "data=2")


def test_what_is_not_sent_is_in_the_predicted_memory() -> None:
    """As much again as the gradients, and int8 a piece of the sums besides; bfloat16 keeps nothing."""
    pricer = Pricer(GRAPH, hosts(1e-5, 1e9, 4), 8)

    def gradients(words: str) -> float:
        layout = Layout.parse(f"data=4 {words}")
        return pricer.predict(layout, pricer.stages(layout), ()).memory.gradients

    assert gradients("compress=bfloat16") == gradients("compress=none") == 4 * GRAPH.num_trainable
    assert gradients("compress=topk") == gradients("zero=1 compress=int8") == 8 * GRAPH.num_trainable
    assert gradients("compress=int8") == 9 * GRAPH.num_trainable


def test_a_constraint_compresses_and_nothing_else_does() -> None:
    cluster = hosts(1e-6, 1e6, 4)
    free = search(GRAPH, cluster, 8, "gpt", "data=4")
    assert free.layout.compress == "none"
    plan = search(GRAPH, cluster, 8, "gpt", "compress=int8")
    assert plan.layout.compress == "int8"
    assert plan.layout.data > 1
    assert plan.layout.zero < 2
    assert {c.layout.compress for c in plan.candidates} == {"int8"}
    assert str(parse_constraints("compress=topk")[0]) == "compress=topk:0.01"
    with pytest.raises(LayoutError, match="int8"):
        parse_constraints("compress=int7")
    with pytest.raises(Infeasible):
        search(GRAPH, cluster, 8, "gpt", "compress=int8 data=1")


def _shown(each_s: list[tuple[float, float]], window_s: float) -> float:
    """A backward of `window_s` and what is left after it: buckets are ready one after another and are summed in turn."""
    at = 0.0
    for ready, seconds in each_s:
        at = max(at, window_s * ready) + seconds
    return at


@settings(max_examples=25, deadline=None)
@given(st.floats(1e-6, 3e-2), st.floats(1e7, 1e10), st.integers(2, 8))
def test_the_best_bucket_is_nearly_that_of_a_queue(latency_s: float, bandwidth: float, num: int) -> None:
    """Every number of equal buckets is tried on a queue whose network takes what the cost model says of each. Only powers of two are
    tried by the plan, and what is left over is a bucket too: a quarter more at most, and rarely. Of those that it tries the plan knows
    what the queue leaves."""
    cluster, layout = hosts(latency_s, bandwidth, num), Layout(data=num)
    pricer = Pricer(BIG, cluster, 4 * num)
    size = 4.0 * BIG.num_trainable
    (cost,) = pricer.stages(layout)
    window = 0.9 * (cost.compute.backward + cost.collectives.backward)  # what gloo's sums hide behind
    group = RankGroup(num, 1, num)

    def queue(bucket: float) -> float:
        ends = [min(size, bucket * (k + 1)) for k in range(ceil(size / bucket))]
        sizes = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
        return _shown(
            [(end / size, collective_s(cluster, "all_reduce", each, group)) for end, each in zip(ends, sizes, strict=True)], window
        )

    chosen = pricer.bucket_size(layout)
    assert chosen in BUCKETS
    most = ceil(size / BUCKETS[0])
    best = min(queue(size / buckets) for buckets in range(1, most + 1))
    assert queue(chosen) <= 1.25 * best
    assert queue(chosen) <= queue(BUCKET_BYTES) * (1 + 1e-9)
    for bucket in BUCKETS:
        assert pricer.with_buckets(bucket).stages(layout)[0].gradients_s == pytest.approx(queue(bucket) - window, rel=1e-6)


BIG = gpt(6, hidden=256, batch=8)
WIDE = gpt(3, hidden=2048, batch=8)


def test_plans_carry_both_as_text() -> None:
    plan = Plan(Layout(data=2, compress="topk:0.03"), "m", "c", 4, bucket_bytes=4 << 20)
    text = format_plan(plan)
    assert 'compress = "topk:0.03"' in text
    assert "bucket_bytes = 4194304" in text
    assert parse_plan(text) == plan
    assert "bucket_bytes" not in format_plan(Plan(Layout(data=2), "m", "c", 4))
    with pytest.raises(LayoutError, match="did you mean int8"):
        parse_plan(text.replace("topk:0.03", "int9"))
    with pytest.raises(Infeasible, match="bucket_bytes"):
        parse_plan(text.replace("4194304", "-1"))


def test_a_plan_has_the_best_bucket() -> None:
    """Of a layout by hand as of a search."""
    cluster = hosts(1e-4, 1e9, 4)
    want = Pricer(BIG, cluster, 16).bucket_size(Layout(data=4))
    assert want != BUCKET_BYTES
    plan = search(BIG, cluster, 16, "gpt", layout=Layout(data=4))
    assert plan.bucket_bytes == want
    assert plan.prediction == _predicted(Pricer(BIG, cluster, 16, bucket_bytes=want), Layout(data=4))


def _predicted(pricer: Pricer, layout: Layout) -> Prediction:
    return pricer.predict(layout, pricer.stages(layout), ())


@pytest.mark.parametrize("words", ["zero=1", "zero=2 microbatches=2", "zero=3 microbatches=2 recompute=full precision=bfloat16"])
def test_a_plan_is_predicted_with_the_buckets_that_it_is_written_with(words: str) -> None:
    """By hand as in a search, in seconds and bytes; another size, of which the plan has nothing, is another price."""
    cluster, layout = Cluster.parse("2xdgx-h100"), Layout.parse(f"data=16 {words}")
    plan = search(WIDE, cluster, 64, "gpt", layout=layout)
    size = plan.bucket_bytes or BUCKET_BYTES
    assert plan.prediction == _predicted(Pricer(WIDE, cluster, 64, bucket_bytes=size), plan.layout)
    assert plan.prediction != _predicted(Pricer(WIDE, cluster, 64, bucket_bytes=1 << 18), plan.layout)
    assert plan.bound_gap == pytest.approx(0.0, abs=1e-9)


def test_no_bucket_is_shared_by_two_layers_where_gradients_are_scattered() -> None:
    """Six layers of 0.8 M parameters: one bucket each, however large a bucket may be, and several where it is small."""
    volume = GradientVolume((), 0.0, 0.0, (10.0, *[800.0] * 6, 10.0))
    total = 6 * 800.0 + 20
    assert volume.num_buckets_of_runs(total, 1e9) == 8
    assert volume.num_buckets_of_runs(total, 800.0) == 8
    assert volume.num_buckets_of_runs(total, 300.0) == 2 + 6 * 3
    assert volume.num_buckets_of_runs(8.0, 1.0) == 2 + 6 * 2


def test_the_best_bucket_is_the_best_that_is_tried() -> None:
    """By the cost of whole stages; and no size is named where the usual one does."""
    for latency_s, bandwidth in ((1e-6, 1e8), (1e-2, 1e9), (1e-4, 1e9)):
        pricer, layout = Pricer(BIG, hosts(latency_s, bandwidth, 4), 16), Layout(data=4)
        costs = {b: pricer.with_buckets(b).stages(layout)[0].gradients_s for b in BUCKETS}
        found = pricer.bucket_size(layout)
        assert costs[found] <= 1.011 * min(costs.values())
        assert found == BUCKET_BYTES or costs[found] < costs[BUCKET_BYTES]
    slow_to_start, quick = hosts(1e-2, 1e9, 4), hosts(1e-7, 1e8, 4)
    assert Pricer(BIG, quick, 16).bucket_size(Layout(data=4)) < BUCKET_BYTES
    late, soon = (Pricer(BIG, c, 16).bucket_size(Layout(data=4)) for c in (slow_to_start, quick))
    assert late > soon
    assert Pricer(BIG, quick, 16).bucket_size(Layout(pipeline=2, microbatches=2)) == BUCKET_BYTES
    host = Cluster("host", CPU, (ClusterLevel("node", 4, NetworkLink(1e-4, 1e9)),))
    assert Pricer(BIG, host, 16).bucket_size(Layout(data=4)) == BUCKET_BYTES


def test_a_plan_says_why_its_gradients_are_summed_so() -> None:
    """With the seconds that the cost model has for a bucket; nothing where there is nothing to sum."""
    cluster = hosts(1e-4, 1e9, 4)
    plan = search(BIG, cluster, 16, "gpt", layout=Layout(data=4))
    said = dict(plan.reasons)["all_reduce"]
    seconds = algorithm_times(cluster, RankGroup(4, 1, 4))[plan.sums.algorithm_for(plan.bucket_bytes)](plan.bucket_bytes)
    assert said.startswith(f"{plan.sums.algorithm_for(plan.bucket_bytes)}")
    assert f"a bucket of {format_bytes(plan.bucket_bytes)} is summed in {format_seconds(seconds)}" in said
    assert "all_reduce" not in dict(search(BIG, cluster, 16, "gpt", layout=Layout(pipeline=4, microbatches=4)).reasons)
    ring = dict(search(BIG, cluster, 16, "gpt", layout=Layout(data=4, all_reduce="ring")).reasons)["all_reduce"]
    assert ring.startswith("ring: a bucket")


def test_the_sum_of_tied_weights_alone_hides_behind_a_backward() -> None:
    """A pipeline without replicas has no buckets of gradients, and one sum where stages share a weight."""
    cluster, layout = Cluster.parse("1xdgx-h100"), Layout(pipeline=2, microbatches=4)
    pricer = Pricer(BIG, cluster, 8, stack=replace(stack_of(cluster.device), overlap=0.8))
    sums, widths = GradientVolume((), 1e8, 2e8), pricer.devices.widths(layout)
    whole = pricer.collective("all_reduce", widths.gradient * 1e8, RankGroup(2, 1, 2))
    assert whole > 0
    for window_s in (0.0, 0.5 * whole, 3 * whole):
        shown, inside, _ = gradient_reduction_s(pricer, layout, sums, widths, BUCKET_BYTES, Seconds(0.0, window_s), 1.0)
        hidden = min(whole, 0.8 * window_s)
        assert shown == pytest.approx(whole - hidden + pricer.devices.contention * hidden)
        assert inside.total == 0.0


def test_between_processors_the_sum_of_tied_weights_hides_behind_nothing() -> None:
    """An embedding's gradient is complete with the last backward; the sum crosses whatever joins the stages' hosts."""
    for bytes_per_s in (1e9, 25e6):
        pricer, layout = Pricer(BIG, hosts(1e-4, bytes_per_s, 2), 8), Layout(pipeline=2, microbatches=4)
        sums, widths = GradientVolume((), 1e6, 2e6), pricer.devices.widths(layout)
        whole = pricer.collective("all_reduce", widths.gradient * 1e6, RankGroup(2, 1, 2))
        assert whole >= widths.gradient * 1e6 / bytes_per_s
        for window_s in (0.0, 3 * whole):
            assert gradient_reduction_s(pricer, layout, sums, widths, BUCKET_BYTES, Seconds(0.0, window_s), 1.0)[0] == pytest.approx(whole)
        assert gradient_reduction_s(pricer, layout, GradientVolume((), 0.0, 2e6), widths, BUCKET_BYTES, Seconds(), 1.0)[0] == 0.0


def test_gathers_of_updated_weights_hide_behind_a_forward_but_for_the_first_bucket() -> None:
    """ZeRO-1: the simulated end of a forward whose layers each wait for one of N equal gathers, which run one after another."""
    cluster, num_buckets = Cluster.parse("2xdgx-h100"), 5
    pricer = Pricer(BIG, cluster, 16, stack=replace(stack_of(cluster.device), overlap=1.0, contention=0.0))
    layout = Layout(data=16, zero=1)
    widths = pricer.devices.widths(layout)
    count = num_buckets * BUCKET_BYTES / widths.gradient
    sums = GradientVolume((((DATA,), count),), 0.0, count)
    gathers_s = pricer.collective("all_gather", widths.weight * count, pricer.group(layout, DATA))
    each = gathers_s / num_buckets
    sums_only = gradient_reduction_s(pricer, layout, sums, widths, BUCKET_BYTES, Seconds(1e9, 1e9), 1.0)[0] - each
    for forward_s in (0.3 * gathers_s, 0.9 * gathers_s, 3 * gathers_s):
        arrived = end = 0.0
        for _ in range(num_buckets):
            arrived += each
            end = max(end, arrived) + forward_s / num_buckets
        shown = gradient_reduction_s(pricer, layout, sums, widths, BUCKET_BYTES, Seconds(forward_s, 1e9), 1.0)[0] - sums_only
        # The formula knows no layers: it may be off by what one layer computes.
        assert end - forward_s - forward_s / num_buckets - 1e-9 <= shown <= end - forward_s + 1e-9
    on_host = replace(layout, offload="optimizer")
    assert gradient_reduction_s(pricer, on_host, sums, widths, BUCKET_BYTES, Seconds(1e9, 1e9), 1.0)[0] == pytest.approx(
        sums_only + gathers_s
    )
