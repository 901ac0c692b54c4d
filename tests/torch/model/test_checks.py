"""Checks of values in a model's forward: they are passed over where a trace meets them, and nothing else that hangs on values is."""

from __future__ import annotations

import json
import pdb
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.capture.capture import capture
from shardwise.errors import ModelError
from shardwise.model.gradients import parameters_with_gradient


class Checked(nn.Module):
    """Checks as users and libraries write them, of tensors and of a number in one, which libraries hand to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if y is not None and y.max() >= 3:
            raise ValueError("a class that there is not")
        if not torch.isfinite(x).all():
            said = f"not a number in {x.shape}"
            raise ValueError(said)
        if x.shape[0] < 1 or (x > 1e6).any() or (x < -1e6).any():
            raise ValueError
        assert (x.abs() < 1e6).all() or torch.isfinite(x).all(), "bounds"
        assert y is not None
        assert x.abs().max().item() < 1e6, f"{x.max().item()} is too large"
        assert not torch.isnan(x).any().item() and -1e6 < x.min().item() < 1e6  # noqa: PT018
        if not torch.isfinite(x).all().item() or y.max().item() > 99:
            raise ValueError(f"{y.min().item()} and {x.max().item():.3f}")
        assert torch.allclose(x, x) and not torch.equal(x, x + 1), "no number"  # noqa: PT018
        torch._assert((x > -1e6).all(), "small")
        torch._assert(x.shape[0] > 0, "no samples")
        if torch.isnan(x).any():
            print("there are such")
        if x.min() < -1e6 or x.max() > 1e6:
            import warnings

            warnings.warn("large", stacklevel=1)
        with torch.no_grad():
            torch._check(y.max().item() <= 12)
        loss: Tensor = nn.functional.cross_entropy(self.head(x), y)
        return loss


class Branches(Checked):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if x.mean() > 0:
            x = x * 2
        return super().forward(x, y)


class Speaks(Checked):
    """Something else is done beside what is said."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if x.mean() > 0:
            print("positive")
        else:
            x = x * 2
        return super().forward(x, y)


class RaisesAtTimes(Checked):
    """Whether it raises hangs on another value, and something else is done where it does not."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if x.mean() > 0:
            if x.max() > 9:
                raise ValueError
            x = x * 2
        return super().forward(x, y)


class RaisesByNumber(Checked):
    """The same of a number."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if x.mean() > 0:
            if int(x.max()) > 9:
                raise ValueError
            x = x * 2
        return super().forward(x, y)


class Untraceable(Checked):
    """What raises is the trace alone, since a tensor without values is no array."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if x.mean() > 0:
            print(x.detach().numpy().sum())
            x = x * 2
        return super().forward(x, y)


class Serialises(Checked):
    """The same of a number, and of an error that is raised from it."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if x.mean() > 0:
            json.dumps(x.max().item())
            x = x * 2
        if x.mean() < 0:
            try:
                x.detach().numpy()
            except RuntimeError:
                raise ValueError from None
            x = x * 2
        return super().forward(x, y)


