"""Hooks of torch that feed the recorder: its public global ones, and functions of torch that are replaced by recording ones."""

from __future__ import annotations

import atexit
import sys
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .recorder import Recorder

_IGNORED_TARGET = -100  # torch's default of ignore_index


def install_hooks(recorder: Recorder) -> None:
    """Install all hooks in this process, for as long as it lives."""
    modules = torch.nn.modules.module
    optimizers = sys.modules["torch.optim.optimizer"]  # torch.optim deletes the name

    def end_forward(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        recorder.end_forward(module, args, kwargs, output)

    modules.register_module_forward_pre_hook(lambda module, args: recorder.begin_forward(module))
    modules.register_module_forward_hook(end_forward, with_kwargs=True, always_call=True)
    optimizers.register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: recorder.begin_step(optimizer))
    optimizers.register_optimizer_step_post_hook(lambda optimizer, args, kwargs: recorder.end_step())
    _replace_backward(recorder)
    _replace_losses(recorder)
    _replace_clipping(recorder)
    _replace_dropout(recorder)
    atexit.register(recorder.finish)


def _replace_backward(recorder: Recorder) -> None:
    backward = torch.autograd.backward

    @wraps(backward)
    def record_and_run_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.record_losses(tensors)
        return backward(tensors, *args, **kwargs)

    torch.autograd.backward = record_and_run_backward


def _replace_losses(recorder: Recorder) -> None:
    def replace_loss(name: str, has_ignored: bool) -> None:
        loss = getattr(F, name)

        @wraps(loss)
        def compute_and_record(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                ignored = kwargs.get("ignore_index", args[2] if len(args) > 2 else _IGNORED_TARGET) if has_ignored else None
                recorder.record_targets(target, kwargs.get("reduction", "mean"), ignored)
            return loss(input, target, *args, **kwargs)

        setattr(F, name, compute_and_record)

    for name in ("cross_entropy", "mse_loss", "binary_cross_entropy_with_logits", "l1_loss", "smooth_l1_loss"):
        replace_loss(name, name == "cross_entropy")


def _replace_clipping(recorder: Recorder) -> None:
    clip = torch.nn.utils.clip_grad_norm_

    @wraps(clip)
    def clip_and_record(*args: Any, **kwargs: Any) -> Any:
        norm = clip(*args, **kwargs)
        recorder.record_norm(norm)
        return norm

    torch.nn.utils.clip_grad_norm_ = clip_and_record
    torch.nn.utils.clip_grad.clip_grad_norm_ = clip_and_record


def _replace_dropout(recorder: Recorder) -> None:
    """Let dropout draw its mask, which moves the generator on, but not apply it: no parallel run has the serial run's masks."""
    if recorder.options.applies_dropout:
        return
    attention = F.scaled_dot_product_attention
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        _replace_dropout_function(recorder, name)

    @wraps(attention)
    def attend_without_dropout(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **kwargs: Any) -> Any:
        return attention(query, key, value, attn_mask, dropout_p if torch.compiler.is_compiling() else 0.0, **kwargs)

    F.scaled_dot_product_attention = attend_without_dropout  # type: ignore[assignment]


def _replace_dropout_function(recorder: Recorder, name: str) -> None:
    dropout = getattr(F, name)

    @wraps(dropout)
    def draw_and_pass(input: Tensor, p: float = 0.5, training: bool = dropout.__defaults__[1], inplace: bool = False) -> Any:
        if torch.compiler.is_compiling() or not training or p == 0:
            return dropout(input, p, training, inplace)
        recorder.record_mask(input, dropout(input, p, training, False))
        return input

    setattr(F, name, draw_and_pass)
