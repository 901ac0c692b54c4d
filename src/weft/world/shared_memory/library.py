"""The transport's C library: compiled on first use by the system's compiler and cached. Out: the library, or the reason why there is none.

See `weft.world.native_build`. Without a compiler (or a folder to write) the transport runs in Python (`portable`), slower.
"""

from __future__ import annotations

import ctypes
import subprocess
from ctypes import POINTER, c_double, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path

from weft.world.native_build import built

SOURCE = Path(__file__).with_name("source")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=gnu11", "-fPIC", "-shared")

_SIGNATURES = {
    "weft_segment_bytes": (c_uint64, [c_int, c_uint64, c_uint64]),
    "weft_engine": (c_void_p, [c_double]),
    "weft_open": (c_void_p, [c_void_p, c_void_p, c_int, c_int, c_uint64, c_uint64, POINTER(c_int)]),
    "weft_buffer": (c_int, [c_void_p, c_int, POINTER(c_void_p)]),
    "weft_leave": (None, [c_void_p]),
    "weft_close": (None, [c_void_p]),
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
    "weft_put": (c_int64, [c_void_p, c_void_p, c_uint64]),
    "weft_sum_of_words": (c_int64, [c_void_p, c_uint64]),
}  # fmt: skip


def load(cache: Path | None = None, compiler: str = "cc") -> ctypes.CDLL | str:
    """Return the library, or the reason why there is none. `cache`: folder of compiled files (default: the user's cache folder)."""
    try:
        path = built("shared-memory", sorted(SOURCE.glob("*.[ch]")), SOURCE / "weft.c", FLAGS, compiler, cache)
        library = ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: a user without a home
        return f"{type(error).__name__}: {error}"
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
