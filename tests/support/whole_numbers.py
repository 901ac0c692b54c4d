"""Rules of operators in a finite field beside torch's own results on whole numbers, which float64 computes exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.run.prove import prove as _  # noqa: F401 - registers the rules
from shardwise.run.prove.field_tensor import FieldMode, have_equal_numbers, lift_constants


def values_and_gradient(f: Callable[[Any], Any], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a function's values, and the gradient of their sum weighted by 1, 2, ..."""
    x = x.detach().requires_grad_()
    y = f(x)
    weights = torch.arange(1, y.numel() + 1).reshape(y.shape)
    (y * weights).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def check_on_whole_numbers(shape: tuple[int, ...], f: Callable[[Any], Any]) -> None:
    """Hold a function's values and gradient in the field against torch's on whole numbers, and see that other ones are told."""
    x = torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(0)).double()
    with FieldMode():  # type: ignore[no-untyped-call]
        values, gradient = values_and_gradient(f, lift_constants(x.clone()))
    expected_values, expected_gradient = values_and_gradient(f, x)
    assert have_equal_numbers(lift_constants(values), lift_constants(expected_values))
    assert have_equal_numbers(lift_constants(gradient), lift_constants(expected_gradient))
    assert not have_equal_numbers(lift_constants(values), lift_constants(expected_values * (1 + 1e-15)))
