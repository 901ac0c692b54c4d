"""What a validation prints: one `Row` a table and protocol. Errors are in percent of the measured value."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.errors import UsageError


@dataclass(frozen=True, slots=True)
class Row:
    """`protocol` says what was held out: in-sample, 5-fold, leave one cluster size out."""

    table: str
    protocol: str
    mean_abs_error_pct: float
    max_abs_error_pct: float
    n: int
    note: str = ""

    @classmethod
    def of(cls, table: str, protocol: str, errors: Sequence[float], note: str = "") -> Row:
        """From relative errors, predicted / measured - 1."""
        sizes = [100 * abs(e) for e in errors]
        return cls(table, protocol, round(sum(sizes) / len(sizes), 2), round(max(sizes), 2), len(sizes), note)

    def record(self) -> dict[str, object]:
        return asdict(self)


def lines(folder: Path, name: str) -> list[str]:
    """Lines of one table, comments left out. Raises `UsageError` saying where the data was looked for."""
    path = folder / name
    if not path.is_file():
        raise UsageError(f"{path} is missing: the measured tables are not part of this project; name their folder with --data DIR")
    return [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]


def table(folder: Path, name: str) -> list[dict[str, str]]:
    """Rows by column name."""
    return list(csv.DictReader(lines(folder, name)))
