"""Fingerprints of samples, targets and dropout masks: equal bytes have equal ones, on every rank and in every run."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from .placement import local_tensor


def to_array(t: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return this process's part of a tensor as an array; types that numpy lacks become their bytes."""
    local = local_tensor(t).cpu().contiguous()
    try:
        return local.numpy()
    except TypeError:
        return local.view(torch.uint8).numpy()


def digest_of(array: np.ndarray[Any, Any]) -> str:
    """Return a digest of an array's bytes."""
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()


def sum_of_hashes(array: np.ndarray[Any, Any]) -> int:
    """Return a sum over the elements that depends neither on their order nor on how they are divided over arrays."""
    flat = np.ascontiguousarray(array)
    if flat.dtype == np.bool_:
        flat = flat.view(np.uint8)
    if flat.dtype.itemsize > 8:
        flat = flat.view(np.uint64)
    bits = flat.view(f"u{flat.dtype.itemsize}").astype(np.uint64)
    with np.errstate(over="ignore"):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the mixing steps of SplitMix64
            bits = bits + np.uint64(0x9E3779B97F4A7C15)
            bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
        return int(bits.sum(dtype=np.uint64))


def describe_input(t: torch.Tensor) -> dict[str, Any] | None:
    """Return the fingerprints of the rows of an input; None of a scalar or an empty tensor.

    `sums`: of rows of numbers their sums and sums of squares, since features that a frozen model computed differ in their last bits.
    """
    if not t.dim() or not t.numel() or t.device.type == "meta":
        return None
    rows = to_array(t)
    sums: list[list[float]] = []
    if t.is_floating_point():
        flat = local_tensor(t).double().reshape(len(rows), -1)
        sums = torch.stack([flat.sum(1), (flat * flat).sum(1)], 1).tolist()
    return {
        "dtype": str(t.dtype), "row": list(rows.shape[1:]), "digests": [digest_of(row) for row in rows], "sum": str(sum_of_hashes(rows)),
        "sums": sums,
    }  # fmt: skip
