"""Fingerprint of everything that a capture depends on: a module, a loss, plain values. `NotFingerprintable` if it cannot be determined.

The walk goes from the modules over their attributes to their classes, and over the bytecode of every function that these reach to the
globals that it names; the user's source files on the way are hashed in full. Installed packages are identified by their versions. Values
of parameters and buffers are left out, since a graph has none of them.

Not detected: a monkey-patched function of an installed package that the user's code does not call by name; contents of files that code
reads. Code that reads the environment, opens files, or imports modules not loaded yet raises `NotFingerprintable`.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import importlib.machinery
import os
import platform
import sys
import sysconfig
from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from functools import lru_cache
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    EllipsisType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import nn

from shardwise.capture.fakes import Fake

_MAX_OBJECTS = 300_000  # objects
_MAX_TENSOR_BYTES = 1 << 24  # of a tensor whose values are hashed
_ENVIRONMENT_NAMES = {"environ", "getenv", "open", "exec", "eval", "globals", "__import__", "import_module", "input"}
_VALUES = (
    bool, int, float, complex, str, bytes, type(None), EllipsisType, range, slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_IMPORT = dis.opmap["IMPORT_NAME"]
_SKIPPED = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__abstractmethods__", "_abc_impl", "__firstlineno__"}
_SOURCE_ROOT = Path(__file__).parents[2]


class NotFingerprintable(Exception):
    """An object of which it cannot be determined whether it will be equal in the next process."""


def fingerprint(model: nn.Module, loss: object, extra: object) -> str:
    """Return the digest, 64 hexadecimal digits. Raises `NotFingerprintable`, RecursionError.

    >>> digest = fingerprint(nn.Linear(2, 2), None, 1)
    >>> digest == fingerprint(nn.Linear(2, 2), None, 1), digest == fingerprint(nn.Linear(2, 3), None, 1)
    (True, False)
    """
    walk = _FingerprintWalk()
    walk.add(_code_versions())
    walk.add(_torch_settings())
    walk.add(model)
    walk.add(loss)
    walk.add(extra)
    return walk.digest()


def _torch_settings() -> tuple[Any, ...]:
    """Return torch's global settings that change what it computes or traces."""
    cuda: Any = torch.backends.cuda
    attention = (cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled())
    cast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cpu")
    return (
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), attention, cast,
        torch.backends.mha.get_fastpath_enabled(), torch.cuda.device_count(),
    )  # fmt: skip


@lru_cache(maxsize=1)
def _code_versions() -> tuple[str, ...]:
    """Return the versions of Python and of installed packages, and the state of shardwise's own capture code."""
    installed = [name for folder in _library_folders() if os.path.isdir(folder) for name in os.listdir(folder) if name.endswith("-info")]
    sources = [
        f"{path.relative_to(_SOURCE_ROOT)} {path.stat().st_size} {path.stat().st_mtime_ns}"
        for part in ("capture", "model", "ops")
        for path in (_SOURCE_ROOT / part).rglob("*.py")
    ]
    return platform.python_version(), platform.machine(), *sorted(installed), *sorted(sources)


