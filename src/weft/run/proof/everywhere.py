"""What every rank holds beside the serial model's: replicas too, of which a whole tensor's owner says nothing.

In: this rank's pieces of parameters, buffers or optimizer state, and on rank 0 the serial run's tensors. Out, on rank 0: of each tensor
how far every rank's piece of it is from the serial one's. A rank that has nothing of a tensor is 0 away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weft.model.graph import Variable
from weft.run.state.checkpoint import Piece
from weft.world.world import Group


def comparable(slot: str, x: Tensor) -> Tensor:
    """One of an optimizer's tensors as it is compared: averages of squares by their roots, which err as gradients do."""
    if slot != "exp_avg_sq":
        return x
    return torch.view_as_complex(torch.view_as_real(x).sqrt()) if x.is_complex() else x.sqrt()


def farthest(got: Tensor, want: Tensor) -> float:
    """The largest difference; infinite for NaN, another shape, or an infinity that only one has. What both have alike is no difference."""
    if got.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    got, want = (torch.view_as_real(x.resolve_conj()).double() if x.is_complex() else x.double() for x in (got, want))
    difference = float(torch.where(got == want, 0.0, got - want).abs().max())
    return difference if difference < float("inf") else float("inf")


def distances(
    variables: Sequence[Variable],
    pieces: Sequence[Piece],
    wanted: Mapping[str, Tensor] | None,
    everyone: Group,
    slot: str = "",
) -> dict[str, list[float]] | None:
    """By name and rank: the largest difference of that rank's pieces from `wanted`, which rank 0 has; None on other ranks.

    One tensor at a time is sent to all. A variable that `wanted` does not have is left out. `slot`: of the optimizer's tensors those of
    that name, which `wanted` has as "name slot", in the form of `comparable`.
    """
    mine: dict[str, list[Piece]] = {}
    for piece in pieces:
        if piece.slot == slot and piece.kind in (("optimizer",) if slot else ("parameter", "buffer")):
            mine.setdefault(piece.name, []).append(piece)
    far = torch.zeros(len(variables), dtype=torch.float64, device=everyone.device)
    there: list[str | None] = []
    for number, v in enumerate(variables):
        name = None if wanted is None else next((n for n in _names(v, slot) if n in wanted), None)
        there.append(name)
        full = _room(v, everyone.device)
        if wanted is not None and name is not None:
            value = wanted[name].detach()
            full.copy_(torch.view_as_real(value.resolve_conj()) if value.is_complex() else value)
        everyone.broadcast(full)
        far[number] = max((_off(piece, full) for piece in mine.get(v.name, ())), default=0.0)
    of_ranks = everyone.all_gather(far[None])
    if wanted is None:
        return None
    return {name: of_ranks[:, number].tolist() for number, name in enumerate(there) if name is not None}


def _room(v: Variable, device: torch.device) -> Tensor:
    """Where a variable arrives: the widest of its kind, complex numbers as pairs."""
    is_complex = v.tensor.dtype.startswith("complex") or v.pairs
    shape = v.tensor.shape if not is_complex or v.pairs else (*v.tensor.shape, 2)
    return torch.zeros(shape, dtype=torch.float64 if v.tensor.is_float or is_complex else torch.int64, device=device)


def _names(v: Variable, slot: str) -> list[str]:
    return [f"{name} {slot}" if slot else name for name in (v.name, *v.aliases)]


def _off(piece: Piece, full: Tensor) -> float:
    shape = piece.tensor.shape if piece.block is None else piece.block
    got = comparable(piece.slot, piece.tensor.detach())
    if got.is_complex():
        got, shape = torch.view_as_real(got.resolve_conj()), (*shape, 2)
    want = full[tuple(slice(o, o + n) for o, n in zip(piece.offsets, shape, strict=False))]
    if piece.flat is not None:
        want = want.reshape(-1)[piece.flat[0] : piece.flat[1]]
    return farthest(got, want.to(got.device))
