"""Apply the table of patches: while a model is exported, while it is called, to the exported program, and to the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any

from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from weft.capture.patches import PATCHES
from weft.capture.patches.patch import Trace, Watch
from weft.model.graph import Graph


class _Calls(TorchFunctionMode):
    """Intercepts calls of torch's Python interface, and runs the replacements and hooks of the patches."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._answers = trace.answers
        watches = [patch.watch(trace) if patch.watch else Watch(calls=patch.calls) for patch in PATCHES]
        self._before = [watch.before for watch in watches if watch.before]
        self._after = [watch.after for watch in watches if watch.after]
        self._calls: dict[Any, list[Callable[..., Any]]] = {}
        for watch in watches:
            for func, call in watch.calls.items():
                self._calls.setdefault(func, []).append(call)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._called(func, args, dict(kwargs or {}))
        except Exception as error:
            self._answers.of_torch = error
            raise

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
def calling(trace: Trace) -> Iterator[None]:
    """A block in which the model of a trace is called.

    Raises:
        ModelError: the model does something that a graph of operators does not represent; the message names it.
    """
    with ExitStack() as stack:
        for patch in PATCHES:
            if patch.while_called:
                stack.enter_context(patch.while_called(trace))
        stack.enter_context(_Calls(trace))
        yield


@contextmanager
def tracing() -> Iterator[None]:
    """A block in which `torch.export` runs."""
    with ExitStack() as stack:
        for patch in PATCHES:
            if patch.while_traced:
                stack.enter_context(patch.while_traced())
        yield


def rewrite(module: GraphModule) -> None:
    """Rewrite an exported program in place."""
    for patch in PATCHES:
        if patch.program:
            patch.program(module)


def rewritten(graph: Graph) -> Graph:
    """Return the captured graph after the graph rewrites of all patches."""
    return reduce(lambda graph, patch: patch.graph(graph) if patch.graph else graph, PATCHES, graph)
