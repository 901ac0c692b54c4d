"""Copies on other hosts: what arrives against what was sent; who has what at any moment, in all orders in which ranks act."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.run.checkpoint.state_shard import StateShard, full_shard
from shardwise.train.recovery.buddy_copies import MAX_INTERVAL_S, BuddyCopies, assign_buddies, assign_copies, assign_senders, shard_id


class Wires:
    """What carries messages between the ranks of a process, each of which is a thread."""

    def __init__(self, num_ranks: int) -> None:
        self.messages: dict[tuple[int, int, int], queue.Queue[Tensor]] = {}
        self.num_ranks, self.told = num_ranks, [""] * num_ranks
        self.barrier, self.votes = threading.Barrier(num_ranks), [[0]] * num_ranks

    def world(self, rank: int) -> Any:
        def isend(x: Tensor, to: int, tag: int = 0) -> Any:
            self.messages.setdefault((rank, to, tag), queue.Queue()).put(x.clone())
            return SimpleNamespace(wait=lambda: None)

        def irecv(x: Tensor, source: int, tag: int = 0) -> Any:
            came = self.messages.setdefault((source, rank, tag), queue.Queue())
            return SimpleNamespace(wait=lambda: x.copy_(came.get(timeout=30)))

        def all_reduce_max(values: Sequence[int]) -> list[int]:
            self.votes[rank] = list(values)
            self.barrier.wait()
            out = [max(column) for column in zip(*self.votes, strict=True)]
            self.barrier.wait()
            return out

        def all_gather_text(text: str) -> list[str]:
            self.told[rank] = text
            self.barrier.wait()
            return list(self.told)

        everyone = SimpleNamespace(isend=isend, irecv=irecv)
        return SimpleNamespace(
            rank=rank,
            num_ranks=self.num_ranks,
            failure_reason="",
            world_group=everyone,
            all_reduce_max=all_reduce_max,
            all_gather_text=all_gather_text,
        )


def together(*work: Any) -> list[Any]:
    out: list[Any] = [None] * len(work)

    def run(i: int) -> None:
        out[i] = work[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(work))]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    return out


def pieces_of(rank: int) -> list[StateShard]:
    alone = [
        StateShard("w", "parameter", (4, 3), (2 * rank, 0), torch.randn(2, 3)),
        StateShard("w", "optimizer", (4, 3), (2 * rank, 0), torch.randn(5).to(torch.bfloat16), "exp_avg", block=(2, 3), flat=(1, 6)),
        StateShard("t", "buffer", (3, 4), (0, 2 * rank), torch.randn(2, 3, dtype=torch.float64).t()),
        full_shard(f"rest{rank}", "rest", torch.tensor([True, False])),
        full_shard(f"none{rank}", "buffer", torch.zeros(0, 7)),
    ]
    return [*alone, full_shard("step", "scalar", torch.tensor(7))]


def test_what_one_host_alone_has_arrives_bit_for_bit() -> None:
    wires = Wires(3)  # two with state, and a spare
    worlds, here = [wires.world(rank) for rank in range(3)], [pieces_of(0), pieces_of(1), []]
    boxes = [(0,), (1,), (2,)]
    states = together(*(lambda rank=rank: assign_copies(worlds[rank], boxes, here[rank]) for rank in range(3)))
    assert states[0] == states[1] == states[2]
    assert {rank: len(names) for rank, names in states[0].shards_by_sender.items()} == {0: 5, 1: 5}  # the step is on both
    assert states[0].required == {shard_id(piece) for of in here for piece in of if piece.kind != "rest"}
    said: list[str] = []
    copies = [BuddyCopies(world, boxes, state, 2, said.append) for world, state in zip(worlds, states, strict=True)]
    copies[2].receive()
    for step in range(4):
        for one, pieces in zip(copies[:2], here, strict=False):
            one.start_round(step, {"loss": 0.5}, lambda pieces=pieces: pieces, 0.1)
        was = [[piece.tensor.clone() for piece in of] for of in here] if step == 2 else []
        if step % 2 == 0:
            assert together(*(one.join_round for one in copies[:2])) == [step, step]
        if step == 2:
            for source, holder in ((0, 1), (1, 2)):
                (copy,) = copies[holder].copies_at(2)
                assert copy.note == {"loss": 0.5}
                assert {shard_id(piece) for piece in copy.shards} == {shard_id(piece) for piece in here[source][:5]}
                named = {shard_id(piece): x for piece, x in zip(here[source], was[source], strict=True)}
                for piece in copy.shards:
                    assert piece.tensor.dtype == named[shard_id(piece)].dtype
                    assert torch.equal(piece.tensor, named[shard_id(piece)])
        for of in here:
            for piece in of:
                piece.tensor.copy_(torch.randn(piece.tensor.shape) * 9)
    assert copies[0].steps == set()
    assert 2 in copies[1].steps
    assert not said


def test_replicas_on_two_hosts_are_not_copied() -> None:
    ranks = [{"a": 8, "b": 8}, {"c": 8, "b": 8}, {"a": 8}, {"c": 8}]
    assert assign_senders(ranks, [(0, 1), (2, 3)]) == {1: ["b"]}
    assert assign_senders(ranks, [(0, 1, 2, 3)]) == {0: ["a"], 1: ["b", "c"]}
    assert assign_buddies([(0, 1, 2, 3)]) == {}


@pytest.mark.parametrize("sizes", [sizes for n in (2, 3, 4) for sizes in product((1, 2, 3), repeat=n)])
def test_nobody_is_the_buddy_of_its_own_host(sizes: tuple[int, ...]) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    boxes = [tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    to, host = assign_buddies(boxes), {rank: i for i, box in enumerate(boxes) for rank in box}
    assert set(to) == set(host)
    assert all(host[there] == (host[rank] + 1) % len(boxes) for rank, there in to.items())


def test_a_network_that_is_too_slow_for_copies_ends_them() -> None:
    wires, said = Wires(1), list[str]()
    state = SimpleNamespace(shards_by_sender={1: ["x"]}, bytes_by_sender={1: 8})
    copies = BuddyCopies(wires.world(0), [(0,), (1,), (2,)], state, None, said.append)  # type: ignore[arg-type]
    for step in range(3):
        copies.start_round(step, {}, list, MAX_INTERVAL_S)
        copies._next_step = None
        assert copies._thread is not None
        copies._thread.join()
        copies._round_times = 0.1 * MAX_INTERVAL_S, 1.0
        assert copies.join_round() == step
    assert copies.is_disabled
    assert "copying is disabled" in said[0]


@dataclass(frozen=True)
class Rank:
    """A rank in a model of the protocol. `sides`: steps of its own snapshots, `copies`: of those of the other; -1: none, or being written.
    `doing`: of the round under way 0 nothing, 1 has begun, 2 is writing, 3 is whole here; `writing`: a side of its own."""

    taken: int = -1
    sides: tuple[int, int] = (-1, -1)
    pinned: int = -1
    writing: int = -1
    round: int = -1
    doing: int = 0
    copies: tuple[int, int] = (-1, -1)


def put(pair: tuple[int, int], side: int, value: int) -> tuple[int, int]:
    return (value, pair[1]) if side == 0 else (pair[0], value)


def moves(me: Rank, other: Rank, every: int, together: bool) -> list[Rank]:
    out = []
    if me.writing >= 0:
        now = replace(me, taken=me.taken + 1, sides=put(me.sides, me.writing, me.taken + 1), writing=-1)
        out.append(replace(now, round=now.taken, doing=1) if now.taken % every == 0 else now)
    elif me.doing == 0 and other.taken >= me.taken:  # a step ends with a sum over all, and waits for the round before
        side = 0 if me.sides[0] <= me.sides[1] else 1
        side = 1 - side if me.sides[side] == me.pinned >= 0 else side
        out.append(replace(me, writing=side, sides=put(me.sides, side, -1)))
    oldest = 0 if me.copies[0] <= me.copies[1] else 1
    if me.doing == 1:
        out.append(replace(me, doing=2, copies=put(me.copies, oldest, -1)))
    elif me.doing == 2 and other.round >= me.round:
        out.append(replace(me, doing=3, copies=put(me.copies, oldest, me.round)))
    elif me.doing == 3 and (not together or other.round > me.round or other.doing in (0, 3)):
        out.append(replace(me, doing=0, pinned=me.round))
    return out


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("together", [True, False])
def test_at_any_moment_either_rank_may_be_lost(every: int, together: bool) -> None:
    """In the broken twin a round ends on a rank before it has ended on the other."""
    todo, seen, held, last = [(Rank(), Rank())], set[tuple[Rank, Rank]](), True, 4 * every
    while todo:
        at = todo.pop()
        if at in seen or max(rank.taken for rank in at) > last:
            continue
        seen.add(at)
        done = max(rank.taken for rank in at)
        if all(rank.pinned >= 0 for rank in at):
            for left in at:
                held = held and max(set(left.sides) & set(left.copies), default=-1) >= max(0, done - every)
        one, two = at
        todo += [(moved, two) for moved in moves(one, two, every, together)]
        todo += [(one, moved) for moved in moves(two, one, every, together)]
    assert held is together
    assert len(seen) > 50
