"""`part.to(dtype)` in a model's forward, where the part is of that dtype already. In: a block in which a model is called. Out: such calls
leave parameters and buffers the tensors that they are, which others hold: a trace, an optimizer, a flat buffer.

Not modelled: casts to another dtype, which torch does as it would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_MODULE: Any = nn.Module


@contextmanager
def without_casts() -> Iterator[None]:
    """Torch itself puts even an equal tensor in a parameter's place, which traces refuse; and while all is made float64, a copy."""
    apply = _MODULE._apply

    def kept(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        held = {(x.dtype, x.device) for x in (*module.parameters(recurse), *module.buffers(recurse))}
        # Tried on others: a trace would take what comes out of a parameter, itself or not, for what is read from then on.
        is_same = all(_is_alike(x, change(x)) for x in (torch.empty(1, dtype=dtype, device=device) for dtype, device in held))
        return module if is_same else apply(module, change, recurse)

    _MODULE._apply = kept
    try:
        yield
    finally:
        _MODULE._apply = apply


def _is_alike(before: Tensor, after: Tensor) -> bool:
    return before.dtype == after.dtype and before.device == after.device
