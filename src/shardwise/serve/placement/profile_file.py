"""Writing a profile into the TOML text of its workflow, leaving all other lines unchanged."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.errors import ConfigError
from shardwise.plan.ir.toml_text import parse_document, quote_key, quote_string

Latency = Mapping[str, Mapping[int, float]]


def with_profile(
    text: str,
    variants: Mapping[tuple[str, str], tuple[Latency, float, float]],
    operators: Sequence[str],
    accuracy: Mapping[tuple[str, ...], float],
    where: str = "workflow",
) -> str:
    """Set the measured values in a workflow's text.

    `variants`: (seconds by worker and batch, bytes of an answer, peak live bytes) by operator and variant. `accuracy`: of every choice of
    variants of `operators`; if empty, the file's values stay.

    Raises:
        ConfigError: a file whose format cannot be edited.
    """
    wanted = parse_document(text, where)
    for (op, variant), (latency, size, memory) in variants.items():
        table = wanted["operator"][op]["variant"][variant]
        written = {w: {str(b): _round_seconds(s) for b, s in by_batch.items()} for w, by_batch in latency.items()}
        values = {"latency_s": written, "output_bytes": size, "memory_bytes": memory}
        table |= values
        lines = {"latency_s": _format_latency(written), "output_bytes": f"{size:g}", "memory_bytes": f"{memory:g}"}
        table.update(tomllib.loads("\n".join(f"{key} = {value}" for key, value in lines.items())))
        text = _set_keys(text, ("operator", op, "variant", variant), lines)
    if accuracy:
        rows = "".join(f"    [{', '.join(map(quote_string, choice))}, {value:.6g}],\n" for choice, value in accuracy.items())
        lines = {"operators": f"[{', '.join(map(quote_string, operators))}]", "table": f"[\n{rows}]"}
        wanted.setdefault("accuracy", {}).update(tomllib.loads("\n".join(f"{key} = {value}" for key, value in lines.items())))
        text = _set_keys(text, ("accuracy",), lines)
    if _parse_or_none(text) != wanted:
        raise ConfigError(f"{where} has tables that are not headed by lines of their own, [operator.NAME.variant.NAME]; write them so")
    return text


def _round_seconds(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _format_latency(by_worker: Mapping[str, Mapping[str, float]]) -> str:
    inner = (f"{quote_key(w)} = {{ {', '.join(f'{b} = {s!r}' for b, s in by_batch.items())} }}" for w, by_batch in by_worker.items())
    return f"{{ {', '.join(inner)} }}" if by_worker else "{}"


def _set_keys(text: str, path: tuple[str, ...], values: Mapping[str, str]) -> str:
    """Set keys of the table at `path`; a missing table is appended."""
    lines = text.split("\n")
    heads = [i for i, line in enumerate(lines) if re.match(r"\s*\[", line) and _table_path(line) is not None]
    begin = next((i for i in heads if _table_path(lines[i]) == path), None)
    if begin is None:
        head = f"[{'.'.join(map(quote_key, path))}]"
        return text.rstrip("\n") + "\n\n" + "\n".join([head, *(f"{key} = {value}" for key, value in values.items())]) + "\n"
    end = next((i for i in heads if i > begin), len(lines))
    body = lines[begin + 1 : end]
    for key in values:
        body = _remove_key(body, key)
    while body and not body[-1].strip():
        body.pop()
    new = [line for key, value in values.items() for line in f"{key} = {value}".split("\n")]
    return "\n".join([*lines[: begin + 1], *body, *new, "", *lines[end:]])


def _remove_key(body: list[str], key: str) -> list[str]:
    """Remove a key, whose value may span several lines, from the lines of a table."""
    first = next((i for i, line in enumerate(body) if re.match(rf"\s*{key}\s*=", line)), None)
    if first is None:
        return body
    for end in range(first + 1, len(body) + 1):
        if _parse_or_none("\n".join(body[first:end])) is not None:
            return body[:first] + body[end:]
    return body


def _table_path(line: str) -> tuple[str, ...] | None:
    """Return the path in a table header; None for any other line (a row of a list)."""
    table, path = _parse_or_none(line), []
    while isinstance(table, dict) and len(table) == 1:
        (key, table), *_ = table.items()
        path.append(key)
    return tuple(path) if path and table in ({}, [{}]) else None


def _parse_or_none(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
