"""Parsing of workflows and workers from TOML; unknown keys are refused with the nearest known one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, UsageError, did_you_mean
from shardwise.plan.ir.toml_text import check_keys, parse_document, read_user_file
from shardwise.serve.placement.workflow import (
    Accuracy,
    Batches,
    Machines,
    Measure,
    OperatorVariant,
    RequestSource,
    TierLink,
    WorkerGroup,
    Workflow,
    WorkflowOperator,
)

Table = Mapping[str, Any]
_WORKER_KEYS = {"tier", "price_per_hour", "count", "spot", "device", "threads"}
_VARIANT_KEYS = {"latency_s", "output_bytes", "accuracy_factor", "memory_bytes", "model", "call"}


def read_workflow(path: str | Path) -> tuple[Workflow, Machines | None, float]:
    """Read (workflow, its workers if it defines any, its rate or 0).

    Raises:
        UsageError: no such file. ConfigError: not TOML, an unknown key, a value of another type.
    """
    where = str(path)
    data = parse_document(read_user_file(path, "workflow"), where)
    check_keys(where, data, {"name", "rate", "source", "operator", "accuracy", "measure", "worker", "link"})
    sources = tuple(
        RequestSource(name, _parse_number(at, row, "output_bytes"), _parse_number(at, row, "share", 1.0), _parse_integer(at, row, "tier"))
        for name, at, row in _tables_at(where, data, "source", {"output_bytes", "share", "tier"})
    )
    operators = tuple(_parse_operator(name, at, row) for name, at, row in _tables_at(where, data, "operator", {"inputs", "variant"}))
    accuracy = _parse_accuracy(f"{where} [accuracy]", _table_at(where, data, "accuracy"))
    row = _table_at(where, data, "measure")
    check_keys(f"{where} [measure]", row, {"labelled", "score"})
    measure = Measure(*(_parse_text(f"{where} [measure]", row, key, "") for key in ("labelled", "score")))
    name, folder = _parse_text(where, data, "name", Path(path).stem), str(Path(path).resolve().parent)
    workflow = Workflow(name, sources, operators, accuracy, measure, folder)
    machines = _parse_machines(where, data) if "worker" in data else None
    if machines is not None:
        _check_workers(where, workflow, machines)
    return workflow, machines, _parse_number(where, data, "rate")


def read_workflow_and_machines(path: Path, cluster: Path | None = None) -> tuple[Workflow, Machines, float]:
    """Read (workflow, machines, requests/s); the machines of the file `cluster`, if it is given.

    Raises:
        UsageError: there are no machines.
    """
    workflow, machines, rate = read_workflow(path)
    machines = read_machines(cluster) if cluster is not None else machines
    if machines is None:
        raise UsageError(f"{path} has no [worker.NAME] tables; give --cluster FILE")
    return workflow, machines, rate


def read_machines(path: str | Path) -> Machines:
    """Read workers and links from a separate file. Raises as `read_workflow`."""
    data = parse_document(read_user_file(path, "file of workers"), str(path))
    check_keys(str(path), data, {"name", "worker", "link"})
    return _parse_machines(str(path), data)


def _check_workers(where: str, workflow: Workflow, machines: Machines) -> None:
    """Raise ConfigError if a variant has a latency of a worker that the same file does not define."""
    names = [w.name for w in machines.workers]
    for op in workflow.operators:
        for variant in op.variants:
            for name, _ in variant.latency_s:
                if name not in names:
                    mistake = f"{where}: {op.name}.{variant.name} has a latency_s of {name}, which is no worker"
                    raise ConfigError(mistake + did_you_mean(name, names))


def _parse_machines(where: str, data: Table) -> Machines:
    workers = tuple(_parse_worker(name, at, row) for name, at, row in _tables_at(where, data, "worker", _WORKER_KEYS))
    rows, at = data.get("link", []), f"{where} [[link]]"
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{where}: link is a list of tables, [[link]]")
    places = {*(w.name for w in workers), *(str(w.tier) for w in workers), *_table_at(where, data, "source"), "0"}
    links = []
    for row in rows:
        check_keys(at, row, {"from", "to", "price_per_gib", "latency_s", "bandwidth_bytes_per_s"})
        ends = [row.get(end) for end in ("from", "to")]
        for end in ends:
            if isinstance(end, bool) or not isinstance(end, str | int) or str(end) not in places:
                raise ConfigError(
                    f"{at}: {end!r} is no tier, worker or source{did_you_mean(str(end), places)}; it goes from one to another"
                )
        bandwidth = _parse_number(at, row, "bandwidth_bytes_per_s", float("inf"))
        links.append(
            TierLink(str(ends[0]), str(ends[1]), _parse_number(at, row, "price_per_gib"), _parse_number(at, row, "latency_s"), bandwidth)
        )
    return Machines(workers, tuple(links))


def _parse_worker(name: str, where: str, row: Table) -> WorkerGroup:
    tier, count, threads = (_parse_integer(where, row, key, default) for key, default in (("tier", 0), ("count", 1), ("threads", 1)))
    price, spot, device = (
        _parse_number(where, row, "price_per_hour"),
        _parse_flag(where, row, "spot"),
        _parse_text(where, row, "device", "here"),
    )
    return WorkerGroup(name, tier, price, count, spot, device, max(1, threads))


def _parse_operator(name: str, where: str, row: Table) -> WorkflowOperator:
    inputs = row.get("inputs", {})
    if isinstance(inputs, list) and all(isinstance(name, str) for name in inputs):
        inputs = dict.fromkeys(inputs, 1.0)
    if not isinstance(inputs, dict):
        raise ConfigError(f"{where}: inputs = {inputs!r}; it is a list of names, or {{ Detector = 3.5 }}, requests for each of the input's")
    variants = []
    for variant, at, of in _tables_at(where, row, "variant", _VARIANT_KEYS):
        latency = tuple((worker, _parse_batches(at, value)) for worker, value in _table_at(at, of, "latency_s").items())
        output_bytes, factor = _parse_number(at, of, "output_bytes"), _parse_number(at, of, "accuracy_factor", 1.0)
        model, call = (_parse_text(at, of, key, "") for key in ("model", "call"))
        if model and call:
            raise ConfigError(f"{at} has a model and a call; it is computed by one of them")
        variants.append(OperatorVariant(variant, latency, output_bytes, factor, model, call))
    return WorkflowOperator(name, tuple((key, _parse_number(where, inputs, key)) for key in inputs), tuple(variants))


def _parse_batches(where: str, value: Any) -> Batches:
    """Parse seconds of one request, or a table of seconds by batch size."""
    sizes = value if isinstance(value, dict) else {"1": value}
    if not sizes or not all(key.isdecimal() and int(key) > 0 for key in sizes):
        raise ConfigError(f"{where}: latency_s = {value!r}; it is seconds, or a table of seconds by batch, {{ 1 = 0.01, 8 = 0.05 }}")
    if not all(_is_number(seconds) and 0 < seconds < float("inf") for seconds in sizes.values()):
        raise ConfigError(f"{where}: latency_s = {value!r}; seconds are above zero")
    return tuple(sorted((int(key), float(seconds)) for key, seconds in sizes.items()))


def _parse_accuracy(where: str, row: Table) -> Accuracy:
    check_keys(where, row, {"operators", "table", "base"})
    operators, table = row.get("operators", []), row.get("table", [])
    if not isinstance(operators, list) or not isinstance(table, list) or not all(isinstance(name, str) for name in operators):
        raise ConfigError(f'{where}: operators is a list of names and table a list of rows, ["small", "large", 71.5]')
    rows = []
    for line in table:
        if not isinstance(line, list) or len(line) != len(operators) + 1 or not all(isinstance(name, str) for name in line[:-1]):
            raise ConfigError(f"{where}: a row of the table has a variant of each of {', '.join(operators)}, then the accuracy: {line!r}")
        rows.append((tuple(line[:-1]), _parse_number(where, {"accuracy": line[-1]}, "accuracy")))
    return Accuracy(tuple(operators), tuple(rows), _parse_number(where, row, "base", 100.0))


def _table_at(where: str, data: Table, key: str) -> dict[str, Any]:
    table = data.get(key, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: {key} = {table!r}; it is a table, [{key}]")
    return table


def _tables_at(where: str, data: Table, key: str, keys: set[str]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (name, position for messages, table) of each table below `key`."""
    tables = [(name, f"{where} [{key}.{name}]", row) for name, row in _table_at(where, data, key).items()]
    for _, at, row in tables:
        if not isinstance(row, dict):
            raise ConfigError(f"{at} is {row!r}; it is a table")
        check_keys(at, row, keys)
    return tables


def _parse_number(where: str, row: Table, key: str, default: float = 0.0) -> float:
    value = row.get(key, default)
    if not _is_number(value) or not (value == default or 0 <= value < float("inf")):
        raise ConfigError(f"{where}: {key} = {value!r}; it is a number, zero or more, and finite")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _parse_integer(where: str, row: Table, key: str, default: int = 0) -> int:
    value = row.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{where}: {key} = {value!r}; it is a whole number, zero or more")
    return value


def _parse_flag(where: str, row: Table, key: str) -> bool:
    value = row.get(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: {key} = {value!r}; it is true or false")
    return value


def _parse_text(where: str, row: Table, key: str, default: str) -> str:
    value = row.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {key} = {value!r}; it is text")
    return value
