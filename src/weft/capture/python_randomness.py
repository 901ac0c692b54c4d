"""Whether Python code has drawn random numbers that are not torch's, and blocks that draw none for what comes after them.

In: nothing. Out: the state of Python's and numpy's generators.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def python_randomness() -> object:
    """Something that is equal to itself later only if neither Python nor numpy (where that is loaded) has drawn meanwhile."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    return random.getstate(), None if state is None else (state[1].tobytes(), state[2])


@contextmanager
def python_randomness_kept() -> Iterator[None]:
    """A block after which Python and numpy draw as if it had not been."""
    python_state, numpy = random.getstate(), sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None and state is not None:
            numpy.random.set_state(state)
