"""Find the rank that blocks a hanging run. In: each rank's last collective, as the launcher reads it. Out: the rank to name, and why.

A rank in a message waits for its peer, in a collective for the members that have not reached it; following these waits ends at a rank that
waits for none, or in a cycle. The members of a group call its collectives in one order, so two are in the same one if their counts for the
group are equal. Not modelled: waits without a record (the store, a receive that was posted ahead).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from weft.world.recorder import UNNAMED, Moment, Status, members

DIFFERENT = "the ranks are in different collectives, or in one with different members"


def culprit(statuses: Sequence[Status], start: int) -> tuple[int, str]:
    """Return (rank, why it blocks the others). `start`: a rank that is in a collective; `statuses` of all, in order."""
    path, awaited = [start], list[int]()
    while waits := _waits(statuses[path[-1]], statuses):
        if waits[0] in path:
            return _round(statuses, path[path.index(waits[0]) :], start)
        path.append(waits[0])
        awaited = waits
    at = path[-1]
    now = _running(statuses[at])
    if now is None:
        idle = [s.rank for s in statuses if s.rank != start and _running(s) is None]
        absent = [rank for rank in awaited if rank in idle] or idle or [at]  # if all have left it meanwhile: the first, `at`
        return at, f"rank {listed(absent)} did not take part"
    participants = [s for rank in _members(now, statuses) if rank != at and _with(s := statuses[rank], now)]
    if (not participants and now.op in ("send", "receive")) or not _members(now, statuses):
        return start, DIFFERENT
    if not participants:
        return at, f"rank {at} is late in {now}; the other members are past it"
    reports = [statuses[at], *participants]
    kinds = Counter(_kind(s) for s in reports)
    if len(kinds) == 1:
        return at, "all members are in it, and one of them does not go on"
    (_, most), (_, next_most) = kinds.most_common(2)
    minority = [s for s in reports if kinds[_kind(s)] < most]
    if next_most == most:
        return start, DIFFERENT
    minority.sort(key=lambda s: s.rank)
    return minority[0].rank, f"rank {listed([s.rank for s in minority])} is in another collective, size or type: {minority[0].last}"


def _round(statuses: Sequence[Status], ranks: list[int], start: int) -> tuple[int, str]:
    """Return the rank that is behind in a cycle of ranks that wait for one another, if all are in one collective."""
    records = [now for rank in ranks if (now := _running(statuses[rank])) is not None]
    if len({(now.group, now.count, now.algorithm, now.op, now.dtype, now.shape) for now in records}) > 1 or not records[0].algorithm:
        return start, DIFFERENT
    least = min(now.tag for now in records)
    behind = [rank for rank, now in zip(ranks, records, strict=True) if now.tag == least]
    return behind[0], f"rank {listed(sorted(behind))} is behind, in step {least}"


def _waits(status: Status, statuses: Sequence[Status]) -> list[int]:
    """Return the ranks that a rank waits for, as far as recorded; none if it is in no collective."""
    now = _running(status)
    if now is None:
        return []
    if now.op in ("send", "receive"):
        return [now.peer]
    if now.algorithm and now.peer >= 0:
        peer = statuses[now.peer]
        return [now.peer] if _behind(peer, now) or _with(peer, now) else []
    return [rank for rank in _members(now, statuses) if rank != status.rank and _behind(statuses[rank], now)]


def _members(now: Moment, statuses: Sequence[Status]) -> Sequence[int]:
    """Return the ranks of a collective's group; if its name is truncated, those that have used it; none if groups share the name."""
    if now.group == UNNAMED:
        return ()
    return members(now.group) or [s.rank for s in statuses if now.group in s.counts]


def _behind(member: Status, now: Moment) -> bool:
    """Return whether a member of its group has not reached the collective `now`."""
    last = _running(member)
    return member.counts.get(now.group, 0) < now.count or (last is not None and last.group == now.group and 0 < last.count < now.count)


def _with(member: Status, now: Moment) -> bool:
    last = _running(member)
    return last is not None and last.group == now.group and last.count == now.count


def _kind(status: Status) -> tuple[object, ...]:
    assert status.last is not None
    return status.last.op, status.last.dtype, status.last.shape, status.last.algorithm


def _running(status: Status) -> Moment | None:
    return status.last if status.last is not None and status.last.running and status.phase not in ("done", "failed") else None


def listed(ranks: Sequence[int]) -> str:
    """Return ranks as text for messages."""
    return ", ".join(map(str, ranks))
