"""Cache of captures on disk, so that a restarted script does not trace the same model again: `cached_capture`.

The key is a fingerprint of everything that a capture depends on: the model's code, configuration and modes, the signature of the batch, and
versions. Models without a fingerprint are not cached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from weft.capture.capture import Captured, Loss
from weft.capture.kept import written
from weft.capture.kept.fingerprint import CannotTell, fingerprint
from weft.capture.kept.store import Store
from weft.capture.nesting import is_value, leaves, tensors_of


def kept(model: nn.Module, loss: Loss | None, batch: Any, asked: object, capture: Callable[[], Captured]) -> Captured:
    """Return the result of `capture()`, from disk if cached. `options`: plain values that it depends on as well."""
    store = Store.usual()
    if store is None:
        return capture()
    try:
        tensors = tensors_of(batch)
        specs = [(path, tuple(x.shape), str(x.dtype), x.device.type) for path, x in tensors.items()]
        fixed = [(path, leaf if is_value(leaf) else _refuse(leaf)) for path, leaf in leaves(batch) if path not in tensors]
        key = fingerprint(model, loss, (type(batch), specs, fixed, asked))
    except Exception:  # also errors of the user's objects when they are inspected: `capture` reports what cannot be captured
        return capture()
    data = store.read(key)
    captured = None if data is None else written.load(data)
    if captured is None:
        captured = capture()
        if (data := written.dump(captured)) is not None:
            store.write(key, data)
    return captured


def _refuse(leaf: object) -> NoReturn:
    raise CannotTell(f"{type(leaf).__name__} in a batch")