class Waits(Checked):
    """For somebody at the keyboard, or ends all."""

    def __init__(self, how: Callable[[], Any]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if torch.isnan(x).any():
            self.how()
        return super().forward(x, y)


@pytest.mark.parametrize("how", [lambda: breakpoint(), lambda: input(), lambda: pdb.set_trace(), sys.exit])
def test_what_waits_or_ends_where_a_value_is_so_does_neither_in_a_trace(how: Callable[[], Any]) -> None:
    with pytest.raises(ModelError, match="data-dependent"):
        capture(Waits(how), batch())


class Chooses(Checked):
    """A number of its own, by a value: the same operators, and another constant."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        factor = torch.tensor([1.0]) if x.mean() > 0 else torch.tensor([2.0])
        return super().forward(x * factor, y)


class Catches(Checked):
    """What is raised is caught, and something else is done."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        try:
            assert x.mean() > 0
        except AssertionError:
            x = x * 2
        return super().forward(x, y)


class Loops(Checked):
    """How often it computes hangs on a value."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        while x.mean() > 1e-3:
            x = x * 0.5
        return super().forward(x, y)


class Hooks(Checked):
    """What is done otherwise cannot be captured at all."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.head(x)
        if x.mean() > 0:
            h.register_hook(lambda grad: grad * 2)
        return super().forward(x, y) + h.sum()


class Elsewhere(Checked):
    """Checks in functions, which put words together and clean up before they raise, or are read by no statement of their own."""

    calls = 0  # which another call finds changed

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        self.calls += 1
        self._refuse(bool(torch.isnan(x).any()))
        if x.mean() > 1e3:
            x.zero_()
            raise ValueError
        return super().forward(x, y)

    def _refuse(self, wrong: bool) -> None:
        if wrong:
            raise ValueError("no number")


def batch() -> dict[str, Tensor]:
    return {"x": torch.ones(8, 4), "y": torch.zeros(8, dtype=torch.int64)}


@pytest.mark.parametrize("model", [Checked, Elsewhere])
def test_checks_are_no_operators(model: type[nn.Module]) -> None:
    targets = {op.target.split(".")[1] for op in capture(model(), batch()).graph.operators}
    assert targets == {"linear", "cross_entropy_loss"}


def test_a_check_says_nothing_while_it_is_traced(capsys: pytest.CaptureFixture[str]) -> None:
    capture(Checked(), batch())
    assert capsys.readouterr().out == ""


class Picks(Checked):
    """A shape that follows values, inside a block without gradients."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            mean = x[x > 0].sort().values[0]
        return super().forward(x, y) * mean


@pytest.mark.parametrize(
    "model", [Branches, Speaks, RaisesAtTimes, RaisesByNumber, Untraceable, Serialises, Chooses, Catches, Loops, Hooks, Picks]
)
def test_branches_on_values_are_refused(model: type[nn.Module]) -> None:
    with pytest.raises(ModelError, match="data-dependent"):
        capture(model(), batch())


class Shapes(nn.Module):
    """Of these weights only the shapes or the dtypes are read, so that plain PyTorch gives them no gradient, and no decay."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.like, self.new, self.kind, self.wide = (nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.head(x) + torch.zeros_like(self.like(x)) + self.new(x).new_ones(4) + x.type_as(self.kind(x))
        return (h + x[:, :1].expand_as(self.wide(x))).square().mean()


def test_what_lends_its_shape_alone_learns_nothing() -> None:
    given, model = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), Shapes()
    graph = capture(model, {"x": given}).graph
    model(given).backward()
    values = {v.name: v.value for v in graph.parameters}
    want = {name for name, p in model.named_parameters() if p.grad is not None}
    assert {name for name, value in values.items() if value in parameters_with_gradient(graph)} == want


class Transcribes(nn.Module):
    """The targets of all samples in one row, by a mask and by lengths that the batch brings."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, words: Tensor, lengths: Tensor) -> Tensor:
        row, heard = words.masked_select(words > 0), self.head(x).log_softmax(-1).transpose(0, 1)
        loss: Tensor = nn.functional.ctc_loss(heard, row, torch.full((len(x),), x.shape[1]), lengths)
        return loss


def test_targets_in_one_row_are_each_samples_own() -> None:
    words = torch.tensor([[1, 0, 2], [0, 2, 0], [2, 1, 1], [0, 0, 0]])
    batch = {"x": torch.randn(4, 9, 5, generator=torch.Generator().manual_seed(0)), "words": words, "lengths": (words > 0).sum(1)}
    engine = shardwise.parallelize(Transcribes, batch=batch, plan="data=1 precision=float64", seed=0)
    torch.manual_seed(0)
    want = Transcribes().double()(**batch | {"x": batch["x"].double()})
    assert engine.step(batch).loss == pytest.approx(want.item(), rel=1e-12)
    with pytest.raises(Exception, match=r"target_lengths \[2, 1, 2, 1\].* picks \[2, 1, 3, 0\]"):
        engine.step(batch | {"lengths": torch.tensor([2, 1, 2, 1])})
