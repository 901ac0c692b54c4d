"""Apply the table of patches: while a model is exported, while it is called, to the exported program, and to the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any

from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from shardwise.capture.nesting import map_tensors, tensors_in
from shardwise.capture.patches import PATCHES
from shardwise.capture.patches.patch import CallHooks, Trace
from shardwise.model.graph import Graph


class _CallInterceptor(TorchFunctionMode):
    """Intercepts calls of torch's Python interface, and runs the replacements and hooks of the patches."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._answers = trace.answers
        current = dict(trace.model.named_parameters())
        self._replaced = {id(p): current[name] for name, p in trace.own_parameters.items() if current.get(name, p) is not p}
        watches = [
            patch.make_call_hooks(trace) if patch.make_call_hooks else CallHooks(replacements=patch.replacements) for patch in PATCHES
        ]
        self._before = [watch.before for watch in watches if watch.before]
        self._after = [watch.after for watch in watches if watch.after]
        self._calls: dict[Any, list[Callable[..., Any]]] = {}
        for watch in watches:
            for func, call in watch.replacements.items():
                self._calls.setdefault(func, []).append(call)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._run_patched(func, args, dict(kwargs or {}))
        except Exception as error:
            self._answers.last_torch_error = error
            raise

    def _run_patched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(id(x) in self._replaced for x in tensors_in((args, kwargs))):
            args, kwargs = map_tensors((args, kwargs), lambda x: self._replaced.get(id(x), x))
        for before in self._before:
            before(func, args, kwargs)
        for call in self._calls.get(func, ()):
            result = call(*args, **kwargs)
            if result is not NotImplemented:
                break
        else:
            result = func(*args, **kwargs)
        for after in self._after:
            after(func, args, kwargs, result)
        return result


@contextmanager
def patched_for_call(trace: Trace) -> Iterator[None]:
    """A block in which the model of a trace is called.

    Raises:
        ModelError: the model does something that a graph of operators does not represent; the message names it.
    """
    with ExitStack() as stack:
        for patch in PATCHES:
            if patch.while_called:
                stack.enter_context(patch.while_called(trace))
        stack.enter_context(_CallInterceptor(trace))
        yield


@contextmanager
def patched_for_export() -> Iterator[None]:
    """A block in which `torch.export` runs."""
    with ExitStack() as stack:
        for patch in PATCHES:
            if patch.while_traced:
                stack.enter_context(patch.while_traced())
        yield


def rewrite_program(module: GraphModule) -> None:
    """Rewrite an exported program in place."""
    for patch in PATCHES:
        if patch.rewrite_program:
            patch.rewrite_program(module)


def rewrite_graph(graph: Graph) -> Graph:
    """Return the captured graph after the graph rewrites of all patches."""
    return reduce(lambda graph, patch: patch.rewrite_graph(graph) if patch.rewrite_graph else graph, PATCHES, graph)
