"""Resolve `path/file.py:factory`, a user's own model.

The factory returns a module, `(module, batch)` or `(module, batch, loss)`. It is called once on fake tensors for its batch and loss (the
same on every rank: the seed is fixed), and once more by each `make`. Factories with arguments are not supported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardwise.capture.initialization import DeferredInit, FactoryLosses, materialize_loss
from shardwise.capture.nesting import named_leaves, replace_leaves
from shardwise.errors import ModelError, format_error
from shardwise.zoo.listing import suggest_nearest
from shardwise.zoo.resolved import Loss, ResolvedModel


def from_file(text: str, batch: int | None = None, sequence: int | None = None) -> ResolvedModel:
    """Resolve the model that a factory in a Python file makes. `batch` takes the first samples of the factory's own batch.

    Raises:
        ModelError: a missing file or factory, a file or factory that raises, a result that is no model, more samples than there are.
    """
    if sequence is not None:
        raise ModelError(f"--sequence {sequence} does not apply to {text}: its factory makes the batch; change it there")
    path, factory = load_factory(text)

    def call_factory() -> tuple[nn.Module, Any, Loss | None]:
        with _importable_folder(path.parent):
            try:
                result = factory()
            except ModelError:
                raise
            except (Exception, SystemExit) as error:
                raise ModelError(f"{text} raises {format_error(error)}; {_remedy_for(error)}") from error
        return _check_result(text, result)

    faked, real, first = _make_batch_and_loss(text, call_factory)
    loss = None if first is None else FactoryLosses(first)
    num_samples = _num_samples(text, faked)

    def make() -> nn.Module:
        module, _, module_loss = call_factory()
        if loss is not None:
            loss.add(module, module_loss)
        return module

    def first_of(size: int, default: Callable[[], Any]) -> Any:
        if faked is None:
            raise ModelError(f"{text} returns a module without a batch; return (module, batch) or (module, batch, loss)")
        if not 1 <= size <= num_samples:
            raise ModelError(f"{text} makes a batch of {num_samples} samples, {size} were requested; use --batch {num_samples} or fewer")
        return _map_tensors(default(), lambda leaf: leaf[:size] if leaf.dim() and leaf.shape[0] == num_samples else leaf)

    def empty() -> Any:
        return _map_tensors(faked, lambda leaf: torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype))

    if batch is not None and faked is not None:
        first_of(batch, lambda: faked)
    return ResolvedModel(
        text, make, lambda size: first_of(size, real), loss, batch or num_samples or 1, empty_batch=lambda size: first_of(size, empty)
    )


def load_factory(text: str) -> tuple[Path, Callable[..., Any]]:
    """Return the file and the function or class of `file.py:name`. Raises `ModelError`, with the names that the file has."""
    file, _, name = text.rpartition(":") if not text.endswith(".py") else (text, "", "")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ModelError(f"there is no file {file}; MODEL is path/file.py:factory")
    unique = f"shardwise_model_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(unique, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{file} is no Python file; MODEL is path/file.py:factory")
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    try:
        with _importable_folder(path.parent):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[unique]
        where = f"line {error.lineno}: " if isinstance(error, SyntaxError) else ""
        raise ModelError(f"{file} cannot be loaded: {where}{format_error(error)}") from error
    factories = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_") and _defined_in(v, module)]
    if not name:
        raise ModelError(f"{file} names no factory; use {file}:NAME, with one of {', '.join(factories) or 'its functions'}")
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ModelError(f"{file} has no function {name}{suggest_nearest(name, factories) if factories else ''}")
    return path, factory


def _remedy_for(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "what a script does belongs under if __name__ == '__main__'"
    if isinstance(error, TypeError) and "argument" in str(error):
        return "a factory takes no arguments"
    if "Uninitialized" in str(error):
        return "lazy layers have no sizes before they are called, so write nn.Linear(8, 4) for nn.LazyLinear(4)"
    return "a factory is called without arguments, and its tensors take no memory yet: a file to load must be there, none can be written"


def _defined_in(value: object, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__


@contextmanager
def _importable_folder(folder: Path) -> Iterator[None]:
    """A block in which the file can import its siblings; stale modules of those names from an earlier model's folder are dropped."""
    for file in (*folder.glob("*.py"), *folder.glob("*/__init__.py")):
        name = file.parent.name if file.name == "__init__.py" else file.stem
        loaded = sys.modules.get(name)
        origin = getattr(loaded, "__file__", None)
        if origin is not None and Path(origin) != file and not _is_importable(Path(origin)):
            for inner in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[inner]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _is_importable(file: Path) -> bool:
    root = file.parent.parent if file.name == "__init__.py" else file.parent
    return any(Path(entry or ".").resolve() == root for entry in sys.path) or "site-packages" in file.parts


