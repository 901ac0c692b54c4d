"""Which of torch's optimizers can update flat buffers, and what they keep. In: a class and its options. Out: its traits, or why it cannot.

An optimizer may if a flat tensor of several parameters is updated as they are one by one. That is tried on small tensors, so that no list
of names says it. Not modelled: optimizers that call the model again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.errors import UsageError, said

_TRIED = 3  # steps
_SIZES = (3, 5)
Build = Callable[[Sequence[tuple[Tensor, bool]]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Traits:
    """`slots`: names of state of a parameter's shape; `scalars`: of state that is one number, the same for all parameters."""

    slots: tuple[str, ...]
    scalars: tuple[str, ...]


def kinds() -> dict[str, type[torch.optim.Optimizer]]:
    """torch's optimizers by name in lower case."""
    base = torch.optim.Optimizer
    classes = {name.lower(): kind for name, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, base)}
    return {name: kind for name, kind in classes.items() if kind is not base}


def takes(kind: type[torch.optim.Optimizer]) -> set[str]:
    """Names of an optimizer's options."""
    return set(inspect.signature(kind).parameters) - {"params"}


def traits(name: str, build: Build) -> Traits:
    """What an optimizer keeps.

    Raises:
        UsageError: it does not update each element by itself, or not from gradients alone; or it refuses its options.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    parts = [drawn(size) for size in _SIZES]
    flat = torch.cat(parts)
    try:
        apart, together = build([(p, True) for p in parts]), build([(flat, True)])
        for _ in range(_TRIED):
            for scale, p in enumerate(parts, 1):
                p.grad = scale * drawn(p.numel())
            flat.grad = torch.cat([p.grad for p in parts if p.grad is not None])
            apart.step()
            together.step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{_refused(name)}: {said(error)}; {REMEDY}") from error
    state = together.state.get(flat, {})
    slots = tuple(slot for slot, x in state.items() if isinstance(x, Tensor) and x.shape == flat.shape)
    scalars = tuple(slot for slot, x in state.items() if isinstance(x, Tensor) and not x.dim())
    agrees = torch.allclose(torch.cat(parts), flat, rtol=1e-12, atol=0)
    scalars_agree = all(torch.equal(apart.state[p][slot], state[slot]) for p in parts for slot in scalars)
    if not agrees or not scalars_agree or len(slots) + len(scalars) < len(state):
        raise UsageError(f"{_refused(name)}: what becomes of an element follows from others of its parameter too; {REMEDY}")
    return Traits(slots, scalars)


REMEDY = "use one that updates each element by itself, such as adamw, adam or rmsprop"


def _refused(name: str) -> str:
    return f"optimizer {name} cannot update pieces of parameters, which ranks have here"


def options_of(kind: type[torch.optim.Optimizer], name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options that a class knows. Raises UsageError for others."""
    accepted = takes(kind)
    for option in options:
        if option not in accepted:
            raise UsageError(f"optimizer {name} has no option {option!r}; it has {', '.join(sorted(accepted))}")
    return options
