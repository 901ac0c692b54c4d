"""The solver in a process of its own: the same answers as here, an end where it does not return, and nothing left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.placements_oracle import engine
from tests.support.placements_oracle.engine import FOUND, IMPOSSIBLE, NOTHING, solve_apart, solve_here

pytest.importorskip("highspy")


def knapsack(values: list[int], sizes: list[int], room: int) -> engine.Arrays:
    """The most valuable things that fit."""
    n = len(values)
    return {
        "costs": -np.array(values, dtype=np.float64), "lower": np.zeros(n), "upper": np.ones(n), "whole": np.ones(n, dtype=np.int32),
        "least": np.array([-np.inf]), "most": np.array([float(room)]), "start": np.array([0, n], dtype=np.int32),
        "index": np.arange(n, dtype=np.int32), "value": np.array(sizes, dtype=np.float64),
        "known_index": np.zeros(0, dtype=np.int32), "known_value": np.zeros(0),
    }  # fmt: skip


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=8), st.integers(0, 30))
def test_apart_here_and_all_subsets_agree(things: list[tuple[int, int]], room: int) -> None:
    values, sizes = (list(row) for row in zip(*things, strict=True))
    problem = knapsack(values, sizes, room)
    subsets = ([i for i in range(len(things)) if mask >> i & 1] for mask in range(1 << len(things)))
    best = max(sum(values[i] for i in chosen) for chosen in subsets if sum(sizes[i] for i in chosen) <= room)
    for found in (solve_here(problem, 10.0, 0.0, 0.0, presolve=False), solve_apart(problem, 10.0, 0.0, 0.0)):
        assert (found.state, found.proven) == (FOUND, True)
        assert -found.objective == pytest.approx(best)
        assert found.bound == pytest.approx(found.objective)


def test_what_is_impossible_is_told() -> None:
    problem = {**knapsack([1], [1], 1), "least": np.array([2.0]), "most": np.array([3.0])}
    assert solve_apart(problem, 10.0, 0.0, 0.0).state == IMPOSSIBLE == solve_here(problem, 10.0, 0.0, 0.0, presolve=False).state


def test_a_solver_that_does_not_return_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(f"import os, time\nopen({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}} ')\ntime.sleep(600)\n")
    monkeypatch.setattr(engine, "GRACE_S", 0.3)
    assert solve_apart(knapsack([1], [1], 1), 0.2, 0.0, 0.0, str(script)).state == NOTHING
    begun = (tmp_path / "pids").read_text().split()
    assert len(begun) == 2, "once with presolve, once without"
    assert not any(Path("/proc", pid).exists() for pid in begun)


def test_a_process_whose_parent_is_gone_ends_by_its_own_alarm() -> None:
    hangs = (
        f"import sys, time; sys.path.insert(0, {str(Path(engine.__file__).parent)!r}); import engine; engine.GRACE_S = 0.1; "
        "engine.solve_here = lambda *a, **k: time.sleep(600); engine.main()"
    )
    sent = subprocess.Popen([sys.executable, "-c", hangs], stdin=subprocess.PIPE)
    assert sent.stdin is not None
    np.savez(sent.stdin, options=np.array([0.2, 0.0, 0.0, 1.0]), **knapsack([1], [1], 1))
    sent.stdin.close()
    began = time.monotonic()
    assert sent.wait(timeout=60) == -signal.SIGALRM
    assert time.monotonic() - began < 60


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit('no such solver')")
    with pytest.raises(RuntimeError, match="no such solver"):
        solve_apart(knapsack([1], [1], 1), 0.2, 0.0, 0.0, str(script))
