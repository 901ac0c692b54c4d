"""Who is named when, on records and clocks made by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from math import inf

import pytest

from shardwise.world.launch.hangs import STOPPED_S, HangWatch, Limits
from shardwise.world.recorder import LEAST_PHASE_LIMIT_S, CollectiveRecord, CollectiveRecorder, RankStatus, StepPace, WorkPace

SUM = CollectiveRecord(0, 5, "0,1", "all_reduce", "float32", (7,), 28, -1, 0, 1.0, 0.0, "", 5)
PIDS = [1 << 30, 1 << 30]  # no processes


def status(rank: int, last: CollectiveRecord | None, patience_s: float = inf, since_s: float = 0.0, beat_s: float = 1e9) -> RankStatus:
    return RankStatus(rank, 0, "running", beat_s, 1, last, {} if last is None else {last.group: last.index_in_group}, patience_s, since_s)


def named(statuses: list[RankStatus], at_s: float) -> tuple[int, str] | None:
    """Of a launcher that has looked every half a second until `at_s`."""
    watch, found = HangWatch(Limits(900.0, 5.0), {}, 0.0), None
    for half in range(1, int(2 * at_s) + 1):
        found = found or watch.find_hang(statuses, {}, PIDS, half / 2)
    return (found.rank, found.reason) if found else None


def test_a_rank_that_does_not_come_is_named_after_what_all_have_announced() -> None:
    waits, absent = status(0, SUM, 0.2), status(1, None, 0.2, since_s=3.0)
    assert named([waits, absent], 5.5) is None
    assert named([waits, absent], 7.0) == (1, named([waits, absent], 7.0)[1])  # type: ignore[index]
    assert "lasts longer than 5 s: rank 1 did not take part" in named([waits, absent], 7.0)[1]  # type: ignore[index]
    slow = replace(absent, announced_limit_s=30.0)
    assert named([waits, slow], 25.0) is None
    assert named([waits, slow], 40.0) is not None
    assert named([waits, replace(absent, announced_limit_s=inf)], 800.0) is None
    assert named([waits, replace(absent, announced_limit_s=inf)], 910.0) is not None


def test_a_rank_that_nobody_waits_for_is_named_where_it_said_how_long_it_takes() -> None:
    assert named([status(0, None, 0.5)], 4.0) is None
    assert "rank 0 computes for longer than 5 s" in named([status(0, None, 0.5)], 7.0)[1]  # type: ignore[index]
    assert named([status(0, None)], 5000.0) is None


def test_a_rank_without_a_heartbeat_is_named() -> None:
    assert "rank 1 gave no sign for 5 s" in named([status(0, None, 1.0, 1e9), status(1, None, 1.0, 1e9, beat_s=2.0)], 8.0)[1]  # type: ignore[index]


def test_silence_counts_from_when_the_launcher_was_awake() -> None:
    waits, watch = [status(0, SUM, 0.2), status(1, None, 0.2)], HangWatch(Limits(900.0, 5.0), {}, 0.0)
    assert watch.find_hang(waits, {}, PIDS, 60.0) is None  # it was stopped for a minute, as the ranks may have been
    assert [watch.find_hang(waits, {}, PIDS, 60.0 + half / 2) is None for half in range(1, 12)] == [True] * 10 + [False]


def test_a_stopped_process_is_named_at_once_and_one_that_is_continued_is_not() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(sleeper.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
        watch = HangWatch(Limits(900.0, 5.0), {sleeper.pid: "the process that starts ranks"}, 0.0)
        assert watch.find_hang([], {}, [], 0.1) is None
        found = watch.find_hang([], {}, [], 0.2 + STOPPED_S)
        assert found is not None
        assert (found.rank, f"kill -CONT {sleeper.pid}" in found.reason) == (-1, True)
        ranks = HangWatch(Limits(900.0, 5.0), {}, 0.0)
        assert ranks.find_hang([status(0, None)], {}, [sleeper.pid], 0.1) is None
        os.kill(sleeper.pid, signal.SIGCONT)
        os.waitid(os.P_PID, sleeper.pid, os.WCONTINUED | os.WNOWAIT)
        assert ranks.find_hang([status(0, None)], {}, [sleeper.pid], 0.2 + STOPPED_S) is None
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_pace_announces_steps_and_nothing_that_takes_long() -> None:
    recorder = CollectiveRecorder()
    said: list[float] = []
    recorder.announce_limit = said.append  # type: ignore[method-assign]
    pace = WorkPace(recorder)
    steps = pace.time_steps()
    for _ in range(4):
        with steps:
            pass
    assert said[:6] == [inf] * 6
    assert said[6] < 1.0
    assert said[7] == inf
    pace.include_gaps()
    with steps, pace.untimed():
        pass
    assert [one < 1.0 for one in said[8:]] == [True, False, True, True]
    said.clear()
    with pace.untimed():  # an evaluation, of which a batch is captured
        with pytest.raises(ValueError), pace.untimed():
            raise ValueError
        with pace.untimed():
            pass
        with steps:
            pass
        assert set(said) == {inf}
    assert said[-1] < 1.0


def test_steps_of_another_engine_have_limits_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, clock = CollectiveRecorder(), [0.0]
    said: list[float] = []
    recorder.announce_limit = said.append  # type: ignore[method-assign]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    pace = WorkPace(recorder)
    pace.include_gaps()
    short, long, compiled = pace.time_steps(), pace.time_steps(), pace.time_steps(is_regular=False)

    def take(steps: StepPace, seconds: float) -> float:
        with steps:
            clock[0] += seconds
        return said[-2]

    assert [take(short, 0.1) for _ in range(4)] == pytest.approx([inf, inf, inf, 1.0])
    assert [take(long, 9.0) for _ in range(4)] == pytest.approx([inf, inf, inf, 90.0])
    assert [take(compiled, 0.1) for _ in range(5)] == [inf] * 5
    assert take(short, 0.1) == pytest.approx(1.0)
    assert said[-1] == inf  # what comes next may be a compiled one
    del compiled
    take(short, 0.1)
    assert said[-1] == pytest.approx(90.0)


def test_an_evaluation_is_limited_by_the_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, clock = CollectiveRecorder(), [0.0]
    said: list[float] = []
    recorder.announce_limit = said.append  # type: ignore[method-assign]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    pace = WorkPace(recorder)
    for seconds in (20.0, 30.0, 0.5):
        with pace.untimed("evaluation"):
            assert said[-1] == inf  # its duration is not known yet
            clock[0] += seconds
    with pace.untimed("evaluation"):
        assert said[-1] == 300.0
        with pace.untimed():  # a capture
            assert said[-1] == inf
        assert said[-1] == 300.0
        with pace.untimed("save"):
            assert said[-1] == inf
    for _ in range(3):
        with pace.untimed("save"):
            pass
    with pace.untimed("save"):
        assert said[-1] == LEAST_PHASE_LIMIT_S
