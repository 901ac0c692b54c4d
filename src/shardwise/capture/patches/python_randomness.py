"""Random numbers of Python and numpy in forward.

Torch: a trace has the drawn values as constants, equal in every step.
Wanted: such a model is refused.
Test: tests/torch/capture/test_untraceable.py::test_what_a_graph_cannot_hold_is_refused_by_name
Until: not known
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.capture.patches.patch import Patch, Trace
from shardwise.capture.python_randomness import python_random_state
from shardwise.errors import ModelError


@contextmanager
def _refuse_random_draws(trace: Trace) -> Iterator[None]:
    state = python_random_state()
    yield
    if python_random_state() != state:
        raise ModelError("the model draws from Python's or numpy's random numbers, which a captured graph would fix; use torch's")


PATCH = Patch(while_called=_refuse_random_draws)
