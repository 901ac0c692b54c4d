"""Files of token ids with random access, which documents are written to once.

A folder has `tokens.bin`, `ends.bin` (number of tokens up to the end of each document, int64) and, unless all tokens have a loss,
`learned.bin` (the loss mask, a byte a token). Not supported: compression.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.errors import ConfigError
from shardwise.train.data.reading.documents import Document
from shardwise.train.data.reading.files import CheckedFile, digest_of

Tokens = npt.NDArray[Any]
TOKENS, ENDS, LEARNED = "tokens.bin", "ends.bin", "learned.bin"


class FileTokens:
    """Tokens [size] of a file; slices are read, and verified, on access."""

    def __init__(self, path: str, size: int, dtype: str = "uint8", sums: Path | None = None) -> None:
        self.size, self._dtype = size, np.dtype(dtype)
        self.file = CheckedFile(path, size * self._dtype.itemsize, sums)

    def __getitem__(self, part: slice) -> Tokens:
        """Read a slice. Raises RunError if the file has changed."""
        start, stop, _ = part.indices(self.size)
        width = self._dtype.itemsize
        return np.frombuffer(self.file.read(width * start, width * max(start, stop)), self._dtype)


@dataclass(frozen=True)
class TokenFileSummary:
    """Description of written token files. `largest`: the largest token id."""

    num_tokens: int
    num_documents: int
    dtype: str
    has_mask: bool
    largest: int
    digest: str


def write_documents(documents: Iterable[Document], folder: Path, size: int) -> TokenFileSummary:
    """Write documents of token ids below `size` as a stream; the files are replaced atomically at the end.

    Raises:
        ConfigError: the folder cannot be written, as with a full disk.
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
                least, largest = min(document.ids), max(largest, *document.ids)
                if least < 0 or largest >= size:
                    raise ConfigError(
                        f"document {len(ends)} has token {least if least < 0 else largest}, and the tokenizer says that it has {size}; "
                        "mend the tokenizer's files"
                    )
                ends.append(num_tokens)
                tokens.write(np.asarray(document.ids, dtype).tobytes())
                learned.write(bytes(document.loss_mask))
                masked = masked or not all(document.loss_mask)
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
    return TokenFileSummary(num_tokens, len(ends), dtype, masked, largest, digest_of_tokens(folder))


def checksums_path(folder: Path, name: str) -> Path:
    """Path of the checksums of a token file."""
    return folder / f"{name}.sums"


def digest_of_tokens(folder: Path) -> str:
    """Return the SHA-256 of all token files, and write their checksums next to them. Raises ConfigError for an unreadable file."""
    digests = {}
    for name in (TOKENS, ENDS, LEARNED):
        file = folder / name
        if file.is_file() or name != LEARNED:
            try:
                digests[name] = digest_of(file, file.stat().st_size, checksums_path(folder, name))
            except OSError as error:
                raise ConfigError(f"{file} cannot be read: {error.strerror}; remove {folder} to have the data prepared again") from error
    return _combined_digest(digests)


def _combined_digest(digests: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in digests.items()).encode()).hexdigest()


@dataclass(frozen=True)
class TokenStore:
    """Token files opened for reading: tokens [n], ends [documents] and, unless all tokens have a loss, the loss mask [n]."""

    tokens: FileTokens
    ends: npt.NDArray[np.int64]
    loss_mask: FileTokens | None


def open_tokens(folder: Path, summary: TokenFileSummary) -> TokenStore:
    """Open token files. Raises ConfigError if a file is missing, or the checksums do not match the description."""
    try:
        tokens = FileTokens(str(folder / TOKENS), summary.num_tokens, summary.dtype, checksums_path(folder, TOKENS))
        ends = FileTokens(str(folder / ENDS), summary.num_documents, "int64", checksums_path(folder, ENDS))
        learned = FileTokens(str(folder / LEARNED), summary.num_tokens, sums=checksums_path(folder, LEARNED)) if summary.has_mask else None
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}; remove {folder} to have the data prepared again") from error
    files = {TOKENS: tokens, ENDS: ends} | ({LEARNED: learned} if learned is not None else {})
    if _combined_digest({name: file.file.digest for name, file in files.items()}) != summary.digest:
        raise ConfigError(f"the sums of the files in {folder} are not those of what was written; run the same command: they are made again")
    return TokenStore(tokens, ends[:], learned)
