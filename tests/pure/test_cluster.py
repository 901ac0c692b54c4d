"""Clusters: the catalogue is sane, files are strict, numbers that cannot be are refused."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import weft.cluster.catalogue as catalogue
from weft.cluster.catalogue import loads, names
from weft.cluster.cluster import Cluster, Device, Level, Link, Speed, Table
from weft.errors import ConfigError, Infeasible, UsageError, WeftError

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
]


@pytest.mark.parametrize("name", names())
def test_every_machine_reads_and_survives_its_own_text(name: str) -> None:
    cluster = Cluster.parse(f"4x{name}")
    assert cluster.num_devices == 4 * cluster.node_size
    assert loads(cluster.to_toml()) == cluster


def test_the_catalogue_has_what_is_promised() -> None:
    assert set(PROMISED) <= set(names())


@pytest.mark.parametrize("kind", ["device", "link", "node"])
def test_every_figure_has_a_source(kind: str) -> None:
    assert all(len(entry.get("source", "")) > 10 for entry in DATA[kind].values())


def test_figures_are_of_the_right_order() -> None:
    """Datasheet relations that a slipped digit would break."""
    for name, device in DATA["device"].items():
        peak = device["peak_flops"]
        assert peak["float64"] <= peak["float32"] <= peak.get("bfloat16", peak.get("float16")), name
        if device["kind"] == "gpu":
            assert 10e9 < device["memory_bytes"] < 300e9, name
            assert 0.5e12 < device["memory_bandwidth_bytes_per_s"] < 10e12, name
            # Bytes a FLOP of any accelerator: between 1/1000 and 1/50 at half precision.
            assert 50 < peak["float16"] / device["memory_bandwidth_bytes_per_s"] < 1000, name
    for name, node in DATA["node"].items():
        inner, outer = DATA["link"][node["link"]], DATA["link"][node["network"]]
        share = outer["bandwidth_bytes_per_s"] / node["size"]
        assert node["device"] == "x86-core" or inner["bandwidth_bytes_per_s"] > share, name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xp3.16xlarg", "did you mean p3.16xlarge"),
        ("0xdgx-h100", "0 machines"),
        ("2xdgx-h100+4xdgx-a100-80", "not built yet"),
        ("missing.toml", "cannot read"),
        ("", "names nothing"),
    ],
)
def test_names_that_mean_nothing(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Cluster.parse(text)


GOOD = Cluster.parse("2xdgx-a100-40").to_toml()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("memory_bytes = 4.25e+10", "memory_bytes = 0", "memory_bytes = 0"),
        ("bandwidth_bytes_per_s = 3e+11", "bandwidth_bytes_per_s = -1", "bandwidth_bytes_per_s = -1"),
        ("memory_bytes", "memory_byte", r"memory_byte \(line 9\).*did you mean memory_bytes"),
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
        loads(GOOD.replace(old, new, 1))


def test_a_file_without_links_or_device() -> None:
    with pytest.raises(ConfigError, match="no links"):
        loads(GOOD.partition("[[level]]")[0])
    with pytest.raises(ConfigError, match="no device"):
        loads('name = "x"')
    with pytest.raises(ConfigError, match="not TOML"):
        loads("name = ")


def test_every_truncation_is_one_clear_error() -> None:
    for end in range(0, len(GOOD), 7):
        try:
            loads(GOOD[:end])
        except WeftError:
            continue


def test_peak_refuses_a_precision_that_is_not_there() -> None:
    with pytest.raises(Infeasible, match="V100-16 has no bfloat16"):
        Cluster.parse("p3.16xlarge").device.peak("bfloat16")


CPU = Device("core", "cpu", (("float32", 1e11),), 4e9, 1e10)


def machine(cores: int, speeds: tuple[Speed, ...] = ()) -> Cluster:
    return Cluster("m", CPU, (Level("node", cores, Link(1e-5, 1e9)),), speeds=speeds)


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
    table = Table("all_reduce", 2, ((4096.0, 1.25e-4), (1048576.0, 2e-3)))
    cluster = replace(machine(2, (speed,)), tables=(table,), fingerprint="0123")
    assert loads(cluster.to_toml()) == cluster


def test_tables_interpolate_between_their_points() -> None:
    table = Table("all_reduce", 2, ((1e3, 1e-4), (1e6, 1e-3), (1e7, 1e-2)))
    assert table.seconds(10) == 1e-4
    assert table.seconds(1e6) == pytest.approx(1e-3)
    assert 1e-3 < table.seconds(3e6) < 1e-2
    assert table.seconds(1e8) == pytest.approx(1e-1)
    with pytest.raises(ConfigError, match="ascend"):
        replace(table, points=((1e6, 1e-3), (1e3, 1e-4)))
