"""Models with functions whose backward is the user's own, as papers and libraries have them: surrogate gradients, fused layers, losses.

Every factory returns (module, batch), 8 samples in dimension 0. `shardwise verify tests/support/function_models.py:NAME`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

N, D, H, C = 8, 12, 16, 4  # samples, features, hidden, classes


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Quick(Function):
    """An activation with a backward that is close to its own, as fused kernels have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(1.702 * x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(1.702 * x)
        return grad * (gate + 1.702 * x * gate * (1 - gate))


class Otherwise(Function):
    """Its backward has nothing to do with its forward: gradients are the user's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 0.3 * grad * torch.cos(x) - 0.1


class Reversed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * grad, None


class Sign(Function):
    """Straight through, where |x| <= 1 (Courbariaux et al. 2016)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad = grad.clone()
        grad[x.abs() > 1] = 0
        return grad


class Product(Function):
    """A linear layer as torch's own tutorial writes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        out = x.mm(weight.t())
        if bias is not None:
            out += bias.unsqueeze(0).expand_as(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight, bias = ctx.saved_tensors
        made: list[Tensor | None] = [None, None, None]
        if ctx.needs_input_grad[0]:
            made[0] = grad.mm(weight)
        if ctx.needs_input_grad[1]:
            made[1] = grad.t().mm(x)
        if bias is not None and ctx.needs_input_grad[2]:
            made[2] = grad.sum(0)
        return made[0], made[1], made[2]


class Held(Function):
    """Keeps its weight as an attribute of the context, and a view and a product of another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.weight, ctx.scaled = weight, weight.t() * scale.unsqueeze(-1)
        ctx.save_for_backward(x, weight.t(), scale)
        return (x * scale) @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, turned, scale = ctx.saved_tensors
        return grad @ ctx.scaled.t(), grad.t() @ (x * scale), ((grad @ ctx.weight) * x).sum(0) + 0.0 * turned.sum()


class Softmax(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = (x - x.amax(-1, keepdim=True)).exp()
        out /= out.sum(-1, keepdim=True)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return out * (grad - (grad * out).sum(-1, keepdim=True))


class Best(Function):
    """The largest of each row, and where it is, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        best, at = x.max(-1)
        above = (x > 0).to(x.dtype)
        ctx.mark_non_differentiable(at, above)
        ctx.save_for_backward(at)
        ctx.width = x.shape[-1]
        return best, at, above

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *none: Any) -> Tensor:
        (at,) = ctx.saved_tensors
        out = torch.zeros(*grad.shape, ctx.width, dtype=grad.dtype)
        return out.scatter(-1, at.unsqueeze(-1), grad.unsqueeze(-1)) * 2


class Two(Function):
    """Two outputs with gradients, of which one may not be read; gradients that are not there stay None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> Tensor | None:
        (x,) = ctx.saved_tensors
        made = None if a is None else a * x.cos() * 1.5
        if b is not None:
            made = -b * x.sin() if made is None else made - b * x.sin()
        return made


class Clamped(Function):
    """New style: forward without a context; an argument by its default, and one in a tuple."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor, span: tuple[float, float] = (-1.0, 1.0)) -> Tensor:
        return (x * scale).clamp(*span)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, scale, ctx.span = inputs
        ctx.save_for_backward(x, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scale = ctx.saved_tensors
        inside = ((x * scale) > ctx.span[0]).to(grad.dtype) + 0.1
        return grad * inside * scale, (grad * inside * x).sum(0), None


class Distance(Function):
    """A loss: the mean of squares."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return (x - y).square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, y = ctx.saved_tensors
        return grad * 2.0 * (x - y) / x.numel(), None


class Summed(Function):
    """A loss: a sum over samples, divided by what is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.by = by
        return x.pow(4).sum() / by

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * 4.0 * x.pow(3) / ctx.by, None


class Centered(Function):
    """Takes the mean over samples away: samples cannot be cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - 0.5 * grad.mean(0, keepdim=True)


class Counted(Function):
    """Reads how many samples there are, not as a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.num = x.shape[0]
        return x + 0.01 * x.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1.0 + ctx.num**-0.5)


class Narrow(Function):
    """Names float32 in its code, and is told a dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x.float())
        return torch.exp(-x.to(torch.float32)).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return -grad.float() * torch.exp(-x) * torch.tensor(0.9), None


class Clipped(Function):
    """Clips the gradient: what comes of summands is not what comes of their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.02, 0.02) + grad / (1.0 + grad.norm())


class Looked(Function):
    """No gradient for its table, which learns by another way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        near = torch.cdist(x, table).argmin(-1)
        return table[near]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


_apply_quick = Quick.apply  # under another name, as modules often keep it


class Net(nn.Module):
    """Some layers with functions between them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.name = name
        self.up, self.mid, self.down = nn.Linear(D, H), nn.Linear(H, H), nn.Linear(H, C)
        self.scale = nn.Parameter(_normal(H, seed=4))
        self.table = nn.Parameter(_normal(6, H, seed=5))

    def between(self, x: Tensor) -> Tensor:
        match self.name:
            case "quick":
                return _apply_quick(x)
            case "otherwise":
                return Otherwise.apply(x)
            case "reverse":
                return x * 0.5 + Reversed.apply(x, 0.25).tanh()
            case "sign":
                return Sign.apply(x)
            case "softmax":
                return Softmax.apply(x)
            case "best":
                best, at, above = Best.apply(x)
                return x * best.unsqueeze(-1) + above * x + at.unsqueeze(-1).to(x.dtype)
            case "two":
                return Two.apply(x)[0] + Two.apply(x * 2)[1] + sum(Two.apply(x * 3))
            case "clamped":
                return Clamped.apply(x, self.scale) + Clamped.apply(x, self.scale, (-0.5, 2.0))
            case "centered":
                return Centered.apply(x)
            case "counted":
                return Counted.apply(x)
            case "held":
                return Held.apply(x, self.mid.weight, self.scale)  # which a linear layer reads as well
            case "quiet":
                with torch.no_grad():
                    gate = _apply_quick(x)
                with torch.autocast("cpu", enabled=False):
                    return Otherwise.apply(x * gate)
            case "clipped":
                return nn.functional.linear(x, Clipped.apply(self.mid.weight), Clipped.apply(self.scale).sin()) + self.scale
            case "narrow":
                return Narrow.apply(x, torch.float32)
            case "looked":
                return Looked.apply(x, self.table) + self.table.mean(0)
            case "all":
                return _apply_quick(Reversed.apply(Clamped.apply(x, self.scale), -2.0)) + Sign.apply(x)
        return x.relu()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        linear = Product.apply if self.name in ("product", "all") else nn.functional.linear
        h = self.between(linear(x, self.up.weight, self.up.bias))
        h = self.between(linear(h, self.mid.weight, self.mid.bias)) + h
        out = linear(h, self.down.weight, self.down.bias) if self.name != "unbiased" else Product.apply(h, self.down.weight)
        if self.name in ("distance", "all"):
            return Distance.apply(out, y)
        if self.name == "summed":
            return Summed.apply(out - y, 32.0)
        return (out - y).square().mean()


NAMES = (
    "quick", "otherwise", "reverse", "sign", "softmax", "best", "two", "clamped", "centered", "counted", "looked",
    "narrow", "held", "quiet", "clipped", "product", "unbiased", "distance", "summed", "all",
)  # fmt: skip


def make(name: str) -> Any:
    return Net(name), (_normal(N, D), _normal(N, C, seed=1))


for _name in NAMES:
    globals()[_name] = lambda name=_name: make(name)
