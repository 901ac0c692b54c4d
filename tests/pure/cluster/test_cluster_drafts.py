"""Cluster files by names of the catalogue: drafts, references, the schema held against another's validator, doubts."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from shardwise.cluster.catalogue import catalogue_names, dump, parse_cluster
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.cluster_file import cluster_schema, draft_cluster, implausible_figures
from shardwise.errors import ConfigError, UsageError

EXAMPLES = Path(__file__).parents[3] / "examples" / "clusters"
BY_NAME = """name = "ours"
device = "H100"
[[level]]
name = "node"
size = 8
link = "nvlink4"
[[level]]
name = "cluster"
size = 4
link = "infiniband-8x400"
"""
MIXED = """name = "both"
[between]
link = "ethernet-100"
[[part]]
name = "new"
device = { like = "H100", memory_bytes = 40e9 }
level = [{ name = "node", size = 8, link = "nvlink4", latency_s = 1e-6 }]
[[part]]
name = "old"
device = "V100-16"
level = [{ name = "node", size = 8, link = "nvlink2" }]
"""


def test_names_stand_for_the_catalogue_s_figures() -> None:
    ours, theirs = parse_cluster(BY_NAME), Cluster.parse("4xdgx-h100")
    assert ours.device == theirs.device
    assert [level.link for level in ours.levels] == [level.link for level in theirs.levels]
    assert parse_cluster(dump(ours)) == ours


def test_own_figures_win_over_those_of_the_name() -> None:
    new, old = parse_cluster(MIXED).parts
    assert (new.device.name, new.device.memory_bytes, new.levels[0].link.latency_s) == ("H100", 40e9, 1e-6)
    assert new.device.peak("bfloat16") == Cluster.parse("dgx-h100").device.peak("bfloat16")
    assert old.device == Cluster.parse("p3.16xlarge").device


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"H100"', '"H10"', "no device of the catalogue.*did you mean H100"),
        ('"H100"', "7", "device is a name"),
        ('"nvlink4"', '"nvlink44"', "no link of the catalogue.*did you mean nvlink4"),
        ('"nvlink4"', "4", "link = 4; it is text"),
        ('link = "nvlink4"', "", "has no latency_s, bandwidth_bytes_per_s"),
    ],
)
def test_names_that_are_not_there_are_refused(old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_cluster(BY_NAME.replace(old, new))


def test_a_file_that_is_no_text_is_refused_as_such(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is no text: byte 0"):
        Cluster.parse(str(file))
    file.write_text("x = " + "[" * 5000)
    with pytest.raises(ConfigError, match="is not TOML"):
        Cluster.parse(str(file))


@pytest.mark.parametrize("device", catalogue_names("device"))
def test_a_draft_of_every_device_reads_back(device: str) -> None:
    try:
        text = draft_cluster('our "own"', device, 4, nodes=2, price_per_hour=2.5, priced="here")
    except UsageError:  # no machine of the catalogue has it
        text = draft_cluster('our "own"', device, 4, nodes=2, link="nvlink4", network="ethernet-10")
    found = parse_cluster(text)
    assert (found.name, found.num_devices, found.device.name) == ('our "own"', 8, device)
    jsonschema.validate(tomllib.loads(text), cluster_schema())


@pytest.mark.parametrize("name", [*catalogue_names(), "2xdgx-h100+1xp3.16xlarge"])
def test_the_schema_takes_what_shardwise_writes(name: str) -> None:
    jsonschema.validate(tomllib.loads(dump(Cluster.parse(name))), cluster_schema())


@pytest.mark.parametrize("text", [BY_NAME, MIXED])
def test_the_schema_takes_names_and_refuses_what_shardwise_refuses(text: str) -> None:
    jsonschema.Draft202012Validator.check_schema(cluster_schema())
    jsonschema.validate(tomllib.loads(text), cluster_schema())
    wrong = ('"H10"', "nvlink44", "sizes = 8", "size = -8", "nam =")
    for old, new in zip(('"H100"', "nvlink4", "size = 8", "size = 8", "name ="), wrong, strict=True):
        twin = text.replace(old, new, 1)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(tomllib.loads(twin), cluster_schema())
        with pytest.raises(ConfigError):
            parse_cluster(twin)


def test_nothing_in_the_catalogue_is_doubted_and_wrong_units_are() -> None:
    for name in catalogue_names():
        assert not implausible_figures(Cluster.parse(f"2x{name}")), name
    good = Cluster.parse("2xdgx-h100")
    inner, outer = good.levels
    fast = replace(inner, link=replace(inner.link, bandwidth_bytes_per_s=1e13))
    slow = replace(inner, link=replace(inner.link, bandwidth_bytes_per_s=450.0, latency_s=3.4))
    twins = {
        "memory_bytes": replace(good, device=replace(good.device, memory_bytes=80.0, scratch_bytes=0.0)),
        "memory_bandwidth": replace(good, device=replace(good.device, memory_bandwidth_bytes_per_s=3350.0)),
        "peak_flops.float32": replace(good, device=replace(good.device, peak_flops=(("float32", 67.0),))),
        "bandwidth_bytes_per_s = 450": replace(good, levels=(slow, outer)),
        "innermost outwards": replace(good, levels=(outer, fast)),
        "no date": replace(good, priced=""),
    }
    for said, twin in twins.items():
        assert any(said in words for words in implausible_figures(twin)), said


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_are_read_and_nothing_in_them_is_doubted(path: Path) -> None:
    assert not implausible_figures(Cluster.parse(str(path)))
    jsonschema.validate(tomllib.loads(path.read_text()), cluster_schema())
