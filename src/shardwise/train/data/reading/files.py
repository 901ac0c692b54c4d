"""Finding data files below paths, and digests and checksums that detect changes in them."""

from __future__ import annotations

import glob
import hashlib
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from shardwise.errors import ConfigError, RunError

BLOCK_BYTES = 16 << 20
PART_BYTES, CHECKSUM_BYTES = 16 << 10, 8  # bytes of a file that share a checksum; bytes of a checksum
MAX_DIGESTED_BYTES = 16 << 30  # of longer data the digest covers evenly spaced blocks, this much in all, including the first and the last
NUM_READERS = 4


def walk_files(root: Path) -> Iterator[Path]:
    """Yield regular files below a folder, sorted, without hidden ones and without following links. Raises OSError for a folder that
    cannot be read, which `os.walk` would leave out."""
    for folder, folders, files in os.walk(root, onerror=_raise_error):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def _raise_error(error: OSError) -> None:
    raise error


def find_files(names: Sequence[str], accepts: Callable[[Path], bool], key: str, expected: str) -> list[Path]:
    """Find files by name or pattern, and those of folders that `accepts` accepts, in sorted order.

    Raises:
        ConfigError: a name without files; `key` is its configuration key and `expected` the kind of files.
    """
    files: list[Path] = []
    for name in names:
        matches = sorted(glob.glob(name)) if glob.has_magic(name) and not Path(name).exists() else [name]
        for match in map(Path, matches):
            if match.is_file():
                files.append(match)
            elif match.is_dir():
                try:
                    files += filter(accepts, walk_files(match))
                except OSError as error:
                    raise ConfigError(f"{key}: {error.filename} cannot be read: {error.strerror}; make it readable") from error
            elif match.exists():
                raise ConfigError(f"{key}: {name} is no regular file; name a file, a folder or a pattern of {expected}")
            else:
                raise ConfigError(f"{key}: {name} does not exist; name a file, a folder or a pattern of {expected}")
    if not files:
        raise ConfigError(f"{key}: no {expected} in {', '.join(names)}; name files or a folder that holds some")
    return files


def _digested_block_starts(size: int) -> list[int]:
    """Return the start offsets of the blocks that the digest covers.

    >>> _digested_block_starts(2 * BLOCK_BYTES + 1) == [0, BLOCK_BYTES, 2 * BLOCK_BYTES]
    True
    """
    return [i * BLOCK_BYTES for i in evenly_spaced(-(-size // BLOCK_BYTES), size)]


def evenly_spaced(count: int, size: int) -> list[int]:
    """Return which of `count` pieces of data of `size` bytes a digest covers: evenly spaced ones, about `MAX_DIGESTED_BYTES` in all,
    including the first and the last.

    >>> evenly_spaced(3, 5), evenly_spaced(6, 4 * MAX_DIGESTED_BYTES), evenly_spaced(0, 0)
    ([0, 1, 2], [0, 4, 5], [])
    """
    step = max(1, -(-size // MAX_DIGESTED_BYTES))
    return sorted({*range(0, count, step), *range(max(0, count - 1), count)})


def replace_file(path: Path, data: bytes | bytearray) -> None:
    """Replace a file by `data` atomically. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def checksum_of(data: bytes | memoryview) -> bytes:
    """Return the checksum of data: the first 8 bytes of its SHA-256."""
    return hashlib.sha256(data).digest()[:CHECKSUM_BYTES]


def _checksums_of_block(file: int, start: int) -> bytes:
    data = memoryview(os.pread(file, BLOCK_BYTES, start))
    return b"".join(checksum_of(data[at : at + PART_BYTES]) for at in range(0, len(data), PART_BYTES))


def digest_of(path: Path, size: int, sums: Path | None = None) -> str:
    """Return the SHA-256 of a file's size and of the checksums of its parts, which are written to the file `sums`, 8 bytes each; zeros for
    blocks that the digest does not cover. Raises OSError."""
    checksums = bytearray(CHECKSUM_BYTES * -(-size // PART_BYTES))
    blocks = _digested_block_starts(size)
    with open(path, "rb") as file, ThreadPoolExecutor(NUM_READERS) as readers:  # hashing releases the GIL
        for start, block in zip(blocks, readers.map(partial(_checksums_of_block, file.fileno()), blocks), strict=True):
            at = CHECKSUM_BYTES * (start // PART_BYTES)
            checksums[at : at + len(block)] = block
    if sums is not None:
        replace_file(sums, checksums)
    return digest_of_checksums(size, bytes(checksums))


def digest_of_checksums(size: int, sums: bytes) -> str:
    """Return the digest of a file from its size and checksums."""
    return hashlib.sha256(str(size).encode() + sums).hexdigest()


REWRITE_WAITS_S = (0.01, 0.05, 0.2)  # before a short file counts as cut off


class CheckedFile:
    """A file whose parts are compared with their checksums whenever they are read. `sums`: the file of the checksums; without it nothing
    is compared.

    Not mapped into memory: if the file is truncated meanwhile, touching a page of the mapping would kill the process.
    """

    def __init__(self, path: Path | str, size: int, sums: Path | None = None) -> None:
        self.path, self.size = path, size
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._sums = b"" if sums is None else sums.read_bytes()
        self.digest = digest_of_checksums(size, self._sums)

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes `start <= i < stop`. Raises RunError if the file was truncated or a part has changed."""
        first = start // PART_BYTES * PART_BYTES if self._sums else start
        last = min(self.size, -(-stop // PART_BYTES) * PART_BYTES) if self._sums else stop
        data = memoryview(os.pread(self._file, last - first, first))
        for wait_s in REWRITE_WAITS_S:  # whoever copies a file over itself empties it first
            if len(data) == last - first:
                break
            time.sleep(wait_s)
            data = memoryview(os.pread(self._file, last - first, first))
        if len(data) < last - first:
            raise RunError(
                f"the text {self.path} had {self.size:,} bytes and ends before byte {last:,} now: it was cut off while it "
                "was trained on; restore it and run the same command, or train on a copy that nobody writes to"
            )
        for at in range(first, last, PART_BYTES) if self._sums else ():
            number = at // PART_BYTES
            expected = self._sums[CHECKSUM_BYTES * number : CHECKSUM_BYTES * (number + 1)]
            if any(expected) and expected != checksum_of(data[at - first : at - first + PART_BYTES]):
                raise RunError(
                    f"the text {self.path} has changed since this run began: bytes {at:,} to {min(self.size, at + PART_BYTES):,} (block "
                    f"{number:,}) are not what they were; restore it and run the same command, or train on a copy that nobody writes to"
                )
        return data[start - first : stop - first]


def digest_of_all(files: Sequence[Path], names: Sequence[str]) -> str:
    """Return the SHA-256 of many files' names, sizes and contents; above 16 GiB, of the contents of evenly spaced files.

    Raises:
        ConfigError: an unreadable file.
    """
    sizes = []
    digest = hashlib.sha256()
    for file, name in zip(files, names, strict=True):
        try:
            sizes.append(file.stat().st_size)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}; make it readable, or leave it out") from error
        digest.update(f"{name}\0{sizes[-1]}\0".encode())
    step = max(1, -(-sum(sizes) // MAX_DIGESTED_BYTES))

    def digest_at(number: int) -> bytes:
        try:
            return digest_of(files[number], sizes[number]).encode()
        except OSError as error:
            raise ConfigError(f"{files[number]} cannot be read: {error.strerror}; make it readable, or leave it out") from error

    for number in sorted({*range(0, len(files), step), len(files) - 1}):
        digest.update(digest_at(number))
    return digest.hexdigest()
