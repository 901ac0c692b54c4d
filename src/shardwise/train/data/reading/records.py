"""Readers of records: `read_jsonl`, `csv`, `read_parquet`, tar shards as webdataset writes them, and Hugging Face datasets.

Each record maps columns to values, and has its position in the file for messages. Not supported: infinite datasets.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from shardwise.errors import ConfigError, format_error
from shardwise.plan.ir.toml_text import parse_json
from shardwise.train.data.reading.files import find_files

EXTRA = "shardwise[data]"


class DataRecord(NamedTuple):
    """`where`: position, such as "train.jsonl, line 3". `values`: by column."""

    where: str
    values: Mapping[str, Any]


def read_jsonl(file: Path) -> Iterator[DataRecord]:
    """Read one JSON object a line, also from `.gz`; empty lines are skipped."""
    with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as lines:
        for number, line in _numbered_lines(lines, file):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                values = parse_json(line)
            except ValueError as error:
                raise ConfigError(f"{where}: no JSON: {error}; mend the line or take it out") from error
            if not isinstance(values, dict):
                raise ConfigError(f'{where}: {type(values).__name__} in place of an object; every line is one, as in {{"text": "..."}}')
            yield DataRecord(where, values)


def _numbered_lines(lines: Iterable[bytes], file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line). Raises ConfigError with the line at which a compressed file is damaged or ends too early."""
    number = 0
    try:
        for number, line in enumerate(lines, 1):
            yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{file}, line {number + 1} cannot be read: {format_error(error)}; write the file again") from error


def read_csv(file: Path) -> Iterator[DataRecord]:
    """Read one record a row, with the columns of the header row."""
    with open(file, encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)  # a quote that is never closed is an error
        try:
            if double := [name for name, count in Counter(reader.fieldnames or ()).items() if count > 1]:
                raise ConfigError(f"{file}, line 1: two columns are called {double[0]!r}; rename one")
            for row in reader:
                where = f"{file}, line {reader.line_num}"
                if None in row or None in row.values():
                    num_columns = len(reader.fieldnames or ())
                    raise ConfigError(f"{where}: not as many fields as the first row has columns ({num_columns}); mend the row")
                yield DataRecord(where, row)
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{file}, after line {reader.reader.line_num}: {error.object[error.start : error.end]!r} is not UTF-8; "
                "convert the file, or leave it out"
            ) from error
        except csv.Error as error:
            where = f"{file}, line {reader.reader.line_num}"
            raise ConfigError(f"{where} is no csv: {error}; mend the row, or write long texts as jsonl") from error


def read_parquet(file: Path) -> Iterator[DataRecord]:
    """Read one record a row."""
    library = import_optional("pyarrow.parquet", 'data.source = "parquet"')
    number = 0
    try:
        table = library.ParquetFile(file)
        batches: Iterator[Any] = table.iter_batches()
        while (batch := next(batches, None)) is not None:
            for values in batch.to_pylist():
                yield DataRecord(f"{file}, row {number}", values)
                number += 1
        num_rows = table.metadata.num_rows
    except Exception as error:  # pyarrow raises many kinds for damaged pages
        raise ConfigError(
            f"{file} is no parquet file that can be read, row {number} on: {format_error(error)}; write it again, or leave it out"
        ) from error
    _check_count(file, number, num_rows, "rows")


def _check_count(where: object, read: int, expected: int, unit: str) -> None:
    if read != expected:
        raise ConfigError(f"{where}: {read:,} {unit} were read, and it says that it has {expected:,}; write it again, or leave it out")


def read_text_file(file: Path) -> Iterator[DataRecord]:
    """Read a text file as one record."""
    try:
        yield DataRecord(str(file), {"text": file.read_text(encoding="utf-8")})
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: byte {error.start} is not UTF-8; convert the file, or leave it out") from error


class ShardMember(NamedTuple):
    """A file in a tar shard: its offset `start` and its `size` in bytes."""

    name: str
    start: int
    size: int


def list_members(file: Path) -> Iterator[tuple[str, list[ShardMember]]]:
    """Yield the samples of a tar shard, without reading contents: adjacent files that differ only after the first dot of the name.

    Raises:
        ConfigError: not a tar file, or a compressed one, whose files cannot be read in place.
    """
    try:
        with tarfile.open(file, "r:") as archive:
            size = file.stat().st_size
            key, group = "", list[ShardMember]()
            for entry in archive:
                if not entry.isfile():
                    continue
                path = PurePosixPath(entry.name)
                stem, dot, ending = path.name.partition(".")
                if not dot:
                    continue
                at = str(path.parent / stem)
                if at != key and group:
                    yield key, group
                    group = []
                key = at
                if not 0 <= entry.size <= size - entry.offset_data:
                    raise ConfigError(
                        f"{file}, byte {entry.offset_data}: {entry.name} has {entry.size:,} bytes by its header, and the file ends after "
                        f"{size:,}; write the shard again"
                    )
                group.append(ShardMember(ending.lower(), entry.offset_data, entry.size))
            _check_end_of_archive(file, archive.offset)
            if group:
                yield key, group
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise ConfigError(f"{file} is no tar file that can be read: {error}; unpack compressed shards, or write them again") from error


def _check_end_of_archive(file: Path, end: int) -> None:
    """Raise ConfigError if a tar file has no block of zeros at `end`, or more than zeros behind it: the library would ignore the rest."""
    with open(file, "rb") as data:
        data.seek(end)
        if data.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise ConfigError(f"{file}, byte {end}: the shard is damaged or cut off here; write it again")
        while block := data.read(1 << 20):
            if any(block):
                raise ConfigError(f"{file}, byte {end}: the shard ends here, and more than zeros follow; unpack joined shards")


