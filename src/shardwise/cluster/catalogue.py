"""Catalogue of devices, links and machines, and cluster files: strict TOML to `Cluster`, and back.

An unknown key is an error with the nearest known one and, if possible, the line. `A+B` is a heterogeneous cluster, and so is a file with
[[part]]; the link between parts is the slower of their networks, or the file's [between].
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, MeasuredTable, NetworkLink, Speed
from shardwise.cluster.heterogeneous import mix_clusters
from shardwise.errors import ConfigError, UsageError, did_you_mean
from shardwise.plan.ir.toml_text import check_keys, parse_document, quote_key, quote_string, read_user_file

FORMAT = 1
WORDS, NUMBERS = ("name", "fingerprint", "stack", "priced"), ("price_per_hour", "power_w")


def node_network(cluster: Cluster) -> NetworkLink:
    """Return the network link between nodes of this kind, even if the cluster has only one."""
    if len(cluster.levels) > 1:
        return cluster.levels[-1].link
    catalogue = _load_catalogue()
    name = re.sub(r"^\d+x", "", cluster.name.partition("@")[0])
    if name not in catalogue["node"]:
        return cluster.levels[-1].link
    link: NetworkLink = _build_record(NetworkLink, f"network of {name}", catalogue["link"][catalogue["node"][name]["network"]], "")
    return link


def catalogue_names(table: str = "node") -> tuple[str, ...]:
    """Return the catalogue's names of machines (`node`), devices (`device`) or links (`link`)."""
    return tuple(_load_catalogue()[table])


def catalogue_section(table: str) -> Mapping[str, Any]:
    """Return the figures of all entries of a catalogue table, by name."""
    entries: Mapping[str, Any] = _load_catalogue()[table]
    return entries


def catalogue_entry(table: str, name: str, where: str = "") -> dict[str, Any]:
    """Return the catalogue's figures of a device or link, or of a machine with the names of its device and links.

    >>> catalogue_entry("node", "dgx-h100")["link"], catalogue_entry("device", "H100")["memory_bytes"]
    ('nvlink4', 85000000000.0)

    Raises:
        ConfigError: no such name, with the nearest.
    """
    entries = _load_catalogue()[table]
    if name not in entries:
        raise ConfigError(
            f"{where or table}: {name!r} is no {table} of the catalogue{did_you_mean(name, entries)}; known: {', '.join(entries)}"
        )
    return dict(entries[name])


@cache
def _load_catalogue() -> dict[str, Any]:
    text = resources.files("shardwise.cluster").joinpath("catalogue.toml").read_text()
    return tomllib.loads(text)


def build_machine(text: str, count: int, name: str) -> Cluster:
    """Build the cluster `text` of `count` machines `name`. Raises UsageError for an unknown name, with the nearest."""
    catalogue = _load_catalogue()
    node = catalogue["node"].get(name)
    if node is None:
        hint = _device_hint(name) or did_you_mean(name, catalogue["node"])
        raise UsageError(f"unknown cluster {text}{hint}; known machines: {', '.join(catalogue['node'])}")
    check_keys(f"catalogue node {name}", node, {"device", "size", "link", "network", "price_per_hour", "priced", "power_w", "source"}, "")
    device = _build_record(Device, f"device {node['device']}", {"name": node["device"], **catalogue["device"][node["device"]]}, "")
    levels = [ClusterLevel("node", node["size"], _build_record(NetworkLink, f"link of {name}", catalogue["link"][node["link"]], ""))]
    if count > 1:
        levels.append(
            ClusterLevel("cluster", count, _build_record(NetworkLink, f"network of {name}", catalogue["link"][node["network"]], ""))
        )
    price, power = (node.get(key, 0.0) * count for key in ("price_per_hour", "power_w"))
    return Cluster(text, device, tuple(levels), price, power, priced=node.get("priced", ""))


def _device_hint(device: str) -> str:
    """Return a hint for a user who names a device, such as H100 or a100, instead of a machine; "" if it is no device."""
    nodes = {name: node for name, node in _load_catalogue()["node"].items() if node["device"].lower().startswith(device.lower())}
    if not nodes:
        return ""
    machines = ", ".join(f"{name} has {node['size']} {node['device']}" for name, node in nodes.items())
    return f': that is a device, and machines are counted: {machines}; "4 devices of {next(iter(nodes))}" is a part of one'


