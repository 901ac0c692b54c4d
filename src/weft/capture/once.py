"""A model that cannot be followed, called for real. In: the model, its batch. Out: a copy that has run, or the model's own error."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from weft.capture.capture import Loss, call, called, taken
from weft.capture.init import Deferred, realize
from weft.capture.modes import set_modes, training_modes
from weft.capture.state import set_state, state_of
from weft.errors import ModelError, said

LARGEST = 200_000_000  # parameters of what is tried


def called_once(
    source: nn.Module,
    deferred: Deferred | None,
    batch: Any,
    loss: Loss | None,
    loss_of: Callable[[Loss | None], Loss | None],
    error: ModelError,
) -> nn.Module | None:
    """A model that cannot be followed may simply be wrong: where it raises when it is run for real, that is the error to tell.

    `loss` is what was given, `loss_of` of it what is called. Returns a copy of the model, as it was before it was called;
    None where it is too large to try. Raises ModelError, where `error` is why it cannot be followed.
    """
    if sum(p.numel() for p in source.parameters()) > LARGEST:
        return None
    state = torch.random.get_rng_state()
    # A copy: running statistics and what else a forward pass changes are not ours to change.
    model = copy.deepcopy(realize(deferred, source) if deferred is not None else source)
    set_modes(model, training_modes(model))
    before = state_of(model)
    try:
        output = called(model, batch if loss is None else taken(model, batch))  # with gradients, which the model itself may ask for
        try:
            call(lambda *_, **__: output, batch, loss_of(loss))  # type: ignore[arg-type]
        except ModelError:
            raise
        except Exception as real:
            signature = "loss(output, batch), where batch is all of it"
            raise ModelError(f"the loss raises when it is called as {signature}: {said(real)}") from error
    except ModelError:
        raise
    except Exception as real:
        raise ModelError(f"the model raises when it is called: {said(real)}{_misfit(model, batch)}") from error
    finally:
        torch.random.set_rng_state(state)
        set_state(model, before)
    return model


def _misfit(model: nn.Module, batch: Any) -> str:
    """What to do where the batch is not what `forward` takes; empty where it is."""
    order, named = ((), batch) if isinstance(batch, Mapping) else (batch, {})
    try:
        inspect.signature(model.forward).bind(*order, **named)
    except TypeError:
        has = f"with the keywords {', '.join(map(str, named))}" if named else f"with {len(order)} arguments in order"
        return f"; it is called {has}, which is all of the batch: let forward take its targets too, and leave them to the loss"
    except ValueError:  # no signature to see
        return ""
    return ""
