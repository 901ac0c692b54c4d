"""The folder of kept captures. In: a key, bytes. Out: the bytes again, where they are whole.

A file begins with the digest of what follows. The files that were used last stay, up to `MOST_BYTES`. `WEFT_CACHE` names another folder, or
is `off`. Ranks that write the same file at the same time write the same, each under a name of its own, and rename it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

VARIABLE = "WEFT_CACHE"
OFF = ("off", "0", "none")
MOST_BYTES = 256 << 20
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class Store:
    """`folder` has the captures; it is made when the first is written."""

    folder: Path
    most_bytes: int = MOST_BYTES

    @classmethod
    def usual(cls) -> Self | None:
        """The one that the environment says, by default `.cache/weft/captures` in the user's home; None where it is off."""
        said = os.environ.get(VARIABLE, "")
        if said.lower() in OFF:
            return None
        try:
            return cls((Path(said) if said else Path.home() / ".cache" / "weft") / "captures")
        except RuntimeError:  # a user without a home
            return None

    def read(self, key: str) -> bytes | None:
        """What was written under a key; None where there is nothing whole, or a file of another user."""
        path = self.folder / key
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_uid != os.getuid():
                    return None
                data = file.read()
            os.utime(path)
        except OSError:
            return None
        return data[_DIGEST:] if hashlib.sha256(data[_DIGEST:]).digest() == data[:_DIGEST] else None

    def write(self, key: str, data: bytes) -> None:
        """Keep bytes. Where they cannot be kept nothing happens: it costs some time at the next start."""
        if len(data) > self.most_bytes // 4:
            return
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = self.folder / f"{key}.{os.getpid()}.part"
            try:
                part.write_bytes(hashlib.sha256(data).digest() + data)
                part.replace(self.folder / key)
            finally:
                part.unlink(missing_ok=True)
            self._bound()

    def files(self) -> list[tuple[Path, os.stat_result]]:
        """All of them, the one used last first."""
        files = []
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                with contextlib.suppress(OSError):
                    files.append((path, path.stat()))
        return sorted(files, key=lambda one: -one[1].st_mtime_ns)

    def clear(self) -> int:
        """Remove all; how many there were."""
        return sum(1 for _ in self._removed(self.files()))

    def _bound(self) -> None:
        total, old = 0, []
        for path, about in self.files():
            total += about.st_size
            if total > self.most_bytes:
                old.append((path, about))
        list(self._removed(old))

    def _removed(self, files: list[tuple[Path, os.stat_result]]) -> Iterator[Path]:
        for path, _ in files:
            with contextlib.suppress(OSError):
                path.unlink()
                yield path
