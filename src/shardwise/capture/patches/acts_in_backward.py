"""Tensor hooks, and gradients computed in forward.

Torch: a trace silently drops hooks, and has `autograd.grad` as operators without second derivatives.
Wanted: both are refused by name.
Test: tests/torch/capture/test_untraceable.py::test_what_a_graph_cannot_hold_is_refused_by_name
Until: not known
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardwise.capture.patches.patch import Patch
from shardwise.errors import ModelError

_REFUSED_CALLS: dict[Any, str] = {
    Tensor.register_hook: "registers a hook on a tensor",
    Tensor.register_post_accumulate_grad_hook: "registers a hook on a tensor",
    Tensor.backward: "calls backward",
    torch.autograd.grad: "calls torch.autograd.grad",
    torch.autograd.backward: "calls torch.autograd.backward",
}


def _make_refusal(act: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ModelError(f"the model {act} while it runs, which a captured graph does not hold")

    return refuse


PATCH = Patch(replacements={func: _make_refusal(act) for func, act in _REFUSED_CALLS.items()})
