"""Which tests are long, by how long they took: `scripts/test --all --record` writes `long.txt`; what stands there has the marker `long`.

Of the cases of a test function the first ones stay short, as many as take `FUNCTION_S` together and at least one; but none that takes more
than `CASE_S` by itself, or `HOUSE_CASE_S` where it holds the whole tree to a rule (`tests/*/house`). So every other function has a case in
every run, and `scripts/test --all` has all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

FUNCTION_S = 0.3
CASE_S = 5.0
HOUSE_CASE_S = 20.0
LONG = Path(__file__).parents[1] / "long.txt"
ROOT = str(Path(__file__).parents[2]) + "/"  # some ids have the path of a file


def long_of(took: Mapping[str, float]) -> dict[str, float]:
    """The tests that are long, of all whose seconds are given, by node id in the order in which they are written."""
    spent: dict[str, float] = {}
    found = {}
    for test, seconds in took.items():
        function = _function(test)
        if seconds > (HOUSE_CASE_S if "/house/" in test else CASE_S) or (function in spent and spent[function] + seconds > FUNCTION_S):
            found[test] = seconds
        else:
            spent[function] = spent.get(function, 0.0) + seconds
    return found


def read(path: Path = LONG) -> dict[str, float]:
    """Long tests and their seconds."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {test: float(seconds) for seconds, test in (line.split(" ", 1) for line in lines)}


def write(took: Mapping[str, float], path: Path = LONG) -> None:
    """Functions of which nothing ran stay as they are written."""
    ran = set(map(_function, took))
    kept = {test: seconds for test, seconds in read(path).items() if _function(test) not in ran}
    lines = sorted((test, seconds) for test, seconds in (kept | long_of(took)).items())
    path.write_text("".join(f"{seconds:.1f} {test}\n" for test, seconds in lines))


def mark(items: Iterable[pytest.Item]) -> None:
    """Tests that are written down as long have the marker."""
    long = read()
    for item in items:
        if item.nodeid.replace(ROOT, "") in long:
            item.add_marker(pytest.mark.long)


class Recorder:
    """Hears how long each test takes, in whichever process it runs."""

    def __init__(self) -> None:
        self.took: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.took[report.nodeid.replace(ROOT, "")] += report.duration

    def pytest_sessionfinish(self) -> None:
        write(self.took)


def _function(test: str) -> str:
    return test.split("[", 1)[0]
