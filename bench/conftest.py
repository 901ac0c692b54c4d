"""Tests of the benchmarks, beside them: they know the machine as it was measured once, and may start ranks."""

from tests.support.fixtures import few_objects, known_machine, launcher, ranks, subject

__all__ = ["few_objects", "known_machine", "launcher", "ranks", "subject"]
