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

from shardwise.lower.kernels.attention_blocks import AttentionBlock, AttentionOutput, SoftmaxState, attend_block, attend_block_backward
from shardwise.lower.kernels.random_stream import DropoutDraw
from shardwise.lower.kernels.randomness import DrawSite, DrawState
from shardwise.lower.kernels.sample_positions import narrow_box
from shardwise.lower.kernels.second_derivatives import refuse_second_derivatives
from shardwise.plan.ir.placement import Range
from shardwise.world.comm.group import Group
from shardwise.world.comm.pending import CollectiveWork

KEYS, GRADIENTS, HOME = 1, 2, 3  # message tags
Ranges = tuple[Range, ...]


class RingTile(NamedTuple):
    """A tile: `rows` of a rank's queries from `row` on and `columns` of a block of keys from `column` on, which are global keys from `key`
    on. `local_causal_ring`: each query sees keys up to its own index. `first`: position of the first query, where each sees keys up to
    its own
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
    dropout_p: float = 0.0
    drawing: tuple[DrawState, DrawSite] | None = None

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size

    @property
    def index(self) -> int:
        return 0 if self.group is None else self.group.index

    @cached_property
    def merged_tiles(self) -> tuple[tuple[tuple[RingTile, ...], ...], ...]:
        """Merged tiles, for use without a mask and without dropout, which address tiles by position."""
        unmasked = tuple((RingTile(0, self.num_keys(owner), 0, self.num_keys(owner), 0, causal=True),) for owner in range(len(self.keys)))
        return tuple(
            tuple(
                unmasked[owner] if self.causal and queries == self.keys[owner] else _merge_tiles(parts) for owner, parts in enumerate(row)
            )
            for queries, row in zip(self.queries, self.tiles, strict=True)
        )

    @cached_property
    def tiles(self) -> tuple[tuple[tuple[RingTile, ...], ...], ...]:
        """[rank][owner]: the visible tiles of a rank's queries and an owner's keys."""
        return tuple(tuple(tuple(_visible_tiles(queries, keys, self.causal)) for keys in self.keys) for queries in self.queries)

    def num_keys(self, owner: int) -> int:
        """Return the number of keys of a rank."""
        return sum(stop - start for start, stop in self.keys[owner])


def _visible_tiles(queries: Ranges, keys: Ranges, causal: bool) -> Iterator[RingTile]:
    row = 0
    for a, b in queries:
        column = 0
        for c, d in keys:
            if not causal or d <= a + 1:
                yield RingTile(row, b - a, column, d - c, c)
            elif (a, b) == (c, d):
                yield RingTile(row, b - a, column, d - c, c, causal=True)
            elif c < b:
                yield RingTile(row, b - a, column, d - c, c, first=a)
            column += d - c
        row += b - a


def _merge_tiles(parts: tuple[RingTile, ...]) -> tuple[RingTile, ...]:
    """Merge adjacent tiles without masks.

    >>> _merge_tiles((RingTile(0, 2, 0, 3, 8), RingTile(2, 2, 0, 3, 8)))
    (RingTile(row=0, rows=4, column=0, columns=3, key=8, causal=False, first=None),)
    """
    merged: list[RingTile] = []
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


def num_hops_by_owner(needed: Sequence[Sequence[bool]]) -> tuple[int, ...]:
    """Return by owner the number of hops of its keys, to the last rank that needs any. `needed[rank][owner]`.

    >>> num_hops_by_owner([[True, False, False], [True, True, False], [False, True, True]])
    (1, 1, 0)
    """
    n = len(needed)
    return tuple(max((step for step in range(1, n) if needed[(owner + step) % n][owner]), default=0) for owner in range(n))


class RingSchedule(NamedTuple):
    """The tiles that a rank computes of each owner's keys, and the number of hops of each owner's keys."""

    tiles: tuple[tuple[RingTile, ...], ...]
    num_hops: tuple[int, ...]


def plan_ring(ring: Ring, mask: Tensor | None) -> RingSchedule:
    """Return the schedule: without a mask from positions; with one from its visible entries, which all ranks exchange."""
    tiles = ring.tiles[ring.index]
    if mask is None:
        parts = tiles if ring.drawing is not None else ring.merged_tiles[ring.index]
        return RingSchedule(parts, num_hops_by_owner([[bool(parts) for parts in row] for row in ring.tiles]))
    if ring.group is None:
        return RingSchedule(tiles, (0,))
    visible = [[bool(_is_visible(_mask_of_tile(part, mask)).any()) for part in parts] for parts in tiles]
    needed = torch.tensor([[any(row) for row in visible]], dtype=torch.uint8, device=ring.group.device)
    blocks = tuple(tuple(part for part, keep in zip(parts, row, strict=True) if keep) for parts, row in zip(tiles, visible, strict=True))
    return RingSchedule(blocks, num_hops_by_owner(ring.group.all_gather(needed).tolist()))


def _is_visible(mask: Tensor) -> Tensor:
    return mask if mask.dtype is torch.bool else mask > -torch.inf


def _mask_of_tile(part: RingTile, mask: Tensor) -> Tensor:
    rows = mask if mask.shape[-2] == 1 else mask.narrow(-2, part.row, part.rows)
    return rows if mask.shape[-1] == 1 else rows.narrow(-1, part.key, part.columns)


class _KeyRing:
    """Keys and values on their way around the ring: those of `owner` are here."""

    def __init__(self, ring: Ring, trip: RingSchedule, k: Tensor, v: Tensor) -> None:
        self.ring, self.schedule, self.templates = ring, trip, (k, v)
        self.step, self.keys_values, self.next_message = 0, (k, v), k.new_empty(0)
        self.message: Tensor | None = None  # the keys and values here, as one message
        self.works: list[CollectiveWork] = []
        if ring.group is not None:
            ring.group.connect_pairs([(i, (i + 1) % ring.size) for i in range(ring.size)])

    @property
    def owner(self) -> int:
        return (self.ring.index - self.step) % self.ring.size

    @property
    def is_needed(self) -> bool:
        """Flag: this step's keys have been received, as this rank or a later one needs them."""
        return self.step <= self.schedule.num_hops[self.owner]

    def send(self) -> None:
        """Start to send the keys here, which may still be read, and to receive the next."""
        group, owner = self.ring.group, self.owner
        assert group is not None
        previous_rank, next_rank, next_owner = (group.index - 1) % group.size, (group.index + 1) % group.size, (owner - 1) % group.size
        self.works = []
        if self.step < self.schedule.num_hops[next_owner]:
            self.next_message = self.templates[0].new_empty(sum(_message_size(x, self.ring.num_keys(next_owner)) for x in self.templates))
            self.works.append(group.irecv(self.next_message, previous_rank, KEYS))
        if self.step < self.schedule.num_hops[owner]:
            if self.message is None:
                self.message = torch.cat([x.reshape(-1) for x in self.keys_values])
            self.works.append(group.isend(self.message, next_rank, KEYS))

    def receive(self) -> None:
        for work in self.works:
            work.wait()
        self.step += 1
        if self.is_needed:
            self.message = self.next_message
            self.keys_values = _unpack_keys_values(self.next_message, self.templates, self.ring.num_keys(self.owner))


