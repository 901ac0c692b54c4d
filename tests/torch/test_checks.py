"""Checks of values in a model's forward: they are passed over where a trace meets them, and nothing else that hangs on values is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.model.capture import capture
from weft.model.gradients import learned


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
        with torch.no_grad():
            torch._check(y.max().item() <= 12)
        loss: Tensor = nn.functional.cross_entropy(self.head(x), y)
        return loss


class Branches(Checked):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if x.mean() > 0:
            x = x * 2
        return super().forward(x, y)


class Raises(Checked):
    """Something else is done before it raises."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if x.mean() > 0:
            x.zero_()
            raise ValueError
        return super().forward(x, y)


def batch() -> dict[str, Tensor]:
    return {"x": torch.ones(8, 4), "y": torch.zeros(8, dtype=torch.int64)}


def test_checks_are_no_operators() -> None:
    targets = {op.target.split(".")[1] for op in capture(Checked(), batch()).graph.operators}
    assert targets == {"linear", "cross_entropy_loss"}


class Picks(Checked):
    """A shape that follows values, inside a block without gradients."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            mean = x[x > 0].mean()
        return super().forward(x, y) * mean


@pytest.mark.parametrize("model", [Branches, Raises, Picks])
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
    assert {name for name, value in values.items() if value in learned(graph)} == want