def _check_result(text: str, result: Any) -> tuple[nn.Module, Any, Loss | None]:
    module, batch, loss = (*result, None, None)[:3] if isinstance(result, tuple) else (result, None, None)
    if not isinstance(module, nn.Module) or (isinstance(result, tuple) and len(result) > 3):
        got = f"({', '.join(type(a).__name__ for a in result)})" if isinstance(result, tuple) else type(result).__name__
        raise ModelError(f"{text} returns {got}; return a torch.nn.Module, (module, batch) or (module, batch, loss)")
    if loss is not None and not callable(loss):
        raise ModelError(f"{text} returns a loss of type {type(loss).__name__}; it must be a function of (output, batch)")
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    if batch is not None and not isinstance(batch, tuple | list | Mapping):
        raise ModelError(f"{text} returns a batch of type {type(batch).__name__}; it must be a tensor, a tuple or a dict of tensors")
    return module, tuple(batch) if isinstance(batch, list) else batch, loss


def _make_batch_and_loss(text: str, make: Callable[[], tuple[nn.Module, Any, Loss | None]]) -> tuple[Any, Callable[[], Any], Loss | None]:
    """Return the factory's fake batch, a function that materializes it, and the loss; the module stays fake.

    The user's random state is preserved. The batch is materialized on demand: this replays the draws of the model that come before its
    batch, which planning need not wait for.
    """
    deferred = DeferredInit()

    @cache
    def real() -> Any:
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return _map_tensors(batch, lambda leaf: (deferred.real_value(leaf) if deferred.is_fake(leaf) else leaf).detach().cpu())
        except ModelError as error:
            raise ModelError(f"{text}: its batch or its loss cannot be made: {error}") from error

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with deferred:
            module, batch, loss = make()
        try:
            return batch, real, None if loss is None else materialize_loss(deferred, loss, module)
        except ModelError as error:
            raise ModelError(f"{text}: its batch or its loss cannot be made: {error}") from error


def _num_samples(text: str, batch: Any) -> int:
    sizes: list[int] = []
    other_types = list(dict.fromkeys(type(leaf).__name__ for _, leaf in named_leaves(batch) if not isinstance(leaf, torch.Tensor)))
    _map_tensors(batch, lambda leaf: sizes.append(leaf.shape[0]) if leaf.dim() else None)
    if batch is not None and not sizes:
        contents = f", it holds {', '.join(other_types)}" if other_types else ""
        raise ModelError(
            f"{text} returns a batch without tensors that have samples in dimension 0{contents}; make tensors of it, for example with "
            "torch.as_tensor"
        )
    if sizes and not sizes[0]:
        raise ModelError(f"{text} returns a batch of 0 samples, which dimension 0 of its first tensor counts; make one of 1 or more")
    return sizes[0] if sizes else 0


def _map_tensors(batch: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Apply `change` to every tensor of a nested batch."""
    if batch is None:
        return None
    return replace_leaves(batch, {path: change(leaf) if isinstance(leaf, torch.Tensor) else leaf for path, leaf in named_leaves(batch)})
