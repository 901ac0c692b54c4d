"""What compressed gradients have not sent yet, as pieces of a checkpoint. In: a rank's compressed buckets. Out: `Piece`s.

A rest belongs to one rank and one layout: the same layout goes on exactly, another begins with none, as at the first step, and what was
kept back is lost to it, once. Not modelled: handing rests over to another layout.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from weft.plan.layout import Layout
from weft.run.reduce.between_hosts import BetweenHosts
from weft.run.reduce.compressed import Compressed
from weft.run.state.checkpoint.piece import Piece, full_piece


class Residuals:
    """The rests of one rank's buckets."""

    def __init__(self, compressed: Iterable[Compressed | BetweenHosts], layout: Layout, rank: int) -> None:
        axes = f"data={layout.data} tensor={layout.grid or layout.tensor} pipeline={layout.pipeline}"
        self._name = f"{axes} zero={layout.zero} compress={layout.compress} rank={rank}"
        self._tensors = {(f"{self._name} {one.name} {x.numel()}", slot): x for one in compressed for slot, x in one.residuals.items()}
        self._step = torch.zeros((), dtype=torch.int64)

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._tensors.values())

    def pieces(self, step: int) -> list[Piece]:
        """All of them, after `step` steps; to be saved, or loaded into."""
        if not self._tensors:
            return []
        self._step.fill_(step)
        pieces = [full_piece(name, "rest", x, slot) for (name, slot), x in self._tensors.items()]
        return [*pieces, full_piece(self._name, "rest", self._step, "step")]

    def loaded(self, step: int) -> None:
        """After `pieces(-1)` were loaded from a checkpoint of `step` steps: forget what it had nothing for."""
        if int(self._step) != step:
            for x in self._tensors.values():
                x.zero_()
