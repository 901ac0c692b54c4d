"""A training of four ranks with a fault drawn at random every ten seconds; a sample of it, and, where all tests run, half an hour."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.faults.soak import Soaked, soak
from shardwise.train import flow
from shardwise.world.launch.launch import Launcher
from shardwise.world.launch.watch import LaunchOptions

LENGTH = "SHARDWISE_SOAK_S"  # the environment variable: seconds of the long one


def check(found: Soaked) -> None:
    assert found.same
    assert found.told  # of a busy machine more ranks than were harmed: one that is late is replaced, too
    early, late = found.early_and_late(found.descriptors)
    assert late <= early + 2
    before, after = found.early_and_late(found.memory)
    assert after < 1.1 * before


def test_a_sample(tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "launch", lambda *args, preload, **options: launcher.launch(*args, options=LaunchOptions(**options)))
    check(soak(20.0, tmp_path))


def test_half_an_hour(tmp_path: Path) -> None:
    check(soak(float(os.environ.get(LENGTH, "1800")), tmp_path))
