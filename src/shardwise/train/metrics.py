"""`metrics.jsonl`: one JSON object a step, appended in whole lines, also after the disk was full for a while.

Each row ends with a digest of what stands before it. A start of the run reads all rows: lines that are damaged, torn, twice or gone are
told; those that are no rows go to `metrics.damaged.jsonl`, and the run goes on with the others. There is no fsync: the last rows may be
lost in a power failure, and are computed again after the last checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from shardwise.errors import RunError
from shardwise.plan.ir.metric_lines import Row, format_row, parse_row, read_metric_lines

METRICS_FILE, DAMAGED_FILE = "metrics.jsonl", "metrics.damaged.jsonl"
LONGEST_ROW = 1 << 16  # bytes


class MetricsFile:
    """Appends rows to `path`, after removing rows after `step` (they are computed again) and any partial line. `in_new_file`: replace the
    file, so that a process that still has the old one open cannot append to it. `checks_all`: read all rows, and mend the file.

    A row that cannot be written is retried with the next; `warn` is called once.

    Raises:
        RunError: the file cannot be written at the start.
    """

    def __init__(self, path: Path, step: int, warn: Callable[[str], None], in_new_file: bool = False, checks_all: bool = False) -> None:
        self.path, self._warn = path, warn
        self._pending = b""
        self._warned = False
        temporary = path.with_name(f".{path.name}.new")
        try:
            if in_new_file or checks_all or not path.exists() or last_step(path) != step:
                read = read_metric_lines(path.read_bytes() if path.exists() else b"")
                temporary.write_bytes(b"".join(line + b"\n" for row, line in read.rows if row["step"] <= step))
                if read.damaged:
                    with open(path.with_name(DAMAGED_FILE), "ab") as file:
                        file.writelines(line + b"\n" for _, line in read.damaged)
                if checks_all and (words := read.describe_damage(step)):
                    warn(f"{path}: {words}; training goes on without these rows")
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
        self._pending += format_row(row) + b"\n"
        try:
            while self._pending:
                written = os.write(self._file, self._pending)
                self._pending = self._pending[written:]
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._warn(f"{self.path} cannot be written: {error.strerror}; training goes on and rows are kept until there is room")


def last_step(path: Path) -> int:
    """Step of the last row, read from the end of the file; -1 if there is none or a partial line follows."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_ROW))
            *_, line, rest = (b"\n" + file.read()).split(b"\n")
    except OSError:
        return -1
    row = parse_row(line) if not rest else None
    return int(row["step"]) if row is not None else -1


def read_metrics(path: Path) -> list[Row]:
    """Read all rows that are whole, in the order of their steps."""
    return [row for row, _ in read_metric_lines(path.read_bytes()).rows]
