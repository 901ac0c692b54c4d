"""The transport's C library: compiled on first use by the system's compiler and cached. Out: the library, or the reason why there is none.

See `shardwise.world.native_build`. Without a compiler (or a folder to write) ranks of one host use gloo, slower.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int, c_int64, c_uint64, c_void_p
from functools import partial
from pathlib import Path

from shardwise.world.native_build import build_library, load_library

SOURCE = Path(__file__).with_name("source")
UNAVAILABLE = "the C library for shared memory could not be built"  # start of the reason why ranks of one host use gloo
REMEDY = "install a C compiler (`cc` in PATH: `apt install gcc libc6-dev`), and let ~/.cache/shardwise be written"
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=gnu11", "-fPIC", "-shared")

_SIGNATURES = {
    "shardwise_segment_bytes": (c_uint64, [c_int, c_uint64, c_uint64]),
    "shardwise_engine": (c_void_p, [c_double]),
    "shardwise_open": (c_void_p, [c_void_p, c_void_p, c_int, c_int, c_uint64, c_uint64, POINTER(c_int)]),
    "shardwise_buffer": (c_int, [c_void_p, c_int, POINTER(c_void_p)]),
    "shardwise_leave": (None, [c_void_p]),
    "shardwise_close": (None, [c_void_p]),
    "shardwise_adds": (c_int, [c_int]),
    "shardwise_start": (
        c_int,
        [
            c_void_p, c_int, c_int, c_int, c_int, c_int, c_void_p, c_void_p, c_uint64, c_uint64,
            POINTER(c_int64), POINTER(c_int64), c_double, POINTER(c_void_p),
        ],
    ),
    "shardwise_all_reduce": (c_int, [c_void_p, c_void_p, c_uint64, c_uint64, c_int, c_double]),
    "shardwise_start_job": (
        c_int,
        [
            c_void_p, c_int, c_int, c_int, c_int, c_int, c_uint64, c_void_p, c_void_p, c_uint64, c_uint64,
            POINTER(c_int64), c_double, POINTER(c_void_p),
        ],
    ),
    "shardwise_message": (c_void_p, [c_void_p, c_int, c_int, c_void_p, c_uint64, c_uint64]),
    "shardwise_wait": (c_int, [c_void_p, c_double]),
    "shardwise_test": (c_int, [c_void_p]),
    "shardwise_culprit": (c_int, [c_void_p]),
    "shardwise_free": (None, [c_void_p]),
    "shardwise_put": (c_int64, [c_void_p, c_void_p, c_uint64]),
    "shardwise_sum_of_words": (c_int64, [c_void_p, c_uint64]),
}  # fmt: skip


def load(cache: Path | None = None, compiler: str = "cc") -> ctypes.CDLL | str:
    """Return the library, or the reason why there is none. `cache`: folder of compiled files (default: the user's cache folder)."""
    sources = sorted(SOURCE.glob("*.[ch]"))
    return load_library(partial(build_library, "shared-memory", sources, SOURCE / "shardwise.c", FLAGS, compiler, cache), _SIGNATURES)
