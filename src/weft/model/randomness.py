"""Whether Python code has drawn random numbers that are not torch's. In: nothing. Out: the state of Python's and numpy's generators."""

from __future__ import annotations

import random
import sys


def python_randomness() -> object:
    """Something that is equal to itself later only if neither Python nor numpy (where that is loaded) has drawn meanwhile."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    return random.getstate(), None if state is None else (state[1].tobytes(), state[2])
