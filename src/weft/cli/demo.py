"""`weft demo`, which `scripts/demo` calls."""

from __future__ import annotations


def demo() -> None:
    """Train a GPT on real text."""