def read_tar_shard(file: Path) -> Iterator[DataRecord]:
    """Read one record a sample of a tar shard; columns are file extensions: text of `txt`, the object of `json`, the integer of `cls`."""
    with open(file, "rb") as data:
        for key, group in list_members(file):
            values: dict[str, Any] = {}
            where = f"{file}, {key}"
            for member in group:
                data.seek(member.start)
                values[member.name] = decode_member(member.name, data.read(member.size), where)
            if isinstance(values.get("json"), dict):
                values = {**values["json"], **values}
            if "txt" in values:
                values.setdefault("text", values["txt"])
            yield DataRecord(where, values)


def decode_member(ending: str, content: bytes, where: str) -> Any:
    """Decode a file of a tar shard by its last extension; unknown ones stay bytes."""
    try:
        match ending.rpartition(".")[2]:
            case "txt" | "text":
                return content.decode()
            case "json":
                return parse_json(content)
            case "cls" | "cls2" | "index" | "id":
                return int(content)
    except ValueError as error:
        raise ConfigError(f"{where}.{ending} cannot be read: {error}; mend it or take it out") from error
    return content


def read_huggingface(name: str, subset: str, split: str, streaming: bool) -> Iterator[DataRecord]:
    """Read a Hugging Face dataset: a folder of `save_to_disk`, anything that `datasets.load_dataset` takes, or a name of the hub."""
    library = import_optional("datasets", 'data.source = "datasets"')
    library.disable_progress_bars()
    folder = Path(name)
    try:
        if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
            dataset = library.load_from_disk(name)
            if isinstance(dataset, dict):
                dataset = _split_of(dataset, name, split)
        else:
            dataset = library.load_dataset(name, subset or None, split=split, streaming=streaming)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"data.path: datasets cannot load {name}{f' ({subset})' if subset else ''}, split {split}: {format_error(error)}; give a "
            f"folder that "
            "save_to_disk wrote, a folder of its files, or a name of the hub where there is a network"
        ) from error
    yield from _number_records(dataset, f"{name}, {split}", None if streaming else len(dataset))


def _number_records(dataset: Iterable[Mapping[str, Any]], where: str, num_rows: int | None) -> Iterator[DataRecord]:
    """Yield the records of a dataset with their numbers. Raises ConfigError where it cannot be read, or has other than `num_rows` rows."""
    records, number = iter(dataset), 0
    while True:
        try:
            values = next(records)
        except StopIteration:
            break
        except Exception as error:
            raise ConfigError(f"{where}[{number}] cannot be read: {format_error(error)}; load or write the data set again") from error
        yield DataRecord(f"{where}[{number}]", values)
        number += 1
    if num_rows is not None:
        _check_count(where, number, num_rows, "rows")


def _split_of(splits: Mapping[str, Any], name: str, split: str) -> Any:
    if split not in splits:
        raise ConfigError(f'data.split = "{split}": {name} has {", ".join(splits)}; use one of these')
    return splits[split]


def import_optional(module: str, what: str) -> Any:
    """Import a module of an optional package. Raises ConfigError with the package to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{what} needs the package {module.partition('.')[0]} ({error}); install {EXTRA}") from error


class RecordFormat(NamedTuple):
    """The reader of a `data.source`, and the extensions of its files."""

    read: Callable[[Path], Iterator[DataRecord]]
    endings: tuple[str, ...]

    def accepts(self, file: Path) -> bool:
        return file.name.lower().endswith(self.endings)


FORMATS = {
    "text": RecordFormat(read_text_file, (".txt", ".md", ".rst", ".py")),
    "jsonl": RecordFormat(read_jsonl, (".jsonl", ".jsonl.gz", ".ndjson")),
    "csv": RecordFormat(read_csv, (".csv",)),
    "parquet": RecordFormat(read_parquet, (".parquet",)),
    "webdataset": RecordFormat(read_tar_shard, (".tar",)),
}


def files_in(source: str, paths: Sequence[str], key: str = "data.path") -> list[Path]:
    """Find the files of a source. Raises ConfigError if there are none."""
    form = FORMATS[source]
    return find_files(paths, form.accepts, key, f"{source} files ({', '.join('*' + end for end in form.endings)})")


def check_endings(source: str, paths: Sequence[str]) -> None:
    """Raise ConfigError if a file's extension belongs to another source: a csv read as text would be trained on with its commas."""
    for path in paths:
        other = next((name for name, form in FORMATS.items() if form.accepts(Path(path))), source)
        if other != source and source in FORMATS:
            what = "or name it by data.text to learn its bytes" if source == "text" else f"or name files of {source}"
            raise ConfigError(
                f'data.path: {path} is {other} by its ending, and data.source = "{source}"; use data.source = "{other}", {what}'
            )


def records_in(source: str, files: Sequence[Path]) -> Iterator[DataRecord]:
    """Read the records of files, one file after another.

    Raises:
        ConfigError: an unreadable file, or one of another format, with the line.
    """
    for file in files:
        try:
            yield from FORMATS[source].read(file)
        except (OSError, EOFError, MemoryError) as error:
            raise ConfigError(f"{file} cannot be read: {format_error(error)}; make it readable, or leave it out") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: byte {error.start} is not UTF-8; convert the file, or leave it out") from error
