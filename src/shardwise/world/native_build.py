"""Compile native libraries on first use with the system's compiler, and cache them for the user. In: sources, flags. Out: the file.

They are built for this processor, so the cache has one file for each source, processor and set of flags. Only files that this user or
root owns are loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Signatures = Mapping[str, tuple[Any, Any]]  # by function: the types of its result and its arguments
COMPILE_S = 60.0


def default_cache() -> Path:
    """The user's cache folder. Raises RuntimeError for a user without a home."""
    return Path.home() / ".cache" / "shardwise"


def build_library(
    name: str,
    sources: Sequence[Path],
    main_source: Path,
    flags: Sequence[str],
    compiler: str,
    cache: Path | None = None,
    *,
    linker_arguments: Sequence[str] = (),
    key: str = "",
) -> Path:
    """Return the compiled file, built if it is missing. Concurrent ranks wait for the first.

    `main_source` is compiled, with `linker_arguments` as last arguments; the file depends on `sources`, `flags` and `key`.

    Raises:
        OSError: no compiler, no folder to write, a file of another user; CalledProcessError: it does not compile.
    """
    program = shutil.which(compiler)
    if program is None:
        raise FileNotFoundError(f"no C compiler {compiler!r} in PATH")
    texts = [path.read_text() for path in sources]
    digest = hashlib.sha256(
        "\0".join([*texts, *flags, *linker_arguments, key, program, processor_description(), platform.machine()]).encode()
    ).hexdigest()[:20]
    cache = default_cache() if cache is None else cache
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = cache / f"{name}-{digest}.so"
    with open(cache / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                library = Path(folder) / "made.so"
                command = [program, *flags, "-o", str(library), str(main_source), *linker_arguments]
                subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
                library.replace(path)
    if path.stat().st_uid not in (os.getuid(), 0):
        raise PermissionError(f"{path} belongs to another user")
    return path


def load_library(build: Callable[[], Path], signatures: Signatures) -> ctypes.CDLL | str:
    """Load the library that `build` returns, or return the reason why there is none."""
    try:
        library = ctypes.CDLL(str(build()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: a user without a home
        return f"{type(error).__name__}: {error}"
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def processor_description() -> str:
    """Return a text that identifies the processor for -march=native and timings: different machines may share a home folder."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return "\n".join(line for line in lines if line.startswith(("model", "cpu family", "flags", "Features", "CPU ")))
    return platform.processor()
