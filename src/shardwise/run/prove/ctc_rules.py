"""Connectionist temporal classification on `FieldTensor`s: sums over paths of products of probabilities (Graves et al. 2006).

The ranks run `shardwise::ctc_loss` with a row of targets for each sample, the serial model torch's operator, with rows or one flat row.
Both are the same recursion on exponentials of the log-probabilities, whose sum over all paths has the loss as negative logarithm. As
torch's, the gradient is that of log-probabilities that a softmax gave: probabilities less the paths' shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.capture.patches import ctc  # noqa: F401 - registers the operators
from shardwise.run.prove.field_tensor import NotProvable, aten, register_for, zeros_of
from shardwise.world import private

# T: steps, N: samples, C: classes, S: positions of targets, K = 2 S + 1: these with a blank before, between and behind.


def targets_in_rows(targets: Tensor, lengths: Tensor) -> Tensor:
    """Return targets [N, S] of one row a sample, or of one flat row."""
    if targets.dim() == 2:
        return targets
    return torch.nn.utils.rnn.pad_sequence(list(torch.split(targets, lengths.tolist())), batch_first=True)


def sum_paths(log_probs_TNC: Any, targets_NS: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int) -> Any:
    """Return each sample's sum over paths of the product of probabilities, [N]."""
    num_steps, num_samples, _ = log_probs_TNC.shape
    labels_NK = torch.full((num_samples, 2 * targets_NS.shape[1] + 1), blank)
    labels_NK[:, 1::2] = targets_NS
    state = torch.arange(labels_NK.shape[1])
    skips_NK = functional.pad((labels_NK[:, 2:] != labels_NK[:, :-2]) & (labels_NK[:, 2:] != blank), (2, 0))
    last = 2 * target_lengths[:, None]
    ends_NK = (state == last) | (state == last - 1)
    inside_NK = state <= last
    chosen_TNK = log_probs_TNC.exp().gather(2, torch.where(inside_NK, labels_NK, blank).expand(num_steps, -1, -1))
    sums_NK = torch.where((state < 2) & inside_NK, chosen_TNK[0], 0.0)
    for step in range(1, num_steps):
        before = functional.pad(sums_NK, (1, 0))[:, :-1]
        skipped = functional.pad(sums_NK, (2, 0))[:, :-2]
        arriving = sums_NK + before + torch.where(skips_NK, skipped, 0.0)
        sums_NK = torch.where((step < input_lengths)[:, None], arriving * chosen_TNK[step], sums_NK)
    return torch.where(ends_NK, sums_NK, 0.0).sum(1)


def losses_of_sums(sums_N: Any, zero_infinity: bool) -> Any:
    """Return the losses. Raises NotProvable if one is infinite, since its sample has no path."""
    has_path = sums_N != 0
    if not zero_infinity and not bool(has_path.all()):
        raise NotProvable("a CTC loss is infinite: more targets than steps; use zero_infinity")
    return torch.where(has_path, -torch.where(has_path, sums_N, 1.0).log(), 0.0)


@register_for(torch.ops.shardwise.ctc_loss)
def _sum_losses(
    func: Any, log_probs: Any, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, zero_infinity: bool = False
) -> Any:
    steps, lengths = _as_lengths(input_lengths), _as_lengths(target_lengths)
    return losses_of_sums(sum_paths(log_probs, targets_in_rows(targets, lengths), steps, lengths, blank), zero_infinity)


@register_for(aten._ctc_loss)
def _sum_losses_of_torch(func: Any, log_probs: Any, *rest: Any) -> Any:
    losses = _sum_losses(func, log_probs, *rest)
    return losses, zeros_of(losses.shape)  # what torch's backward reads of the paths is computed again


@register_for(torch.ops.shardwise.ctc_loss_backward)
def differentiate_losses(
    func: Any, grad: Any, log_probs: Any, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int, zero_infinity: bool
) -> Any:
    """Return the gradient by log-probabilities that are a softmax's."""
    steps, lengths = _as_lengths(input_lengths), _as_lengths(target_lengths)
    with private.autograd_in_dispatch(), torch.enable_grad():
        leaf = log_probs.detach().requires_grad_()
        sums = sum_paths(leaf, targets_in_rows(targets, lengths), steps, lengths, blank)
        losses = losses_of_sums(sums, zero_infinity)
        (of_paths,) = torch.autograd.grad(losses, leaf, grad)
    counts_TN = (torch.arange(log_probs.shape[0])[:, None] < steps) & (sums.detach() != 0)
    return of_paths.detach() + torch.where(counts_TN[..., None], log_probs.exp() * grad[:, None], 0.0)


@register_for(aten._ctc_loss_backward)
def _differentiate_losses_of_torch(func: Any, grad: Any, log_probs: Any, targets: Tensor, *rest: Any) -> Any:
    input_lengths, target_lengths, _, _, blank, *options = rest
    return differentiate_losses(func, grad, log_probs, targets, input_lengths, target_lengths, blank, bool(options and options[0]))


def _as_lengths(lengths: Tensor | Sequence[int]) -> Tensor:
    return lengths if isinstance(lengths, Tensor) else torch.tensor(lengths)
