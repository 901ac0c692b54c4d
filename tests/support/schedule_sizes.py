"""Sizes that a schedule is for, from any."""

from __future__ import annotations


def fit(name: str, p: int, m: int) -> tuple[int, int]:
    """(stages, microbatches) of a pipeline of p ranks, nearest to what is asked for."""
    stages = 2 * p if name == "zb-v" else p
    if name == "gems-mast":
        return stages, 2
    return stages, m + m % 2 if name in ("chimera", "gems-master") else m
