"""Random generators of Python and numpy: detect draws by user code, and preserve their state over a block."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def python_random_state() -> object:
    """Return the state of the generators of Python and numpy (if loaded); it changes with every draw."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    return random.getstate(), None if state is None else (state[1].tobytes(), state[2])


@contextmanager
def preserve_python_random_state() -> Iterator[None]:
    """A block after which the generators of Python and numpy have their state from before it."""
    python_state, numpy = random.getstate(), sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None and state is not None:
            numpy.random.set_state(state)
