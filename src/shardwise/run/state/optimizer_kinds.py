"""Determine which of torch's optimizers are elementwise, so that they can update flat buffers and shards, and their state tensors.

An optimizer qualifies if it updates a flat tensor of several parameters like the parameters one by one. This is tested on small tensors,
so that no list of names is needed. Not supported: optimizers that call the model again (closures).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import UsageError, format_error

_NUM_TRIAL_STEPS = 3  # steps
_TRIAL_SIZES = (3, 5)
BuildOptimizer = Callable[[Sequence[tuple[Tensor, bool]]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class OptimizerTraits:
    """Names of an optimizer's state: `slots` of a parameter's shape; `scalars`: one number, the same for all parameters."""

    slots: tuple[str, ...]
    scalars: tuple[str, ...]


def optimizer_classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Return torch's optimizer classes by name in lower case."""
    base = torch.optim.Optimizer
    classes = {name.lower(): kind for name, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, base)}
    return {name: kind for name, kind in classes.items() if kind is not base}


def option_names(kind: type[torch.optim.Optimizer]) -> set[str]:
    """Return the names of an optimizer's options."""
    return set(inspect.signature(kind).parameters) - {"params"}


def measure_traits(name: str, build: BuildOptimizer) -> OptimizerTraits:
    """Measure the state tensors of an optimizer on a trial update.

    Raises:
        UsageError: it is not elementwise, needs more than gradients, or rejects its options.
    """
    generator = torch.Generator().manual_seed(0)

    def sample_normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    parameters = [sample_normal(size) for size in _TRIAL_SIZES]
    flat = torch.cat(parameters)
    try:
        per_parameter, flattened = build([(p, True) for p in parameters]), build([(flat, True)])
        for _ in range(_NUM_TRIAL_STEPS):
            for scale, p in enumerate(parameters, 1):
                p.grad = scale * sample_normal(p.numel())
            flat.grad = torch.cat([p.grad for p in parameters if p.grad is not None])
            per_parameter.step()
            flattened.step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{_explain_refusal(name)}: {format_error(error)}; {REMEDY}") from error
    state = flattened.state.get(flat, {})
    slots = tuple(slot for slot, x in state.items() if isinstance(x, Tensor) and x.shape == flat.shape)
    scalars = tuple(slot for slot, x in state.items() if isinstance(x, Tensor) and not x.dim())
    agrees = torch.allclose(torch.cat(parameters), flat, rtol=1e-12, atol=0)
    scalars_agree = all(torch.equal(per_parameter.state[p][slot], state[slot]) for p in parameters for slot in scalars)
    if not agrees or not scalars_agree or len(slots) + len(scalars) < len(state):
        raise UsageError(f"{_explain_refusal(name)}: the update of an element depends on others of its parameter; {REMEDY}")
    return OptimizerTraits(slots, scalars)


REMEDY = "use one that updates each element by itself, such as adamw, adam or rmsprop"


def _explain_refusal(name: str) -> str:
    return f"optimizer {name} cannot update pieces of parameters, which ranks have here"


def check_options(kind: type[torch.optim.Optimizer], name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options if the class accepts them all. Raises UsageError for others."""
    accepted = option_names(kind)
    for option in options:
        if option not in accepted:
            raise UsageError(f"optimizer {name} has no option {option!r}; it has {', '.join(sorted(accepted))}")
    return options
