"""Captures kept on disk, so that the same model is not traced again when its script starts again: `kept`.

In: the model, what it is called with, and a way to capture it. Out: what that makes, or what it made when everything that it depends on was
the same: the model's code, configuration and modes, the form of the batch, versions. What cannot be told apart is not kept.
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
    """What `capture()` returns, from disk where it is there. `asked`: what else it depends on, plain values."""
    store = Store.usual()
    if store is None:
        return capture()
    try:
        tensors = tensors_of(batch)
        form = [(path, tuple(x.shape), str(x.dtype), x.device.type) for path, x in tensors.items()]
        fixed = [(path, leaf if is_value(leaf) else _refuse(leaf)) for path, leaf in leaves(batch) if path not in tensors]
        key = fingerprint(model, loss, (type(batch), form, fixed, asked))
    except Exception:  # also what objects of the user's raise when they are looked at: whether they can be captured, capture says
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
