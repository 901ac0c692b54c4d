"""Texts of configurations: YAML, JSON and TOML as flat dotted keys, and keys as YAML or JSON. Shell and Python: `shell`, `recipes`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from shardwise.errors import UsageError


def flatten_keys(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings; lists stay values.

    >>> flatten_keys({"a": {"b": 1}, "c": [2]})
    {'a.b': 1, 'c': [2]}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten_keys(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nest_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nest dotted keys.

    >>> nest_keys({"a.b": 1, "a.c": 2})
    {'a': {'b': 1, 'c': 2}}
    """
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        table = nested
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return nested


def parse_mapping(text: str, name: str) -> dict[str, Any]:
    """Parse a JSON, TOML or YAML text as flat keys. Raises UsageError where it is none of these."""
    suffix = name.rpartition(".")[2].lower()
    try:
        if suffix == "toml":
            return flatten_keys(tomllib.loads(text))
        if suffix == "json":
            return _flatten_object(json.loads(text), name)
        return _flatten_object(_load_yaml(text, name), name)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{name} cannot be read: {error}") from None


def _load_yaml(text: str, name: str) -> Any:
    try:
        yaml = import_module("yaml")  # here: an optional dependency
    except ImportError:
        raise UsageError(f"{name} is YAML, which needs pyyaml: pip install pyyaml, or pip install shardwise[hf]") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{name} cannot be read: {' '.join(str(error).split())}") from None


def _flatten_object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} has no keys; give a configuration of a framework")
    return flatten_keys({str(key): item for key, item in value.items()})


def write_yaml(values: Mapping[str, Any], head: str = "") -> str:
    """Write dotted keys as YAML of nested mappings.

    >>> print(write_yaml({"a.b": True, "a.c": "x", "d": None}), end="")
    a:
      b: true
      c: x
    d: null
    """
    lines = [f"# {line}" for line in head.splitlines()]
    _write_lines(nest_keys(values), "", lines)
    return "\n".join(lines) + "\n"


def _write_lines(table: Mapping[str, Any], indent: str, lines: list[str]) -> None:
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:")
            _write_lines(value, indent + "  ", lines)
        else:
            lines.append(f"{indent}{key}: {_yaml_scalar(value)}")


def _yaml_scalar(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | list):
        return json.dumps(value)
    text = str(value)
    is_plain = (
        bool(text) and all(c.isalnum() or c in "_-./" for c in text) and text.lower() not in ("no", "yes", "on", "off", "true", "null")
    )
    return text if is_plain and not text[0].isdigit() and text[0] not in "-." else json.dumps(text)


def write_json(values: Mapping[str, Any]) -> str:
    """Write dotted keys as JSON of nested objects."""
    return json.dumps(nest_keys(values), indent=2) + "\n"
