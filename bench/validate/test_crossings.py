"""Where algorithms change in measured curves, and that the cost model's winner changes there, too."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from bench.validate.collectives import a100, h100
from bench.validate.crossings import MACHINES, changes, crossings, curve, falls, nearest
from shardwise.cluster.cluster import Cluster
from shardwise.cost.network.network import RankGroup, collective_s, library_times
from shardwise.errors import UsageError

DATA = Path(__file__).resolve().parents[3] / "shared" / "validation"  # as scripts/validate has it
measured = pytest.mark.skipif(not DATA.is_dir(), reason="the measured tables, ../shared/validation, are not part of the project")


def made(*lines: tuple[float, float]) -> list[tuple[float, float]]:
    """A curve of algorithms with these starts and seconds a byte, the least at every size."""
    sizes = [2.0**k for k in range(3, 34)]
    return [(size, min(start + slope * size for start, slope in lines)) for size in sizes]


def test_one_algorithm_has_no_switch() -> None:
    assert falls(made((1e-5, 1e-9))) == []


@pytest.mark.parametrize("later", [1e-4, 1e-3, 1e-2])
def test_a_switch_is_found_where_two_lines_cross(later: float) -> None:
    """Of 10 us + 1 ns a byte and a later start with a tenth of that: known, since both lines are."""
    crossing = (later - 1e-5) / (1e-9 - 1e-10)
    size, _ = max(falls(made((1e-5, 1e-9), (later, 1e-10))), key=lambda one: one[1])
    assert 0.5 <= size / crossing <= 2


def test_the_library_takes_the_least_of_its_lines() -> None:
    cluster, group = Cluster.parse("8xdgx-a100-40"), RankGroup(64)
    for size in (1e4, 1e6, 1e8, 1e10):
        assert collective_s(cluster, "all_reduce", size, group) >= min(library_times(cluster, size, group).values())
    with pytest.raises(UsageError, match="on one node"):
        library_times(cluster, 1e6, RankGroup(8))


def test_trees_give_way_to_rings_later_the_more_ranks_there_are() -> None:
    at = [next(size for before, after, size in changes("dgx-a100-40", n) if after == "ring") for n in (16, 32, 64, 128)]
    assert all(a < b for a, b in pairwise(at))


@measured
def test_the_model_changes_where_the_curves_do() -> None:
    """Every change of the model's fastest, on 16 to 128 A100 and 16 H100, lies by a measured switch; sizes are a factor of two apart."""
    found = crossings(DATA)
    assert {(one.machine, one.ranks) for one in found} == {
        (name, n) for name, ns in (("dgx-a100-40", (16, 32, 64, 128)), ("a3-megagpu-8g", (16,))) for n in ns
    }
    assert sum(one.after == "ring" for one in found) == 4
    for one in found:
        assert one.factor < 3, one
    assert median(one.factor for one in found) < 1.6
    # Where the measured curve has its sharpest switch above 1 MiB, and the model has one of its own kind.
    for machine, read, ranks, after in (("dgx-a100-40", a100, 64, "ring"), ("a3-megagpu-8g", h100, 16, "tree Simple")):
        sharpest, fall = max((one for one in falls(curve(read(DATA), ranks)) if one[0] >= 1 << 20), key=lambda one: one[1])
        assert fall > 0.25
        model = next(size for _, name, size in changes(machine, ranks) if name == after)
        assert 1 / 1.5 < model / sharpest < 1.5


@measured
def test_a_model_that_is_off_would_be_seen() -> None:
    """The same crossings at a quarter of their size are not all by a switch."""
    points = {name: read(DATA) for name, read in MACHINES.items()}
    off = []
    for one in crossings(DATA):
        at, _ = nearest(falls(curve(points[one.machine], one.ranks)), one.size / 4)
        off.append(max(one.size / 4 / at, at / (one.size / 4)))
    assert max(off) > 4
    assert median(off) > 1.6
