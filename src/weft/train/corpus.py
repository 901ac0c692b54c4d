"""Text as bytes on disk. In: files or folders, or nothing (Python's own sources). Out: one memory-mapped array of byte tokens.

Not modelled: other tokenizers, compressed files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sysconfig
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft.errors import ConfigError, RunError

Tokens = npt.NDArray[np.uint8]
VOCABULARY = 256
PYTHON_SUFFIXES = (".py", ".txt", ".rst")
# Tests are more than half of the library where they are installed at all; packages differ from machine to machine.
PYTHON_SKIPS = ("test", "tests", "site-packages", "dist-packages", "__pycache__")
PYTHON_LIMIT_BYTES = 30_000_000
BLOCK_BYTES = 16 << 20
_ALL_BYTES = 16 << 30  # of a longer text every so many-th block is read, this much in all, the first and the last among them
_READERS = 4


class FileTokens:
    """Byte tokens [size] of a file, of which slices are read when they are asked for.

    Not mapped into memory: of a file that is cut off meanwhile a mapping has pages that kill the process when they are touched.
    """

    def __init__(self, path: str, size: int) -> None:
        self.size, self._path, self._file = size, path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def __getitem__(self, part: slice) -> Tokens:
        """Raises RunError where the file has become too short."""
        start, stop, _ = part.indices(self.size)
        found = os.pread(self._file, stop - start, start)
        if len(found) < stop - start:
            raise RunError(
                f"the text {self._path} had {self.size:,} bytes and ends before byte {stop:,} now: it was cut off while it was trained on; "
                "restore it and run the same command, or train on a copy that nobody writes to"
            )
        return np.frombuffer(found, np.uint8)


@dataclass(frozen=True, slots=True)
class Corpus:
    """`size` byte tokens in the file `path`. `digest` tells whether they are the same as when a run began: SHA-256 of the size and of the
    digests of blocks."""

    path: str
    size: int
    digest: str
    origin: str

    def tokens(self) -> FileTokens:
        """All tokens [size], read from the disk as they are used."""
        return FileTokens(self.path, self.size)

    def stamp(self) -> tuple[int, int]:
        """Size and time of change of the file as it lies there now. Raises `RunError` where it is gone."""
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise RunError(
                f"the text {self.path} cannot be read any more: {error.strerror}; put it back and run again"
            ) from error
        return found.st_size, found.st_mtime_ns


def open_corpus(text: Sequence[str], folder: Path | str) -> Corpus:
    """The text of files and folders (all files that look like text, in sorted order), by default Python's own.

    One file is used where it lies; several are joined into `folder/corpus.bin`.

    Raises:
        ConfigError: a path that does not exist or cannot be read, or no text in it.
    """
    folder = Path(folder)
    if len(text) == 1 and Path(text[0]).is_file():
        path = Path(text[0]).resolve()
        return _described(path, str(path))
    files = list(_python_files() if not text else _files_of(text))
    origin = "the sources and documentation of this Python" if not text else ", ".join(text)
    if not files:
        raise ConfigError(f"data.text: no text in {origin}; name a file or a folder that holds some")
    path = folder / "corpus.bin"
    limit = PYTHON_LIMIT_BYTES if not text else math.inf
    _join(files, path, limit)
    return _described(path, origin)


def save_description(corpus: Corpus, path: Path) -> None:
    path.write_text(json.dumps(asdict(corpus), indent=1) + "\n", encoding="utf-8")


def describes_corpus(corpus: Corpus, path: Path) -> bool:
    """Whether `path`, written by `save_description`, describes the same tokens; also where it does not exist."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return True
    except ValueError:
        return False
    return isinstance(before, dict) and (before.get("size"), before.get("digest")) == (corpus.size, corpus.digest)


def byte_frequency_loss(tokens: Tokens) -> float:
    """Nats a byte of the best prediction that knows only how often each byte occurs: their entropy.

    >>> round(byte_frequency_loss(np.frombuffer(b"abab", dtype=np.uint8)) / math.log(2), 6)
    1.0
    """
    counts = np.bincount(tokens, minlength=VOCABULARY)
    p = counts[counts > 0] / max(1, tokens.size)
    return float(-(p * np.log(p)).sum())


def _python_files() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in _walk(root):
        relative = path.relative_to(root)
        if path.suffix in PYTHON_SUFFIXES and not any(part in PYTHON_SKIPS for part in relative.parts):
            yield path


def _files_of(text: Sequence[str]) -> Iterator[Path]:
    for name in text:
        path = Path(name)
        if path.is_file():
            yield path
        elif path.is_dir():
            yield from (file for file in _walk(path) if _is_text(file))
        else:
            raise ConfigError(f"data.text: {name} does not exist; name a file or a folder of text")


def _walk(root: Path) -> Iterator[Path]:
    """Regular files below a folder, sorted, without hidden ones and without following links."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def _is_text(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return b"\0" not in file.read(8192)
    except OSError:
        return False


def _join(files: Sequence[Path], path: Path, limit: float) -> None:
    """One file after the other, each ended by a line feed, whole files only up to `limit` bytes."""
    temporary = path.with_name(f"{path.name}.new")
    size = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as out:
            for file in files:
                try:
                    data = file.read_bytes()
                except OSError as error:
                    raise ConfigError(f"data.text: {file} cannot be read: {error.strerror}; leave it out or make it readable") from error
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


def _blocks(size: int) -> list[int]:
    """Where blocks begin that the digest is of.

    >>> _blocks(2 * BLOCK_BYTES + 1) == [0, BLOCK_BYTES, 2 * BLOCK_BYTES]
    True
    """
    count = -(-size // BLOCK_BYTES)
    step = max(1, -(-size // _ALL_BYTES))
    return [i * BLOCK_BYTES for i in sorted({*range(0, count, step), *range(max(0, count - 1), count)})]


def _block_digest(file: int, start: int) -> bytes:
    return hashlib.sha256(os.pread(file, BLOCK_BYTES, start)).digest()


def _described(path: Path, origin: str) -> Corpus:
    try:
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with open(path, "rb") as file, ThreadPoolExecutor(_READERS) as readers:  # hashing lets other threads run
            for block in readers.map(partial(_block_digest, file.fileno()), _blocks(size)):
                digest.update(block)
    except OSError as error:
        raise ConfigError(f"data.text: {path} cannot be read: {error.strerror}; make it readable or name another") from error
    if not size:
        raise ConfigError(f"data.text: {origin} is empty; name a file or a folder that holds text")
    return Corpus(str(path), size, digest.hexdigest(), origin)
