"""Local shards: what a process holds of a tensor, and which elements of the full tensor those are.

The place is the ranges of every dimension that form a block, and the flat range within that block where it is cut once more.
Where a plain tensor is a shard that nothing annotates, the place is left open; the comparison finds it by the initial values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .private import without_overrides

Ranges = list[list[tuple[int, int]]]  # for each dimension the (start, stop) runs of the full tensor


@dataclass
class LocalShard:
    """A copy of a shard on the CPU. `shape`: of the full tensor, None where unknown; `is_partial`: a summand of the full values."""

    value: torch.Tensor
    dtype: str
    shape: tuple[int, ...] | None = None
    ranges: Ranges | None = None
    flat: tuple[int, int] | None = None
    is_partial: bool = False

    def describe(self) -> dict[str, Any]:
        """Return all but the values, in JSON types."""
        return {
            "dtype": self.dtype, "shape": self.shape, "ranges": self.ranges, "flat": self.flat, "partial": self.is_partial,
        }  # fmt: skip


def local_tensor(t: Any) -> torch.Tensor:
    """Return this process's part of a tensor of any kind, detached, as a plain tensor."""
    if hasattr(t, "to_local"):
        local = t.detach().to_local()
        return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]
    if hasattr(t, "spec") and hasattr(t.spec, "block_ranges"):  # of shardwise
        with torch.no_grad(), without_overrides():
            return t.detach().as_subclass(torch.Tensor)  # type: ignore[no-any-return]
    return t.detach()  # type: ignore[no-any-return]


def take_shard(t: Any, **place: Any) -> LocalShard | None:
    """Copy what this process holds of a tensor; None where it has no values (no gradient, a tensor on the meta device)."""
    if t is None or t.device.type == "meta" or type(t).__name__ == "FakeTensor":
        return None
    local = local_tensor(t)
    local = local.to_dense() if local.layout != torch.strided else local
    if hasattr(t, "placements"):
        place = _place_of_dtensor(t, local)
    elif hasattr(t, "spec") and hasattr(t.spec, "block_ranges"):
        place = {"shape": tuple(t.spec.global_shape), "ranges": [[tuple(r) for r in runs] for runs in t.spec.block_ranges]}
    value = local.to("cpu", copy=True)
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    return LocalShard(value.float() if value.dtype in (torch.bfloat16, torch.float16) else value, str(t.dtype), **place)


def _place_of_dtensor(t: Any, local: torch.Tensor) -> dict[str, Any]:
    coordinates = t.device_mesh.get_coordinate()
    is_partial = any(p.is_partial() for p in t.placements)
    if coordinates is None:
        return {"is_partial": is_partial}
    indices = [torch.arange(n) for n in t.shape]
    # A strided shard is a shard of what the placements on its right leave, so it is applied last.
    placed = [(p, t.device_mesh.size(i), coordinates[i]) for i, p in enumerate(t.placements) if hasattr(p, "dim")]
    for placement, size, coordinate in sorted(placed, key=lambda x: "Strided" in type(x[0]).__name__):
        parts = torch.chunk(indices[placement.dim], size)
        indices[placement.dim] = parts[coordinate] if coordinate < len(parts) else indices[placement.dim][:0]
    place: dict[str, Any] = {"shape": tuple(t.shape), "is_partial": is_partial}
    if [len(x) for x in indices] == list(local.shape):
        place["ranges"] = [runs_of(x.tolist()) for x in indices]
    return place


def runs_of(indices: list[int]) -> list[tuple[int, int]]:
    """Return consecutive indices as (start, stop) runs."""
    runs: list[tuple[int, int]] = []
    for i in indices:
        if runs and runs[-1][1] == i:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
    return runs
