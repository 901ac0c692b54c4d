"""Lines of `metrics.jsonl`: a JSON object a step, whose last key is a digest of what stands before it, so that damage shows."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardwise.plan.ir.toml_text import parse_json

DIGEST = "digest"  # the last key of a row
Row = dict[str, float | int | None]


def format_row(row: Row) -> bytes:
    """Format a row with its digest, without entries that are None."""
    text = json.dumps({key: value for key, value in row.items() if value is not None})
    return f'{text[:-1]}, "{DIGEST}": "{zlib.crc32(text.encode()):08x}"}}'.encode()


class MetricLines(NamedTuple):
    """Rows in the order of their steps with their lines; (line number, line) of those that are no rows."""

    rows: list[tuple[dict[str, Any], bytes]]
    damaged: list[tuple[int, bytes]]

    def describe_damage(self, last: int) -> str:
        """Describe lines that are damaged, and steps up to `last` that have no row."""
        words = []
        if self.damaged:
            words.append(f"line {_format_ranges([number for number, _ in self.damaged])} is damaged")
        steps = {row["step"] for row, _ in self.rows}
        if missing := [step for step in range(1, last + 1) if step not in steps]:
            words.append(f"the row of step {_format_ranges(missing)} is gone")
        return " and ".join(words)


def _format_ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers.

    >>> _format_ranges([1, 2, 3, 7])
    '1 to 3, 7'
    """
    first = [n for i, n in enumerate(numbers) if not i or numbers[i - 1] != n - 1]
    last = [n for i, n in enumerate(numbers) if i + 1 == len(numbers) or numbers[i + 1] != n + 1]
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in zip(first, last, strict=True))


def read_metric_lines(data: bytes) -> MetricLines:
    """Parse the lines of a metrics file. A torn last line is the end of a process that was killed, and no damage."""
    rows: dict[int, tuple[dict[str, Any], bytes]] = {}
    damaged = []
    *lines, last = data.split(b"\n")
    if parse_row(last) is not None:
        lines.append(last)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = parse_row(line)
        if row is None or row["step"] in rows:
            damaged.append((number, line))
        else:
            rows[row["step"]] = row, line
    return MetricLines([rows[step] for step in sorted(rows)], damaged)


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{8}", value) is not None


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Parse a row; None if it is none, or its digest is another. Rows of older versions have none."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] < 1:
        return None
    digest = row.pop(DIGEST, None)
    is_intact = line == format_row(row) if digest is not None else not any(_is_digest(value) for value in row.values())  # under its key
    return row if is_intact else None
