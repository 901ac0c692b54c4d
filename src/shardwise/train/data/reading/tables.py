"""Readers of tables: columns of csv and parquet files as arrays of numbers, standardized on the CPU or on a GPU.

Both have the same interface: pandas and scikit-learn by default, or RAPIDS' cuDF and cuML.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shardwise.errors import ConfigError, format_error
from shardwise.train.data.reading.files import digest_of_all
from shardwise.train.data.reading.records import import_optional

Floats = npt.NDArray[np.float32]
_KEY = 'data.preprocess = "device" for tables'


class TableReader(Protocol):
    """Reads tables, and standardizes columns to mean 0 and variance 1."""

    def read(self, file: Path) -> dict[str, npt.NDArray[Any]]:
        """Read columns by name, of numbers or of text."""
        ...

    def standardize(self, learn_from: Floats, values: Floats) -> Floats:
        """Standardize `values` by mean and standard deviation of each column of `learn_from`."""
        ...


@dataclass(frozen=True)
class LibraryTableReader:
    """A table reader: `reader` is a module with the interface of pandas, `models` one with that of `sklearn.preprocessing`."""

    reader: Any
    models: Any

    def read(self, file: Path) -> dict[str, npt.NDArray[Any]]:
        try:
            frame = self.reader.read_parquet(file) if file.suffix == ".parquet" else self.reader.read_csv(file)
        except Exception as error:
            raise ConfigError(f"{file} is no table that can be read: {format_error(error)}; mend it, or leave it out") from error
        names = list(map(str, frame.columns))
        if len(set(names)) < len(names):
            raise ConfigError(f"{file}: two columns are called {max(names, key=names.count)!r}; rename one")
        return {name: frame[column].to_numpy() for name, column in zip(names, frame.columns, strict=True)}

    def standardize(self, learn_from: Floats, values: Floats) -> Floats:
        scaler = self.models.StandardScaler().fit(learn_from)
        return np.asarray(scaler.transform(values), np.float32)


def pandas_table_reader() -> LibraryTableReader:
    """Return a table reader by pandas and scikit-learn. Raises ConfigError if one is missing."""
    return LibraryTableReader(
        import_optional("pandas", 'data.source = "table"'), import_optional("sklearn.preprocessing", 'data.source = "table"')
    )


def cudf_table_reader() -> LibraryTableReader:
    """Return a table reader by cuDF and cuML. Untested: it was written without a GPU. Raises ConfigError if one is missing."""
    return LibraryTableReader(import_optional("cudf", _KEY), import_optional("cuml.preprocessing", _KEY))


def table_reader_of(where: str) -> TableReader:
    """Return the table reader for `data.preprocess`: "cpu" or "device"."""
    if where == "cpu":
        return pandas_table_reader()
    try:
        return cudf_table_reader()
    except ConfigError as error:
        raise ConfigError(f'{error}; or use data.preprocess = "cpu", which makes the same of tables') from error


def stack_columns(columns: dict[str, npt.NDArray[Any]], names: Sequence[str], file: Path) -> Floats:
    """Stack columns to an array [rows, names].

    Raises:
        ConfigError: a column that is missing, holds text, or has gaps, with the row.
    """
    stacked = []
    for name in names:
        if name not in columns:
            raise ConfigError(f'{file} has no column "{name}", which data.features or data.label_column names; it has {", ".join(columns)}')
        try:
            values = columns[name].astype(np.float32)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f'{file}: column "{name}" is no column of numbers: {format_error(error)}; leave it out of data.features'
            ) from error
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ConfigError(f'{file}: column "{name}" has no number in row {row + 1}; fill the gap, or leave the row out')
        stacked.append(values)
    return np.stack(stacked, 1)


FEATURES, LABELS = "features.npy", "labels.npy"


@dataclass(frozen=True)
class TableRows:
    """Description of written rows: `num_rows` of these feature columns."""

    num_rows: int
    features: tuple[str, ...]
    digest: str


def write_rows(files: Sequence[Path], features: Sequence[str], label: str, tables: TableReader, folder: Path) -> TableRows:
    """Read tables one after another and write their numbers to a folder; without `features` all numeric columns except the label.

    Raises:
        ConfigError: columns that are missing, of text or with gaps; no rows; a full disk.
    """
    chosen, parts = tuple(features), []
    for file in files:
        columns = tables.read(file)
        if not chosen:
            chosen = tuple(name for name, x in columns.items() if name != label and np.issubdtype(x.dtype, np.number))
        parts.append(stack_columns(columns, [*chosen, label], file))
    rows = np.concatenate(parts)
    if not len(rows) or not chosen:
        raise ConfigError(f"data.path: no rows or no columns of numbers in {', '.join(map(str, files))}; name tables that hold some")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, values in ((FEATURES, rows[:, :-1]), (LABELS, rows[:, -1])):
            np.save(folder / f".new-{name}", values, allow_pickle=False)
            os.replace(folder / f".new-{name}", folder / name)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; use a run.folder with room for it") from error
    return TableRows(len(rows), chosen, digest_of_rows(folder))


def digest_of_rows(folder: Path) -> str:
    """Return the SHA-256 of both arrays."""
    return digest_of_all([folder / FEATURES, folder / LABELS], [FEATURES, LABELS])


def read_rows(folder: Path, digest: str = "") -> tuple[Floats, Floats]:
    """Read (features [rows, columns], labels [rows]). Raises ConfigError if they are unreadable or do not match `digest`."""
    if digest and digest_of_rows(folder) != digest:
        raise ConfigError(f"the rows in {folder} are not what this run wrote; run the same command: they are made again")
    try:
        return np.load(folder / FEATURES, allow_pickle=False), np.load(folder / LABELS, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} cannot be read: {format_error(error)}; remove it to have the data prepared again") from error
