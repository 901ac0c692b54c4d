"""Who is named where ranks do not get on, on records as fuzzed runs left them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.world.launch.stuck import DIFFERENT_COLLECTIVES, find_culprit
from shardwise.world.recorder import UNNAMED, CollectiveRecord, RankStatus, group_name, parse_group_name

EVERYONE = "0,1,2"
SUM = CollectiveRecord(0, 5, EVERYONE, "all_reduce", "float32", (2425,), 9700, -1, 0, 1.0, 0.0, "", 5)
ENDED = replace(SUM, end_s=2.0, index_in_group=6)


def status(rank: int, last: CollectiveRecord | None, phase: str = "running", **counts: int) -> RankStatus:
    """A rank's; `counts` of other groups, with an underscore for a comma."""
    known = {name.strip("g").replace("_", ","): n for name, n in counts.items()}
    if last is not None and last.index_in_group:
        known.setdefault(last.group, last.index_in_group)
    return RankStatus(rank, 100 + rank, phase, 0.0, 1, last, known)


def test_a_member_that_has_not_come_is_named() -> None:
    assert find_culprit([status(0, SUM), status(1, None), status(2, SUM)], 0) == (1, "rank 1 did not take part")
    assert find_culprit([status(0, SUM), status(1, replace(ENDED, index_in_group=4)), status(2, None)], 0) == (
        1,
        "rank 1, 2 did not take part",
    )
    returned = status(2, replace(SUM, index_in_group=4), phase="done")
    assert find_culprit([status(0, SUM), status(1, SUM), returned], 0) == (2, "rank 2 did not take part")


def test_one_that_others_have_left_behind_is_named() -> None:
    """The others ended the sum and one after it; they are outside of any collective, and were named."""
    found = find_culprit([status(0, replace(SUM, algorithm="ring", peer=1, tag=7)), status(1, ENDED), status(2, ENDED)], 0)
    assert found[0] == 0
    assert "rank 0 is late in all_reduce #5 float32 [2425] by ring, step 7" in found[1]
    assert find_culprit([status(0, ENDED), status(1, SUM), status(2, ENDED)], 1)[0] == 1


def test_waits_are_followed_through_pipelines() -> None:
    """Rank 0 waits for rank 1, that one for a message of rank 3, whose own sum rank 2 has ended; rank 2 waits for nobody."""
    first = replace(SUM, group="0,1", index_in_group=9)
    message = replace(SUM, op="receive", group="1,3", peer=3, tag=14, index_in_group=0)
    last = replace(SUM, group="2,3", index_in_group=9)
    ranks = [status(0, first), status(1, message, g0_1=8), status(2, replace(ENDED, group="0-3"), g2_3=9), status(3, last)]
    assert find_culprit(ranks, 0)[0] == 3
    assert find_culprit([*ranks[:3], status(3, replace(last, end_s=2.0))], 0) == (3, "rank 3 did not take part")


@pytest.mark.parametrize("other", [{"shape": (7,)}, {"op": "reduce_scatter"}, {"dtype": "float64"}, {"algorithm": ""}])
def test_the_odd_one_out_is_named(other: dict[str, Any]) -> None:
    ring = replace(SUM, algorithm="ring")
    odd = replace(ring, **other)
    rank, what = find_culprit([status(0, ring), status(1, ring), status(2, odd)], 0)
    assert (rank, what) == (2, f"rank 2 is in another collective, size or type: {odd}")


def test_of_ranks_that_wait_for_one_another_in_a_program_the_one_behind_is_named() -> None:
    tree = replace(SUM, algorithm="tree")
    ranks = [status(0, replace(tree, peer=1, tag=4)), status(1, replace(tree, peer=0, tag=1)), status(2, replace(tree, index_in_group=7))]
    assert find_culprit(ranks, 0) == (1, "rank 1 is behind, in step 1")


def test_who_is_at_fault_may_be_unknown() -> None:
    pair = replace(SUM, group="0,1", index_in_group=2)
    message = replace(SUM, op="receive", group="0,1", peer=1, tag=5, index_in_group=0)
    assert find_culprit([status(0, message, g0_1=1), status(1, pair)], 0) == (0, DIFFERENT_COLLECTIVES)
    assert find_culprit([status(0, pair), status(1, replace(pair, shape=(3,)))], 0) == (0, DIFFERENT_COLLECTIVES)
    assert find_culprit([status(0, SUM), status(1, SUM), status(2, SUM)], 0) == (0, "all members are in it, and one of them does not go on")


def test_groups_whose_names_are_cut_short_or_shared() -> None:
    """A long one's members are those that know its name; where many groups share a slot nothing is claimed."""
    many = replace(SUM, group=group_name(tuple(n * n for n in range(60))))
    known = many.group
    ranks = [status(0, many), RankStatus(1, 1, "running", 0.0, 0, None, {}), RankStatus(2, 2, "running", 0.0, 0, None, {known: 4})]
    assert find_culprit(ranks, 0) == (2, "rank 2 did not take part")
    assert find_culprit([status(0, replace(SUM, group=UNNAMED)), *ranks[1:]], 0) == (0, DIFFERENT_COLLECTIVES)


def test_members_follow_from_a_name() -> None:
    for ranks in ((0, 1), (0, 1, 2, 3), (1, 4, 7, 10), (7, 5, 3, 1), (3, 1), (5, 2, 9, 4)):
        assert parse_group_name(group_name(ranks)) == ranks
    assert parse_group_name(group_name(tuple(n * n for n in range(60)))) == ()
