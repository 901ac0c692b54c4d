"""The transport's C library: compiled on first use by the system's compiler, kept in the user's cache. Out: the library, or why not.

It is built for this very processor, so the cache keeps one file for each source, processor and set of flags. Nothing else is loaded
from there than what this user owns. Without a compiler (or a folder to write) the transport runs in Python (`portable`), slower.
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
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path

SOURCE = Path(__file__).with_name("source")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=gnu11", "-fPIC", "-shared")
COMPILE_S = 60.0

_SIGNATURES = {
    "weft_segment_bytes": (c_uint64, [c_int, c_uint64, c_uint64]),
    "weft_engine": (c_void_p, [c_double]),
    "weft_open": (c_void_p, [c_void_p, c_void_p, c_int, c_int, c_uint64, c_uint64, POINTER(c_int)]),
    "weft_buffer": (c_int, [c_void_p, c_int, POINTER(c_void_p)]),
    "weft_adds": (c_int, [c_int]),
    "weft_start": (
        c_int,
        [
            c_void_p, c_int, c_int, c_int, c_int, c_int, c_void_p, c_void_p, c_uint64, c_uint64,
            POINTER(c_int64), POINTER(c_int64), c_double, POINTER(c_void_p),
        ],
    ),
    "weft_all_reduce": (c_int, [c_void_p, c_void_p, c_uint64, c_uint64, c_int, c_double]),
    "weft_start_job": (
        c_int,
        [
            c_void_p, c_int, c_int, c_int, c_int, c_int, c_uint64, c_void_p, c_void_p, c_uint64, c_uint64,
            POINTER(c_int64), c_double, POINTER(c_void_p),
        ],
    ),
    "weft_message": (c_void_p, [c_void_p, c_int, c_int, c_void_p, c_uint64, c_uint64]),
    "weft_wait": (c_int, [c_void_p, c_double]),
    "weft_test": (c_int, [c_void_p]),
    "weft_culprit": (c_int, [c_void_p]),
    "weft_free": (None, [c_void_p]),
    "weft_copy": (None, [c_void_p, c_char_p, c_uint64]),
}  # fmt: skip


def load(cache: Path | None = None, compiler: str = "cc") -> ctypes.CDLL | str:
    """The library, or the reason why there is none. `cache`: where compiled files are kept (default: the user's cache folder)."""
    try:
        path = _built(cache or _cache(), compiler)
        library = ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: a user without a home
        return f"{type(error).__name__}: {error}"
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _cache() -> Path:
    return Path.home() / ".cache" / "weft"


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by machines that differ."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return "\n".join(line for line in lines if line.startswith(("model", "cpu family", "flags", "Features", "CPU ")))
    return platform.processor()


def _built(cache: Path, compiler: str) -> Path:
    """The compiled file, made where it is missing. Ranks that come at the same time wait for the first."""
    found = shutil.which(compiler)
    if found is None:
        raise FileNotFoundError(f"no C compiler {compiler!r} in PATH")
    sources = [path.read_text() for path in sorted(SOURCE.glob("*.[ch]"))]
    key = hashlib.sha256("\0".join([*sources, *FLAGS, found, _processor(), platform.machine()]).encode()).hexdigest()[:20]
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = cache / f"shared-memory-{key}.so"
    with open(cache / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                made = Path(folder) / "made.so"
                command = [found, *FLAGS, "-o", str(made), str(SOURCE / "weft.c")]
                subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
                made.replace(path)
    if path.stat().st_uid not in (os.getuid(), 0):
        raise PermissionError(f"{path} belongs to another user")
    return path
