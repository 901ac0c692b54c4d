"""The training data on disk: files of the `[data]` section, prepared if necessary, and a description of them with a digest.

Text whose tokens are bytes is read in place, or joined into one file; other text is tokenized into the run folder, tables are converted to
arrays there, images are indexed. Batches are made of it in `train/data/sources`, `train/data/image_batches` and `train/data/table_batches`.
"""

from __future__ import annotations

import json
import math
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardwise.errors import ConfigError, RunError
from shardwise.plan.ir.toml_text import parse_json
from shardwise.train.config import DataSection
from shardwise.train.data.reading.documents import Columns, documents_of
from shardwise.train.data.reading.files import digest_of, find_files, walk_files
from shardwise.train.data.reading.images import FILES, INDEX, ImageSet, digest_of_images, write_index
from shardwise.train.data.reading.records import DataRecord, check_endings, files_in, read_huggingface, records_in
from shardwise.train.data.reading.tables import FEATURES, LABELS, digest_of_rows, table_reader_of, write_rows
from shardwise.train.data.reading.token_files import (
    ENDS,
    TOKENS,
    FileTokens,
    TokenFileSummary,
    Tokens,
    TokenStore,
    digest_of_tokens,
    open_tokens,
    write_documents,
)
from shardwise.train.data.reading.tokenizers import tokenizer_of

VOCABULARY = 256

PYTHON_SUFFIXES = (".py", ".txt", ".rst")
# Tests are more than half of the library if they are installed at all; packages differ between machines.
PYTHON_SKIPS = ("test", "tests", "site-packages", "dist-packages", "__pycache__")
PYTHON_LIMIT_BYTES = 30_000_000
PYTHON = "the sources and documentation of this Python"
SUMS = "text.sums"
PREPARED, DESCRIPTION = "data", "corpus.json"  # the folder of prepared data in a run folder, and the file that describes it


class PreparedFormat(NamedTuple):
    """Format of a folder of prepared data: the unit of its size, its files (the first is read throughout training), their digest."""

    unit: str
    files: tuple[str, ...]
    digest: Callable[[Path], str]


# By the field of `Corpus` that describes it.
PREPARED_FORMATS = {
    "written": PreparedFormat("tokens", (TOKENS, ENDS), digest_of_tokens),
    "images": PreparedFormat("images", (INDEX, FILES), digest_of_images),
    "rows": PreparedFormat("rows", (FEATURES, LABELS), digest_of_rows),
}