def load(path: Path) -> Cluster:
    """Read a cluster file. Raises `ConfigError` with the file, the key, the nearest known key and the line."""
    text = read_user_file(path, "cluster file", f"`shardwise probe -o {path}` writes one")
    return replace(parse_cluster(text, str(path)), origin=str(path))


def parse_cluster(text: str, where: str = "cluster") -> Cluster:
    """Parse a cluster from TOML text; `where` names it in errors."""
    data = parse_document(text, where)
    version = data.pop("format", FORMAT)
    _check_type(where, "format", version, "int")
    if version != FORMAT:
        raise ConfigError(f"{where}: this shardwise reads cluster format {FORMAT}; probe again")
    if "part" not in data:
        return _build_cluster(data, where, text)
    check_keys(where, data, {"name", "part", "between"}, text)
    for key in ("name", "between"):
        if key not in data:
            raise ConfigError(f"{where} has no {key}; a mixed cluster needs name, [between] (what joins its parts) and [[part]]")
    parts = [_build_cluster(entry, f"{where} [[part]]", text) for entry in _list_of_tables(where, data, "part")]
    if not isinstance(data["between"], dict):
        raise ConfigError(f"{where}: between is a table, [between]")
    _check_type(where, "name", data["name"], "str")
    return mix_clusters(data["name"], parts, _build_link(f"{where} [between]", data["between"], text))


def _build_cluster(data: Mapping[str, Any], where: str, text: str) -> Cluster:
    """Build a homogeneous cluster from its tables."""
    check_keys(where, data, {*WORDS, *NUMBERS, "device", "level", "speed", "table"}, text)
    for key in ("name", "device"):
        if key not in data:
            raise ConfigError(f"{where} has no {key}; a cluster needs name, [device] and [[level]]")
    levels = []
    for level in _list_of_tables(where, data, "level"):
        check_keys(f"{where} [[level]]", level, {"name", "size", "link", *_field_names(NetworkLink)}, text)
        for key in ("name", "size"):
            if key not in level:
                raise ConfigError(f"{where} [[level]] has no {key}")
        _check_type(f"{where} [[level]]", "size", level["size"], "int")
        _check_type(f"{where} [[level]]", "name", level["name"], "str")
        link = {k: v for k, v in level.items() if k not in ("name", "size")}
        levels.append(ClusterLevel(level["name"], level["size"], _build_link(f"{where} [[level]] {level['name']}", link, text)))
    tables = []
    for row in _list_of_tables(where, data, "table"):
        table = _build_record(MeasuredTable, f"{where} [[table]]", {**row, "points": _parse_points(where, row.get("points"))}, text)
        tables.append(table)
    numbers = {key: data.get(key, 0.0) for key in NUMBERS}
    words = {key: data.get(key, "") for key in WORDS}
    for kind, fields_of in (("float", numbers), ("str", words)):
        for key, value in fields_of.items():
            _check_type(where, key, value, kind)
    return Cluster(
        device=_build_device(where, data["device"], data["name"], text),
        levels=tuple(levels),
        speeds=tuple(_build_record(Speed, f"{where} [[speed]]", row, text) for row in _list_of_tables(where, data, "speed")),
        tables=tuple(tables),
        **numbers,
        **words,
    )


def _build_device(where: str, entry_or_name: Any, name: str, text: str) -> Device:
    """Build a device by its name in the catalogue, by its figures, or `like` one of the catalogue with some figures replaced."""
    if isinstance(entry_or_name, str):
        entry_or_name = {"like": entry_or_name}
    if not isinstance(entry_or_name, dict):
        raise ConfigError(f'{where}: device is a name of the catalogue, device = "H100", or a table, [device]')
    like = entry_or_name.get("like")
    if like is not None:
        _check_type(f"{where} [device]", "like", like, "str")
        name, entry_or_name = like, {**catalogue_entry("device", like, where), **{k: v for k, v in entry_or_name.items() if k != "like"}}
    device: Device = _build_record(Device, f"{where} [device]", {"name": name, **entry_or_name}, text)
    return device


def _build_link(where: str, table: Mapping[str, Any], text: str) -> NetworkLink:
    """Build a link from its figures, with those of `link` in the catalogue as defaults."""
    name = table.get("link")
    if name is not None:
        _check_type(where, "link", name, "str")
        table = {**catalogue_entry("link", name, where), **{k: v for k, v in table.items() if k != "link"}}
    link: NetworkLink = _build_record(NetworkLink, where, table, text)
    return link


