"""Call convention of a parallelised module in a plain loop: set by its adapter, read at every call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CallConvention:
    """How ranks call the module. `is_global_batch`: every rank passes the same global batch."""

    is_global_batch: bool = False
