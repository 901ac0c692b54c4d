"""Cache of captures on disk, so that a restarted script does not trace the same model again: `cached_capture`.

The key is a fingerprint of everything that a capture depends on: the model's code, configuration and modes, the signature of the batch, and
versions. Models without a fingerprint are not cached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from shardwise.capture.cache import serialization
from shardwise.capture.cache.fingerprint import NotFingerprintable, fingerprint
from shardwise.capture.cache.store import CaptureStore
from shardwise.capture.capture import CapturedGraph, Loss
from shardwise.capture.nesting import is_literal_value, named_leaves, tensors_of


def cached_capture(model: nn.Module, loss: Loss | None, batch: Any, options: object, capture: Callable[[], CapturedGraph]) -> CapturedGraph:
    """Return the result of `capture()`, from disk if cached. `options`: plain values that it depends on as well."""
    store = CaptureStore.from_environment()
    if store is None:
        return capture()
    try:
        tensors = tensors_of(batch)
        specs = [(path, tuple(x.shape), str(x.dtype), x.device.type) for path, x in tensors.items()]
        fixed = [
            (path, leaf if is_literal_value(leaf) else _refuse_leaf(leaf)) for path, leaf in named_leaves(batch) if path not in tensors
        ]
        key = fingerprint(model, loss, (type(batch), specs, fixed, options))
    except Exception:  # also errors of the user's objects when they are inspected: `capture` reports what cannot be captured
        return capture()
    data = store.read(key)
    captured = None if data is None else serialization.load(data)
    if captured is None:
        captured = capture()
        if (data := serialization.dump(captured)) is not None:
            store.write(key, data)
    return captured


def _refuse_leaf(leaf: object) -> NoReturn:
    raise NotFingerprintable(f"{type(leaf).__name__} in a batch")
