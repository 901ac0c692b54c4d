"""Connectionist temporal classification with lengths that are tensors (Graves et al. 2006), as an operator that a trace can hold.

In: `log_probs_TNC`, `targets_NS`, and each sample's lengths. Out: each sample's loss. Torch's own operator also returns what its backward
reads, whose shape follows from the values of the lengths; here backward makes that again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.library.custom_op("weft::ctc_loss", mutates_args=())
def losses(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool) -> Tensor:
    """The losses of N samples, each by itself."""
    return torch.ops.aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0].clone()  # type: ignore[no-any-return]


@torch.library.custom_op("weft::ctc_loss_backward", mutates_args=())
def _gradient(
    grad: Tensor, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    given = (log_probs, targets, input_lengths, target_lengths)
    found, paths = torch.ops.aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    made: Tensor = torch.ops.aten._ctc_loss_backward.Tensor(grad.contiguous(), *given, found, paths, blank, zero_infinity)
    return made


@losses.register_fake
def _(log_probs: Tensor, *rest: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@_gradient.register_fake
def _(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _gradient(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


losses.register_autograd(_backward, setup_context=_keep)


def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """What `torch.nn.functional.ctc_loss` returns. Targets of all samples in one row, and one sample alone, are left to torch."""
    if log_probs.dim() != 3 or targets.dim() != 2 or reduction not in ("none", "mean", "sum"):
        plain: Tensor = F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
        return plain
    lengths = [n if isinstance(n, Tensor) else torch.tensor(n) for n in (input_lengths, target_lengths)]
    found: Tensor = losses(log_probs, targets, *lengths, blank, zero_infinity)
    if reduction == "mean":
        return (found / lengths[1].clamp(min=1).to(found.dtype)).mean()
    return found.sum() if reduction == "sum" else found
