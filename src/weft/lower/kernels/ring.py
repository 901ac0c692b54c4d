"""Ring attention: queries and keys are sharded, keys and values go around the ring of ranks, and no rank ever holds all of them.

From this rank's queries [..., queries, width], keys and values, and the positions of each rank, to attention of its queries to all keys
(Liu, Zaharia and Abbeel 2023, arXiv 2310.01889). While a block is computed (`attention_blocks`) the next one is in flight. Backward goes
around again; the sum of a block's gradients follows it, and returns home from the last reader. Fully masked tiles are not computed, and a
block goes no further than to the last rank that needs it. With p bytes of keys and values per rank, and n ranks that need all, a rank sends
(n-1)p forward, and backward that and (n-1)p of gradients, float32 at least. Not modeled: second derivatives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.lower.kernels.blocks import Block, Rows, Seen, attend, differentiate
from weft.lower.kernels.draws import Dropping
from weft.lower.kernels.randomness import Draw, Where
from weft.lower.kernels.sample_positions import narrowed
from weft.plan.placement import Range
from weft.world.group import Group
from weft.world.pending import Work

KEYS, GRADIENTS, HOME = 1, 2, 3  # message tags
Ranges = tuple[Range, ...]


class Part(NamedTuple):
    """A tile: `rows` of a rank's queries from `row` on and `columns` of a block of keys from `column` on, which are global keys from `key`
    on. `causal`: each query sees keys up to its own index. `first`: position of the first query, where each sees keys up to its own
    position."""

    row: int
    rows: int
    column: int
    columns: int
    key: int
    causal: bool = False
    first: int | None = None


@dataclass(frozen=True)
class Ring:
    """`queries` and `keys`: positions of each rank; without a `group`, this rank alone, with all keys. `draw`: the dropout, if any."""

    group: Group | None
    queries: tuple[Ranges, ...]
    keys: tuple[Ranges, ...]
    causal: bool
    scale: float | None = None
    p: float = 0.0
    drawing: tuple[Draw, Where] | None = None

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size

    @property
    def index(self) -> int:
        return 0 if self.group is None else self.group.index

    @cached_property
    def blocks(self) -> tuple[tuple[tuple[Part, ...], ...], ...]:
        """Merged tiles, for use without a mask and without dropout, which address tiles by position."""
        unmasked = tuple((Part(0, self.length(owner), 0, self.length(owner), 0, causal=True),) for owner in range(len(self.keys)))
        return tuple(
            tuple(unmasked[owner] if self.causal and queries == self.keys[owner] else _joined(parts) for owner, parts in enumerate(row))
            for queries, row in zip(self.queries, self.parts, strict=True)
        )

    @cached_property
    def parts(self) -> tuple[tuple[tuple[Part, ...], ...], ...]:
        """[rank][owner]: the visible tiles of a rank's queries and an owner's keys."""
        return tuple(tuple(tuple(_parts(queries, keys, self.causal)) for keys in self.keys) for queries in self.queries)

    def length(self, owner: int) -> int:
        """Return the number of keys of a rank."""
        return sum(stop - start for start, stop in self.keys[owner])


def _parts(queries: Ranges, keys: Ranges, causal: bool) -> Iterator[Part]:
    row = 0
    for a, b in queries:
        column = 0
        for c, d in keys:
            if not causal or d <= a + 1:
                yield Part(row, b - a, column, d - c, c)
            elif (a, b) == (c, d):
                yield Part(row, b - a, column, d - c, c, causal=True)
            elif c < b:
                yield Part(row, b - a, column, d - c, c, first=a)
            column += d - c
        row += b - a


def _joined(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Merge adjacent tiles without masks.

    >>> _joined((Part(0, 2, 0, 3, 8), Part(2, 2, 0, 3, 8)))
    (Part(row=0, rows=4, column=0, columns=3, key=8, causal=False, first=None),)
    """
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last is None or any(tile.causal or tile.first is not None for tile in (last, part)):
            merged.append(part)
        elif (last.column, last.columns, last.row + last.rows) == (part.column, part.columns, part.row):
            merged[-1] = last._replace(rows=last.rows + part.rows)
        elif (last.row, last.rows, last.column + last.columns) == (part.row, part.rows, part.column):
            merged[-1] = last._replace(columns=last.columns + part.columns)
        else:
            merged.append(part)
    return tuple(merged)


