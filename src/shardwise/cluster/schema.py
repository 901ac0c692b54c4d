"""JSON Schema (2020-12) of cluster files, for editors, generated from the dataclasses that files become."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from shardwise.cluster.catalogue import FORMAT, NUMBERS, WORDS, catalogue_names
from shardwise.cluster.cluster import PRECISIONS, ClusterLevel, Device, MeasuredTable, NetworkLink, Speed

_BELOW_ZERO = {"exclusiveMaximum": 0}
_NUMBER = {"type": "number", "not": _BELOW_ZERO}
_TYPES: dict[str, dict[str, Any]] = {
    "str": {"type": "string"},
    "int": {"type": "integer", "not": _BELOW_ZERO},
    "float": _NUMBER,
    "tuple[tuple[str, float], ...]": {"type": "object", "additionalProperties": _NUMBER},
    "tuple[tuple[float, float], ...]": {"type": "array", "minItems": 1, "items": {"type": "array", "items": _NUMBER}},
}


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
