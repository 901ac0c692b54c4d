"""`metrics.jsonl`: one JSON object a step, appended in whole lines, also after the disk was full for a while.

There is no fsync: the last rows may be lost in a power failure, and are computed again after the last checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from shardwise.errors import RunError

METRICS_FILE = "metrics.jsonl"
LONGEST_ROW = 1 << 16  # bytes
Row = dict[str, float | int | None]


class MetricsFile:
    """Appends rows to `path`, after removing rows after `step` (they are computed again) and any partial line. `in_new_file`: replace the
    file, so that a process that still has the old one open cannot append to it.

    A row that cannot be written is retried with the next; `warn` is called once.

    Raises:
        RunError: the file cannot be written at the start.
    """

    def __init__(self, path: Path, step: int, warn: Callable[[str], None], in_new_file: bool = False) -> None:
        self.path, self._warn = path, warn
        self._pending = b""
        self._warned = False
        temporary = path.with_name(f".{path.name}.new")
        try:
            if in_new_file or not path.exists() or last_step(path) != step:
                temporary.write_bytes(_rows_until(path, step))
                os.replace(temporary, path)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror}; make room, or choose another run.folder") from error

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._file)

    def write(self, row: Row) -> None:
        """Append a row; entries that are None are left out."""
        self._pending += json.dumps({key: value for key, value in row.items() if value is not None}).encode() + b"\n"
        try:
            while self._pending:
                written = os.write(self._file, self._pending)
                self._pending = self._pending[written:]
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._warn(f"{self.path} cannot be written: {error.strerror}; training goes on and rows are kept until there is room")


def _rows_until(path: Path, step: int) -> bytes:
    """Return the complete lines of a metrics file up to a step."""
    if not path.exists():
        return b""
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] <= step:
            rows.append(line)
    return b"".join(line + b"\n" for line in rows)


def last_step(path: Path) -> int:
    """Step of the last row, read from the end of the file; -1 if there is none or a partial line follows."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_ROW))
            *_, row, rest = (b"\n" + file.read()).split(b"\n")
        return int(json.loads(row)["step"]) if not rest else -1
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def read_metrics(path: Path) -> list[Row]:
    """Read all rows; a truncated last line is left out."""
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