@dataclass(frozen=True, slots=True)
class Corpus:
    """`size` tokens in `path`; `digest` detects changes since a run began.

    `path` is a file whose bytes are the tokens, or a folder of token files, of an image index or of table rows, which one of `written`,
    `images` and `rows` describes, and `size` counts these.
    """

    path: str
    size: int
    digest: str
    origin: str
    written: dict[str, Any] | None = None
    images: dict[str, Any] | None = None
    rows: dict[str, Any] | None = None
    sums: str = ""  # file with the checksums of the parts of a file that is read in place

    @property
    def prepared_format(self) -> PreparedFormat | None:
        """Format of the folder `path`; None if `path` is a file whose bytes are the tokens."""
        return next((described for field, described in PREPARED_FORMATS.items() if getattr(self, field)), None)

    @property
    def file(self) -> Path:
        """The file that is read, or the first of them."""
        return Path(self.path, self.prepared_format.files[0] if self.prepared_format else "")

    @property
    def is_text(self) -> bool:
        """Return whether the data are tokens."""
        return not self.images and not self.rows

    @property
    def unit(self) -> str:
        """The unit that `size` counts."""
        return self.prepared_format.unit if self.prepared_format else "bytes"

    @property
    def image_set(self) -> ImageSet:
        """Description of the images."""
        assert self.images is not None
        return ImageSet(**self.images)

    @property
    def vocabulary(self) -> int:
        """Upper bound of the token ids."""
        return int(self.written["largest"]) + 1 if self.written else VOCABULARY

    def tokens(self) -> FileTokens:
        """Return the tokens [size], read from disk on access."""
        if self.written:
            return self.store().tokens
        try:
            tokens = FileTokens(self.path, self.size, sums=Path(self.sums) if self.sums else None)
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be read: {error.strerror}; run the same command: it is made again") from error
        if self.sums and tokens.file.digest != self.digest:
            raise ConfigError(f"{self.sums} is not what this run wrote; run the same command: it is made again")
        return tokens

    def store(self) -> TokenStore:
        """Open the token files. Raises ConfigError if a file is missing."""
        assert self.written is not None
        return open_tokens(Path(self.path), TokenFileSummary(**self.written))

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Return the current size and modification time of the files. Raises `RunError` if one is missing."""
        names = self.prepared_format.files if self.prepared_format else ("",)
        try:
            statuses = [os.stat(Path(self.path, name)) for name in names]
        except OSError as error:
            raise RunError(f"the text {error.filename} cannot be read any more: {error.strerror}; put it back and run again") from error
        return tuple((status.st_size, status.st_mtime_ns) for status in statuses)


def open_data(data: DataSection, model: str, folder: Path | str) -> Corpus:
    """Open the data of a configuration's `[data]`, prepared in `folder` unless read in place; `model` may bring the tokenizer.

    Raises:
        ConfigError: missing or unreadable data, or data of another format, with file, line and remedy; a missing package.
    """
    if not data.text:
        check_endings(data.source, data.paths)
    if data.uses_raw_bytes:
        return open_corpus(data.paths, folder, data.key)
    if data.source == "images":
        if not data.paths:
            raise ConfigError('data.path is missing: data.source = "images" needs a folder, as in path = "photos"')
        where = Path(folder, PREPARED)
        images = write_index(data.paths, data.validation_paths, where)
        return Corpus(str(where), images.num_train + images.num_validation, images.digest, ", ".join(data.paths), images=asdict(images))
    if data.source == "table":
        files = find_files(data.paths, lambda file: file.suffix in (".csv", ".parquet"), "data.path", "tables (*.csv, *.parquet)")
        where = Path(folder, PREPARED)
        rows = write_rows(files, data.features, data.label_column, table_reader_of(data.preprocess), where)
        return Corpus(str(where), rows.num_rows, rows.digest, ", ".join(data.paths), rows=asdict(rows))
    tokenizer = tokenizer_of(data.tokenizer, model)
    columns = Columns(data.format, data.text_column, data.prompt_column, data.completion_column, data.messages_column)
    records, origin = _read_records(data)
    where = Path(folder, PREPARED)
    written = write_documents(documents_of(records, columns, tokenizer), where, tokenizer.size)
    if not written.num_tokens:
        raise ConfigError(f"{data.key}: {origin} is empty; name data that holds text")
    return Corpus(str(where), written.num_tokens, written.digest, origin, asdict(written))


def _read_records(data: DataSection) -> tuple[Iterator[DataRecord], str]:
    """Return the records, and a name of their origin."""
    if data.source == "datasets":
        if len(data.paths) != 1:
            raise ConfigError('data.path: data.source = "datasets" takes one folder or name')
        return read_huggingface(data.paths[0], data.subset, data.split, data.streaming), data.paths[0]
    if not data.paths:
        if data.source != "text":
            raise ConfigError(f'data.path is missing: data.source = "{data.source}" needs files, as in path = "my_folder"')
        return records_in("text", list(_python_files())), PYTHON
    return records_in(data.source, files_in(data.source, data.paths, data.key)), ", ".join(data.paths)


def is_unchanged(corpus: Corpus) -> bool:
    """Return whether the data, prepared or read in place, still match their description."""
    if corpus.prepared_format:
        folder = Path(corpus.path)
        return (
            all((folder / name).is_file() for name in corpus.prepared_format.files)
            and corpus.prepared_format.digest(folder) == corpus.digest
        )
    file = Path(corpus.path)
    return (
        file.is_file() and _file_digest(file, file.stat().st_size, corpus.path, Path(corpus.sums) if corpus.sums else None) == corpus.digest
    )


def open_corpus(text: Sequence[str], folder: Path | str, key: str = "data.text") -> Corpus:
    """Open the text of files, patterns and folders (all files that look like text, in sorted order), by default Python's own.

    One file is read in place; several are joined into `folder/corpus.bin`. `key`: the configuration key of `text`, for messages.

    Raises:
        ConfigError: a path that does not exist or cannot be read, or has no text.
    """
    folder = Path(folder)
    if len(text) == 1 and Path(text[0]).is_file():
        path = Path(text[0]).resolve()
        return _describe_file(path, str(path), key, folder / SUMS)
    path = folder / "corpus.bin"
    if text:
        _join_files(find_files(text, _is_text, key, "text"), path, math.inf, key)
    else:
        _join_files(list(_python_files()), path, PYTHON_LIMIT_BYTES, key)
    return _describe_file(path, ", ".join(text) or PYTHON, key, folder / SUMS)


def save_description(corpus: Corpus, path: Path) -> None:
    path.write_text(json.dumps(asdict(corpus), indent=1) + "\n", encoding="utf-8")


def read_description(path: Path) -> Corpus | None:
    """Read the file that `save_description` wrote; None if it does not exist. Raises ConfigError if it is damaged."""
    if not path.exists():
        return None
    try:
        return Corpus(**parse_json(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is damaged; remove it to gather the text again") from error


def describes_corpus(corpus: Corpus, path: Path) -> bool:
    """Return whether `path`, written by `save_description`, describes the same data, or does not exist."""
    try:
        description = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return True
    except ValueError:
        return False
    return isinstance(description, dict) and (description.get("size"), description.get("digest")) == (corpus.size, corpus.digest)


def byte_frequency_loss(tokens: Tokens) -> float:
    """Loss in nats a byte of the best prediction from byte frequencies alone: their entropy.

    >>> round(byte_frequency_loss(np.frombuffer(b"abab", dtype=np.uint8)) / math.log(2), 6)
    1.0
    """
    counts = np.bincount(tokens, minlength=VOCABULARY)
    p = counts[counts > 0] / max(1, tokens.size)
    return float(-(p * np.log(p)).sum())


def _python_files() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in walk_files(root):
        relative = path.relative_to(root)
        if path.suffix in PYTHON_SUFFIXES and not any(part in PYTHON_SKIPS for part in relative.parts):
            yield path


def _is_text(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return b"\0" not in file.read(8192)
    except OSError:
        return True  # so that it is refused where it is read, and not left out


def _join_files(files: Sequence[Path], path: Path, limit: float, key: str) -> None:
    """Concatenate files, each ended by a line feed, skipping those that would exceed `limit` bytes."""
    temporary = path.with_name(f"{path.name}.new")
    size = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as out:
            for file in files:
                try:
                    data = file.read_bytes()
                except OSError as error:
                    raise ConfigError(f"{key}: {file} cannot be read: {error.strerror}; leave it out or make it readable") from error
                if size + len(data) > limit:
                    continue
                if not data.endswith(b"\n"):
                    data += b"\n"
                out.write(data)
                size += len(data)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"the text cannot be gathered in {path.parent}: {error.strerror}; use a run.folder with room for it") from error


def _describe_file(path: Path, origin: str, key: str, sums: Path) -> Corpus:
    try:
        size = path.stat().st_size
        sums.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}; make it readable or name another") from error
    digest = _file_digest(path, size, key, sums)
    if not size:
        raise ConfigError(f"{key}: {origin} is empty; name a file or a folder that holds text")
    return Corpus(str(path), size, digest, origin, sums=str(sums))


def _file_digest(path: Path, size: int, key: str, sums: Path | None) -> str:
    try:
        return digest_of(path, size, sums)
    except OSError as error:
        raise ConfigError(f"{key}: {error.filename or path}: {error.strerror}; make it readable, or name another") from error
