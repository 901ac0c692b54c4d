"""Forward hooks on submodules of a sharded model, for what a script logs: norms of activations, attention maps, which layers ran.

For submodules that were hooked after the model was sharded, the trace returns arguments and results of each call as extra outputs; when
the graph has run, the user's hooks are called with them, in the order of the calls. They see this rank's samples in full tensors, without
gradients. Not modelled: hooks on backward, and hooks that change what the model computes, which are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from shardwise.capture.nesting import named_leaves, replace_leaves
from shardwise.errors import UsageError
from shardwise.world import private

HookedModules = tuple[tuple[str, frozenset[int]], ...]  # (name, ids of its hooks) of each hooked submodule


@contextmanager
def record_hooked_calls(model: nn.Module, hooked: HookedModules) -> Iterator[None]:
    """Make the model return (output, [(name, args, kwargs, output) of each call of a hooked submodule]) within a block."""
    if not hooked:
        yield
        return
    calls: list[tuple[str, Any, Any, Any]] = []

    def begin(module: nn.Module, args: Any) -> None:
        calls.clear()

    def recorder(name: str) -> Any:
        return lambda module, args, kwargs, output: calls.append((name, args, kwargs, output))

    def finish(module: nn.Module, args: Any, output: Any) -> Any:
        return output, list(calls)

    submodules = dict(model.named_modules())
    tables = [(table, dict(table), ids) for name, ids in hooked for table in private.module_tables(submodules[name])[1]]
    handles = []
    try:
        for table, _, ids in tables:
            for number in ids & table.keys():
                del table[number]
        handles = [submodules[name].register_forward_hook(recorder(name), with_kwargs=True) for name, _ in hooked]
        handles += [model.register_forward_pre_hook(begin), model.register_forward_hook(finish)]
        yield
    finally:
        for handle in handles:
            handle.remove()
        for table, items, _ in tables:
            table.clear()
            table.update(items)


def call_hooks(model: nn.Module, hooked: HookedModules, calls: Iterable[tuple[str, Any, Any, Any]]) -> None:
    """Call the user's hooks with the recorded calls.

    Raises:
        UsageError: a hook returns something other than None, which could not reach the model.
    """
    submodules, ids = dict(model.named_modules()), dict(hooked)
    for name, *values in calls:
        args, kwargs, output = (_without_gradients(x) for x in values)
        for number, before, hook, takes_kwargs in private.hooks_around_forward(submodules[name]):
            if number not in ids[name]:
                continue
            arguments = (args, *((kwargs,) if takes_kwargs else ()), *(() if before else (output,)))
            if hook(submodules[name], *arguments) is not None:
                raise UsageError(
                    f"a hook on {name} returns something, which would change what the model computes; the divided model runs as a whole, "
                    "and hooks on its parts see what it computed: return nothing, or register the hook before the model is divided"
                )


def _without_gradients(values: Any) -> Any:
    tensors: Mapping[str, Any] = dict(named_leaves(values))
    return replace_leaves(values, {path: x.detach() if isinstance(x, Tensor) else x for path, x in tensors.items()}) if tensors else values
