"""Clusters: the catalogue is sane, files are strict, numbers that cannot be are refused."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import shardwise.cluster.catalogue as catalogue
from shardwise.cluster.catalogue import catalogue_names, dump, parse_cluster
from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, MeasuredTable, NetworkLink, Speed
from shardwise.cluster.heterogeneous import mix_clusters, reorder_parts
from shardwise.errors import ConfigError, Infeasible, ShardwiseError, UsageError

DATA = tomllib.loads((Path(catalogue.__file__).parent / "catalogue.toml").read_text())
PROMISED = [
    "p3.16xlarge",
    "p4d.24xlarge",
    "p4de.24xlarge",
    "p5.48xlarge",
    "dgx-a100-40",
    "dgx-a100-80",
    "dgx-h100",
    "hgx-h200",
    "gb200-nvl72",
    "frontier",
    "perlmutter",
    "alps",
    "a2-highgpu-8g",
    "a3-megagpu-8g",
    "cpu-2",
    "rtx-3090-2",
    "rtx-4090-4",
    "rtx-5090",
    "rtx-a6000-2",
    "g6.12xlarge",
    "g6e.48xlarge",
    "g4dn.12xlarge",
    "g5.48xlarge",
]


@pytest.mark.parametrize("name", catalogue_names())
def test_every_machine_reads_and_survives_its_own_text(name: str) -> None:
    cluster = Cluster.parse(f"4x{name}")
    assert cluster.num_devices == 4 * cluster.node_size
    assert parse_cluster(dump(cluster)) == cluster


def test_the_catalogue_has_what_is_promised() -> None:
    assert set(PROMISED) <= set(catalogue_names())


@pytest.mark.parametrize("kind", ["device", "link", "node"])
def test_every_figure_has_a_source(kind: str) -> None:
    assert all(len(entry.get("source", "")) > 10 for entry in DATA[kind].values())


# Datasheets: half-precision peak in TFLOP/s without sparsity, memory in GB (powers of 1000 or 1024), its bandwidth in GB/s.
DATASHEETS = {
    "V100-16": (125, 16, 900),
    "V100-32": (125, 32, 900),
    "A100-40": (312, 40, 1555),
    "A100-80": (312, 80, 2039),
    "H100": (989, 80, 3350),
    "H100-96": (989, 96, 2400),  # six stacks of HBM2e, as torchtitan describes its machines
    "H200": (989, 141, 4800),
    "B200": (2250, 180, 7700),
    "B300": (2250, 288, 7750),
    "GB200": (2500, 186, 8000),
    "GB300": (2500, 288, 8000),
    "GH200-96": (989, 96, 4000),
    "RTX-3090": (71, 24, 936),
    "RTX-4090": (165.2, 24, 1008),
    "RTX-5090": (209.5, 32, 1792),
    "RTX-A6000": (154.8, 48, 768),
    "L4": (121, 24, 300),
    "L40S": (362, 48, 864),
    "T4": (65, 16, 320),
    "A10G": (70, 24, 600),
    "MI250X-GCD": (191.5, 64, 1638),
    "MI300X": (1307, 192, 5300),
    "TPU-v5e": (197, 16, 819),
    "TPU-v5p": (459, 95, 2765),
}


def test_every_accelerator_is_as_its_datasheet_has_it() -> None:
    accelerators = {name: device for name, device in DATA["device"].items() if device["kind"] != "cpu"}
    assert set(accelerators) == set(DATASHEETS)
    for name, device in accelerators.items():
        flops, memory, bandwidth = DATASHEETS[name]
        peak = device["peak_flops"]
        assert peak.get("bfloat16", peak.get("float16")) == pytest.approx(flops * 1e12, rel=0.01), name
        assert 0.99 * memory * 1e9 <= device["memory_bytes"] <= 1.08 * memory * 1e9, name  # GB or GiB, as vendors mean either
        assert device["memory_bandwidth_bytes_per_s"] == pytest.approx(bandwidth * 1e9, rel=0.01), name


def test_figures_are_of_the_right_order() -> None:
    """Relations that a slipped digit would break."""
    for name, device in DATA["device"].items():
        peak = device["peak_flops"]
        half = peak.get("bfloat16", peak.get("float16", 2 * peak["float32"]))
        assert peak.get("float64", 0) <= peak["float32"] <= half, name
        if device["kind"] != "cpu":
            assert 10e9 < device["memory_bytes"] < 300e9, name
            assert 0.25e12 < device["memory_bandwidth_bytes_per_s"] < 10e12, name
            # FLOPs a byte of any accelerator at half precision.
            assert 50 < half / device["memory_bandwidth_bytes_per_s"] < 1000, name
        else:  # one core
            assert 20e9 < peak["float32"] < 200e9, name
            assert 2e9 < device["memory_bandwidth_bytes_per_s"] < 20e9, name
        assert 0.4 <= device.get("matmul_efficiency", 1.0) <= 1, name
        assert 1e-6 <= device["launch_s"] <= 2e-5, name
    for name, link in DATA["link"].items():
        assert 1e9 <= link["bandwidth_bytes_per_s"] <= 1e13, name
        assert 5e-7 <= link["latency_s"] <= 2e-4, name
    for name, node in DATA["node"].items():
        inner, outer = DATA["link"][node["link"]], DATA["link"][node["network"]]
        share = outer["bandwidth_bytes_per_s"] / node["size"]
        device = DATA["device"][node["device"]]
        assert device["kind"] == "cpu" or inner["bandwidth_bytes_per_s"] > share, name
        if device["kind"] != "cpu":
            # Dollars and watts of one device: from a T4 to a rack of 72.
            assert 0.5 <= node.get("price_per_hour", 8 * node["size"]) / node["size"] <= 15, name
            assert 100 <= node.get("power_w", 500 * node["size"]) / node["size"] <= 2000, name
        else:
            assert 3 <= node["power_w"] / node["size"] <= 20, name


@pytest.mark.parametrize("name", sorted(catalogue_names()))
def test_a_machine_without_price_or_power_says_why(name: str) -> None:
    """No figure is made up: what is rented has a price, and where power is missing the source says that it is not published."""
    node = DATA["node"][name]
    rented = any(word in node["source"] for word in ("AWS", "Google"))
    assert not rented or "price_per_hour" in node or name == "a3-megagpu-8g"
    assert "power_w" in node or "not published" in node["source"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xp3.16xlarg", "did you mean p3.16xlarge"),
        ("0xdgx-h100", "0 machines"),
        ("missing.toml", "cannot read"),
        ("", "names nothing"),
    ],
)
def test_names_that_mean_nothing(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Cluster.parse(text)


GOOD = dump(Cluster.parse("2xdgx-a100-40"))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("memory_bytes = 4.25e+10", "memory_bytes = 0", "memory_bytes = 0"),
        ("bandwidth_bytes_per_s = 3e+11", "bandwidth_bytes_per_s = -1", "bandwidth_bytes_per_s = -1"),
        ("memory_bytes", "memory_byte", r"memory_byte \(line 11\).*did you mean memory_bytes"),
        ("size = 8", 'size = "8"', "whole number"),
        ("size = 8", "size = 0", "size = 0"),
        ("launch_s", "lunch_s", "did you mean launch_s"),
        ("latency_s = 1.4e-05", "latency_s = -1e-6", "latency_s = -1e-06"),
        ("efficiency = 0.634", "efficiency = 1.5", "at most 1"),
        ('kind = "gpu"', 'kind = "npu"', "npu"),
        ("format = 1", "format = 99", "format 1"),
        ("[device]", "[devices]", "did you mean device"),
        ('name = "node"', "size_ = 1", "unknown key size_"),
        ("peak_flops = {", "peak_flops = { float99 = 1,", "float99"),
    ],
)
def test_files_are_strict(old: str, new: str, said: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError, match=said):
        parse_cluster(GOOD.replace(old, new, 1))


def test_a_file_without_links_or_device() -> None:
    with pytest.raises(ConfigError, match="no links"):
        parse_cluster(GOOD.partition("[[level]]")[0])
    with pytest.raises(ConfigError, match="no device"):
        parse_cluster('name = "x"')
    with pytest.raises(ConfigError, match="not TOML"):
        parse_cluster("name = ")


def test_every_truncation_is_one_clear_error() -> None:
    for end in range(0, len(GOOD), 7):
        try:
            parse_cluster(GOOD[:end])
        except ShardwiseError:
            continue


def test_peak_refuses_a_precision_that_is_not_there() -> None:
    with pytest.raises(Infeasible, match="V100-16 has no bfloat16"):
        Cluster.parse("p3.16xlarge").device.peak("bfloat16")


CPU = Device("core", "cpu", (("float32", 1e11),), 4e9, 1e10)


def machine(cores: int, speeds: tuple[Speed, ...] = ()) -> Cluster:
    return Cluster("m", CPU, (ClusterLevel("node", cores, NetworkLink(1e-5, 1e9)),), speeds=speeds)


def test_ranks_share_the_cores_and_the_memory() -> None:
    cluster = machine(8)
    assert [cluster.threads_of(n) for n in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
    assert [cluster.memory_of(n) for n in (1, 2, 8)] == [32e9, 16e9, 4e9]
    assert dict(cluster.speed(2).flops)["float32"] == 4e11
    assert dict(cluster.speed(16).flops)["float32"] == 0.5e11


def test_measured_speeds_win_and_scale() -> None:
    one, both = Speed(1, 2, (("float32", 1.8e11),), 1e10, 1e-6), Speed(2, 1, (("float32", 0.95e11),), 6e9, 1e-6)
    cluster = machine(2, (one, both))
    assert cluster.speed(1) == one
    assert cluster.speed(2) == both
    four = cluster.speed(4)
    assert dict(four.flops)["float32"] == pytest.approx(0.95e11 / 2)
    assert four.launch_s == pytest.approx(2e-6)


def test_a_measured_cluster_survives_its_own_text() -> None:
    speed = Speed(1, 2, (("float32", 1.8e11),), 1e10, 1e-6, (("norm", 1e9), ("attention.bfloat16", 5e10)))
    table = MeasuredTable("all_reduce", 2, ((4096.0, 1.25e-4), (1048576.0, 2e-3)))
    cluster = replace(machine(2, (speed,)), tables=(table,), fingerprint="0123")
    assert parse_cluster(dump(cluster)) == cluster


def test_tables_interpolate_between_their_points() -> None:
    table = MeasuredTable("all_reduce", 2, ((1e3, 1e-4), (1e6, 1e-3), (1e7, 1e-2)))
    assert table.seconds(10) == 1e-4
    assert table.seconds(1e6) == pytest.approx(1e-3)
    assert 1e-3 < table.seconds(3e6) < 1e-2
    assert table.seconds(1e8) == pytest.approx(1e-1)
    with pytest.raises(ConfigError, match="ascend"):
        replace(table, points=((1e6, 1e-3), (1e3, 1e-4)))


MIXED = "2xdgx-h100+4xdgx-a100-80"


def test_a_mixed_cluster_has_parts_and_what_all_can_count_on() -> None:
    cluster = Cluster.parse(MIXED)
    fast, slow = Cluster.parse("2xdgx-h100"), Cluster.parse("4xdgx-a100-80")
    assert cluster.parts == (fast, slow)
    assert cluster.num_devices == 48
    assert cluster.device.peak("bfloat16") == slow.device.peak("bfloat16")
    assert cluster.device.memory_bytes == min(fast.device.memory_bytes, slow.device.memory_bytes)
    assert parse_cluster(dump(cluster)) == cluster
    assert reorder_parts(cluster, (1, 0)).name == "4xdgx-a100-80+2xdgx-h100"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2xdgx-h100+cpu-2", "do not mix"),
        ("2xdgx-h100+dgx-h10", "did you mean dgx-h100"),
        ("2xdgx-h100+0xdgx-a100-80", "0 machines"),
    ],
)
def test_parts_that_do_not_mix(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Cluster.parse(text)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[between]", "[betwen]", "did you mean between"),
        ("latency_s", "latency", r"unknown key latency.*did you mean latency_s"),
        ("[part.device]", "[part.devices]", "did you mean device"),
    ],
)
def test_mixed_files_are_strict(old: str, new: str, said: str) -> None:
    good = dump(Cluster.parse(MIXED))
    with pytest.raises(ConfigError, match=said):
        parse_cluster(good.replace(old, new, 1))


def test_a_mixed_cluster_of_one_part() -> None:
    with pytest.raises(UsageError, match="needs 2 or more"):
        mix_clusters("one", [Cluster.parse("dgx-h100")], NetworkLink(1e-5, 1e9))


def test_a_limit_is_what_a_rank_may_use() -> None:
    """What its process holds before it has any tensor comes on top; more than there is cannot be allowed."""
    machines = Cluster.parse("1xcpu-2")
    limited = machines.with_memory_limit(1e6)
    assert limited.memory_of(1) == limited.memory_of(2) == 1e6 + machines.device.scratch_bytes
    assert machines.with_memory_limit(1e15).memory_of(2) == machines.memory_of(2)
    assert machines.with_memory_limit(0) == machines
