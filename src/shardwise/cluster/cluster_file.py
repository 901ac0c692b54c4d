"""Help with writing a cluster file: a template from catalogue names, a JSON Schema (2020-12) for editors, and warnings.

Impossible figures are refused when a file is read; `implausible_figures` finds mistakes of units and of order.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from shardwise.cluster.catalogue import FORMAT, NUMBERS, WORDS, catalogue_entry, catalogue_names
from shardwise.cluster.cluster import PRECISIONS, Cluster, ClusterLevel, Device, MeasuredTable, NetworkLink, Speed
from shardwise.errors import UsageError
from shardwise.plan.ir.toml_text import quote_string
from shardwise.units import format_bytes, format_seconds

_BELOW_ZERO = {"exclusiveMaximum": 0}
_NUMBER = {"type": "number", "not": _BELOW_ZERO}
_TYPES: dict[str, dict[str, Any]] = {
    "str": {"type": "string"},
    "int": {"type": "integer", "not": _BELOW_ZERO},
    "float": _NUMBER,
    "tuple[tuple[str, float], ...]": {"type": "object", "additionalProperties": _NUMBER},
    "tuple[tuple[float, float], ...]": {"type": "array", "minItems": 1, "items": {"type": "array", "items": _NUMBER}},
}


def draft_cluster(
    name: str,
    device: str,
    devices: int,
    *,
    nodes: int = 1,
    link: str = "",
    network: str = "",
    price_per_hour: float = 0.0,
    priced: str = "",
) -> str:
    """Return a cluster file of `nodes` machines of `devices` devices each; `price_per_hour` in dollars, of all of them.

    Missing links are those of the catalogue's first machine with this device.

    >>> print(draft_cluster("ours", "H100", 4, price_per_hour=12.0).splitlines()[2])
    price_per_hour = 12

    Raises:
        ConfigError: a device or link that the catalogue lacks.
        UsageError: no machine of the catalogue has the device, and a link is missing.
    """
    figures = catalogue_entry("device", device)
    machine = next((node_entry for node in catalogue_names() if (node_entry := catalogue_entry("node", node))["device"] == device), None)
    if machine is None and not (link and (network or nodes == 1)):
        raise UsageError(f"no machine of the catalogue has {device}; say what joins the devices: --link, and --network between machines")
    inner = link or (machine or {})["link"]
    levels = [("node", devices, inner, "devices of a machine")]
    if nodes > 1:
        levels.append(("cluster", nodes, network or (machine or {})["network"], "machines"))
    precision = next((p for p in ("bfloat16", "float16") if p in figures["peak_flops"]), "float32")
    lines = [f"format = {FORMAT}", f"name = {quote_string(name)}"]
    if price_per_hour:
        lines.append(f"price_per_hour = {price_per_hour:g}")
    if priced:
        lines.append(f"priced = {quote_string(priced)}")
    lines += [
        f"# {figures['peak_flops'][precision] / 1e12:g} TFLOP/s in {precision}, {figures['memory_bytes'] / 1e9:g} GB.",
        "# A table has figures of your own:",
        f'# [device] like = "{device}", memory_bytes = 40e9',
        f'device = "{device}"',
    ]
    for level, size, link_name, what in levels:
        link_entry = catalogue_entry("link", link_name)
        lines += [
            "",
            f"[[level]]  # {what}: {link_entry['bandwidth_bytes_per_s'] / 1e9:g} GB/s each way, {link_entry['latency_s'] * 1e6:g} us",
            f'name = "{level}"',
            f"size = {size}",
            f'link = "{link_name}"',
        ]
    return "\n".join(lines) + "\n"


def implausible_figures(cluster: Cluster) -> tuple[str, ...]:
    """Return one sentence for each figure that is far from existing hardware.

    >>> implausible_figures(Cluster.parse("8xdgx-h100"))
    ()
    """
    if cluster.parts:
        return tuple(f"{part.name}: {words}" for part in cluster.parts for words in implausible_figures(part))
    device, doubtful = cluster.device, []
    if device.memory_bytes < 100e6:
        doubtful.append(f"memory_bytes = {device.memory_bytes:g} is {format_bytes(device.memory_bytes)} a device; it is in bytes: 80e9")
    if device.memory_bandwidth_bytes_per_s < 1e9:
        doubtful.append(
            f"memory_bandwidth_bytes_per_s = {device.memory_bandwidth_bytes_per_s:g} is slow for a memory; it is in bytes/s: 2e12"
        )
    for precision, flops in device.peak_flops:
        if not 1e9 <= flops <= 1e17:
            doubtful.append(f"peak_flops.{precision} = {flops:g} FLOP/s is out of what devices reach; 312 TFLOP/s are 312e12")
    previous = None
    for level in cluster.levels:
        link = level.link
        if link.bandwidth_bytes_per_s < 1e6:
            doubtful.append(f"level {level.name}: bandwidth_bytes_per_s = {link.bandwidth_bytes_per_s:g}; 100 Gbit/s are 12.5e9 bytes/s")
        if link.latency_s > 0.1:
            doubtful.append(
                f"level {level.name}: latency_s = {link.latency_s:g} is {format_seconds(link.latency_s)}; 5 microseconds are 5e-6"
            )
        if previous is not None and link.bandwidth_bytes_per_s > previous.size * previous.link.bandwidth_bytes_per_s:
            doubtful.append(
                f"level {level.name} is faster than all devices of {previous.name} together "
                f"({link.bandwidth_bytes_per_s:g} bytes/s against {previous.size} x {previous.link.bandwidth_bytes_per_s:g}); "
                "levels go from the innermost outwards"
            )
        previous = level
    if cluster.price_per_hour and not cluster.priced:
        doubtful.append('price_per_hour has no date; prices change: priced = "our contract, 2026-10"')
    return tuple(doubtful)


def cluster_schema() -> dict[str, Any]:
    """Return the schema of cluster files.

    >>> cluster_schema()["$defs"]["cluster"]["properties"]["device"]["anyOf"][0]["enum"][0]
    'V100-16'
    """
    link = _table_schema(
        NetworkLink, {"link": {"enum": list(catalogue_names("link"))}}, required=[], or_by=("link", _required_keys(NetworkLink))
    )
    level = _table_schema(ClusterLevel, {}, required=["name", "size"])
    level["properties"] = {key: value for key, value in level["properties"].items() if key != "link"} | link["properties"]
    level["anyOf"] = link["anyOf"]
    by_name = {"enum": list(catalogue_names("device"))}
    of_cluster = [key for key in _required_keys(Device) if key != "name"]  # it defaults to the cluster's
    device = _table_schema(Device, {"like": by_name}, required=[], or_by=("like", of_cluster))
    device["properties"]["peak_flops"] = {"type": "object", "properties": dict.fromkeys(PRECISIONS, _NUMBER), "additionalProperties": False}
    tables = {
        "level": level,
        "speed": _table_schema(Speed, {}, _required_keys(Speed)),
        "table": _table_schema(MeasuredTable, {}, _required_keys(MeasuredTable)),
    }
    properties: dict[str, Any] = {
        "format": {"const": FORMAT},
        **dict.fromkeys(WORDS, _TYPES["str"]),
        **dict.fromkeys(NUMBERS, _NUMBER),
        "device": {"anyOf": [by_name, device]},
        **{key: {"type": "array", "items": value} for key, value in tables.items()},
    }
    cluster = {"type": "object", "properties": properties, "required": ["name", "device", "level"], "additionalProperties": False}
    parts = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/cluster"}}
    mixed = {
        "type": "object",
        "properties": {"format": {"const": FORMAT}, "name": _TYPES["str"], "between": link, "part": parts},
        "required": ["name", "between", "part"],
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A cluster file of shardwise",
        "$defs": {"cluster": cluster},
        "anyOf": [{"$ref": "#/$defs/cluster"}, mixed],
    }


def _required_keys(kind: type) -> list[str]:
    return [f.name for f in fields(kind) if f.default is MISSING]


def _table_schema(kind: type, more: dict[str, Any], required: list[str], or_by: tuple[str, list[str]] | None = None) -> dict[str, Any]:
    """Return the schema of a dataclass as a table with additional keys `more`; `or_by`: (a key, the required keys that it replaces)."""
    properties = {f.name: _TYPES.get(str(f.type), {}) for f in fields(kind)} | more
    schema_of: dict[str, Any] = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if or_by is not None:
        schema_of["anyOf"] = [{"required": [or_by[0]]}, {"required": or_by[1]}]
    return schema_of
