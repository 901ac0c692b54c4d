"""What a traced program computes from numbers alone (masks, positions), so that it can be told their values.

In: calls of torch's Python interface, in order. Out: the value of a tensor that follows from no input, parameter or buffer.
Not modelled: random numbers, and tensors that the program writes with something unknown: after that nothing earlier is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.capture.fakes import for_real, tree_flatten, tree_map

_MAKES = {
    torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.logspace, torch.ones, torch.tensor, torch.tril_indices,
    torch.triu_indices, torch.zeros,
}  # fmt: skip
_DRAWS = ("rand", "dropout", "bernoulli", "normal", "multinomial", "uniform", "exponential", "poisson", "cauchy", "geometric")
_ASKS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__bool__: bool,
    torch.Tensor.__int__: int,
    torch.Tensor.__float__: float,
    torch.Tensor.item: torch.Tensor.item,
}


class Known:
    """The calls whose results are known, replayed when a value is asked for."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self._held: dict[int, torch.Tensor] = {}  # alive, so that no identity is used again

    def asked(self, func: Any, args: Any) -> tuple[Any] | None:
        """The number that `func(*args)` asks of a known tensor, in a tuple; None where it asks for none, or of another."""
        how = _ASKS.get(func)
        if how is None or id(args[0]) not in self._held:
            return None
        with for_real():
            real: dict[int, Any] = {}
            for called, given, named, made in self._calls:
                given, named = tree_map(lambda x: real.get(id(x), x), (given, named))
                found = [x for x in tree_flatten(called(*given, **named))[0] if isinstance(x, torch.Tensor)]
                real.update(zip(map(id, made), found, strict=True))
            return (how(real[id(args[0])]),)

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note a call, if its result follows from known tensors and numbers alone."""
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        known = [id(x) in self._held for x in given]
        name = getattr(func, "__name__", "")
        if all(known) and (given or func in _MAKES) and not any(word in name for word in _DRAWS):
            made = [x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)]
            if made or name == "__setitem__":
                self._calls.append((func, args, kwargs, made))
                self._held.update({id(x): x for x in made})
        elif any(known) and ("out" in kwargs or (name.endswith("_") and id(args[0]) in self._held)):  # a write, or so it may be
            self._calls.clear()
            self._held.clear()
