"""Proofs of float16: the loss is scaled and gradients are scaled back, in exact numbers; what is scaled wrongly is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise
from shardwise.run.prove.field_tensor import FieldMode, lift_constants
from shardwise.run.prove.finite_field import P
from shardwise.run.prove.proof import Proof
from shardwise.run.state.optimizer import Optimizer
from shardwise.run.state.precision import INITIAL_SCALE, LossScale
from shardwise.run.step.stage_runner import StageRunner

BATCH = tuple(torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
CLIPPED = {"name": "adamw", "clip": 0.5}
Mutation = Callable[[pytest.MonkeyPatch], None]
unscale, clip, backward = LossScale.unscale, Optimizer._clip, StageRunner.backward


class Perceptron(nn.Module):
    """Three layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 6)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = functional.gelu(layer(x))
        return functional.mse_loss(self.layers[-1](x), y)


def prove_scaled(layout: str, optimizer: str | dict[str, object] = "adamw", steps: int = 1) -> Proof:
    """Prove a layout in float16 at one point."""
    proof = shardwise.prove(Perceptron, f"{layout} precision=float16", BATCH, optimizer=optimizer, steps=steps, max_error_probability=0.1)
    assert isinstance(proof, Proof)
    return proof


@pytest.mark.parametrize(
    "layout", ["data=2 zero=2", "tensor=2", "pipeline=2 microbatches=4 schedule=zb-h1", "data=2 zero=3 microbatches=2 recompute=full"]
)
@pytest.mark.parametrize("optimizer", ["adamw", CLIPPED])
def test_scaled_gradients_are_scaled_back(layout: str, optimizer: str | dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    scales: list[float] = []

    def unscale_and_note(self: LossScale, gradients: Sequence[Tensor]) -> None:
        scales.append(self.factor)
        unscale(self, gradients)

    monkeypatch.setattr(LossScale, "unscale", unscale_and_note)
    proof = prove_scaled(layout, optimizer, steps=2)
    assert proof.ok, proof
    assert "precision=float16" in proof.layout
    assert set(scales) == {INITIAL_SCALE}


def forget_a_bucket(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LossScale, "unscale", lambda self, gradients: unscale(self, gradients[1:]))


def unscale_twice_as_far(patch: pytest.MonkeyPatch) -> None:
    def unscale_by_half(self: LossScale, gradients: Sequence[Tensor]) -> None:
        unscale(self, gradients)
        for gradient in gradients:
            gradient.mul_(0.5)

    patch.setattr(LossScale, "unscale", unscale_by_half)


def unscale_by_nearly_as_much(patch: pytest.MonkeyPatch) -> None:
    def unscale_nearly(self: LossScale, gradients: Sequence[Tensor]) -> None:
        unscale(self, gradients)
        gradients[-1].mul_(1 + 1e-15)

    patch.setattr(LossScale, "unscale", unscale_nearly)


def clip_before(patch: pytest.MonkeyPatch) -> None:
    """Clip gradients while they are scaled."""

    def clip_scaled(self: Optimizer) -> Tensor:
        gradients = [g for pairs in self._updated for _, g in pairs]
        for gradient in gradients:
            gradient.mul_(INITIAL_SCALE)
        norm = clip(self)
        for gradient in gradients:
            gradient.mul_(1 / INITIAL_SCALE)
        return norm

    patch.setattr(Optimizer, "_clip", clip_scaled)


def scale_a_stage_again(patch: pytest.MonkeyPatch) -> None:
    """Scale gradients that arrive from the next stage, as if they were of the loss."""

    def backward_scaled(self: StageRunner, saved: object, gradients: list[Tensor | None], scale: float) -> list[Tensor | None]:
        return backward(self, saved, [g if g is None else g * INITIAL_SCALE for g in gradients], scale)

    patch.setattr(StageRunner, "backward", backward_scaled)


@pytest.mark.parametrize(
    ("layout", "optimizer", "mutation"),
    [
        ("data=2 zero=2", "adamw", forget_a_bucket),
        ("data=2", "adamw", unscale_twice_as_far),
        ("tensor=2", "adamw", unscale_by_nearly_as_much),
        ("data=2 zero=1", CLIPPED, clip_before),
        ("pipeline=2 microbatches=2", "adamw", scale_a_stage_again),
    ],
)
def test_what_is_scaled_wrongly_is_found(
    layout: str, optimizer: str | dict[str, object], mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    assert not prove_scaled(layout, optimizer).ok


def test_only_what_stands_for_infinity_overflows() -> None:
    with FieldMode():  # type: ignore[no-untyped-call]
        scale = LossScale(torch.device("cpu"), "float64", scales_always=True)
        finite = lift_constants(torch.tensor([INITIAL_SCALE, 3.0, -1e290], dtype=torch.float64))
        scale.unscale([finite])
        assert finite.a[0] == 1
        assert int(finite.a[1]) * int(INITIAL_SCALE) % P == 3
        assert not bool(scale.overflowed)
        scale.unscale([lift_constants(torch.tensor([1.0, -torch.inf], dtype=torch.float64))])
        assert bool(scale.overflowed)
