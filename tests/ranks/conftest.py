"""The harness of all tests of ranks; no process that a test started may outlive it."""

from tests.support.fixtures import launcher, no_rank_is_left, ranks, subject

__all__ = ["launcher", "no_rank_is_left", "ranks", "subject"]
