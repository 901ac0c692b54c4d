"""scripts/bench collectives --algorithms and --hosts: its arithmetic on made-up times, and one small run of real ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.collectives.collectives import DEEPSPEED, GLOO, at, judged
from bench.collectives.collectives import lines_of as table_of
from bench.collectives.collectives import page as page_of
from bench.collectives.collectives_hosts import HOSTS, INSIDE, emulated
from bench.collectives.collectives_programs import NAMES, Case, lines_of, page, predictions, rank_times, time_word, verdict
from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, MeasuredTable, NetworkLink
from shardwise.cost.network.collectives import algorithm_times
from shardwise.cost.network.network import RankGroup
from shardwise.world.launch.launch import launch

SMALL, LARGE = 64 << 10, 1 << 20
CASE = Case(
    2,
    "gloo",
    {(SMALL, "native"): 1e-4, (SMALL, "ring"): 2e-4, (LARGE, "native"): 1.2e-3, (LARGE, "ring"): 1e-3},
    {(SMALL, "native"): 2e-4, (SMALL, "ring"): 2e-4, (LARGE, "native"): 1.2e-3, (LARGE, "ring"): 1.3e-3},
    {SMALL: "native", LARGE: "native"},
)


def test_misses_are_above_64_kib_and_auto_is_beside_the_best() -> None:
    assert CASE.misses() == {(LARGE, "native"): 0.0, (LARGE, "ring"): pytest.approx(0.3)}
    assert CASE.lost() == {SMALL: 1.0, LARGE: pytest.approx(1.2)}
    words = verdict(CASE)
    assert "1 of 2 predictions within 15%" in words
    assert "worst ring at 1 MiB by +30%" in words
    assert "auto at worst 1.20 of the best, at 1 MiB (native)" in words


def test_one_measurement_is_held_against_the_other() -> None:
    second = {**CASE.measured, (LARGE, "ring"): 1.3e-3, (SMALL, "ring"): 1.0}
    twice = replace(CASE, passes=(CASE.measured, second))
    assert twice.strayed() == {(LARGE, "native"): 0.0, (LARGE, "ring"): pytest.approx(1 / 1.3 - 1)}
    assert "the first measurement within 15% of the second in 1;" in verdict(twice)
    assert "first measurement" not in verdict(CASE)


def test_the_page_has_a_row_a_size() -> None:
    head, rule, *rows = lines_of(CASE)
    assert head == "| bytes | native | ring | auto | auto / best |"
    assert rule.count("---") == 5
    assert rows[0] == "| 64 KiB | 100 us (+100%) | 200 us (+0%) | native | 1.00 |"
    assert "## 2 ranks over gloo" in page({"command": "x"}, [CASE])
    assert [time_word(s) for s in (1.234e-5, 0.0123, 2.0)] == ["12.3 us", "12.3 ms", "2 s"]


def cpu(**tables: tuple[tuple[float, float], ...]) -> Cluster:
    device = Device("core", "cpu", (("float32", 1e11),), 4e9, 1e10)
    made = tuple(MeasuredTable(name, 2, points) for name, points in tables.items())
    return Cluster("here", device, (ClusterLevel("node", 2, NetworkLink(2e-6, 1e10)),), tables=made)


def test_what_is_predicted_is_the_cost_model_s() -> None:
    line = ((1024.0, 1e-5), (1048576.0, 1e-3))
    cluster = cpu(send=line, exchange=line, all_reduce=line)
    found, auto = predictions(cluster, 2, "", [SMALL, LARGE])
    assert set(found) == {(size, name) for size in (SMALL, LARGE) for name in NAMES}
    assert found[LARGE, "ring"] == algorithm_times(cluster, RankGroup(2))["ring"](LARGE)
    assert auto == {SMALL: "native", LARGE: "native"}


def test_emulated_hosts_are_two_levels() -> None:
    cluster = emulated(cpu(), "1 Gbit/s", 1e9, 5e-5)
    assert (cluster.num_devices, cluster.node_size) == (HOSTS * INSIDE, INSIDE)
    assert cluster.levels[1].link.latency_s == 5e-5
    size = 64e6
    times = algorithm_times(cluster, RankGroup(4))
    assert times["ring"](size) == pytest.approx(1.5 * size / (0.95 * 1.25e8), rel=0.05)
    assert times["ring"](size) > 1.2 * times["hierarchical"](size)


def test_a_contender_that_cannot_be_built_is_told_on_the_page() -> None:
    times = {(size, name): [1e-5, 2e-5] for size in (4096, 1 << 20) for name in (GLOO, "shared buffer", "shared memory", "copy")}
    told = page_of({}, {2: times}, judged(2, times, 0.5), {DEEPSPEED: "no compiler"})
    assert "Not measured: DeepSpeed (no compiler)." in told
    assert DEEPSPEED not in table_of(2, times)[0]
    with_it = {**times, (4096, DEEPSPEED): [5e-5], (1 << 20, DEEPSPEED): [5e-5]}
    assert DEEPSPEED in table_of(2, with_it)[0]
    assert any("DeepSpeed" in v.target for v in judged(2, with_it, 0.5))
    assert at([1.0, 2.0, 3.0], 0.5) == 2.0


def test_real_ranks_are_timed() -> None:
    rows = launch(rank_times, 2, "", [4096, 65536], ["native", "ring", "tree"], 3, 0.1, threads=1, timeout_s=60.0)[0]
    assert {(size, name) for size, name, _ in rows} == {(size, name) for size in (4096, 65536) for name in ("native", "ring", "tree")}
    assert all(len(passes) == 2 and all(0 < s < 10 for times in passes for s in times) for _, _, passes in rows)
