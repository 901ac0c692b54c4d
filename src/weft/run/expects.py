"""What a divided module in a plain loop was told of how it will be called. In: its adapter's word. Out: `Expects`, read at every call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Expects:
    """`global_batch`: every rank calls the module with the whole batch, and what ranks call it with is the same."""

    global_batch: bool = False
