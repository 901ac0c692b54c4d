"""Find the rank that blocks a hanging run. In: each rank's last collective, as the launcher reads it. Out: the rank to name, and why.

A rank in a message waits for its peer, in a collective for the members that have not reached it; following these waits ends at a rank that
waits for none, or in a cycle. The members of a group call its collectives in one order, so two are in the same one if their counts for the
group are equal. Not modelled: waits without a record (the store, a receive that was posted ahead).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardwise.world.recorder import UNNAMED, CollectiveRecord, RankStatus, parse_group_name

DIFFERENT_COLLECTIVES = "the ranks are in different collectives, or in one with different members"


def find_culprit(statuses: Sequence[RankStatus], start: int) -> tuple[int, str]:
    """Return (rank, why it blocks the others). `start`: a rank that is in a collective; `statuses` of all, in order."""
    path, awaited = [start], list[int]()
    while waits := awaited_ranks(statuses[path[-1]], statuses):
        if waits[0] in path:
            return _explain_cycle(statuses, path[path.index(waits[0]) :], start)
        path.append(waits[0])
        awaited = waits
    at = path[-1]
    now = _running_collective(statuses[at])
    if now is None:
        idle = [s.rank for s in statuses if s.rank != start and _running_collective(s) is None]
        absent = [rank for rank in awaited if rank in idle] or idle or [at]  # if all have left it meanwhile: the first, `at`
        return at, f"rank {format_ranks(absent)} did not take part"
    participants = [s for rank in _group_members(now, statuses) if rank != at and _is_in_same_collective(s := statuses[rank], now)]
    if (not participants and now.op in ("send", "receive")) or not _group_members(now, statuses):
        return start, DIFFERENT_COLLECTIVES
    if not participants:
        return at, f"rank {at} is late in {now}; the other members are past it"
    reports = [statuses[at], *participants]
    kinds = Counter(_collective_signature(s) for s in reports)
    if len(kinds) == 1:
        return at, "all members are in it, and one of them does not go on"
    (_, most), (_, next_most) = kinds.most_common(2)
    minority = [s for s in reports if kinds[_collective_signature(s)] < most]
    if next_most == most:
        return start, DIFFERENT_COLLECTIVES
    minority.sort(key=lambda s: s.rank)
    return minority[0].rank, f"rank {format_ranks([s.rank for s in minority])} is in another collective, size or type: {minority[0].last}"


def _explain_cycle(statuses: Sequence[RankStatus], ranks: list[int], start: int) -> tuple[int, str]:
    """Return the rank that is behind in a cycle of ranks that wait for one another, if all are in one collective."""
    records = [now for rank in ranks if (now := _running_collective(statuses[rank])) is not None]
    if (
        len({(now.group, now.index_in_group, now.algorithm, now.op, now.dtype, now.shape) for now in records}) > 1
        or not records[0].algorithm
    ):
        return start, DIFFERENT_COLLECTIVES
    least = min(now.tag for now in records)
    behind = [rank for rank, now in zip(ranks, records, strict=True) if now.tag == least]
    return behind[0], f"rank {format_ranks(sorted(behind))} is behind, in step {least}"


def awaited_ranks(status: RankStatus, statuses: Sequence[RankStatus]) -> list[int]:
    """Return the ranks that a rank waits for, as far as recorded; none if it is in no collective."""
    now = _running_collective(status)
    if now is None:
        return []
    if now.op in ("send", "receive"):
        return [now.peer]
    if now.algorithm and now.peer >= 0:
        peer = statuses[now.peer]
        return [now.peer] if _is_behind(peer, now) or _is_in_same_collective(peer, now) else []
    return [rank for rank in _group_members(now, statuses) if rank != status.rank and _is_behind(statuses[rank], now)]


def _group_members(now: CollectiveRecord, statuses: Sequence[RankStatus]) -> Sequence[int]:
    """Return the ranks of a collective's group; if its name is truncated, those that have used it; none if groups share the name."""
    if now.group == UNNAMED:
        return ()
    return parse_group_name(now.group) or [s.rank for s in statuses if now.group in s.num_started_by_group]


def _is_behind(member: RankStatus, now: CollectiveRecord) -> bool:
    """Return whether a member of its group has not reached the collective `now`."""
    last = _running_collective(member)
    return member.num_started_by_group.get(now.group, 0) < now.index_in_group or (
        last is not None and last.group == now.group and 0 < last.index_in_group < now.index_in_group
    )


def _is_in_same_collective(member: RankStatus, now: CollectiveRecord) -> bool:
    last = _running_collective(member)
    return last is not None and last.group == now.group and last.index_in_group == now.index_in_group


def _collective_signature(status: RankStatus) -> tuple[object, ...]:
    assert status.last is not None
    return status.last.op, status.last.dtype, status.last.shape, status.last.algorithm


def _running_collective(status: RankStatus) -> CollectiveRecord | None:
    return status.last if status.last is not None and status.last.is_running and status.phase not in ("done", "failed") else None


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text for messages."""
    return ", ".join(map(str, ranks))
