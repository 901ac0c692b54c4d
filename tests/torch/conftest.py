"""Tests of one process, and of the processes that they start, know the machine as it was measured once."""

from tests.support.fixtures import few_objects, known_machine

__all__ = ["few_objects", "known_machine"]
