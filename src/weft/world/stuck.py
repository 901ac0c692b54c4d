"""Whom ranks wait for that do not get on. In: what each rank last did, as the launcher reads it. Out: the rank to name, and why.

A rank in a message waits for its other end, in a collective for the members that have not come to it; following that from rank to rank ends
at one that waits for nobody, or goes round. The members of a group call its collectives in one order, so that two are in the same one where
their counts of it are equal. Not modelled: what a rank waits for without a record of it (the store, a receive that was posted ahead).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from weft.world.recorder import UNNAMED, Moment, Status, members

DIFFERENT = "the ranks are in different collectives, or in one with different members"


def culprit(statuses: Sequence[Status], start: int) -> tuple[int, str]:
    """(rank, why it holds up the others). `start`: a rank that is in a collective; `statuses` of all, in order."""
    path, before = [start], list[int]()
    while waits := _waits(statuses[path[-1]], statuses):
        if waits[0] in path:
            return _round(statuses, path[path.index(waits[0]) :], start)
        path.append(waits[0])
        before = waits
    at = path[-1]
    now = _running(statuses[at])
    if now is None:
        idle = [s.rank for s in statuses if s.rank != start and _running(s) is None]
        missing = [rank for rank in before if rank in idle] or idle or [at]  # the first has just come out of it itself where nobody waits
        return at, f"rank {listed(missing)} did not take part"
    with_it = [s for rank in _members(now, statuses) if rank != at and _with(s := statuses[rank], now)]
    if (not with_it and now.op in ("send", "receive")) or not _members(now, statuses):
        return start, DIFFERENT
    if not with_it:
        return at, f"rank {at} is late in {now}; the other members are past it"
    reports = [statuses[at], *with_it]
    kinds = Counter(_kind(s) for s in reports)
    if len(kinds) == 1:
        return at, "all members are in it, and one of them does not go on"
    (_, most), (_, next_most) = kinds.most_common(2)
    odd = [s for s in reports if kinds[_kind(s)] < most]
    if next_most == most:
        return start, DIFFERENT
    odd.sort(key=lambda s: s.rank)
    return odd[0].rank, f"rank {listed([s.rank for s in odd])} is in another collective, size or type: {odd[0].last}"


def _round(statuses: Sequence[Status], ranks: list[int], start: int) -> tuple[int, str]:
    """Of ranks that wait for one another: who is behind, where all are in one collective."""
    rounds = [now for rank in ranks if (now := _running(statuses[rank])) is not None]
    if len({(now.group, now.count, now.algorithm, now.op, now.dtype, now.shape) for now in rounds}) > 1 or not rounds[0].algorithm:
        return start, DIFFERENT
    least = min(now.tag for now in rounds)
    behind = [rank for rank, now in zip(ranks, rounds, strict=True) if now.tag == least]
    return behind[0], f"rank {listed(sorted(behind))} is behind, in step {least}"


def _waits(one: Status, statuses: Sequence[Status]) -> list[int]:
    """The ranks that `one` waits for, as far as the record tells; none where it is in no collective."""
    now = _running(one)
    if now is None:
        return []
    if now.op in ("send", "receive"):
        return [now.peer]
    if now.algorithm and now.peer >= 0:
        there = statuses[now.peer]
        return [now.peer] if _behind(there, now) or _with(there, now) else []
    return [rank for rank in _members(now, statuses) if rank != one.rank and _behind(statuses[rank], now)]


def _members(now: Moment, statuses: Sequence[Status]) -> Sequence[int]:
    """The ranks of a collective's group; of one whose name is cut short those that know it, and none of groups that share a name."""
    if now.group == UNNAMED:
        return ()
    return members(now.group) or [s.rank for s in statuses if now.group in s.counts]


def _behind(other: Status, now: Moment) -> bool:
    """Whether `other` has not come to the collective `now` of a group that it is in."""
    there = _running(other)
    return other.counts.get(now.group, 0) < now.count or (there is not None and there.group == now.group and 0 < there.count < now.count)


def _with(other: Status, now: Moment) -> bool:
    there = _running(other)
    return there is not None and there.group == now.group and there.count == now.count


def _kind(one: Status) -> tuple[object, ...]:
    assert one.last is not None
    return one.last.op, one.last.dtype, one.last.shape, one.last.algorithm


def _running(one: Status) -> Moment | None:
    return one.last if one.last is not None and one.last.running and one.phase not in ("done", "failed") else None


def listed(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    return ", ".join(map(str, ranks))
