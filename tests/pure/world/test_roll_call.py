"""Who goes on after a loss, as files in a folder decide it: threads in the place of ranks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from shardwise.errors import RunError
from shardwise.world.launch.membership_vote import Decision, MembershipVote

BOXES = ((0, 1), (2, 3))
QUIET_S = 0.3


def answers(folder: Path, ranks: tuple[int, ...]) -> dict[int, tuple[Decision, bool] | str]:
    found: dict[int, tuple[Decision, bool] | str] = {}

    def answer(rank: int) -> None:
        try:
            found[rank] = MembershipVote(folder, rank, BOXES).vote("here", 100 + rank, QUIET_S)
        except RunError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=answer, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize(("left", "order"), [((0, 1, 2, 3), (0, 1, 2, 3)), ((2, 3), (2, 3)), ((1, 2, 3), (2, 3, 1)), ((3,), (3,))])
def test_all_that_are_left_come_to_one_decision(tmp_path: Path, left: tuple[int, ...], order: tuple[int, ...]) -> None:
    found = answers(tmp_path / "call", left)
    assert {rank: answer for rank, answer in found.items() if isinstance(answer, str)} == {}
    decisions = {answer[0] for answer in found.values() if not isinstance(answer, str)}
    assert decisions == {Decision(order, "here", 100 + min(left))}
    assert [rank for rank, answer in found.items() if answer[1]] == [min(left)]


def test_who_comes_after_the_decision_takes_part_in_nothing_more(tmp_path: Path) -> None:
    answers(tmp_path / "call", (0, 1))
    late = answers(tmp_path / "call", (2, 3))
    assert all(isinstance(text, str) and "had continued without it" in text for text in late.values())


def test_who_failed_by_itself_ends_the_others(tmp_path: Path) -> None:
    MembershipVote(tmp_path / "call", 3, BOXES).record_failure("ConfigError: no such key")
    assert set(answers(tmp_path / "call", (0, 1, 2)).values()) == {"rank 3: ConfigError: no such key"}
