"""Connectionist temporal classification with lengths that are tensors (Graves et al. 2006).

Torch: its operator also returns tensors saved for backward, of data-dependent shape; targets of all samples may be one flat row, which a
    mask selects from `targets_NS` (`labels.masked_select(labels >= 0)`), of data-dependent length.
Wanted: an operator from `log_probs_TNC`, `targets_NS` and lengths to each sample's loss, whose backward recomputes the saved tensors; a
    flat row of targets is restored to one row a sample. Not other flat rows.
Test: tests/torch/model/test_checks.py::test_targets_in_one_row_are_each_samples_own
Until: not known
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.capture.patches.patch import CallHooks, Patch, Trace


@torch.library.custom_op("shardwise::ctc_loss", mutates_args=())
def ctc_losses(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """Return the CTC loss of each of N samples."""
    return torch.ops.aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0].clone()  # type: ignore[no-any-return]


@torch.library.custom_op("shardwise::ctc_loss_backward", mutates_args=())
def _ctc_backward(
    grad: Tensor, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    inputs = (log_probs, targets, input_lengths, target_lengths)
    losses, paths = torch.ops.aten._ctc_loss.Tensor(*inputs, blank, zero_infinity)
    gradient: Tensor = torch.ops.aten._ctc_loss_backward.Tensor(grad.contiguous(), *inputs, losses, paths, blank, zero_infinity)
    return gradient


@ctc_losses.register_fake
def _shape_of_losses(log_probs: Tensor, *rest: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@_ctc_backward.register_fake
def _shape_of_gradient(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _differentiate_losses(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    log_probs, targets, input_lengths, target_lengths = ctx.saved_tensors
    blank, zero_infinity = ctx.options
    gradient = _ctc_backward(grad, log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    return gradient, None, None, None, None, None


ctc_losses.register_autograd(_differentiate_losses, setup_context=_save_for_backward)


@torch.library.custom_op("shardwise::ctc_lengths", mutates_args=())
def _check_target_lengths(lengths: Tensor, taken: Tensor) -> Tensor:
    """Return `lengths` after checking that the mask selects as many targets of each sample; else samples would share targets."""
    if not torch.equal(lengths, taken.to(lengths.dtype)):
        raise ValueError(
            f"ctc_loss has target_lengths {lengths.tolist()}, and the mask picks {taken.tolist()} of the targets; they must be equal"
        )
    return lengths.clone()


@_check_target_lengths.register_fake
def _shape_of_lengths(lengths: Tensor, taken: Tensor) -> Tensor:
    return torch.empty_like(lengths)


class _MaskedTargets:
    """Tracks flat rows that a mask selects from targets_NS."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # with the row itself, so that no id is reused

    def record_call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record a call that makes such a row or casts one."""
        if func in _PICKS and len(args) == 2:
            targets, mask = args
            if isinstance(mask, Tensor) and mask.dtype is torch.bool and targets.dim() == 2 and targets.shape == mask.shape:
                self._sources[id(result)] = (result, targets, mask)
        elif func in _CASTS and id(args[0]) in self._sources:
            _, targets, mask = self._sources[id(args[0])]
            self._sources[id(result)] = (result, targets.to(result.dtype), mask)

    def ctc_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return `ctc_loss` with such targets in one row a sample, the selected ones first."""
        arguments = dict(zip(_ARGUMENTS, args, strict=False)) | dict(kwargs)
        lengths = arguments.get("target_lengths")
        if id(arguments.get("targets")) in self._sources and isinstance(lengths, Tensor) and lengths.dim() == 1:
            _, targets, mask = self._sources[id(arguments["targets"])]
            order = (~mask).to(torch.int32).argsort(dim=1, stable=True)
            arguments |= {"targets": targets.gather(1, order), "target_lengths": _check_target_lengths(lengths, mask.sum(1))}
        return _ctc_loss(**arguments)


_PICKS = (torch.masked_select, Tensor.masked_select, Tensor.__getitem__)
_CASTS = (Tensor.to, Tensor.int, Tensor.long)
_ARGUMENTS = ("log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """Return the result of `torch.nn.functional.ctc_loss`. Flat targets, and unbatched inputs, are left to torch."""
    if log_probs.dim() != 3 or targets.dim() != 2 or reduction not in ("none", "mean", "sum"):
        loss: Tensor = F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
        return loss
    lengths = [n if isinstance(n, Tensor) else torch.tensor(n) for n in (input_lengths, target_lengths)]
    by_row: Tensor = ctc_losses(log_probs, targets, lengths[0], lengths[1], blank, zero_infinity)
    if reduction == "mean":
        return (by_row / lengths[1].clamp(min=1).to(by_row.dtype)).mean()
    return by_row.sum() if reduction == "sum" else by_row


def _watch_targets(trace: Trace) -> CallHooks:
    rows = _MaskedTargets()
    return CallHooks(replacements={F.ctc_loss: rows.ctc_loss}, after=rows.record_call)


PATCH = Patch(make_call_hooks=_watch_targets)
