"""Hooks on parts of a divided model, for what a script logs: activations' norms, attention maps, which layers ran.

In: the parts whose hooks were registered after the model was divided. Out: while the model is traced, what each call of such a part takes
and returns, as outputs beside the model's own; after it has computed, the user's hooks, called with them in the order of the calls. They
see this rank's samples, whole but for these, without gradients. Not modelled: hooks that change what the model computes, which are refused
by name, and hooks on backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from weft.capture.nesting import leaves, rebuild
from weft.errors import UsageError
from weft.world import private

Hooked = tuple[tuple[str, frozenset[int]], ...]  # of each such part, its name and which of its hooks


@contextmanager
def recording(model: nn.Module, hooked: Hooked) -> Iterator[None]:
    """A block in which the model, called, returns (its output, [(name, arguments, keyword arguments, output) of each call of a part])."""
    if not hooked:
        yield
        return
    calls: list[tuple[str, Any, Any, Any]] = []

    def begin(module: nn.Module, args: Any) -> None:
        calls.clear()

    def noted(name: str) -> Any:
        return lambda module, args, kwargs, output: calls.append((name, args, kwargs, output))

    def finish(module: nn.Module, args: Any, output: Any) -> Any:
        return output, list(calls)

    parts = dict(model.named_modules())
    tables = [(table, dict(table), ids) for name, ids in hooked for table in private.tables_of(parts[name])[1]]
    handles = []
    try:
        for table, _, ids in tables:
            for number in ids & table.keys():
                del table[number]
        handles = [parts[name].register_forward_hook(noted(name), with_kwargs=True) for name, _ in hooked]
        handles += [model.register_forward_pre_hook(begin), model.register_forward_hook(finish)]
        yield
    finally:
        for handle in handles:
            handle.remove()
        for table, items, _ in tables:
            table.clear()
            table.update(items)


def call_hooks(model: nn.Module, hooked: Hooked, calls: Iterable[tuple[str, Any, Any, Any]]) -> None:
    """Call the user's hooks of these calls.

    Raises:
        UsageError: a hook returns something else than None, which would not reach the model.
    """
    parts, ids = dict(model.named_modules()), dict(hooked)
    for name, *seen in calls:
        args, kwargs, output = (_without_gradients(x) for x in seen)
        for number, before, hook, takes_kwargs in private.hooks_around_forward(parts[name]):
            if number not in ids[name]:
                continue
            arguments = (args, *((kwargs,) if takes_kwargs else ()), *(() if before else (output,)))
            if hook(parts[name], *arguments) is not None:
                raise UsageError(
                    f"a hook on {name} returns something, which would change what the model computes; the divided model runs as a whole, "
                    "and hooks on its parts see what it computed: return nothing, or register the hook before the model is divided"
                )


def _without_gradients(seen: Any) -> Any:
    tensors: Mapping[str, Any] = dict(leaves(seen))
    return rebuild(seen, {path: x.detach() if isinstance(x, Tensor) else x for path, x in tensors.items()}) if tensors else seen
