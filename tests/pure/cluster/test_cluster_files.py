"""Cluster files that are wrong: each figure replaced by nonsense is refused with its key, none is taken for a number or ignored."""

from __future__ import annotations

import pytest

from shardwise.cluster.catalogue import parse_cluster
from shardwise.cluster.cluster import Cluster
from shardwise.errors import ConfigError

GOOD = """format = 1
name = "mine"
price_per_hour = 10.0
power_w = 3000.0
fingerprint = ""
stack = ""
[device]
kind = "gpu"
peak_flops = { float32 = 19.5e12, bfloat16 = 312e12 }
memory_bytes = 42.5e9
memory_bandwidth_bytes_per_s = 1555e9
launch_s = 5e-6
matmul_efficiency = 0.7
scratch_bytes = 1e9
[[level]]
name = "inner"
size = 4
latency_s = 3e-6
bandwidth_bytes_per_s = 300e9
ports = 1
efficiency = 0.9
protocol = "nccl"
[[speed]]
ranks = 4
threads = 0
flops = { float32 = 1e12 }
memory_bandwidth_bytes_per_s = 1e12
launch_s = 5e-6
rates = { norm = 1e11 }
waits = 0.0
[[table]]
collective = "all_reduce"
ranks = 4
points = [[1024, 1e-5], [2048, 2e-5]]
"""
NUMBERS = ("nan", "inf", "-1", '"x"', "true", "[1]", "{ a = 1 }", "1e400")
TEXTS = ("0", "nan", "true", "[1]", "{ a = 1 }")
LISTS = ("0", '"x"', "true", "[]", "[1]", "[[1]]", '[["a", 1]]', "[[nan, 1]]", "[[1, inf]]", "[[2, 1], [1, 1]]")
RATES = ("0", '"x"', "true", "[1]", "{ float32 = nan }", '{ float32 = "x" }')
KEYS = (
    *((key, value) for key in ("price_per_hour", "power_w", "memory_bytes", "launch_s", "matmul_efficiency", "scratch_bytes", "size",
        "latency_s", "bandwidth_bytes_per_s", "ports", "efficiency", "waits", "threads", "format") for value in NUMBERS),
    *((key, "0") for key in ("memory_bytes", "matmul_efficiency", "size", "bandwidth_bytes_per_s", "ports", "efficiency", "ranks")),
    *((key, value) for key in ("name", "kind", "protocol", "collective", "fingerprint", "stack") for value in TEXTS),
    *((key, value) for key in ("peak_flops", "flops", "rates") for value in RATES),
    *(("points", value) for value in LISTS),
)  # fmt: skip


def with_value(key: str, value: str) -> str:
    return "\n".join(f"{key} = {value}" if line.startswith(f"{key} =") else line for line in GOOD.splitlines())


def test_what_is_right_is_read() -> None:
    assert parse_cluster(GOOD).num_devices == 4


@pytest.mark.parametrize(("key", "value"), KEYS)
def test_nonsense_is_refused_with_its_key(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match="points|sizes must ascend" if key == "points" else key):
        parse_cluster(with_value(key, value))


def test_a_process_that_takes_all_memory_leaves_a_model_none() -> None:
    with pytest.raises(ConfigError, match=r"scratch_bytes = 5e\+10 of memory_bytes = 4.25e\+10"):
        parse_cluster(with_value("scratch_bytes", "50e9"))


def test_prices_of_a_mixed_cluster_are_those_of_its_parts() -> None:
    """At the top of the file they would be ignored."""
    part = GOOD.replace("format = 1\n", "").replace("[device]", "[part.device]").replace("\n[[", "\n[[part.")
    text = (
        f'name = "both"\nprice_per_hour = 3.0\n[between]\nlatency_s = 1e-5\nbandwidth_bytes_per_s = 1e9\n[[part]]\n{part}[[part]]\n{part}'
    )
    with pytest.raises(ConfigError, match="unknown key price_per_hour"):
        parse_cluster(text)
    assert parse_cluster(text.replace("price_per_hour = 3.0\n", "", 1)).price_per_hour == 20.0


def test_a_part_of_a_file_by_its_number_of_devices(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "mine.toml").write_text(GOOD)
    found = Cluster.parse(f"2 devices of {tmp_path}/mine.toml")
    assert (found.num_devices, found.price_per_hour, found.source_text) == (2, 5.0, f"2 devices of {tmp_path}/mine.toml")
