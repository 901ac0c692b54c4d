"""What a comparison lets pass and what it does not, on tensors; and the noise of a serial run against what is known of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.state.optimizer import OptimizerSpec
from shardwise.run.verify.serial import RoundingNoise, SerialRun
from shardwise.run.verify.shard_differences import relative_error
from shardwise.run.verify.verify import StepComparison

EPSILON = torch.finfo(torch.float64).eps


def values(**gradients: Tensor) -> dict[str, dict[str, Tensor]]:
    return {"loss": {"": torch.tensor(1.0, dtype=torch.float64)}, "gradients": gradients, "input_gradients": {}, "weights": {}}


def compared(got: Tensor | None, want: Tensor, noise: float, largest: float = 1.0) -> StepComparison:
    seen = StepComparison(1e-9, lambda kind, name, reference, step: noise)
    other = torch.tensor([largest], dtype=torch.float64)
    seen.compare_step(0, values(other=other, **({} if got is None else {"g": got})), values(other=other, g=want))
    return seen


def real(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize(
    ("got", "want", "noise", "passes"),
    [
        (real(1.0, 2.0), real(1.0, 2.0), 0.0, True),
        (real(1.0, 2.0 + 1e-9), real(1.0, 2.0), 1e-16, True),
        (real(1.0, 2.0 + 2e-8), real(1.0, 2.0), 1e-15, False),  # 1e-8 relative
        (real(3e-17), real(-2e-17), 3e-17, True),  # noise on both sides
        (real(0.0), real(-2e-17), 3e-17, True),
        (real(2e-14), real(-2e-17), 3e-17, False),  # more than noise
        (real(0.0), real(2e-17), 1e-33, False),  # a small gradient that is real
        (real(2e-17 * (1 + 1e-8)), real(2e-17), 1e-33, False),
        (real(0.0), real(1e-3), 1e-3, False),  # a value that means nothing at all is not excused: that is no rounding
        (real(float("nan")), real(0.0), 1.0, False),
        (real(1.0, 2.0), real(1.0), 1.0, False),
        (None, real(0.0), 1.0, False),
    ],
)
def test_what_is_equal(got: Tensor | None, want: Tensor, noise: float, passes: bool) -> None:
    found = compared(got, want, noise)
    assert (found.first_difference is None) == passes, found
    if not passes:
        assert found.first_difference is not None
        assert found.first_difference.startswith("gradients of g in step 1")


@pytest.mark.parametrize(
    ("weight", "gradient", "gain", "passes"),
    [
        (1.2e-9, 2e-14, 1e5, True),
        (1.2e-9, 2e-14, 0.0, False),  # more than 1e-9 of the largest weight
        (1.2e-9, 1e-15, 1e5, False),  # more than the update makes of the gradient's difference
        (2.5e-9, 2e-14, 1e5, False),
        (3e-8, 9e-10, 1e5, False),  # more than noise
        (1.2e-9, 2e-9, 1e5, False),  # of a gradient that differs itself
    ],
)
def test_a_weight_may_differ_by_what_its_update_makes_of_noise(weight: float, gradient: float, gain: float, passes: bool) -> None:
    """Of a gradient that is zero but for rounding. The largest weight and gradient are 1; serial runs differ by 1.3e-9 and 2e-10."""
    noise = {"gradients": 2e-10, "weights": 1.3e-9}
    seen = StepComparison(1e-9, lambda kind, name, reference, step: noise[kind], optimizer_gain=gain)
    want = values(other=real(1.0), b=real(0.0)) | {"weights": {"other": real(1.0), "b": real(0.25)}}
    got = values(other=real(1.0), b=real(gradient)) | {"weights": {"other": real(1.0), "b": real(0.25 + weight)}}
    seen.compare_step(0, got, want)
    assert (seen.first_difference is None) == passes, seen


def test_gain_is_how_much_adamw_makes_of_noise() -> None:
    """Two runs of torch's whose gradients are noise; SGD, momentum or other optimizers have none that is known."""
    spec, generator = OptimizerSpec("adamw", lr=1e-3, weight_decay=0.0), torch.Generator().manual_seed(0)
    weights = [torch.ones(50, dtype=torch.float64).requires_grad_() for _ in range(2)]
    runs, far = [spec.build([(w, False)]) for w in weights], 0.0
    for step in range(4):
        noise = [1e-14 * torch.randn(50, dtype=torch.float64, generator=generator) for _ in weights]
        far = max(far, float((noise[0] - noise[1]).abs().max()))
        for run, w, gradient in zip(runs, weights, noise, strict=True):
            w.grad = gradient
            run.step()
        moved = float((weights[0] - weights[1]).detach().abs().max())
        assert moved < spec.rounding_gain * (step + 1) * far * (1 + 1e-4)
        assert step or moved > 0.999 * spec.rounding_gain * far
    assert OptimizerSpec("sgd", momentum=0.9).rounding_gain == OptimizerSpec("rmsprop").rounding_gain == 0.0


