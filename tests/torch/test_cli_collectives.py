"""`weft collectives`: its numbers are the closed forms, and the links are the cluster's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.cli import run
from weft.cluster.cluster import Cluster
from weft.simulate.wires import wires


def answer(words: list[str], capfd: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    capfd.readouterr()
    assert run(["collectives", *words, "--json"]) == code
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_the_table_of_the_field(capfd: pytest.CaptureFixture[str]) -> None:
    found = answer(["compare", "--ranks", "8", "--bytes", "1GB"], capfd)
    rows = {row["algorithm"]: row for row in found["algorithms"]}
    assert rows["ring"]["total_bytes"] == pytest.approx(2e9 * 7)
    assert rows["ring"]["busiest_bytes"] == pytest.approx(2e9 * 7 / 8)
    assert rows["ring"]["time_s"] == pytest.approx(14 * (1e9 / 8 / 25e9 + 10e-6))
    assert rows["naive"]["total_bytes"] == pytest.approx(8 * 7 * 1e9)
    assert (rows["ring"]["steps"], rows["tree"]["steps"], rows["recursive_doubling"]["steps"]) == (14, 6, 3)
    assert rows["parameter_server"]["balance"] == pytest.approx(4)
    assert [row["time_s"] for row in found["algorithms"]] == sorted(row["time_s"] for row in found["algorithms"])


def test_boxes_make_the_hierarchy_win(capfd: pytest.CaptureFixture[str]) -> None:
    found = answer(["compare", "--ranks", "32", "--bytes", "1GB", "--cluster", "4xdgx-a100-80"], capfd)
    assert found["algorithms"][0]["algorithm"] == "hierarchical"
    assert found["best"][-1]["algorithm"] == "hierarchical"
    assert found["best"][0]["algorithm"] != "hierarchical"


def test_wires_are_the_cluster_s_links() -> None:
    machines = Cluster.parse("2xdgx-a100-80")
    between, inside, outside = wires(machines), machines.levels[0].link, machines.levels[1].link
    assert between(0, 7).byte_s == pytest.approx(1 / (inside.bandwidth_bytes_per_s * inside.efficiency))
    assert between(0, 7).shared == ()
    assert between(0, 8).byte_s == pytest.approx(outside.ports / (outside.bandwidth_bytes_per_s * outside.efficiency))
    assert between(0, 8).latency_s == outside.latency_s
    # Each of the eight has a port of its own.
    assert len({between(r, r + 8).shared for r in range(8)}) == 8


def test_steps_are_drawn(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["collectives", "draw", "ring", "--ranks", "3"]) == 0
    out = capfd.readouterr().out
    assert "4 steps, 12 messages, proven" in out
    assert "  0 -+> 1  chunk(2)" in out
    assert "  2 -> 0  chunk(1)" in out
    assert answer(["draw", "tree", "--ranks", "4"], capfd)["steps"] == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["draw", "rign"], "did you mean ring?"),
        (["compare", "--collective", "all_reduse"], "did you mean all_reduce?"),
        (["compare", "--ranks", "64", "--cluster", "1xdgx-a100-80"], "has 8 devices; name more machines"),
        (["compare", "--ranks", "4096"], "more than 512 ranks"),
        (["compare", "--bytes", "0"], "a byte or more"),
    ],
)
def test_bad_input(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["collectives", *words]) == 2
    assert said in capfd.readouterr().err
