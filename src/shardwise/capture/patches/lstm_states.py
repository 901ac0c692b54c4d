"""Shapes of the last states of an LSTM.

Torch: 2.11 and 2.12 infer [layers, 1, ...] for them.
Wanted: the shapes at run time.
Test: tests/torch/house/test_private.py::test_states_of_a_traced_lstm_have_the_shapes_that_they_have_when_it_runs
Until: 2.13
"""

from __future__ import annotations

from typing import Any

from shardwise.capture.fakes import LSTM_LAYER, decompositions, patched_attribute
from shardwise.capture.patches.patch import Patch

_LAYER: Any = getattr(decompositions, LSTM_LAYER)


def _lstm_layer(x: Any, hidden: Any, *more: Any, **named: Any) -> Any:
    out, last = _LAYER(x, hidden, *more, **named)
    return out, tuple(after.reshape(before.shape) for after, before in zip(last, hidden, strict=True))


PATCH = Patch(while_traced=lambda: patched_attribute(decompositions, LSTM_LAYER, _lstm_layer))
