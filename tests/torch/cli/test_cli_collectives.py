"""`shardwise collectives`: its numbers are the closed forms, and the links are the cluster's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from shardwise.cli import run
from shardwise.cluster.cluster import Cluster
from shardwise.collectives import ALGORITHMS
from shardwise.simulate.wires import cluster_wires

SVG = "{http://www.w3.org/2000/svg}"


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
    between, inside, outside = cluster_wires(machines), machines.levels[0].link, machines.levels[1].link
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


def test_closed_forms_take_over_where_programs_end(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answer for 32 ranks by running programs and by forms."""
    words = ["compare", "--ranks", "32", "--bytes", "1GB", "--cluster", "4xdgx-a100-80"]
    by_programs = answer(words, capfd)
    monkeypatch.setattr("shardwise.cli.collectives.MAX_SIMULATED_RANKS", 8)
    by_forms = answer(words, capfd)
    both = [{row["algorithm"]: row for row in found["algorithms"]} for found in (by_programs, by_forms)]
    assert set(both[0]) == set(both[1])
    for name, row in both[0].items():
        off = {"naive": 0.25, "double_tree": 0.25}.get(name, 1e-6)
        for key in ("time_s", "latency_s", "total_bytes", "mean_bytes", "busiest_bytes", "steps", "balance"):
            assert both[1][name][key] == pytest.approx(row[key], rel=off if key in ("time_s", "latency_s") else 1e-6), (name, key)


def test_sixteen_thousand_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    found = answer(["compare", "--ranks", "16384", "--bytes", "1GB", "--cluster", "2048xdgx-a100-80"], capfd)
    rows = {row["algorithm"]: row for row in found["algorithms"]}
    assert len(rows) == 8
    assert rows["ring"]["steps"] == 2 * 16383
    assert rows["tree"]["time_s"] > rows["hierarchical"]["time_s"] > 2 * 1e9 / 8 / 25e9
    assert found["best"][0]["algorithm"] in ("recursive_doubling", "tree")
    assert found["best"][-1]["library_s"] > 2 * (1 << 30) / 200e9


def test_a_node_that_is_not_full(capfd: pytest.CaptureFixture[str]) -> None:
    """100 ranks on nodes of 8: everything but boxes of equal size."""
    found = answer(["compare", "--ranks", "100", "--cluster", "13xdgx-a100-80"], capfd)
    assert {row["algorithm"] for row in found["algorithms"]} == set(ALGORITHMS["all_reduce"]) - {"hierarchical"}
    assert next(row for row in found["algorithms"] if row["algorithm"] == "ring")["steps"] == 198
    equal = answer(["compare", "--ranks", "100"], capfd)
    assert len(equal["algorithms"]) == len(ALGORITHMS["all_reduce"])


def test_pictures(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Well-formed, with a line an algorithm, the winners' band and an arrow a message."""
    target = tmp_path / "times.svg"
    found = answer(["compare", "--ranks", "8", "--cluster", "2xdgx-a100-80", "-o", str(target)], capfd)
    assert found["picture"] == str(target)
    tree = ElementTree.parse(target)
    words = [text.text for text in tree.iter(f"{SVG}text")]
    names = {row["algorithm"] for row in found["algorithms"]}
    assert names <= set(words)
    assert "the library's own" in words
    dashed = [line for line in tree.iter(f"{SVG}polyline") if line.get("stroke-dasharray")]
    assert len(dashed) == 1
    colour = {text.text: text.get("fill") for text in tree.iter(f"{SVG}text") if text.get("fill") != "#ffffff"}
    band = [box.get("fill") for box in tree.iter(f"{SVG}rect")][1:]
    # The least of all lines at the smallest and the largest size.
    for box, row in ((band[0], found["best"][0]), (band[-1], found["best"][-1])):
        name = row["algorithm"] if row["time_s"] <= row["library_s"] else "the library's own"
        assert box == colour[name]
    drawn = tmp_path / "ring.svg"
    answer(["draw", "ring", "--ranks", "4", "-o", str(drawn)], capfd)
    lines = [line for line in ElementTree.parse(drawn).iter(f"{SVG}polyline") if line.get("stroke-width") == "1.6"]
    assert len(lines) == 24
    assert answer(["draw", "tree", "--ranks", "4", "-o", str(tmp_path / "tree.png")], capfd)["proven"]
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["draw", "rign"], "did you mean ring?"),
        (["compare", "--collective", "all_reduse"], "did you mean all_reduce?"),
        (["compare", "--ranks", "64", "--cluster", "1xdgx-a100-80"], "has 8 devices; name more machines"),
        (["compare", "--ranks", "1048577"], "at most 1048576 ranks"),
        (["compare", "--ranks", "9" * 30], "at most 1048576 ranks"),
        (["compare", "--ranks", "4096", "--collective", "all_gather"], "more than 256 ranks"),
        (["compare", "-o", "picture.pdf"], ".svg or .png"),
        (["draw", "ring", "-o", "no/such/folder.svg"], "choose a folder that can be written to"),
        (["compare", "--bytes", "0"], "a byte or more"),
        (["compare", "--collective", "halo"], "nothing to compare; shardwise collectives draw exchange"),
    ],
)
def test_bad_input(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["collectives", *words]) == 2
    assert said in capfd.readouterr().err


def test_a_collective_of_ones_own_is_drawn(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "swap.txt"
    file.write_text("all_reduce\nrank 0: chunk(0)>1 chunk(0)+<1\nrank 1: chunk(0)>0 chunk(0)+<0\n")
    found = answer(["draw", str(file), "-o", str(tmp_path / "swap.svg")], capfd)
    assert (found["collective"], found["ranks"], found["messages"], found["steps"]) == ("all_reduce", 2, 2, 1)
    assert "<svg" in (tmp_path / "swap.svg").read_text()
    file.write_text("all_reduce\nrank 0: chunk(0)>1 chunk(0)<1\nrank 1: chunk(0)>0 chunk(0)+<0\n")
    assert "chunk(0)" in answer(["draw", str(file)], capfd, 4)["error"]
    assert "leave --ranks out" in answer(["draw", str(file), "--ranks", "2"], capfd, 2)["error"]
