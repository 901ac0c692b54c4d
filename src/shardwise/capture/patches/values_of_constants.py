"""Constant folding: values that a model computes from numbers alone (masks, positions), and then reads in Python.

Torch: all tensors of a trace lack values: `if mask.all()`, `int(positions.max())` end it.
Wanted: the value, by the same calls on real tensors. Not of random numbers; after a write of an unknown value all earlier ones are dropped.
Test: tests/torch/capture/test_patches.py::values_of_constants
Until: not known
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.capture.fakes import for_real, tree_flatten, tree_map
from shardwise.capture.patches.patch import CallHooks, Patch, Trace

_CONSTRUCTORS = {
    torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.logspace, torch.ones, torch.tensor, torch.tril_indices,
    torch.triu_indices, torch.zeros,
}  # fmt: skip
_DRAWS = ("rand", "dropout", "bernoulli", "normal", "multinomial", "uniform", "exponential", "poisson", "cauchy", "geometric")
_VALUE_READS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__bool__: bool,
    torch.Tensor.__int__: int,
    torch.Tensor.__float__: float,
    torch.Tensor.item: torch.Tensor.item,
}


class _ConstantCalls:
    """Calls with constant results, replayed on real tensors when a value is read."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self._constant_tensors: dict[int, torch.Tensor] = {}  # kept alive so that no id is reused

    def answer(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of `ask` for constant tensors."""

        def answered(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
            if id(tensor) not in self._constant_tensors:
                return NotImplemented
            with for_real():
                return ask(self._value(tensor))

        return answered

    def _value(self, tensor: torch.Tensor) -> Any:
        real: dict[int, Any] = {}
        for func, args, kwargs, results in self._calls:
            args, kwargs = tree_map(lambda x: real.get(id(x), x), (args, kwargs))
            tensors = [x for x in tree_flatten(func(*args, **kwargs))[0] if isinstance(x, torch.Tensor)]
            real.update(zip(map(id, results), tensors, strict=True))
        return real[id(tensor)]

    def record_call(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record a call if its result depends on constant tensors and numbers only."""
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        constant = [id(x) in self._constant_tensors for x in inputs]
        name = getattr(func, "__name__", "")
        if all(constant) and (inputs or func in _CONSTRUCTORS) and not any(word in name for word in _DRAWS):
            results = [x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)]
            if results or name == "__setitem__":
                self._calls.append((func, args, kwargs, results))
                self._constant_tensors.update({id(x): x for x in results})
        elif any(constant) and ("out" in kwargs or (name.endswith("_") and id(args[0]) in self._constant_tensors)):  # possibly a write
            self._calls.clear()
            self._constant_tensors.clear()


def _watch_constants(trace: Trace) -> CallHooks:
    constants: _ConstantCalls = trace.memory.setdefault(__name__, _ConstantCalls())
    return CallHooks(replacements={func: constants.answer(ask) for func, ask in _VALUE_READS.items()}, after=constants.record_call)


PATCH = Patch(make_call_hooks=_watch_constants)