def reaches(needed: Sequence[Sequence[bool]]) -> tuple[int, ...]:
    """Return by owner the number of hops of its keys, to the last rank that needs any. `needed[rank][owner]`.

    >>> reaches([[True, False, False], [True, True, False], [False, True, True]])
    (1, 1, 0)
    """
    n = len(needed)
    return tuple(max((step for step in range(1, n) if needed[(owner + step) % n][owner]), default=0) for owner in range(n))


class Trip(NamedTuple):
    """The tiles that a rank computes of each owner's keys, and the number of hops of each owner's keys."""

    parts: tuple[tuple[Part, ...], ...]
    reach: tuple[int, ...]


def planned(ring: Ring, mask: Tensor | None) -> Trip:
    """Return the schedule: without a mask from positions; with one from its visible entries, which all ranks exchange."""
    tiles = ring.parts[ring.index]
    if mask is None:
        parts = tiles if ring.drawing is not None else ring.blocks[ring.index]
        return Trip(parts, reaches([[bool(parts) for parts in row] for row in ring.parts]))
    if ring.group is None:
        return Trip(tiles, (0,))
    visible = [[bool(_lets(_of_mask(part, mask)).any()) for part in parts] for parts in tiles]
    needed = torch.tensor([[any(row) for row in visible]], dtype=torch.uint8, device=ring.group.device)
    blocks = tuple(tuple(part for part, keep in zip(parts, row, strict=True) if keep) for parts, row in zip(tiles, visible, strict=True))
    return Trip(blocks, reaches(ring.group.all_gather(needed).tolist()))


def _lets(mask: Tensor) -> Tensor:
    return mask if mask.dtype is torch.bool else mask > -torch.inf


def _of_mask(part: Part, mask: Tensor) -> Tensor:
    rows = mask if mask.shape[-2] == 1 else mask.narrow(-2, part.row, part.rows)
    return rows if mask.shape[-1] == 1 else rows.narrow(-1, part.key, part.columns)


class _Round:
    """Keys and values on their way around the ring: those of `owner` are here."""

    def __init__(self, ring: Ring, trip: Trip, k: Tensor, v: Tensor) -> None:
        self.ring, self.trip, self.like = ring, trip, (k, v)
        self.step, self.here, self.coming = 0, (k, v), k.new_empty(0)
        self.flat: Tensor | None = None  # the keys and values here, as one message
        self.works: list[Work] = []
        if ring.group is not None:
            ring.group.connect_pairs([(i, (i + 1) % ring.size) for i in range(ring.size)])

    @property
    def owner(self) -> int:
        return (self.ring.index - self.step) % self.ring.size

    @property
    def there(self) -> bool:
        """Flag: this step's keys have been received, as this rank or a later one needs them."""
        return self.step <= self.trip.reach[self.owner]

    def send(self) -> None:
        """Start to send the keys here, which may still be read, and to receive the next."""
        group, owner = self.ring.group, self.owner
        assert group is not None
        previous_rank, next_rank, next_owner = (group.index - 1) % group.size, (group.index + 1) % group.size, (owner - 1) % group.size
        self.works = []
        if self.step < self.trip.reach[next_owner]:
            self.coming = self.like[0].new_empty(sum(_size(x, self.ring.length(next_owner)) for x in self.like))
            self.works.append(group.irecv(self.coming, previous_rank, KEYS))
        if self.step < self.trip.reach[owner]:
            if self.flat is None:
                self.flat = torch.cat([x.reshape(-1) for x in self.here])
            self.works.append(group.isend(self.flat, next_rank, KEYS))

    def receive(self) -> None:
        for work in self.works:
            work.wait()
        self.step += 1
        if self.there:
            self.flat = self.coming
            self.here = _unpacked(self.coming, self.like, self.ring.length(self.owner))


