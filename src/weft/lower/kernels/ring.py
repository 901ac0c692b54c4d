"""Ring attention: queries and keys are cut, keys and values go round the ranks, and none ever holds them whole.

In: this rank's queries [..., queries, width], keys and values, and which positions each rank has. Out: attention of its queries to all keys
(Liu, Zaharia and Abbeel 2023, arXiv 2310.01889). While a block is computed (`blocks`) the next one is on its way. Backward goes round once
more; what a block's readers add up of its gradient follows it, and goes home from the last of them. What no query sees is not computed,
and a block goes no further than to the last rank that sees any of it. Where p is what a rank has of keys and values, and n ranks see all,
a rank sends (n-1)p forward, and backward that and (n-1)p of gradients, float32 at least. Not modelled: a gradient of the gradient.
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

KEYS, GRADIENTS, HOME = 1, 2, 3  # tags
Ranges = tuple[Range, ...]


class Part(NamedTuple):
    """`rows` of a rank's queries from `row` on and `columns` of a block of keys from `column` on, which is at `key` in all. `causal`: each
    sees those up to its own place. `first`: the position of the first query, where each sees keys up to its own position."""

    row: int
    rows: int
    column: int
    columns: int
    key: int
    causal: bool = False
    first: int | None = None


@dataclass(frozen=True)
class Ring:
    """`queries` and `keys`: the positions that each rank has of them; without a `group`, this rank alone, with all keys. `drawing`: what is
    dropped, where anything is."""

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
        """The same in as few parts as can be, where nothing is asked of them by position: no mask, nothing that is dropped."""
        unmasked = tuple((Part(0, self.length(owner), 0, self.length(owner), 0, causal=True),) for owner in range(len(self.keys)))
        return tuple(
            tuple(unmasked[owner] if self.causal and mine == self.keys[owner] else _joined(parts) for owner, parts in enumerate(row))
            for mine, row in zip(self.queries, self.parts, strict=True)
        )

    @cached_property
    def parts(self) -> tuple[tuple[tuple[Part, ...], ...], ...]:
        """[rank][owner]: the parts of a rank's queries and of an owner's keys that see one another."""
        return tuple(tuple(tuple(_parts(mine, theirs, self.causal)) for theirs in self.keys) for mine in self.queries)

    def length(self, owner: int) -> int:
        """Keys that a rank has."""
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
    """Parts that lie one behind another, and of which all is seen, as one.

    >>> _joined((Part(0, 2, 0, 3, 8), Part(2, 2, 0, 3, 8)))
    (Part(row=0, rows=4, column=0, columns=3, key=8, causal=False, first=None),)
    """
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last is None or any(one.causal or one.first is not None for one in (last, part)):
            merged.append(part)
        elif (last.column, last.columns, last.row + last.rows) == (part.column, part.columns, part.row):
            merged[-1] = last._replace(rows=last.rows + part.rows)
        elif (last.row, last.rows, last.column + last.columns) == (part.row, part.rows, part.column):
            merged[-1] = last._replace(columns=last.columns + part.columns)
        else:
            merged.append(part)
    return tuple(merged)


def reaches(needed: Sequence[Sequence[bool]]) -> tuple[int, ...]:
    """By owner: how many ranks its keys are passed on, to the last that needs any. `needed[rank][owner]`.

    >>> reaches([[True, False, False], [True, True, False], [False, True, True]])
    (1, 1, 0)
    """
    n = len(needed)
    return tuple(max((step for step in range(1, n) if needed[(owner + step) % n][owner]), default=0) for owner in range(n))


class Trip(NamedTuple):
    """What a rank computes of each owner's keys, and how far each owner's go."""

    parts: tuple[tuple[Part, ...], ...]
    reach: tuple[int, ...]


def planned(ring: Ring, mask: Tensor | None) -> Trip:
    """Without a mask what positions say; with one, what it lets through, of which all ranks tell one another."""
    mine = ring.parts[ring.index]
    if mask is None:
        parts = mine if ring.drawing is not None else ring.blocks[ring.index]
        return Trip(parts, reaches([[bool(parts) for parts in row] for row in ring.parts]))
    if ring.group is None:
        return Trip(mine, (0,))
    lets = [[bool(_lets(_of_mask(part, mask)).any()) for part in parts] for parts in mine]
    needed = torch.tensor([[any(row) for row in lets]], dtype=torch.uint8, device=ring.group.device)
    blocks = tuple(tuple(part for part, let in zip(parts, row, strict=True) if let) for parts, row in zip(mine, lets, strict=True))
    return Trip(blocks, reaches(ring.group.all_gather(needed).tolist()))


def _lets(mask: Tensor) -> Tensor:
    return mask if mask.dtype is torch.bool else mask > -torch.inf


def _of_mask(part: Part, mask: Tensor) -> Tensor:
    rows = mask if mask.shape[-2] == 1 else mask.narrow(-2, part.row, part.rows)
    return rows if mask.shape[-1] == 1 else rows.narrow(-1, part.key, part.columns)


class _Round:
    """Keys and values on their way round: those of `owner` are here."""

    def __init__(self, ring: Ring, trip: Trip, k: Tensor, v: Tensor) -> None:
        self.ring, self.trip, self.like = ring, trip, (k, v)
        self.step, self.here, self.coming = 0, (k, v), k.new_empty(0)
        self.flat: Tensor | None = None  # what is here, as one message
        self.works: list[Work] = []
        if ring.group is not None:
            ring.group.connect_pairs([(i, (i + 1) % ring.size) for i in range(ring.size)])

    @property
    def owner(self) -> int:
        return (self.ring.index - self.step) % self.ring.size

    @property
    def there(self) -> bool:
        """Whether any of its queries need what is here, or anybody's behind it, so that it has come."""
        return self.step <= self.trip.reach[self.owner]

    def send(self) -> None:
        """Start to pass on what is here, which may still be read, and to receive the next."""
        group, owner = self.ring.group, self.owner
        assert group is not None
        before, after, following = (group.index - 1) % group.size, (group.index + 1) % group.size, (owner - 1) % group.size
        self.works = []
        if self.step < self.trip.reach[following]:
            self.coming = self.like[0].new_empty(sum(_size(x, self.ring.length(following)) for x in self.like))
            self.works.append(group.irecv(self.coming, before, KEYS))
        if self.step < self.trip.reach[owner]:
            if self.flat is None:
                self.flat = torch.cat([x.reshape(-1) for x in self.here])
            self.works.append(group.isend(self.flat, after, KEYS))

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
    """Gradients of keys and values on their way: what their readers add up follows them, and goes home from the last."""

    def __init__(self, ring: Ring, trip: Trip, k: Tensor, v: Tensor) -> None:
        self.ring, self.trip, self.like = ring, trip, (k, v)
        self.wide = torch.float64 if k.dtype is torch.float64 else torch.float32
        self.sent: list[tuple[Work, Tensor]] = []  # home, where nobody waits for it before all else is done
        self.passed: tuple[Work, Tensor] | None = None
        self.before: tuple[Work, Tensor] | None = None
        if ring.group is not None:
            ring.group.connect_pairs(((owner + reach) % ring.size, owner) for owner, reach in enumerate(trip.reach) if reach)

    def empty(self, owner: int) -> Tensor:
        length = self.ring.length(owner)
        return self.like[0].new_zeros(sum(_size(x, length) for x in self.like), dtype=self.wide)

    def expect(self, step: int, owner: int) -> None:
        """Begin to receive what those before have added up of an owner's keys, which are here in `step`."""
        self.before = None
        if self.ring.group is not None and 2 <= step <= self.trip.reach[owner]:
            into = self.empty(owner)
            self.before = self.ring.group.irecv(into, (self.ring.index - 1) % self.ring.size, GRADIENTS), into

    def pass_on(self, step: int, owner: int, mine: Tensor) -> None:
        """Add what this rank has found, and send it on, or home."""
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
        """This rank's own keys' and values', with what it found itself."""
        group, reach = self.ring.group, self.trip.reach[self.ring.index]
        if group is not None and reach:
            into = torch.empty_like(mine)
            group.irecv(into, (group.index + reach) % group.size, HOME).wait()
            mine += into
        for work, _ in (*self.sent, *([self.passed] if self.passed is not None else [])):
            work.wait()
        of_k, of_v = _unpacked(mine, self.like, self.ring.length(self.ring.index))
        return of_k.to(self.like[0].dtype), of_v.to(self.like[1].dtype)


