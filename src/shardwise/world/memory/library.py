"""The library that counts allocations: compiled on first use against torch's headers and cached. Out: the library, or an error text."""

from __future__ import annotations

import ctypes
import subprocess
from ctypes import POINTER, c_int, c_int64, c_void_p
from pathlib import Path

import torch

from shardwise.world.native_build import build_library

SOURCE = Path(__file__).with_name("count.cpp")

_SIGNATURES = {
    "shardwise_memory_install": (c_int, []),
    "shardwise_memory_part": (c_int, [c_int]),
    "shardwise_memory_assign": (c_int, [c_void_p, c_int]),
    "shardwise_memory_add": (None, [c_int, c_int64]),
    "shardwise_memory_limit": (None, [c_int64]),
    "shardwise_memory_forget_peak": (None, []),
    "shardwise_memory_read": (None, [POINTER(c_int64)]),
}


def load(cache: Path | None = None, compiler: str = "c++") -> ctypes.CDLL | str:
    """Return the library, installed in this process, or the reason why there is none."""
    home = Path(torch.__file__).parent
    links = [f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-lc10"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    try:
        flags = ("-O2", "-std=c++20", "-fPIC", "-shared", abi, f"-I{home / 'include'}")
        path = build_library("memory", [SOURCE], SOURCE, flags, compiler, cache, linker_arguments=links, key=torch.__version__)
        library = ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: a user without a home
        return f"{type(error).__name__}: {error}"
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library if library.shardwise_memory_install() else "torch's allocator of the host cannot be wrapped"
