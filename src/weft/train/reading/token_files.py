"""Documents as files of token numbers, from which any part is read when it is asked for.

In: documents. Out: a folder with `tokens.bin`, `ends.bin` (the number of tokens up to the end of each document, int64) and, where not all
tokens are learned, `learned.bin` (a byte each). Not modelled: compression.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.errors import ConfigError, RunError
from weft.train.reading.documents import Document
from weft.train.reading.files import digest_of

Tokens = npt.NDArray[Any]
TOKENS, ENDS, LEARNED = "tokens.bin", "ends.bin", "learned.bin"


class FileTokens:
    """Tokens [size] of a file, of which slices are read when they are asked for.

    Not mapped into memory: of a file that is cut off meanwhile a mapping has pages that kill the process when they are touched.
    """

    def __init__(self, path: str, size: int, dtype: str = "uint8") -> None:
        self.size, self._path, self._dtype = size, path, np.dtype(dtype)
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def __getitem__(self, part: slice) -> Tokens:
        """Raises RunError where the file has become too short."""
        start, stop, _ = part.indices(self.size)
        width = self._dtype.itemsize
        data = os.pread(self._file, width * (stop - start), width * start)
        if len(data) < width * (stop - start):
            raise RunError(
                f"the text {self._path} had {width * self.size:,} bytes and ends before byte {width * stop:,} now: it was cut off while it "
                "was trained on; restore it and run the same command, or train on a copy that nobody writes to"
            )
        return np.frombuffer(data, self._dtype)


@dataclass(frozen=True)
class Written:
    """What was written. `largest`: the largest number of a token."""

    num_tokens: int
    num_documents: int
    dtype: str
    has_mask: bool
    largest: int
    digest: str


def write_documents(documents: Iterable[Document], folder: Path, size: int) -> Written:
    """Write documents of tokens below `size` as they come; the folder's files are there whole or not at all.

    Raises:
        ConfigError: no room, or no document.
    """
    dtype = "uint8" if size <= 1 << 8 else "uint16" if size <= 1 << 16 else "uint32"
    ends, num_tokens, largest, masked = array("q"), 0, 0, False
    temporary = {name: folder / f".{name}.new" for name in (TOKENS, ENDS, LEARNED)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(temporary[TOKENS], "wb") as tokens, open(temporary[LEARNED], "wb") as learned:
            for document in documents:
                if not document.ids:
                    continue
                num_tokens += len(document.ids)
                largest = max(largest, *document.ids)
                ends.append(num_tokens)
                tokens.write(np.asarray(document.ids, dtype).tobytes())
                learned.write(bytes(document.learned))
                masked = masked or not all(document.learned)
        temporary[ENDS].write_bytes(ends.tobytes())
        for name, file in temporary.items():
            if name == LEARNED and not masked:
                file.unlink()
                (folder / name).unlink(missing_ok=True)
            else:
                os.replace(file, folder / name)
    except OSError as error:
        raise ConfigError(f"tokens cannot be written to {folder}: {error.strerror}; use a run.folder with room for them") from error
    finally:
        for file in temporary.values():
            file.unlink(missing_ok=True)
    return Written(num_tokens, len(ends), dtype, masked, largest, digest_of_tokens(folder))


def digest_of_tokens(folder: Path) -> str:
    """SHA-256 of all files together. Raises ConfigError where one cannot be read."""
    digest = hashlib.sha256()
    for name in (TOKENS, ENDS, LEARNED):
        file = folder / name
        if file.exists() or name != LEARNED:
            try:
                digest.update(f"{name} {digest_of(file, file.stat().st_size)}\n".encode())
            except OSError as error:
                raise ConfigError(f"{file} cannot be read: {error.strerror}; remove {folder} to have the data prepared again") from error
    return digest.hexdigest()


@dataclass(frozen=True)
class TokenStore:
    """What `write_documents` wrote, for reading: tokens [n], ends [documents] and, where not all are learned, a byte each [n]."""

    tokens: FileTokens
    ends: npt.NDArray[np.int64]
    learned: FileTokens | None


def open_tokens(folder: Path, written: Written) -> TokenStore:
    """Raises ConfigError where a file is gone."""
    try:
        tokens = FileTokens(str(folder / TOKENS), written.num_tokens, written.dtype)
        learned = FileTokens(str(folder / LEARNED), written.num_tokens) if written.has_mask else None
        ends = np.frombuffer((folder / ENDS).read_bytes(), np.int64)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}; remove {folder} to have the data prepared again") from error
    return TokenStore(tokens, ends, learned)