def _size(x: Tensor, length: int) -> int:
    return x.numel() // x.shape[-2] * length


def _unpacked(flat: Tensor, like: Sequence[Tensor], length: int) -> tuple[Tensor, Tensor]:
    parts = torch.split(flat, [_size(x, length) for x in like])
    k, v = (part.view(*x.shape[:-2], length, x.shape[-1]) for part, x in zip(parts, like, strict=True))
    return k, v


class _Gradients:
    """Gradients of keys and values on their way around the ring: the sum over readers follows them, and returns home from the last."""

    def __init__(self, ring: Ring, trip: Trip, k: Tensor, v: Tensor) -> None:
        self.ring, self.trip, self.like = ring, trip, (k, v)
        self.wide = torch.float64 if k.dtype is torch.float64 else torch.float32
        self.sent: list[tuple[Work, Tensor]] = []  # sends to owners, waited for at the end
        self.passed: tuple[Work, Tensor] | None = None
        self.before: tuple[Work, Tensor] | None = None
        if ring.group is not None:
            ring.group.connect_pairs(((owner + reach) % ring.size, owner) for owner, reach in enumerate(trip.reach) if reach)

    def empty(self, owner: int) -> Tensor:
        length = self.ring.length(owner)
        return self.like[0].new_zeros(sum(_size(x, length) for x in self.like), dtype=self.wide)

    def expect(self, step: int, owner: int) -> None:
        """Start to receive the sum of earlier ranks for an owner's keys, which are here in `step`."""
        self.before = None
        if self.ring.group is not None and 2 <= step <= self.trip.reach[owner]:
            buffer = self.empty(owner)
            self.before = self.ring.group.irecv(buffer, (self.ring.index - 1) % self.ring.size, GRADIENTS), buffer

    def pass_on(self, step: int, owner: int, mine: Tensor) -> None:
        """Add this rank's gradient, and send the sum on, or home."""
        group, reach = self.ring.group, self.trip.reach[owner]
        assert group is not None
        if self.before is not None:
            self.before[0].wait()
            mine += self.before[1]
        if self.passed is not None:
            self.passed[0].wait()
            self.passed = None
        if step < reach:
            self.passed = group.isend(mine, (group.index + 1) % group.size, GRADIENTS), mine
        else:
            self.sent.append((group.isend(mine, owner, HOME), mine))

    def home(self, mine: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's own keys and values, including those of other ranks."""
        group, reach = self.ring.group, self.trip.reach[self.ring.index]
        if group is not None and reach:
            buffer = torch.empty_like(mine)
            group.irecv(buffer, (group.index + reach) % group.size, HOME).wait()
            mine += buffer
        for work, _ in (*self.sent, *([self.passed] if self.passed is not None else [])):
            work.wait()
        of_k, of_v = _unpacked(mine, self.like, self.ring.length(self.ring.index))
        return of_k.to(self.like[0].dtype), of_v.to(self.like[1].dtype)


def causal(at: Ranges, keys: int, scale: float | None = None) -> Ring:
    """Return a ring of this rank alone: causal attention of queries at these positions to so many keys, in tiles without a mask for fused
    kernels.

    >>> [(p.rows, p.columns, p.causal) for p in causal(((0, 2), (6, 8)), 8).blocks[0][0]]
    [(2, 2, True), (2, 6, False), (2, 2, True)]
    """
    borders = sorted({0, keys, *(border for range_ in at for border in range_ if border < keys)})
    return Ring(None, (at,), (tuple(pairwise(borders)),), True, scale)


def ring_attention(ring: Ring, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Run the operator on this rank's positions. `mask`: rows of its queries or one, all keys or one; boolean, or added to the scores."""
    if torch.is_autocast_enabled(q.device.type):
        autocast_dtype = torch.get_autocast_dtype(q.device.type)
        with torch.autocast(q.device.type, enabled=False):
            return ring_attention(ring, q.to(autocast_dtype), k.to(autocast_dtype), v.to(autocast_dtype), mask)
    out: Tensor = _Ring.apply(q, k, v, mask, ring)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class _Reads:
    """Source of blocks."""

    ring: Ring
    q: Tensor
    mask: Tensor | None
    dropping: Dropping | None

    def block(self, part: Part, here: tuple[Tensor, Tensor]) -> Block:
        k, v = (x.narrow(-2, part.column, part.columns) for x in here)
        mask, dropping = self.mask, self.dropping
        if mask is not None:
            mask = _of_mask(part, mask)
        elif part.first is not None:
            at = torch.arange(part.first, part.first + part.rows, device=k.device)
            mask = at.unsqueeze(-1) >= torch.arange(part.key, part.key + part.columns, device=k.device)
        if dropping is not None:
            box = narrowed(narrowed(dropping.box, -1, part.key, part.columns), -2, part.row, part.rows)
            dropping = dropping._replace(box=box)
        return Block(self.q.narrow(-2, part.row, part.rows), k, v, mask, part.causal, self.ring.scale, dropping)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: Ring) -> Tensor:
        trip, dropping = planned(ring, mask), None
        if ring.drawing is not None:
            draw, site = ring.drawing
            dropping = Dropping(draw.key(site.number), draw.box(site.place), ring.p)
        reads = _Reads(ring, q, mask, dropping)
        rows, keys_in_ring = Rows(q, v.shape[-1]), _Round(ring, trip, k, v)
        for step in range(ring.size):
            last = step == ring.size - 1
            if not last:
                keys_in_ring.send()
            for part in trip.parts[keys_in_ring.owner]:
                attend(rows, part.row, reads.block(part, keys_in_ring.here))
            if not last:
                keys_in_ring.receive()
        out = rows.done(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, rows.top, rows.total)
        ctx.rest = ring, trip, dropping
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, top, total = ctx.saved_tensors
        ring, trip, dropping = ctx.rest
        reads, outputs = _Reads(ring, q, mask, dropping), Seen(out, grad, top, total)
        keys_in_ring, gradient_ring = _Round(ring, trip, k, v), _Gradients(ring, trip, k, v)
        of_q, of_kv = torch.zeros_like(q, dtype=gradient_ring.wide), gradient_ring.empty(ring.index)
        of_mask = torch.zeros_like(mask) if ctx.needs_input_grad[3] else None
        for step in range(ring.size):
            owner, last = keys_in_ring.owner, step == ring.size - 1
            gradient_ring.expect(step, owner)
            if not last:
                keys_in_ring.send()
            if keys_in_ring.there:
                gradient = gradient_ring.empty(owner) if step else of_kv
                of_k, of_v = _unpacked(gradient, (k, v), ring.length(owner))
                for part in trip.parts[owner]:
                    piece = [x.narrow(-2, part.column, part.columns) for x in (of_k, of_v)]
                    targets = of_q.narrow(-2, part.row, part.rows), piece[0], piece[1]
                    of_part = None if of_mask is None else _of_mask(part, of_mask)
                    differentiate(reads.block(part, keys_in_ring.here), outputs.narrow(part.row, part.rows), *targets, of_part)
                if step:
                    gradient_ring.pass_on(step, owner, gradient)
            if not last:
                keys_in_ring.receive()
        of_k, of_v = gradient_ring.home(of_kv)
        return of_q.to(q.dtype), of_k, of_v, of_mask, None