def _parse_points(where: str, value: Any) -> tuple[tuple[float, float], ...]:
    """Return the points of a measured table: pairs of bytes and seconds."""
    rows = value if isinstance(value, list) else [value]
    for row in rows:
        numbers = row if isinstance(row, list) else []
        if len(numbers) != 2 or not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
            raise ConfigError(f"{where} [[table]]: points has {row!r}; it is a list of pairs of bytes and seconds, [[1024.0, 1e-5], ...]")
    return tuple((float(size), float(seconds)) for size, seconds in rows)


def dump(cluster: Cluster) -> str:
    """Return a cluster as TOML text, numbers in SI units."""
    if cluster.parts and cluster.between is not None:
        lines = [f"format = {FORMAT}", f"name = {_format_value(cluster.name)}", "", "[between]", *_field_lines(cluster.between)]
        for part in cluster.parts:
            lines += ["", "[[part]]", *_cluster_lines(part, "part.")]
        return "\n".join(lines) + "\n"
    return "\n".join([f"format = {FORMAT}", *_cluster_lines(cluster, "")]) + "\n"


def _cluster_lines(cluster: Cluster, prefix: str) -> list[str]:
    """Return the lines of a homogeneous cluster; `prefix` is put before the names of its tables."""
    lines = [f"name = {_format_value(cluster.name)}"]
    for key in (*NUMBERS, *WORDS[1:]):
        if getattr(cluster, key):
            lines.append(f"{key} = {_format_value(getattr(cluster, key))}")
    lines += ["", f"[{prefix}device]", *_field_lines(cluster.device)]
    for level in cluster.levels:
        lines += ["", f"[[{prefix}level]]", f"name = {_format_value(level.name)}", f"size = {level.size}", *_field_lines(level.link)]
    for speed in cluster.speeds:
        lines += ["", f"[[{prefix}speed]]", *_field_lines(speed)]
    for table in cluster.tables:
        lines += ["", f"[[{prefix}table]]", *_field_lines(table)]
    return lines


def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))


def _list_of_tables(where: str, data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    rows = data.get(key, [])
    if not isinstance(rows, list) or not all(isinstance(item, dict) for item in rows):
        raise ConfigError(f"{where}: {key} is a list of tables, [[{key}]]")
    return rows


def _check_type(where: str, key: str, value: Any, kind: str) -> None:
    kind = "rates" if kind.startswith("tuple[tuple[str") else kind
    wanted = {"int": "a whole number", "float": "a number", "str": "text", "rates": "a table of numbers, { float32 = 19.5e12 }"}
    ok = {
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, int | float) and not isinstance(value, bool),
        "str": isinstance(value, str),
        "rates": isinstance(value, dict),
    }.get(kind, True)
    if not ok:
        raise ConfigError(f"{where}: {key} = {value!r}; it is {wanted[kind]}")


def _build_record(kind: Any, where: str, table: Mapping[str, Any], text: str) -> Any:
    """Build a frozen dataclass from a TOML table; a table of numbers becomes pairs."""
    types = {f.name: str(f.type) for f in fields(kind)}
    check_keys(where, table, set(types), text)
    values: dict[str, Any] = {}
    for key, value in table.items():
        _check_type(where, key, value, types[key])
        if isinstance(value, dict):
            for inner, number in value.items():
                _check_type(where, f"{key}.{inner}", number, "float")
            value = tuple((inner, float(number)) for inner, number in value.items())
        values[key] = float(value) if types[key] == "float" else value
    try:
        return kind(**values)
    except TypeError as error:
        missing = [key for key in types if f"'{key}'" in str(error)]
        raise ConfigError(f"{where} has no {', '.join(missing) or str(error)}") from error


def _field_lines(item: Any) -> list[str]:
    return [f"{f.name} = {_format_value(getattr(item, f.name))}" for f in fields(item) if getattr(item, f.name) != f.default]


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        return quote_string(value)
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, tuple) and value and isinstance(value[0][0], str):
        return "{ " + ", ".join(f"{quote_key(name)} = {_format_value(number)}" for name, number in value) + " }"
    if isinstance(value, tuple):
        return "[" + ", ".join("[" + ", ".join(_format_value(float(n)) for n in point) + "]" for point in value) + "]"
    return str(value)
