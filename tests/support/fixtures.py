"""Fixtures of the tests that know the machine as it was measured once, and of those that start ranks.

`ranks(function, n, *args)` runs a function of a test module on n processes. One prepared process serves the session, with what an engine
needs imported, so that a launch costs tenths of a second. After every test of `tests/ranks` no process that it started may live.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.world.launch.launch import ENGINE, Launcher
from shardwise.world.launch.watch import LaunchOptions
from tests.support.processes import children_of, gone

TIMEOUT_S = 60.0
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def launcher(home: Path) -> Iterator[Launcher]:
    """The session's prepared process; ranks inherit its home folder."""
    with Launcher(env={"OMP_NUM_THREADS": "1"}, preload=ENGINE) as made:
        yield made


@pytest.fixture
def ranks(launcher: Launcher) -> Callable[..., list[Any]]:
    """`ranks(function, num_ranks, *args, **options)`: results in the order of ranks. One thread per rank."""

    def run(function: Callable[..., Any], num_ranks: int, *args: Any, **options: Any) -> list[Any]:
        return launcher.launch(function, num_ranks, *args, options=LaunchOptions(**{"threads": 1, "timeout_s": TIMEOUT_S, **options}))

    return run


@pytest.fixture(autouse=True)
def no_rank_is_left(launcher: Launcher) -> Iterator[None]:
    launcher.start()
    before = children_of(os.getpid()) | {launcher.pid or 0}
    yield
    left = gone(lambda: (children_of(os.getpid()) - before - {launcher.pid or 0}) | children_of(launcher.pid or 0))
    assert not left, f"processes {sorted(left)} outlive their test"


@pytest.fixture(scope="module")
def subject() -> Iterator[Callable[[str], Any]]:
    """Models by name, each traced once."""
    import torch

    from tests.support.verified_models import Subject

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made: dict[str, Subject] = {}

    def get(name: str) -> Subject:
        if name not in made:
            made[name] = Subject(str(ROOT / name) if ".py" in name else name.replace("hf:", f"hf:{ROOT}/"))
        return made[name]

    yield get
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def known_machine(home: Path) -> None:
    """See `home`."""


@pytest.fixture(scope="module")
def few_objects() -> Iterator[None]:
    """The collector leaves out what was there before: each `gc.collect()` would look at a million objects, for a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
