"""Libraries that are compiled on first use by the system's compiler and kept in the user's cache. In: sources, flags. Out: the file.

They are built for this very processor, so the cache keeps one file for each source, processor and set of flags. Nothing else is loaded
from there than what this user owns.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

COMPILE_S = 60.0


def default_cache() -> Path:
    """The user's cache folder. Raises RuntimeError for a user without a home."""
    return Path.home() / ".cache" / "weft"


def built(
    name: str,
    sources: Sequence[Path],
    main: Path,
    flags: Sequence[str],
    compiler: str,
    cache: Path | None = None,
    *,
    after: Sequence[str] = (),
    key: str = "",
) -> Path:
    """The compiled file, made where it is missing. Ranks that come at the same time wait for the first.

    `main` is what is compiled, with `after` behind it; `sources`, `flags` and `key` are what the file depends on.

    Raises:
        OSError: no compiler, no folder to write, a file of another user; CalledProcessError: it does not compile.
    """
    program = shutil.which(compiler)
    if program is None:
        raise FileNotFoundError(f"no C compiler {compiler!r} in PATH")
    texts = [path.read_text() for path in sources]
    digest = hashlib.sha256("\0".join([*texts, *flags, *after, key, program, processor(), platform.machine()]).encode()).hexdigest()[:20]
    cache = default_cache() if cache is None else cache
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = cache / f"{name}-{digest}.so"
    with open(cache / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                library = Path(folder) / "made.so"
                command = [program, *flags, "-o", str(library), str(main), *after]
                subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
                library.replace(path)
    if path.stat().st_uid not in (os.getuid(), 0):
        raise PermissionError(f"{path} belongs to another user")
    return path


def processor() -> str:
    """The processor in words, as far as -march=native and speed depend on it: a home folder may be shared by machines that differ."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return "\n".join(line for line in lines if line.startswith(("model", "cpu family", "flags", "Features", "CPU ")))
    return platform.processor()