def causal(at: Ranges, keys: int, scale: float | None = None) -> Ring:
    """Causal attention of queries at these positions to so many keys, all of them here: blocks without a mask, which fused kernels know.

    >>> [(p.rows, p.columns, p.causal) for p in causal(((0, 2), (6, 8)), 8).blocks[0][0]]
    [(2, 2, True), (2, 6, False), (2, 2, True)]
    """
    borders = sorted({0, keys, *(border for both in at for border in both if border < keys)})
    return Ring(None, (at,), (tuple(pairwise(borders)),), True, scale)


def ring_attention(ring: Ring, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The operator on this rank's positions. `mask`: rows of its queries or one, for all keys or one; boolean, or added to the scores."""
    if torch.is_autocast_enabled(q.device.type):
        narrow = torch.get_autocast_dtype(q.device.type)
        with torch.autocast(q.device.type, enabled=False):
            return ring_attention(ring, q.to(narrow), k.to(narrow), v.to(narrow), mask)
    out: Tensor = _Ring.apply(q, k, v, mask, ring)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class _Reads:
    """What blocks are made of."""

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
            draw, where = ring.drawing
            dropping = Dropping(draw.key(where.number), draw.box(where.place), ring.p)
        reads = _Reads(ring, q, mask, dropping)
        rows, going = Rows(q, v.shape[-1]), _Round(ring, trip, k, v)
        for step in range(ring.size):
            last = step == ring.size - 1
            if not last:
                going.send()
            for part in trip.parts[going.owner]:
                attend(rows, part.row, reads.block(part, going.here))
            if not last:
                going.receive()
        out = rows.done(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, rows.top, rows.total)
        ctx.rest = ring, trip, dropping
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, top, total = ctx.saved_tensors
        ring, trip, dropping = ctx.rest
        reads, seen = _Reads(ring, q, mask, dropping), Seen(out, grad, top, total)
        coming, homing = _Round(ring, trip, k, v), _Gradients(ring, trip, k, v)
        of_q, of_kv = torch.zeros_like(q, dtype=homing.wide), homing.empty(ring.index)
        of_mask = torch.zeros_like(mask) if ctx.needs_input_grad[3] else None
        for step in range(ring.size):
            owner, last = coming.owner, step == ring.size - 1
            homing.expect(step, owner)
            if not last:
                coming.send()
            if coming.there:
                mine = homing.empty(owner) if step else of_kv
                of_k, of_v = _unpacked(mine, (k, v), ring.length(owner))
                for part in trip.parts[owner]:
                    piece = [x.narrow(-2, part.column, part.columns) for x in (of_k, of_v)]
                    into = of_q.narrow(-2, part.row, part.rows), piece[0], piece[1]
                    of_part = None if of_mask is None else _of_mask(part, of_mask)
                    differentiate(reads.block(part, coming.here), seen.narrow(part.row, part.rows), *into, of_part)
                if step:
                    homing.pass_on(step, owner, mine)
            if not last:
                coming.receive()
        of_k, of_v = homing.home(of_kv)
        return of_q.to(q.dtype), of_k, of_v, of_mask, None