@lru_cache(maxsize=1)
def _library_folders() -> tuple[str, ...]:
    """Return the folders of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    folders = {os.path.realpath(paths[key]) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(sorted(folders | {os.path.dirname(os.path.dirname(os.path.realpath(torch.__file__)))}))


@lru_cache(maxsize=4096)
def _is_installed(name: str) -> bool:
    """Return whether a module belongs to the standard library or an installed package."""
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        spec = getattr(module, "__spec__", None)
        loaders: tuple[Any, ...] = (importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter)
        return bool(spec is not None and spec.loader in loaders)
    return str(os.path.realpath(file)).startswith(tuple(f"{folder}{os.sep}" for folder in _library_folders()))


class _FingerprintWalk:
    """A digest of all added objects; an object that was added before is hashed by its number."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []  # so that no id is reused
        self._files: set[str] = set()

    def digest(self) -> str:
        return self._hash.hexdigest()

    def _hash_words(self, *words: object) -> None:
        self._hash.update(repr(words).encode())

    def add(self, x: Any) -> None:
        """Add an object, with everything reachable from it."""
        if isinstance(x, _VALUES) and type(x).__module__ in ("builtins", "torch"):
            self._hash_words(type(x).__name__, x)
            return
        if self._is_new(x) and not (self._add_code(x) or self._add_container(x)):
            self._add_object(x)

    def _is_new(self, x: object) -> bool:
        """Return whether an object is new; of one added before its number is hashed."""
        if id(x) in self._numbers:
            self._hash_words("again", self._numbers[id(x)])
            return False
        self._numbers[id(x)] = len(self._numbers)
        self._alive.append(x)
        if len(self._alive) > _MAX_OBJECTS:
            raise NotFingerprintable("too much")
        return True

    def _add_code(self, x: Any) -> bool:
        match x:
            case type():
                self._add_class(x)
            case FunctionType():
                self._add_function(x)
            case CodeType():
                self._add_bytecode(x)
            case MethodType():
                self._add_items("method", x.__func__, x.__self__)
            case staticmethod() | classmethod():
                self._add_items(type(x).__name__, x.__func__)
            case property():
                self._add_items("property", x.fget, x.fset, x.fdel)
            case functools.partial():
                self._add_items("partial", x.func, x.args, x.keywords)
            case ModuleType():
                self._hash_words("module", x.__name__)
            case MemberDescriptorType() | GetSetDescriptorType():  # of a class with `__slots__`
                self._hash_words(type(x).__name__, x.__qualname__)
            case BuiltinFunctionType():
                self._add_items("builtin", x.__qualname__, None if isinstance(x.__self__, ModuleType) else x.__self__)
            case _ if callable(x) and not hasattr(x, "__dict__") and _is_installed(type(x).__module__):  # C descriptors
                self._hash_words(type(x).__name__, getattr(x, "__qualname__", ""))
            case _:
                return False
        return True

    def _add_container(self, x: Any) -> bool:
        match x:
            case torch.Tensor():
                self._add_tensor(x)
            case enum.Enum():
                self._add_items("enum", type(x), x.name)
            case tuple() | list() | deque():
                self._add_items(type(x).__name__, type(x), *x)
            case AbstractSet() if all(isinstance(item, _VALUES) for item in x):
                self._hash_words("set", sorted(map(repr, x)))
            case Mapping() if type(x).__module__ in ("builtins", "collections", "types"):
                self._add_items("dict", type(x).__name__, *(item for pair in x.items() for item in pair))
            case _:
                return False
        return True

    def _add_items(self, *items: Any) -> None:
        self._hash_words("many", len(items))
        for item in items:
            self.add(item)

    def _add_tensor(self, x: torch.Tensor) -> None:
        self._add_tensor_spec(x)
        if isinstance(x, nn.Parameter):
            return
        if isinstance(x, Fake) or x.is_meta or x.layout is not torch.strided or x.numel() * x.element_size() > _MAX_TENSOR_BYTES:
            raise NotFingerprintable("the values of a tensor")
        self._hash.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if x.numel() else b"")

    def _add_tensor_spec(self, x: torch.Tensor) -> None:
        form = (type(x).__name__, tuple(x.shape), str(x.dtype), x.device.type, x.requires_grad, str(x.layout))
        self._hash_words("tensor", form, tuple(x.stride()) if x.layout is torch.strided else ())

    def _add_module(self, x: nn.Module) -> None:
        attributes = {key: value for key, value in vars(x).items() if key not in ("training", "_buffers", "_parameters")}
        self._hash_words("nn", sorted(attributes))
        for table in (x._parameters, x._buffers):
            for name, tensor in table.items():
                self._hash_words(name)
                if tensor is None:
                    self._hash_words(None)
                elif self._is_new(tensor):
                    self._add_tensor_spec(tensor)
        self.add(type(x))
        for key in sorted(attributes):
            self._hash_words(key)
            self.add(attributes[key])

    def _add_object(self, x: Any) -> None:
        if isinstance(x, nn.Module):
            self._add_module(x)
            return
        slots = [name for cls in type(x).__mro__ for name in _slot_names(cls) if hasattr(x, name)]
        if not hasattr(x, "__dict__") and not slots:
            raise NotFingerprintable(type(x).__qualname__)
        if type(x).__module__.partition(".")[0] in ("_thread", "threading", "io", "_io", "socket", "random", "numpy"):
            raise NotFingerprintable(type(x).__qualname__)
        if isinstance(x, Mapping):
            self._add_items("mapping", *(item for pair in x.items() for item in pair))
        self.add(type(x))
        for key, value in sorted({**getattr(x, "__dict__", {}), **{name: getattr(x, name) for name in slots}}.items()):
            self._hash_words(key)
            if not (key.endswith("hash") and _is_installed(type(x).__module__)):  # a library's hash, different in each process
                self.add(value)

    def _add_class(self, x: type) -> None:
        self._hash_words("class", x.__module__, x.__qualname__)
        if _is_installed(x.__module__):
            return
        self._add_source_file(x.__module__)
        for base in x.__mro__[1:]:
            self.add(base)
        for key, value in sorted(vars(x).items()):
            if key not in _SKIPPED:
                self._hash_words(key)
                self.add(value)

    def _add_function(self, x: FunctionType) -> None:
        self._hash_words("function", x.__module__, x.__qualname__)
        self.add(x.__defaults__)
        self.add(x.__kwdefaults__)
        for cell in x.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # an empty cell
                self._hash_words("empty")
        if _is_installed(x.__module__):
            return
        self._add_source_file(x.__module__)
        self.add(x.__code__)
        names = _names_in_code(x.__code__)
        if names & _ENVIRONMENT_NAMES:
            raise NotFingerprintable(f"{x.__qualname__} asks for {', '.join(sorted(names & _ENVIRONMENT_NAMES))}")
        for name in sorted(names & x.__globals__.keys()):
            self._hash_words(name)
            value = x.__globals__[name]
            self.add(value)
            self._add_named_members(value, names)

    def _add_named_members(self, module: Any, names: set[str]) -> None:
        """Add the user's objects among the attributes of a module that code names."""
        if not isinstance(module, ModuleType):
            return
        is_library = _is_installed(module.__name__)
        if not is_library:
            self._add_source_file(module.__name__)
        for name in sorted(names & vars(module).keys()):
            value = vars(module)[name]
            home = getattr(value, "__module__", None)
            if isinstance(value, ModuleType):
                if not is_library and value is not module and id(value) not in self._numbers:
                    self.add(value)
                    self._add_named_members(value, names)
            elif not is_library or (isinstance(value, FunctionType | type) and not _is_installed(home or "")):
                self._hash_words(name)
                self.add(value)

    def _add_bytecode(self, x: CodeType) -> None:
        self._hash_words("code", x.co_code, x.co_names, x.co_varnames, x.co_freevars, x.co_flags, x.co_argcount, x.co_kwonlyargcount)
        for constant in x.co_consts:
            self.add(sorted(constant) if isinstance(constant, frozenset) and all(isinstance(c, str) for c in constant) else constant)
        if _IMPORT in x.co_code[::2]:
            for step in dis.get_instructions(x):
                if step.opcode == _IMPORT and (module := sys.modules.get(step.argval)) is None:
                    raise NotFingerprintable(f"{step.argval} is imported when it is called")
                if step.opcode == _IMPORT and not _is_installed(step.argval):
                    self._add_source_file(step.argval)
                    self._add_named_members(module, _names_in_code(x))

    def _add_source_file(self, name: str) -> None:
        """Add the full source file of a user's module."""
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None or file in self._files:
            return
        self._files.add(file)
        try:
            self._hash.update(Path(file).read_bytes())
        except OSError as error:
            raise NotFingerprintable(file) from error


def _slot_names(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return tuple(s for s in ((slots,) if isinstance(slots, str) else slots) if s not in ("__dict__", "__weakref__"))


@lru_cache(maxsize=4096)
def _names_in_code(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in_code(constant)
    return names
