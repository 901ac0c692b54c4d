"""Two emulated hosts and what may happen to them and to the line between: `scripts/bench hosts` as a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.faults.hosts import FAULTS, Fault, measure, undisturbed
from tests.support.networks import NoNetworks

LAYOUT = "pipeline=2 microbatches=2"
TEXT = bytes(range(32, 127)) * 200


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "text.txt").write_bytes(TEXT)
    try:
        return undisturbed(LAYOUT, folder)
    except NoNetworks as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_happens_between_hosts(tmp_path: Path, calm: list[float], fault: Fault) -> None:
    """Who is to be lost is; nobody else is, and the losses are those of the run without the fault."""
    (tmp_path / "text.txt").write_bytes(TEXT)
    felt = measure(fault, FAULTS[fault], LAYOUT, calm, tmp_path)
    assert felt.ended == "as it should"
    assert felt.off < 2e-5 if fault.lost else felt.off == 0.0
