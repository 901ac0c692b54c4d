"""Backward operators without a rule: the gradient of what torch composes the forward operator of, by autograd.

In: a call of `..._backward`. The forward operator's arguments are those of the same names. Not derived: operators whose forward torch does
not compose of others, and those that save something else than their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.run.prove.field_tensor import aten, register_fallback
from shardwise.world import private

_SUFFIX, _SAVED, _GRADIENT = "_backward", "saved_", "grad"


@register_fallback
def derive_backward(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the gradients of the composed forward operator; NotImplemented where there is none, or where an argument of it is unknown."""
    forward = _forward_of(func)
    if forward is None:
        return NotImplemented
    values = {**dict(zip(private.argument_names(func), args, strict=False)), **kwargs}
    gradients = [x for name, x in values.items() if name.startswith(_GRADIENT) and isinstance(x, Tensor)]
    known = {name.removeprefix(_SAVED): x for name, x in values.items() if not name.startswith(_GRADIENT)}
    names = private.argument_names(forward)
    num_known = next((i for i, name in enumerate(names) if name not in known), len(names))
    if not set(private.required_arguments(forward)) <= set(names[:num_known]):
        return NotImplemented
    return _differentiate(func, private.DECOMPOSITIONS[forward], [known[name] for name in names[:num_known]], gradients)


def _forward_of(func: Any) -> Any:
    """Return the forward operator of a backward one, if torch composes it of others."""
    name = func.overloadpacket.__name__
    stem = name.removesuffix(_SUFFIX)
    if stem == name:
        return None
    packets = (getattr(aten, candidate, None) for candidate in (stem, f"{stem}_forward"))
    forward = (getattr(packet, "default", None) for packet in packets)
    return next((operator for operator in forward if operator in private.DECOMPOSITIONS), None)


def _differentiate(func: Any, compose: Any, inputs: Sequence[Any], gradients: Sequence[Tensor]) -> Any:
    with private.autograd_in_dispatch(), torch.enable_grad():
        leaves = [x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
        wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        if len(wanted) != len(private.result_names(func)):
            return NotImplemented
        results = compose(*leaves)
        results = results if isinstance(results, list | tuple) else [results]
        found = torch.autograd.grad(list(results[: len(gradients)]), wanted, list(gradients))
    return found[0].detach() if len(found) == 1 else tuple(x.detach() for x in found)
