"""Gradients that are views of their buckets: what a loop holds of them stays as it is when the bucket is written again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.run.gradients.lent_gradients import LentGradients
from shardwise.run.state.parameters import FlatGroup

HOLDS: dict[str, Callable[[Tensor], object]] = {
    "itself": lambda x: x,
    "detached": lambda x: x.detach(),
    "a view": lambda x: x.view(-1),
    "a part": lambda x: x[:1],
    "a graph": lambda x: (x * torch.ones(3, requires_grad=True)).sum(),
    "numbers": lambda x: x.numpy(),
}


class Bucket:
    """Two parameters, of one bucket of 2 x 3 and 3 elements."""

    def __init__(self) -> None:
        self.parameters = {"a": nn.Parameter(torch.zeros(2, 3)), "b": nn.Parameter(torch.zeros(3))}
        members: Any = tuple(SimpleNamespace(name=name, size=p.numel(), shape=p.shape) for name, p in self.parameters.items())
        self.group = FlatGroup((0, 1), True, True, True, torch.zeros(9), torch.zeros(9), members, (0, 6))
        self.group.use_gradient_buffer(torch.zeros(9))
        self.lent = LentGradients([self.group], self.parameters)

    def write(self, value: float, protects: bool = True) -> None:
        """A backward that gives all gradients this value."""
        if protects:
            self.lent.protect_holders()
        self.group.grad.fill_(value)
        for name, p in self.parameters.items():
            if self.lent.is_lent(name):
                continue
            if p.grad is None:
                p.grad = self.lent.lend(name)
            else:
                p.grad.copy_(self.group.views[name])

    def zero(self) -> None:
        for p in self.parameters.values():
            p.grad = None


def _values(held: object) -> Tensor:
    if isinstance(held, Tensor) and held.grad_fn is not None:
        (x,) = (x for x in (getattr(held.grad_fn.next_functions[0][0], "_saved_self", None),) if x is not None)
        return x
    return torch.as_tensor(held)


@pytest.mark.parametrize("hold", HOLDS)
def test_what_is_held_stays_as_it_is(hold: str) -> None:
    bucket = Bucket()
    bucket.write(1.0)
    assert all(bucket.lent.is_lent(name) for name in bucket.parameters)
    grad = bucket.parameters["a"].grad
    assert grad is not None
    held = HOLDS[hold](grad)
    del grad
    bucket.zero()
    for value in (2.0, 3.0):
        bucket.write(value)
        assert bool((_values(held) == 1.0).all())
        assert all(p.grad is not None and bool((p.grad == value).all()) for p in bucket.parameters.values())
        bucket.zero()


def test_without_protection_it_does_not() -> None:
    bucket = Bucket()
    bucket.write(1.0)
    held = bucket.parameters["a"].grad
    bucket.zero()
    bucket.write(2.0, protects=False)
    assert held is not None
    assert bool((held == 2.0).all())


def test_without_holders_nothing_is_copied() -> None:
    bucket = Bucket()
    for value in (1.0, 2.0, 3.0):
        bucket.write(value)
        for name, p in bucket.parameters.items():
            assert p.grad is not None
            assert p.grad.data_ptr() == bucket.group.views[name].data_ptr()
            assert not p.grad._is_view()
        if value == 1.0:
            bucket.zero()
        elif value == 2.0:
            bucket.lent.protect_holders()  # gradients of parameters are not held by others
            bucket.parameters["a"].grad = None


def test_a_gradient_is_taken_back_before_its_bucket_is_written() -> None:
    bucket = Bucket()
    bucket.write(1.0)
    bucket.lent.take_back("a")
    bucket.group.grad.fill_(2.0)
    grads = [p.grad for p in bucket.parameters.values()]
    assert [float(grad.mean()) for grad in grads if grad is not None] == [1.0, 2.0]
