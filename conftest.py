"""What holds for every test, and what any may ask for. Nothing here imports torch beforehand, so that tests/pure starts at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.support.durations import Recorder, mark

if TYPE_CHECKING:
    from shardwise.world.memory import Accounts

# Times are not tested: a machine that has other work must not fail a test.
settings.register_profile("shardwise", deadline=None)
settings.load_profile("shardwise")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write tests/long.txt anew from how long the tests take that run")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["SHARDWISE_CACHE"] = "off"  # tests of tracing trace
    if config.getoption("--record") and not hasattr(config, "workerinput"):  # the process that hears of every test
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(tryfirst=True)  # before what is not asked for is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark(items)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home folder whose stored machine stays the same for the session; whatever else is cached is the user's.

    A machine that was busy when it was measured is measured again some minutes later, for seconds. Tests keep it busy, so that of all
    tests some would wait, ranks of one run for one another, and a later one would plan for another machine than an earlier one.
    """
    from shardwise.cluster.catalogue import dump
    from shardwise.cluster.probe import probe

    made = tmp_path_factory.mktemp("home")
    found = probe()
    cache, own = Path.home() / ".cache", made / ".cache"
    for folder, there in ((cache, own), (cache / "shardwise", own / "shardwise")):
        there.mkdir(mode=0o700)
        for entry in folder.iterdir() if folder.is_dir() else ():
            if entry not in (cache / "shardwise", cache / "shardwise" / "cluster.toml"):
                (there / entry.name).symlink_to(entry)
    (own / "shardwise" / "cluster.toml").write_text(dump(replace(found, device=replace(found.device, source="measured"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(made))
        yield made


@pytest.fixture
def counting() -> Accounts:
    """The accounts of this process's memory. Without a compiler the test is skipped; anything else that is in the way is a fault."""
    import torch

    from shardwise.world.memory import accounts_of

    made = accounts_of(torch.device("cpu"))
    if not made.is_counting:
        if shutil.which("c++") is None:
            pytest.skip(f"memory is counted by a library that needs a C++ compiler ({made.reason})")
        pytest.fail(f"memory is not counted although there is a C++ compiler: {made.reason}")
    return made
