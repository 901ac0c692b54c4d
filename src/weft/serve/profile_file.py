"""Writing a profile into the TOML text of its workflow, leaving all other lines unchanged."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from weft.cluster import toml
from weft.errors import ConfigError
from weft.plan.toml_text import quoted, quoted_key

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
    wanted = toml.parse(text, where)
    for (op, variant), (latency, size, memory) in variants.items():
        table = wanted["operator"][op]["variant"][variant]
        written = {w: {str(b): _rounded(s) for b, s in by_batch.items()} for w, by_batch in latency.items()}
        values = {"latency_s": written, "output_bytes": size, "memory_bytes": memory}
        table |= values
        lines = {"latency_s": _latency(written), "output_bytes": f"{size:g}", "memory_bytes": f"{memory:g}"}
        table.update(tomllib.loads("\n".join(f"{key} = {value}" for key, value in lines.items())))
        text = _edited(text, ("operator", op, "variant", variant), lines)
    if accuracy:
        rows = "".join(f"    [{', '.join(map(quoted, choice))}, {value:.6g}],\n" for choice, value in accuracy.items())
        lines = {"operators": f"[{', '.join(map(quoted, operators))}]", "table": f"[\n{rows}]"}
        wanted.setdefault("accuracy", {}).update(tomllib.loads("\n".join(f"{key} = {value}" for key, value in lines.items())))
        text = _edited(text, ("accuracy",), lines)
    if _parses(text) != wanted:
        raise ConfigError(f"{where} has tables that are not headed by lines of their own, [operator.NAME.variant.NAME]; write them so")
    return text


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _latency(by_worker: Mapping[str, Mapping[str, float]]) -> str:
    inner = (f"{quoted_key(w)} = {{ {', '.join(f'{b} = {s!r}' for b, s in by_batch.items())} }}" for w, by_batch in by_worker.items())
    return f"{{ {', '.join(inner)} }}" if by_worker else "{}"


def _edited(text: str, path: tuple[str, ...], values: Mapping[str, str]) -> str:
    """Set keys of the table at `path`; a missing table is appended."""
    lines = text.split("\n")
    heads = [i for i, line in enumerate(lines) if re.match(r"\s*\[", line) and _head(line) is not None]
    begin = next((i for i in heads if _head(lines[i]) == path), None)
    if begin is None:
        head = f"[{'.'.join(map(quoted_key, path))}]"
        return text.rstrip("\n") + "\n\n" + "\n".join([head, *(f"{key} = {value}" for key, value in values.items())]) + "\n"
    end = next((i for i in heads if i > begin), len(lines))
    body = lines[begin + 1 : end]
    for key in values:
        body = _without(body, key)
    while body and not body[-1].strip():
        body.pop()
    new = [line for key, value in values.items() for line in f"{key} = {value}".split("\n")]
    return "\n".join([*lines[: begin + 1], *body, *new, "", *lines[end:]])


def _without(body: list[str], key: str) -> list[str]:
    """Remove a key, whose value may span several lines, from the lines of a table."""
    first = next((i for i, line in enumerate(body) if re.match(rf"\s*{key}\s*=", line)), None)
    if first is None:
        return body
    for end in range(first + 1, len(body) + 1):
        if _parses("\n".join(body[first:end])) is not None:
            return body[:first] + body[end:]
    return body


def _head(line: str) -> tuple[str, ...] | None:
    """Return the path in a table header; None for any other line (a row of a list)."""
    table, path = _parses(line), []
    while isinstance(table, dict) and len(table) == 1:
        (key, table), *_ = table.items()
        path.append(key)
    return tuple(path) if path and table in ({}, [{}]) else None


def _parses(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
