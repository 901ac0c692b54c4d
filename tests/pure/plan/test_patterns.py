"""Patterns for parameter names: short, and they mean exactly the cuts that they came from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import LayoutError
from shardwise.plan.ir.patterns import expand_patterns, expand_sites, matches_pattern, shorten_patterns, shorten_sites

parts = st.sampled_from(["h", "mlp", "up", "0", "1", "2", "12"])
names = st.lists(st.lists(parts, min_size=1, max_size=4).map(".".join), max_size=30, unique=True)


@given(names, st.data())
def test_short_cuts_mean_the_same(names: list[str], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    cuts = tuple((name, data.draw(st.integers(0, 1))) for name in chosen)
    short = shorten_patterns(cuts, names)
    assert dict(expand_patterns(short, names)) == dict(cuts)
    assert len(short) <= len(cuts)
    assert dict(shorten_patterns(short, names)) == dict(short)


def test_forty_eight_layers_are_one_entry() -> None:
    names = [f"layers.{i}.{p}.weight" for i in range(48) for p in ("q", "o")]
    cuts = tuple((name, 0 if "q" in name else 1) for name in names)
    assert shorten_patterns(cuts, names) == (("layers.*.q.weight", 0), ("layers.*.o.weight", 1))


def test_a_layer_that_differs_is_named() -> None:
    names = [f"h.{i}.up" for i in range(8)]
    cuts = tuple((name, int(name == "h.0.up")) for name in names)
    assert shorten_patterns(cuts, names) == (("h.*.up", 0), ("h.0.up", 1))
    assert shorten_patterns((("h.0.up", 0), ("h.1.up", 0)), names) == (("h.0.up", 0), ("h.1.up", 0)), "h.*.up would cut the third too"


def test_numbered_parts_of_layers_that_differ_among_themselves() -> None:
    names = [f"h.{i}.convs.{j}.weight" for i in range(3) for j in range(2)]
    cuts = tuple((name, int(name.split(".")[3])) for name in names)
    assert shorten_patterns(cuts, names) == (("h.*.convs.0.weight", 0), ("h.*.convs.1.weight", 1))


def test_a_star_is_a_number_and_nothing_else() -> None:
    assert matches_pattern("h.*.up", "h.10.up")
    assert not matches_pattern("h.*.up", "h.mlp.up")
    assert not matches_pattern("h.*.up", "h.1.up.weight")


sites = st.lists(st.tuples(st.sampled_from(["h", "h.x", "g"]), st.integers(0, 12), st.sampled_from(["norm/a", "up/b"])), max_size=20)


@given(sites)
def test_short_sites_mean_the_same(made: list[tuple[str, int, str]]) -> None:
    written_out = tuple(f"{head}.{n}.{tail}" for head, n, tail in made)
    short = shorten_sites(written_out)
    assert expand_sites(short) == written_out
    assert len(short) <= len(written_out)


def test_127_stages_are_one_line() -> None:
    assert shorten_sites([f"layers.{n}.norm/layer_norm" for n in range(1, 128)]) == ("layers.{1..127}.norm/layer_norm",)
    assert shorten_sites([f"layers.{n}.norm" for n in (1, 2, 4)]) == ("layers.1.norm", "layers.2.norm", "layers.4.norm")
    assert shorten_sites(["a.01.b", "a.02.b", "a.03.b"]) == ("a.01.b", "a.02.b", "a.03.b")
    assert expand_sites(shorten_sites(["{1..3}", "x"])) == ("1", "2", "3", "x")  # braces are no module's name
    with pytest.raises(LayoutError, match="100000"):
        expand_sites(["a.{1..999999999}.b"])
