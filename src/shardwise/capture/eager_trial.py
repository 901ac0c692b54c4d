"""Run a model that cannot be captured once eagerly, on real tensors, to report the model's own error where it has one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.capture.capture import Loss, call_model, call_with_loss, forward_arguments
from shardwise.capture.initialization import DeferredInit, materialize_module
from shardwise.capture.modes import set_modes, training_modes
from shardwise.capture.module_state import set_state, state_of
from shardwise.errors import ModelError, format_error

MAX_PARAMETERS = 200_000_000  # of a model that is tried


def run_eagerly_once(
    source: nn.Module,
    deferred: DeferredInit | None,
    batch: Any,
    loss: Loss | None,
    loss_of: Callable[[Loss | None], Loss | None],
    error: ModelError,
) -> nn.Module | None:
    """Run a model that cannot be captured once eagerly: if it is simply wrong, its own error is reported.

    `loss` is the user's argument, `loss_of(loss)` the function to call. Returns a copy of the model in its state before the call; None if
    it is too large to try. Raises ModelError, from `error`, the reason why it cannot be captured.
    """
    if sum(p.numel() for p in source.parameters()) > MAX_PARAMETERS:
        return None
    state = torch.random.get_rng_state()
    # A copy: a forward pass may change running statistics and other state of the user's model.
    model = copy.deepcopy(materialize_module(deferred, source) if deferred is not None else source)
    set_modes(model, training_modes(model))
    before = state_of(model)
    try:
        output = call_model(
            model, batch if loss is None else forward_arguments(model, batch)
        )  # with gradients enabled, which the model itself may need
        try:
            call_with_loss(lambda *_, **__: output, batch, loss_of(loss))  # type: ignore[arg-type]
        except ModelError:
            raise
        except Exception as real:
            signature = "loss(output, batch), where batch is all of it"
            raise ModelError(f"the loss raises when it is called as {signature}: {format_error(real)}") from error
    except ModelError:
        raise
    except Exception as real:
        raise ModelError(f"the model raises when it is called: {format_error(real)}{_explain_batch_mismatch(model, batch)}") from error
    finally:
        torch.random.set_rng_state(state)
        set_state(model, before)
    return model


def _explain_batch_mismatch(model: nn.Module, batch: Any) -> str:
    """Return a remedy if the batch does not match the signature of `forward`; empty if it does."""
    positional, keywords = ((), batch) if isinstance(batch, Mapping) else (batch, {})
    try:
        inspect.signature(model.forward).bind(*positional, **keywords)
    except TypeError:
        has = f"with the keywords {', '.join(map(str, keywords))}" if keywords else f"with {len(positional)} arguments in order"
        return f"; it is called {has}, which is all of the batch: let forward take its targets too, and leave them to the loss"
    except ValueError:  # no signature to see
        return ""
    return ""
