"""Sums in two levels: inside boxes (hosts) through shared memory, between them over the network. In: tensors. Out: `Work`.

Boxes of one size: members scatter sums inside their box, each sums its piece with its like in the other boxes (a rail), and they gather.
Between boxes go 2M(b-1)/(k·b) bytes a rank, of b boxes of k. Boxes that differ: each sums at one member, those sum with one another, and
tell their boxes. Large sums go in parts, so that one crosses the network while the next is scattered. Not modelled: more than two levels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.world import recorder
from weft.world.connection import BOX
from weft.world.group import Group
from weft.world.pending import NARROW, Work
from weft.world.runner import Call, Note, Runner

PART_BYTES = 4 << 20
NAME = "hierarchical"


class Levels:
    """Sums of the runner's group, of whose boxes one or more has several members."""

    def __init__(self, runner: Runner) -> None:
        group, boxes = runner.group, runner.group.boxes
        me = group.ranks[group.index]
        self.runner, self._group = runner, group
        self.even = len({len(box) for box in boxes}) == 1
        mine = next(box for box in boxes if me in box)
        self.box = group.apart(BOX, mine)
        place = mine.index(me)
        across = tuple(box[place] for box in boxes) if self.even else tuple(box[0] for box in boxes)
        self.rail = group.apart("rail", across) if me in across else None
        # Pieces of the whole, first those of the members who are first in their boxes: what a box scatters to each of its own.
        index = {rank: i for i, rank in enumerate(group.ranks)}
        self.order = torch.tensor([index[box[j]] for j in range(len(mine)) for box in boxes] if self.even else [])

    def connect(self) -> None:
        """Connects now; all members must come."""
        for part in (self.box, self.rail):
            if part is not None:
                part.connect()

    def shared_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Group.shared_buffer`: memory that the members of a box map."""
        return self.box.shared_buffer(numel, dtype)

    def all_reduce(self, x: Tensor, wait: bool = True) -> Work:
        """Replaces `x` by the sum over the members."""

        def work(note: Note, tag: int) -> None:
            flat = x.detach().reshape(-1).contiguous()  # a view of every other element is flat and has gaps
            wide = flat.float() if flat.dtype in NARROW else flat
            (self._rails if self.even else self._leaders)(wide, note)
            if wide.data_ptr() != x.data_ptr():
                x.detach().copy_(wide.view(x.shape))

        return self.runner.start(Call(recorder.ALL_REDUCE, NAME, 0, (x.numel(),)), x, work, wait)

    def reduce_scatter_into(self, out: Tensor, x: Tensor, wait: bool = True) -> Work:
        """Piece `index` of the sum of flat `x` over the members into flat `out`; pieces are equal. Of boxes of one size."""

        def work(note: Note, tag: int) -> None:
            assert self.rail is not None
            rows = x.detach().view(self._group.size, -1)[self.order]
            rows = rows.float() if rows.dtype in NARROW else rows
            half = rows.new_empty(rows.numel() // self.box.size)
            note(1, self.one(self.box))
            self.box.reduce_scatter_into(half, rows.view(-1))
            piece = half.new_empty(out.numel())
            note(2, self.one(self.rail))
            self.rail.reduce_scatter_into(piece, half)
            out.detach().copy_(piece)

        return self.runner.start(Call(recorder.REDUCE_SCATTER, NAME, 0, (x.numel(),)), x, work, wait)

    def all_gather_into(self, out: Tensor, x: Tensor, wait: bool = True) -> Work:
        """Flat `x` of every member into flat `out`, member after member. Of boxes of one size."""

        def work(note: Note, tag: int) -> None:
            assert self.rail is not None
            half = x.new_empty(x.numel() * self.rail.size)
            note(1, self.one(self.rail))
            self.rail.all_gather_into(half, x)
            rows = x.new_empty((self._group.size, x.numel()))
            note(2, self.one(self.box))
            self.box.all_gather_into(rows.view(-1), half)
            out.detach().view(self._group.size, -1)[self.order] = rows

        return self.runner.start(Call(recorder.ALL_GATHER, NAME, 0, (out.numel(),)), x, work, wait)

    def _rails(self, flat: Tensor, note: Note) -> None:
        box, rail = self.box, self.rail
        assert rail is not None
        under_way: list[tuple[Tensor, Tensor, Work]] = []
        tail = flat.numel() % box.size
        body = flat[: flat.numel() - tail]
        width = max(1, PART_BYTES // flat.element_size() // box.size) * box.size
        for part in torch.split(body, width):
            if part.numel():
                mine = part.view(box.size, -1)[box.index]
                note(1, self.one(box))
                box.reduce_scatter_into(mine, part)
                under_way.append((part, mine, rail.all_reduce(mine, wait=False)))
        if tail:
            box.all_reduce(flat[body.numel() :])
            rail.all_reduce(flat[body.numel() :])
        for part, mine, work in under_way:
            note(2, self.one(rail))
            work.wait()
            note(3, self.one(box))
            box.all_gather_into(part, mine)

    def _leaders(self, flat: Tensor, note: Note) -> None:
        under_way: list[tuple[Tensor, Work | None]] = []
        for part in torch.split(flat, max(1, PART_BYTES // flat.element_size())):
            note(1, self.one(self.box))
            self.box.all_reduce(part)
            under_way.append((part, self.rail.all_reduce(part, wait=False) if self.rail is not None else None))
        for part, work in under_way:
            if work is not None:
                note(2, self.one(self.rail))
                work.wait()
            note(3, self.one(self.box))
            self.box.broadcast(part)

    def one(self, among: Group | None) -> int:
        """The member that is waited for where there is only one; else -1: the transport's own words must do."""
        if among is None or among.size != 2:
            return -1
        return self._group.ranks.index(among.ranks[1 - among.index])
