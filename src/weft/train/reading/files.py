"""Files below paths, and what tells whether they are the same as before. In: names of files, folders, patterns. Out: files, digests."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from weft.errors import ConfigError

BLOCK_BYTES = 16 << 20
_ALL_BYTES = 16 << 30  # of longer data every so many-th block is read, this much in all, the first and the last among them
_READERS = 4


def walk(root: Path) -> Iterator[Path]:
    """Regular files below a folder, sorted, without hidden ones and without following links."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def files_of(names: Sequence[str], takes: Callable[[Path], bool], key: str, holds: str) -> list[Path]:
    """Files by name or pattern, and those of folders that `takes` accepts, in sorted order.

    Raises:
        ConfigError: a name that nothing has; `key` is where it stands and `holds` what it should hold.
    """
    files: list[Path] = []
    for name in names:
        matches = sorted(glob.glob(name)) if glob.has_magic(name) and not Path(name).exists() else [name]
        for match in map(Path, matches):
            if match.is_file():
                files.append(match)
            elif match.is_dir():
                files += filter(takes, walk(match))
            else:
                raise ConfigError(f"{key}: {name} does not exist; name a file, a folder or a pattern of {holds}")
    if not files:
        raise ConfigError(f"{key}: no {holds} in {', '.join(names)}; name files or a folder that holds some")
    return files


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


def digest_of(path: Path, size: int) -> str:
    """SHA-256 of a file's size and of the digests of its blocks. Raises OSError."""
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file, ThreadPoolExecutor(_READERS) as readers:  # hashing lets other threads run
        for block in readers.map(partial(_block_digest, file.fileno()), _blocks(size)):
            digest.update(block)
    return digest.hexdigest()


def digest_of_all(files: Sequence[Path], names: Sequence[str]) -> str:
    """SHA-256 of many files' names, sizes and contents; where they hold more than 16 GiB, of the contents of evenly spaced ones.

    Raises:
        ConfigError: one that cannot be read.
    """
    sizes = []
    digest = hashlib.sha256()
    for file, name in zip(files, names, strict=True):
        try:
            sizes.append(file.stat().st_size)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}; make it readable, or leave it out") from error
        digest.update(f"{name}\0{sizes[-1]}\0".encode())
    step = max(1, -(-sum(sizes) // _ALL_BYTES))

    def one(number: int) -> bytes:
        try:
            return digest_of(files[number], sizes[number]).encode()
        except OSError as error:
            raise ConfigError(f"{files[number]} cannot be read: {error.strerror}; make it readable, or leave it out") from error

    for number in sorted({*range(0, len(files), step), len(files) - 1}):
        digest.update(one(number))
    return digest.hexdigest()
