"""The cache folder of captures: bytes by key, with an integrity check and eviction of the least recently used files.

A file begins with the digest of its content. The total is bounded by `MAX_BYTES`. `SHARDWISE_CACHE` names another folder, or is `off`.
Ranks that write the same file at the same time write equal bytes to different temporary names, and rename them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ENVIRONMENT_VARIABLE = "SHARDWISE_CACHE"
OFF_WORDS = ("off", "0", "none")
MAX_BYTES = 256 << 20
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class CaptureStore:
    """The cache in `folder`, which is made when the first capture is written."""

    folder: Path
    max_bytes: int = MAX_BYTES

    @classmethod
    def from_environment(cls) -> Self | None:
        """Return the cache set by the environment, by default `.cache/shardwise/captures` in the user's home; None if it is off."""
        setting = os.environ.get(ENVIRONMENT_VARIABLE, "")
        if setting.lower() in OFF_WORDS:
            return None
        try:
            return cls((Path(setting) if setting else Path.home() / ".cache" / "shardwise") / "captures")
        except RuntimeError:  # a user without a home
            return None

    def read(self, key: str) -> bytes | None:
        """Return the bytes of a key; None if there are none, they are corrupted, or the file is another user's."""
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
        """Write bytes under a key. Failures are ignored: they cost some time at the next start."""
        if len(data) > self.max_bytes // 4:
            return
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = self.folder / f"{key}.{os.getpid()}.part"
            try:
                part.write_bytes(hashlib.sha256(data).digest() + data)
                part.replace(self.folder / key)
            finally:
                part.unlink(missing_ok=True)
            self._evict_oldest()

    def files(self) -> list[tuple[Path, os.stat_result]]:
        """Return all files, the most recently used first."""
        files = []
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                with contextlib.suppress(OSError):
                    files.append((path, path.stat()))
        return sorted(files, key=lambda file: -file[1].st_mtime_ns)

    def clear(self) -> int:
        """Remove all files and return their number."""
        return sum(1 for _ in self._remove_files(self.files()))

    def _evict_oldest(self) -> None:
        total, evicted = 0, []
        for path, stat in self.files():
            total += stat.st_size
            if total > self.max_bytes:
                evicted.append((path, stat))
        list(self._remove_files(evicted))

    def _remove_files(self, files: list[tuple[Path, os.stat_result]]) -> Iterator[Path]:
        for path, _ in files:
            with contextlib.suppress(OSError):
                path.unlink()
                yield path
