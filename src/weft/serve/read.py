"""Workflows and workers from TOML. In: text. Out: `Workflow`, `Machines`. Unknown keys are refused with the nearest known one."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, UsageError, nearest
from weft.serve.workflow import Accuracy, Batches, Link, Machines, Operator, Source, Variant, Worker, Workflow


def read_workflow(path: str | Path) -> tuple[Workflow, Machines | None, float]:
    """(workflow, its own workers if it names any, its rate, 0 where it says none).

    Raises:
        UsageError: no such file. ConfigError: not TOML, an unknown key, a value of another kind.
    """
    data = _load(path)
    where = str(path)
    _only(where, data, {"name", "rate", "source", "operator", "accuracy", "worker", "link"})
    sources = tuple(
        Source(name, _number(where, row, "output_bytes"), _number(where, row, "share", 1.0), int(_number(where, row, "tier")))
        for name, row in _tables(where, data, "source", {"output_bytes", "share", "tier"}).items()
    )
    rows = _tables(where, data, "operator", {"inputs", "variant"})
    operators = tuple(_operator(where, name, row) for name, row in rows.items())
    workflow = Workflow(str(data.get("name", Path(path).stem)), sources, operators, _accuracy(where, data.get("accuracy", {})))
    machines = _machines(where, data) if "worker" in data else None
    return workflow, machines, _number(where, data, "rate")


def read_machines(path: str | Path) -> Machines:
    """Workers and links of a file of their own. Raises as `read_workflow`."""
    data = _load(path)
    _only(str(path), data, {"name", "worker", "link"})
    return _machines(str(path), data)


def _machines(where: str, data: Mapping[str, Any]) -> Machines:
    rows = _tables(where, data, "worker", {"tier", "price_per_hour", "count", "spot"})
    workers = tuple(
        Worker(
            name, int(_number(where, row, "tier")), _number(where, row, "price_per_hour"), int(_number(where, row, "count", 1)),
            bool(row.get("spot", False)),
        )
        for name, row in rows.items()
    )  # fmt: skip
    links = []
    given = data.get("link", [])
    if not isinstance(given, list):
        raise ConfigError(f"{where}: link is a list of tables, [[link]]")
    for row in given:
        _only(f"{where} [[link]]", row, {"from", "to", "price_per_gib", "latency_s", "bandwidth_bytes_per_s"})
        if "from" not in row or "to" not in row:
            raise ConfigError(f"{where} [[link]] needs from and to: a tier, a worker or a source")
        links.append(
            Link(
                str(row["from"]), str(row["to"]), _number(where, row, "price_per_gib"), _number(where, row, "latency_s"),
                _number(where, row, "bandwidth_bytes_per_s", float("inf")),
            )
        )  # fmt: skip
    known = {*(w.name for w in workers), *(str(w.tier) for w in workers), *_names(data, "source"), "0"}
    for link in links:
        for end in (link.start, link.end):
            if end not in known:
                raise ConfigError(f"{where} [[link]]: {end} is no tier, worker or source{nearest(end, known)}")
    return Machines(workers, tuple(links))


def _operator(where: str, name: str, row: Mapping[str, Any]) -> Operator:
    inputs = row.get("inputs", {})
    if isinstance(inputs, list):
        inputs = dict.fromkeys(inputs, 1.0)
    if not isinstance(inputs, dict) or not all(isinstance(key, str) for key in inputs):
        raise ConfigError(f"{where}: inputs of {name} are a list of names, or {{ Detector = 3.5 }}, requests of each of the input's")
    known = {"latency_s", "output_bytes", "accuracy_factor"}
    variants = tuple(
        Variant(
            key, tuple((worker, _batches(f"{where}: {name}.{key}", value)) for worker, value in of.get("latency_s", {}).items()),
            _number(where, of, "output_bytes"), _number(where, of, "accuracy_factor", 1.0),
        )
        for key, of in _tables(f"{where}: operator {name}", row, "variant", known).items()
    )  # fmt: skip
    return Operator(name, tuple((key, float(value)) for key, value in inputs.items()), variants)


def _batches(where: str, value: Any) -> Batches:
    """Seconds of one request, or a table of seconds by requests together."""
    given = {"1": value} if isinstance(value, int | float) and not isinstance(value, bool) else value
    if not isinstance(given, dict) or not all(key.isdecimal() and int(key) > 0 for key in given):
        raise ConfigError(f"{where}: latency_s = {value!r}; it is seconds, or a table of seconds by batch, {{ 1 = 0.01, 8 = 0.05 }}")
    found = tuple(sorted((int(key), float(seconds)) for key, seconds in given.items()))
    if not found or not all(0 < seconds < float("inf") for _, seconds in found):
        raise ConfigError(f"{where}: latency_s = {value!r}; seconds are above zero")
    return found


def _accuracy(where: str, row: Mapping[str, Any]) -> Accuracy:
    _only(f"{where} [accuracy]", row, {"operators", "table", "base"})
    operators, table = tuple(row.get("operators", ())), row.get("table", [])
    for line in table:
        if not isinstance(line, list) or len(line) != len(operators) + 1 or not isinstance(line[-1], int | float):
            names = ", ".join(operators)
            raise ConfigError(f"{where} [accuracy]: a row of the table has a variant for each of {names}, then the accuracy: {line}")
    return Accuracy(operators, tuple((tuple(map(str, line[:-1])), float(line[-1])) for line in table), _number(where, row, "base", 100.0))


def _load(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _names(data: Mapping[str, Any], key: str) -> tuple[str, ...]:
    return tuple(data.get(key, {}))


def _tables(where: str, data: Mapping[str, Any], key: str, known: set[str]) -> dict[str, dict[str, Any]]:
    found = data.get(key, {})
    if not isinstance(found, dict) or not all(isinstance(row, dict) for row in found.values()):
        raise ConfigError(f"{where}: {key} is a table of tables, [{key}.NAME]")
    for name, row in found.items():
        _only(f"{where} [{key}.{name}]", row, known)
    return found


def _only(where: str, data: Mapping[str, Any], known: set[str]) -> None:
    for key in data:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key}{nearest(key, known)}; known: {', '.join(sorted(known))}")


def _number(where: str, row: Mapping[str, Any], key: str, default: float = 0.0) -> float:
    value = row.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"{where}: {key} = {value!r}; it is a number, zero or more")
    return float(value)
