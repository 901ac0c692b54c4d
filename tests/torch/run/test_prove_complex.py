"""Complex numbers in proofs: arithmetic against numpy's on whole numbers, and plans of models with complex numbers, right and wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise
from shardwise.run.prove import complex_rules, rank_threads
from shardwise.run.prove import prove as _  # noqa: F401 - registers the rules
from shardwise.run.prove.field_tensor import (
    CERTAINTY,
    COMPLEX_RULES,
    ComplexFieldTensor,
    FieldMode,
    degree_of,
    have_equal_numbers,
    lift_complex,
    lift_constants,
    random_like,
)
from shardwise.run.prove.finite_field import P
from shardwise.run.prove.proof import Proof

IDS = tuple(torch.randint(0, 12, (4, 4), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))


def gaussian_integers(*shape: int, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return rng.integers(-30, 30, shape) + 1j * rng.integers(-30, 30, shape)


def numbers_of(z: Any) -> Tensor:
    return lift_complex(torch.as_tensor(z, dtype=torch.complex128)).pair.a


ARITHMETIC: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "product": (lambda x, y: x * y, lambda x, y: x * y),
    "product with a real one": (lambda x, y: x * y.real, lambda x, y: x * y.real),
    "product with i": (lambda x, y: x * 1j + y, lambda x, y: x * 1j + y),
    "difference": (lambda x, y: 2 - x - y, lambda x, y: 2 - x - y),
    "conjugate": (lambda x, y: x.conj() * y, lambda x, y: x.conj() * y),
    "sums": (lambda x, y: x.sum(0) * y.mean(-1, keepdim=True) * 4, lambda x, y: x.sum(0) * y.mean(-1, keepdims=True) * 4),
    "matrix product": (lambda x, y: x @ y.transpose(0, 1), lambda x, y: x @ y.T),
    "linear": (lambda x, y: functional.linear(x, y, y[:, 0]), lambda x, y: x @ y.T + y[:, 0]),
    "einsum": (lambda x, y: torch.einsum("ij,kj->ik", x, y), lambda x, y: np.einsum("ij,kj->ik", x, y)),
    "whole power": (lambda x, y: x**3 + y.square(), lambda x, y: x**3 + y**2),
    "parts": (lambda x, y: torch.complex(x.imag, y.real), lambda x, y: x.imag + 1j * y.real),
    "structure": (
        lambda x, y: torch.cat([x.flip(0).reshape(2, -1), y.roll(1, 1)[:2]], 1)[:, 1:],
        lambda x, y: np.concatenate([x[::-1].reshape(2, -1), np.roll(y, 1, 1)[:2]], 1)[:, 1:],
    ),
    "choice": (lambda x, y: torch.where(x.real > 0, x, y), lambda x, y: np.where(x.real > 0, x, y)),
    "rows by number": (lambda x, y: x[torch.tensor([2, 0, 2])] + y[0], lambda x, y: x[[2, 0, 2]] + y[0]),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_is_numpys_on_whole_numbers(name: str) -> None:
    in_torch, in_numpy = ARITHMETIC[name]
    x, y = gaussian_integers(4, 4), gaussian_integers(4, 4, seed=1)
    with FieldMode():  # type: ignore[no-untyped-call]
        found = in_torch(*(lift_complex(torch.as_tensor(z)) for z in (x, y)))
    assert isinstance(found, ComplexFieldTensor)
    assert torch.equal(found.pair.a, numbers_of(in_numpy(x, y)))
    assert not torch.equal(found.pair.a, numbers_of(in_numpy(x, y).conj()))


def test_quotients_and_absolute_values_are_exact() -> None:
    x, y = (random_like(torch.zeros(3, 4, dtype=torch.complex128), name, 0) for name in "xy")
    assert have_equal_numbers(lift_complex(x / y * y).pair, lift_complex(x).pair)
    assert have_equal_numbers(lift_complex(y.reciprocal() * y).pair, lift_complex(torch.ones(3, 4, dtype=torch.complex128)).pair)
    squares: Any = x.real.square() + x.imag.square()
    assert have_equal_numbers(lift_constants(x.abs().square()), squares)
    assert have_equal_numbers(lift_complex(torch.sgn(x) * x.abs()).pair, lift_complex(x).pair)
    five = lift_complex(torch.tensor([3 + 4j])) / 5
    assert ((five.pair.a.flatten().double() * 0 + 1) > 0).all()
    assert [int(n) * 5 % P for n in five.pair.a.flatten()] == [3, 4]


def test_a_polar_number_is_size_times_cosine_and_sine() -> None:
    size, angle = (random_like(torch.zeros(5), name, 0) for name in ("size", "angle"))
    z: Any = torch.polar(size, angle)
    assert have_equal_numbers(z.real, size * angle.cos())
    assert have_equal_numbers(z.imag, size * angle.sin())


def test_gradients_are_torchs_on_whole_numbers() -> None:
    def gradients(x: Any, y: Any) -> tuple[Tensor, ...]:
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        z = torch.view_as_real((x * y.conj() + x[:1] * 2j) @ y.transpose(0, 1)) + x.real[..., None]
        (z * torch.arange(1, z.numel() + 1).reshape(z.shape)).sum().backward()
        return x.grad, y.grad

    x, y = (torch.as_tensor(gaussian_integers(3, 3, seed=seed)) for seed in (0, 1))
    with FieldMode():  # type: ignore[no-untyped-call]
        found = gradients(lift_complex(x), lift_complex(y))
    for z, expected in zip(found, gradients(x, y), strict=True):
        assert torch.equal(lift_complex(z).pair.a, numbers_of(expected))


def test_what_is_written_into_a_view_is_in_its_buffer() -> None:
    with FieldMode():  # type: ignore[no-untyped-call]
        buffer: Any = torch.zeros(2, 3, dtype=torch.complex128)
        buffer.view(-1)[3:].copy_(lift_complex(torch.tensor([1 + 2j, 3j, 4])))
        torch.view_as_real(buffer)[0, 0, 1] = 7.0
        buffer[1] *= 1j
    assert torch.equal(buffer.pair.a, numbers_of([[7j, 0, 0], [1j - 2, -3, 4j]]))


class RotaryAttention(nn.Module):
    """Llama's reference: queries and keys are turned as complex numbers by polar ones."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv, self.out = nn.Embedding(12, 8), nn.Linear(8, 24), nn.Linear(8, 12)
        angles = torch.outer(torch.arange(4.0), torch.tensor([1.0, 0.1]))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def turn(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * self.turns[None, :, None]
        return torch.view_as_real(turned).flatten(3).type_as(x)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        q, k, v = self.qkv(self.tokens(ids)).unflatten(-1, (3, 2, 4)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (self.turn(q), self.turn(k), v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return functional.cross_entropy(self.out(mixed.transpose(1, 2).flatten(2)).flatten(0, 1), labels.flatten())


class ComplexLayers(nn.Module):
    """Complex parameters and inputs, whose absolute values are the output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, dtype=torch.complex64), nn.Linear(6, 2, dtype=torch.complex64)
        self.phase = nn.Parameter(torch.linspace(0, 1, 6))

    def forward(self, z: Tensor) -> Tensor:
        hidden = self.up(z) * torch.polar(torch.ones_like(self.phase), self.phase)
        return (self.down(hidden * hidden.conj().abs()).abs().square() + hidden.real.mean()).mean()


def prove_layouts(make: Callable[[], nn.Module], layouts: Sequence[str], batch: tuple[Tensor, ...], steps: int = 1) -> list[Proof]:
    proofs = shardwise.prove(make, layouts, batch, max_error_probability=0.1, steps=steps)
    assert isinstance(proofs, tuple)
    return list(proofs)


ROTARY = ["tensor=2", "data=2 zero=2", "context=2 attention=ring", "data=2 tensor=2 context=2 attention=ulysses"]
SIGNAL = (torch.randn(4, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.parametrize("layouts", [ROTARY[:2], ROTARY[2:3], ROTARY[3:]])
def test_rotary_positions_as_complex_numbers_are_proven(layouts: list[str]) -> None:
    for proof in prove_layouts(RotaryAttention, layouts, IDS):
        assert proof.ok, proof


def test_complex_parameters_are_proven() -> None:
    for proof in prove_layouts(ComplexLayers, ["tensor=2", "data=2 zero=1 microbatches=2", "data=2 zero=3"], SIGNAL, steps=2):
        assert proof.ok, proof


@pytest.mark.parametrize("times", [1, 1000])
def test_a_conjugate_on_a_rank_is_found(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, on the first rank; on every rank, where the operator is named too. The serial run is on the main thread."""
    multiply, fired = complex_rules._apply_multiply, list[bool]()

    def multiply_conjugate(func: Any, x: Any, y: Any) -> Any:
        product: Any = multiply(func, x, y)
        if threading.current_thread() is threading.main_thread() or len(fired) >= times:
            return product
        fired.append(True)
        return product.conj()

    monkeypatch.setitem(COMPLEX_RULES, torch.ops.aten.mul, multiply_conjugate)
    (proof,) = prove_layouts(RotaryAttention, ["tensor=2"], IDS)
    assert not proof.ok
    assert times == 1 or "mul" in str(proof.wrong_value)


def test_a_sum_that_is_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    add_up = rank_threads.add_up
    monkeypatch.setattr(
        rank_threads, "add_up", lambda parts: add_up(parts) * (1 + 1e-15) if parts[0].is_floating_point() else add_up(parts)
    )
    for make, batch in ((RotaryAttention, IDS), (ComplexLayers, SIGNAL)):
        (proof,) = prove_layouts(make, ["data=2"], batch)
        assert not proof.ok


def test_degrees_are_those_of_real_parts() -> None:
    """A product is of degree 2; moved numbers keep theirs; a quotient divides by the square of an absolute value."""
    x, y = (random_like(torch.zeros(3, 4, dtype=torch.complex128), name, 0) for name in "xy")
    assert degree_of(x).total == degree_of(x.flip(0)).total == degree_of(torch.cat([x, y])).total == 1
    assert degree_of(x * y).total == degree_of((x * y)[1:]).total == degree_of(x @ y.mT).total == 2
    CERTAINTY.reset()
    quotient = x / y
    assert sum(degree_of(quotient).reciprocals.values()) == 1
    assert CERTAINTY.wrong_point_probability(degree_of(quotient)) >= (2 + 12 * 2) / P
