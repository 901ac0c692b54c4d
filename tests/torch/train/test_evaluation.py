"""Evaluation is the serial model's own: a capture of its own, in evaluation; what cannot be followed there is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import ModelError


class _Model(nn.Module):
    """Dropout, statistics, recurrence and attention with dropout; `odd` adds what only training does."""

    def __init__(self, odd: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.up, self.drop, self.norm = nn.Linear(8, 8), nn.Dropout(0.3), nn.BatchNorm1d(8)
        self.recurrent = nn.GRU(8, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.channels, self.alpha = nn.Dropout1d(0.4), nn.AlphaDropout(0.4)
        self.odd = odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.alpha(self.channels(self.drop(self.norm(self.up(x)))))
        y = self.recurrent(y.unsqueeze(1))[0]
        y = nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=0.1 if self.training else 0.0)
        return (y if self.odd is None else self.odd(self, y)).square().mean()


X = (torch.randn(4, 8, generator=torch.Generator().manual_seed(1)),)


def test_evaluation_is_that_of_the_serial_model() -> None:
    engine = shardwise.parallelize(_Model, X, plan="data=1", seed=0)
    engine.step(X)
    torch.manual_seed(0)
    serial = _Model()
    state = engine.full_state_dict()
    assert state is not None
    serial.load_state_dict(state, strict=False)
    serial.eval()
    with torch.no_grad():
        assert engine.evaluate(X) == pytest.approx(float(serial(*X)), rel=1e-6)
    assert engine.step(X).loss > 0


@pytest.mark.parametrize(
    "odd",
    [
        lambda module, y: y * 2 if module.training else y,
        lambda module, y: y * (2.0 if module.training else 3.0),
        lambda module, y: y if module.training else y.relu(),
        lambda module, y: (y + y.mean()) if module.training else (y.mean() - y),
    ],
)
def test_what_only_training_does_is_left_out(odd: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    """Evaluation is a capture of its own: it may have other operators, other numbers, and another order."""
    engine = shardwise.parallelize(lambda: _Model(odd), X, plan="data=1", seed=0)
    engine.step(X)
    assert engine.evaluate(X) == pytest.approx(_serial(_Model(odd), engine), rel=1e-6)
    assert engine.step(X).loss > 0
    assert engine.evaluate(X) == pytest.approx(_serial(_Model(odd), engine), rel=1e-6)


def _serial(model: nn.Module, engine: shardwise.Engine) -> float:
    """The loss of the serial model in evaluation, with the engine's weights."""
    state = engine.full_state_dict()
    assert state is not None
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        return float(model.eval()(*X))


def test_evaluation_that_cannot_be_followed_is_refused_by_name() -> None:
    def odd(module: nn.Module, y: torch.Tensor) -> torch.Tensor:
        return y if module.training or float(y.sum()) > 0 else -y

    engine = shardwise.parallelize(lambda: _Model(odd), X, plan="data=1", seed=0)
    engine.step(X)
    with pytest.raises(ModelError, match=r"cannot be evaluated.*torch.export cannot follow the model"):
        engine.evaluate(X)


def test_a_model_that_is_built_in_evaluation_is_trained_in_training() -> None:
    """As `from_pretrained` returns one. What an engine's step does is training."""
    engine = shardwise.parallelize(lambda: _Branch().eval(), X, plan="data=1", seed=0)
    torch.manual_seed(0)
    serial = _Branch()
    assert engine.step(X).loss == pytest.approx(float(serial(*X).detach()), rel=1e-6)
    assert engine.evaluate(X) == pytest.approx(_serial(_Branch(), engine), rel=1e-6)
    assert shardwise.verify(lambda: _Branch().eval(), "data=1", X).ok


class _Branch(nn.Module):
    """Doubles in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).square().mean()
        return 2 * y if self.training else y


class _Untraceable(nn.Module):
    """Branches on data, so that it runs whole; with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.up(x))
        return y.square().mean() if float(x.sum()) > -1e9 else y.mean()


def test_a_model_that_runs_whole_drops_nothing_in_evaluation() -> None:
    engine = shardwise.parallelize(_Untraceable, X, plan="data=1", seed=0)
    assert engine.plan.uncaptured
    assert engine.evaluate(X) == engine.evaluate(X)
    serial = _Untraceable()
    state = engine.full_state_dict()
    assert state is not None
    serial.load_state_dict(state)
    with torch.no_grad():
        assert engine.evaluate(X) == pytest.approx(float(serial.eval()(*X)), rel=1e-6)


class _Equation(nn.Module):
    """A loss of derivatives of the model, which it asks for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.body(x).sum(), x, create_graph=True)
        return (slope.sum(1) - 1).square().mean()


def test_a_model_that_asks_for_its_own_gradients_is_evaluated() -> None:
    engine = shardwise.parallelize(_Equation, X, plan="data=1", seed=0)
    assert engine.plan.uncaptured
    serial = _Equation()
    state = engine.full_state_dict()
    assert state is not None
    serial.load_state_dict(state)
    assert engine.evaluate(X) == pytest.approx(float(serial(*X).detach()), rel=1e-6)
