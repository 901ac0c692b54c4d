"""Differences of every rank's shards from the serial run's tensors, replicas included (a gathered full tensor shows one owner only).

Given this rank's shards of parameters, buffers or optimizer state, and on rank 0 the serial run's tensors, rank 0 gets the largest
difference of each tensor on each rank; 0 for ranks without a shard of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwise.model.graph import Variable
from shardwise.run.checkpoint import StateShard
from shardwise.world.world import Group


def comparable_slot(slot: str, x: Tensor) -> Tensor:
    """Return an optimizer slot as it is compared: second moments by their roots, whose errors are like those of gradients."""
    if slot != "exp_avg_sq":
        return x
    return torch.view_as_complex(torch.view_as_real(x).sqrt()) if x.is_complex() else x.sqrt()


def max_difference(got: Tensor, want: Tensor) -> float:
    """Return the largest difference; infinite for NaN, another shape, or an infinity in one of the two only. Equal values differ by 0."""
    if got.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    got, want = (torch.view_as_real(x.resolve_conj()).double() if x.is_complex() else x.double() for x in (got, want))
    largest = float(torch.where(got == want, 0.0, got - want).abs().max())
    return largest if largest < float("inf") else float("inf")


def relative_error(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference over the largest finite magnitude (of the tensor, at least `floor`).

    Infinite for NaN, another shape, or an infinity in one of the two only; equal infinities (of a mask) are no difference.
    """
    return relative_difference(max_difference(got, want), want, floor)


def relative_difference(difference: float, want: Tensor, floor: float) -> float:
    """Return a difference over the largest finite magnitude of `want`, at least `floor`."""
    if not difference or difference == float("inf"):
        return difference
    bound = max(finite_largest(want), floor)
    return difference / bound if bound else difference


def finite_largest(x: Tensor) -> float:
    """Return the largest finite magnitude of a tensor."""
    x = torch.view_as_real(x.resolve_conj()).double() if x.is_complex() else x.double()
    return float(torch.where(x.isfinite(), x, 0.0).abs().max())


def differences_by_rank(
    variables: Sequence[Variable],
    shards: Sequence[StateShard],
    expected: Mapping[str, Tensor] | None,
    world_group: Group,
    slot: str = "",
) -> dict[str, list[float]] | None:
    """Return by name the largest difference of each rank's shards from `expected`, which only rank 0 has; None on other ranks.

    Tensors are broadcast one at a time; variables that `expected` lacks are left out. `slot`: compare the optimizer's tensors of that slot,
    which `expected` holds as "name slot", converted by `comparable_slot`.
    """
    local_shards: dict[str, list[StateShard]] = {}
    for piece in shards:
        if piece.slot == slot and piece.kind in (("optimizer",) if slot else ("parameter", "buffer")):
            local_shards.setdefault(piece.name, []).append(piece)
    differences = torch.zeros(len(variables), dtype=torch.float64, device=world_group.device)
    names: list[str | None] = []
    for number, v in enumerate(variables):
        name = None if expected is None else next((n for n in _names_of(v, slot) if n in expected), None)
        names.append(name)
        full = _receive_buffer(v, world_group.device)
        if expected is not None and name is not None:
            value = expected[name].detach()
            full.copy_(torch.view_as_real(value.resolve_conj()) if value.is_complex() else value)
        world_group.broadcast(full)
        differences[number] = max((_shard_difference(piece, full) for piece in local_shards.get(v.name, ())), default=0.0)
    differences_of_ranks = world_group.all_gather(differences[None])
    if expected is None:
        return None
    return {name: differences_of_ranks[:, number].tolist() for number, name in enumerate(names) if name is not None}


def _receive_buffer(v: Variable, device: torch.device) -> Tensor:
    """Allocate a receive buffer for a variable, in the widest dtype of its kind; complex numbers as pairs."""
    is_complex = v.tensor.dtype.startswith("complex") or v.is_complex_pairs
    shape = v.tensor.shape if not is_complex or v.is_complex_pairs else (*v.tensor.shape, 2)
    return torch.zeros(shape, dtype=torch.float64 if v.tensor.is_float or is_complex else torch.int64, device=device)


def _names_of(v: Variable, slot: str) -> list[str]:
    return [f"{name} {slot}" if slot else name for name in (v.name, *v.aliases)]


def _shard_difference(shard: StateShard, full: Tensor) -> float:
    shape = shard.tensor.shape if shard.block is None else shard.block
    actual = comparable_slot(shard.slot, shard.tensor.detach())
    if actual.is_complex():
        actual, shape = torch.view_as_real(actual.resolve_conj()), (*shape, 2)
    expected = full[tuple(slice(o, o + n) for o, n in zip(shard.offsets, shape, strict=False))]
    if shard.flat is not None:
        expected = expected.reshape(-1)[shard.flat[0] : shard.flat[1]]
    return max_difference(actual, expected.to(actual.device))