def test_noise_is_not_measured_where_all_is_well() -> None:
    def never(*asked: Any) -> float:
        raise AssertionError(asked)

    seen = StepComparison(1e-9, never)
    seen.compare_step(0, values(g=real(1.0)), values(g=real(1.0 + 1e-12)))
    assert 0.9e-12 < seen.worst["gradients"] < 1.1e-12


def test_relative_error_is_of_the_largest() -> None:
    assert relative_error(real(1.0, 4.5), real(1.0, 4.0)) == 0.125
    assert relative_error(real(1.0), real(0.0)) == 1.0
    assert relative_error(real(1.0), real(0.0), floor=4.0) == 0.25


def test_infinities_are_equal_only_to_themselves() -> None:
    """A mask of -inf is a buffer of many models."""
    infinite, nan = float("inf"), float("nan")
    assert relative_error(real(-infinite, 4.5), real(-infinite, 4.0)) == 0.125
    for got, want in ((infinite, -infinite), (1.0, infinite), (infinite, 1.0), (nan, 1.0), (nan, nan)):
        assert relative_error(real(got, 1.0), real(want, 1.0)) == infinite


class Cancels(nn.Module):
    """The gradient of `shift` is a sum of `terms` that is zero; the others' are what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.zeros(8))
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.terms = self.inside(x) + self.shift
        self.terms.retain_grad()
        out: Tensor = self.head(self.norm(self.terms).tanh()).square().mean()
        return out


class Asking(nn.Module):
    """Asks for gradients of its own input, which torch allows of a leaf only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :]
        x.requires_grad = True
        return self.layer(x).square().mean()  # type: ignore[no-any-return]


def test_a_model_that_asks_for_gradients_of_its_input_is_trained_as_plain_pytorch_does() -> None:
    x, plan = torch.ones(4, 8), Plan(Layout(precision="float64"), "Asking", "1xcpu-2", 4)
    found = SerialRun(Asking, 0, (x,), None, plan, OptimizerSpec(), torch.device("cpu")).step()
    assert not found["input_gradients"]
    assert all(bool(x.any()) for x in found["gradients"].values())


class Masked(nn.Module):
    """nanoGPT's mask: a buffer that is a view of another tensor."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4, 4).tril().view(1, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x)[:, None] * self.mask).square().mean()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_buffer_may_be_a_view(precision: str) -> None:
    plan = Plan(Layout(precision=precision), "Masked", "1xcpu-2", 2)
    found = SerialRun(Masked, 0, (torch.ones(2, 4),), None, plan, OptimizerSpec(), torch.device("cpu")).step()
    assert found["gradients"]["layer.weight"].any()


def test_noise_measures_the_terms_that_cancel() -> None:
    """Noise over the unit of rounding is the sum of the terms' magnitudes: here to within a factor of 30, of a sum that is zero."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plan = Plan(Layout(precision="float64"), "Cancels", "1xcpu-2", 64)

    def make() -> SerialRun:
        return SerialRun(Cancels, 0, (x,), None, plan, OptimizerSpec(), torch.device("cpu"))

    serial, noise = make(), RoundingNoise(make)
    for step in range(2):
        found = serial.step()
        assert isinstance(serial.model, Cancels)
        assert serial.model.terms.grad is not None
        terms = serial.model.terms.grad.abs().sum(0).max().item()
        cancelled = found["gradients"]["shift"]
        assert cancelled.abs().max() < 1e-14
        assert terms * EPSILON / 30 < noise.max_distance("gradients", "shift", cancelled, step) < terms * EPSILON * 30
        sound = found["gradients"]["head.weight"]
        assert noise.max_distance("gradients", "head.weight", sound, step) < 100 * EPSILON * sound.abs().max()
        assert noise.max_distance("weights", "inside.weight", found["weights"]["inside.weight"], step) < 1e-12


def test_an_ill_conditioned_model_is_told_from_a_wrong_run() -> None:
    """Noise above the tolerance of the largest tensor excuses nothing, and is named as what it is."""
    chaotic = compared(real(1.0 + 2e-9), real(1.0), noise=1e-9)
    assert "serial runs whose weights differ by one unit of rounding do so too (1.0e-09)" in (chaotic.first_difference or "")
    wrong = compared(real(1.0 + 2e-9), real(1.0), noise=1e-15)
    assert wrong.first_difference == "gradients of g in step 1: relative error 2.0e-09"


def test_a_serial_loss_that_is_no_number_is_told() -> None:
    seen, loss = StepComparison(1e-9, lambda kind, name, reference, step: 0.0), {"": real(float("nan"))}
    seen.compare_step(0, {**values(), "loss": loss}, {**values(), "loss": loss})
    assert "the serial run's is nan, so there is nothing to compare" in (seen.first_difference or "")