def _message_size(x: Tensor, length: int) -> int:
    return x.numel() // x.shape[-2] * length


def _unpack_keys_values(flat: Tensor, like: Sequence[Tensor], length: int) -> tuple[Tensor, Tensor]:
    parts = torch.split(flat, [_message_size(x, length) for x in like])
    k, v = (part.view(*x.shape[:-2], length, x.shape[-1]) for part, x in zip(parts, like, strict=True))
    return k, v


class _KeyGradientRing:
    """Gradients of keys and values on their way around the ring: the sum over readers follows them, and returns home from the last."""

    def __init__(self, ring: Ring, trip: RingSchedule, k: Tensor, v: Tensor) -> None:
        self.ring, self.schedule, self.templates = ring, trip, (k, v)
        self.dtype = torch.float64 if k.dtype is torch.float64 else torch.float32
        self.sent_home: list[tuple[CollectiveWork, Tensor]] = []  # sends to owners, waited for at the end
        self.pending_send: tuple[CollectiveWork, Tensor] | None = None
        self.pending_receive: tuple[CollectiveWork, Tensor] | None = None
        if ring.group is not None:
            ring.group.connect_pairs(((owner + reach) % ring.size, owner) for owner, reach in enumerate(trip.num_hops) if reach)

    def zeros(self, owner: int) -> Tensor:
        length = self.ring.num_keys(owner)
        return self.templates[0].new_zeros(sum(_message_size(x, length) for x in self.templates), dtype=self.dtype)

    def start_receive(self, step: int, owner: int) -> None:
        """Start to receive the sum of earlier ranks for an owner's keys, which are here in `step`."""
        self.pending_receive = None
        if self.ring.group is not None and 2 <= step <= self.schedule.num_hops[owner]:
            buffer = self.zeros(owner)
            self.pending_receive = self.ring.group.irecv(buffer, (self.ring.index - 1) % self.ring.size, GRADIENTS), buffer

    def pass_on(self, step: int, owner: int, gradient: Tensor) -> None:
        """Add this rank's gradient, and send the sum on, or home."""
        group, reach = self.ring.group, self.schedule.num_hops[owner]
        assert group is not None
        if self.pending_receive is not None:
            self.pending_receive[0].wait()
            gradient += self.pending_receive[1]
        if self.pending_send is not None:
            self.pending_send[0].wait()
            self.pending_send = None
        if step < reach:
            self.pending_send = group.isend(gradient, (group.index + 1) % group.size, GRADIENTS), gradient
        else:
            self.sent_home.append((group.isend(gradient, owner, HOME), gradient))

    def finish(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's own keys and values, including those of other ranks."""
        group, reach = self.ring.group, self.schedule.num_hops[self.ring.index]
        if group is not None and reach:
            buffer = torch.empty_like(gradient)
            group.irecv(buffer, (group.index + reach) % group.size, HOME).wait()
            gradient += buffer
        for work, _ in (*self.sent_home, *([self.pending_send] if self.pending_send is not None else [])):
            work.wait()
        of_k, of_v = _unpack_keys_values(gradient, self.templates, self.ring.num_keys(self.ring.index))
        return of_k.to(self.templates[0].dtype), of_v.to(self.templates[1].dtype)


def local_causal_ring(at: Ranges, keys: int, scale: float | None = None) -> Ring:
    """Return a ring of this rank alone: causal attention of queries at these positions to so many keys, in tiles without a mask for fused
    kernels.

    >>> [(p.rows, p.columns, p.causal) for p in local_causal_ring(((0, 2), (6, 8)), 8).merged_tiles[0][0]]
    [(2, 2, True), (2, 6, False), (2, 2, True)]
    """
    borders = sorted({0, keys, *(border for range_ in at for border in range_ if border < keys)})
    return Ring(None, (at,), (tuple(pairwise(borders)),), True, scale)


def causal_mask_at(at: Ranges, q: Tensor, k: Tensor) -> Tensor:
    """Return the causal mask of queries at these positions: keys up to their own. bool [queries, keys]."""
    positions = torch.cat([torch.arange(a, b, device=q.device) for a, b in at])
    return positions.unsqueeze(-1) >= torch.arange(k.shape[-2], device=q.device)


def ring_attention(ring: Ring, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Run the operator on this rank's positions. `mask`: rows of its queries or one, all keys or one; boolean, or added to the scores."""
    if torch.is_autocast_enabled(q.device.type):
        autocast_dtype = torch.get_autocast_dtype(q.device.type)
        with torch.autocast(q.device.type, enabled=False):
            return ring_attention(ring, q.to(autocast_dtype), k.to(autocast_dtype), v.to(autocast_dtype), mask)
    out: Tensor = _RingAttention.apply(q, k, v, mask, ring)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class _BlockReader:
    """Source of blocks."""

    ring: Ring
    q: Tensor
    mask: Tensor | None
    dropout: DropoutDraw | None

    def block(self, part: RingTile, here: tuple[Tensor, Tensor]) -> AttentionBlock:
        k, v = (x.narrow(-2, part.column, part.columns) for x in here)
        mask, dropping = self.mask, self.dropout
        if mask is not None:
            mask = _mask_of_tile(part, mask)
        elif part.first is not None:
            at = torch.arange(part.first, part.first + part.rows, device=k.device)
            mask = at.unsqueeze(-1) >= torch.arange(part.key, part.key + part.columns, device=k.device)
        if dropping is not None:
            box = narrow_box(narrow_box(dropping.box, -1, part.key, part.columns), -2, part.row, part.rows)
            dropping = dropping._replace(box=box)
        return AttentionBlock(self.q.narrow(-2, part.row, part.rows), k, v, mask, part.causal, self.ring.scale, dropping)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: Ring) -> Tensor:
        trip, dropping = plan_ring(ring, mask), None
        if ring.drawing is not None:
            draw, site = ring.drawing
            dropping = draw.dropout(site, ring.dropout_p)
        reads = _BlockReader(ring, q, mask, dropping)
        rows, keys_in_ring = SoftmaxState(q, v.shape[-1]), _KeyRing(ring, trip, k, v)
        for step in range(ring.size):
            last = step == ring.size - 1
            if not last:
                keys_in_ring.send()
            for part in trip.tiles[keys_in_ring.owner]:
                attend_block(rows, part.row, reads.block(part, keys_in_ring.keys_values))
            if not last:
                keys_in_ring.receive()
        out = rows.normalized(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, rows.max_score, rows.weight_sum)
        ctx.rest = ring, trip, dropping
        return out

    @staticmethod
    @refuse_second_derivatives("attention", "context")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, top, total = ctx.saved_tensors
        ring, trip, dropping = ctx.rest
        reads, outputs = _BlockReader(ring, q, mask, dropping), AttentionOutput(out, grad, top, total)
        keys_in_ring, gradient_ring = _KeyRing(ring, trip, k, v), _KeyGradientRing(ring, trip, k, v)
        of_q, of_kv = torch.zeros_like(q, dtype=gradient_ring.dtype), gradient_ring.zeros(ring.index)
        of_mask = torch.zeros_like(mask) if ctx.needs_input_grad[3] else None
        for step in range(ring.size):
            owner, last = keys_in_ring.owner, step == ring.size - 1
            gradient_ring.start_receive(step, owner)
            if not last:
                keys_in_ring.send()
            if keys_in_ring.is_needed:
                gradient = gradient_ring.zeros(owner) if step else of_kv
                of_k, of_v = _unpack_keys_values(gradient, (k, v), ring.num_keys(owner))
                for part in trip.tiles[owner]:
                    of_rows = of_q.narrow(-2, part.row, part.rows)
                    of_columns = [x.narrow(-2, part.column, part.columns) for x in (of_k, of_v)]
                    of_part = None if of_mask is None else _mask_of_tile(part, of_mask)
                    block, output = reads.block(part, keys_in_ring.keys_values), outputs.narrow(part.row, part.rows)
                    attend_block_backward(block, output, of_rows, of_columns[0], of_columns[1], of_part)
                if step:
                    gradient_ring.pass_on(step, owner, gradient)
            if not last:
                keys_in_ring.receive()
        of_k, of_v = gradient_ring.finish(of_kv)
        return of_q.to(q.dtype), of_k, of_v, of_mask, None
