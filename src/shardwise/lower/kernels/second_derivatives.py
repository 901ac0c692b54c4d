"""Refusal of second derivatives by kernels whose backward autograd cannot differentiate: it exchanges values, or writes in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from shardwise.errors import UsageError


def refuse_second_derivatives(operator: str, key: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the backward of a kernel: with `create_graph=True` it raises UsageError that names `operator` and the layout's `key`."""

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def backward_once(ctx: Any, *grads: Any) -> Any:
            if torch.is_grad_enabled():  # in backward only with create_graph=True
                raise UsageError(
                    f"create_graph=True differentiates the gradient of {operator}, which {key} divides and which has no second derivative "
                    f"here: use a layout without {key}, or take the penalty of a part of the model without it"
                )
            return backward(ctx, *grads)

        return backward_once

    return decorate
