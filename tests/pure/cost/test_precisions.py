"""The precisions that are only asked for: what they cost, where they are refused, and that no search takes them."""

from __future__ import annotations

import pytest

from shardwise.cluster.cluster import Cluster
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.timing import price
from shardwise.errors import Infeasible
from shardwise.plan.ir.precision import MIXED, PRECISIONS
from shardwise.plan.layout import Layout
from shardwise.solve.search import search
from tests.support.gpt_graph import gpt

GRAPH = gpt(4, hidden=2048, batch=8)
ASKED = [name for name in PRECISIONS if name not in ("float32", "float16", "bfloat16")]


def _step(cluster: Cluster, precision: str) -> float:
    return price(Pricer(GRAPH, cluster, 64), Layout.parse(f"data=8 precision={precision}")).prediction.step_time_s


def test_tf32_lies_between_float32_and_bfloat16() -> None:
    """Products at the catalogue's peak, in bytes of float32: state, sums and memory are those of float32."""
    cluster = Cluster.parse("dgx-a100-80")
    exact, tf32, half = (_step(cluster, name) for name in ("float32", "tf32", "bfloat16"))
    assert exact > 2 * tf32 > 2 * half
    wide, narrow = (Pricer(GRAPH, cluster, 64).devices.widths(Layout(precision=name)) for name in ("float32", "tf32"))
    assert wide == narrow


def test_on_processors_it_costs_what_it_computes_in() -> None:
    cluster = Cluster.parse("cpu-2")
    for name, one in PRECISIONS.items():
        if one.substitute and name != "float16":
            pricer = Pricer(GRAPH, cluster, 8)
            times = [
                price(pricer, Layout.parse(f"data=2 precision={p}")).prediction.step_time_s
                for p in (name, MIXED if one.held_dtype else one.substitute)
            ]
            assert times[0] == pytest.approx(times[1])


def test_a_device_without_it_refuses_it_by_name() -> None:
    with pytest.raises(Infeasible, match=r"precision=tf32: .*V100.* has no tf32 matrix products; use one of"):
        _step(Cluster.parse("p3.16xlarge"), "tf32")


def test_no_search_takes_it_unasked_and_a_constraint_does() -> None:
    cluster = Cluster.parse("dgx-a100-80")
    assert {c.layout.precision for c in search(GRAPH, cluster, 64, "gpt", "data=8").candidates} <= {"float32", "bfloat16-mixed"}
    assert search(GRAPH, cluster, 64, "gpt", "data=8 precision=tf32").layout.precision == "tf32"


def test_float8_makes_its_products_faster_and_pays_for_casts() -> None:
    """On H100: two products of three are faster than in 16 bits where layers are large, by less than a third of the step, and three by less
    than half; in bytes, state and memory both are bfloat16-mixed."""
    cluster = Cluster.parse("dgx-h100")
    large = gpt(2, hidden=4096, sequence=1024, batch=8)
    pricer, words = Pricer(large, cluster, 64), ("bfloat16-mixed", "float8-rows", "float8")
    half, rows, eight = (price(pricer, Layout.parse(f"data=8 precision={name}")).prediction.step_time_s for name in words)
    assert 0.67 * half < rows < half
    assert 0.5 * half < eight < rows
    assert len({Pricer(large, cluster, 64).devices.widths(Layout(precision=name)) for name in words}) == 1
    with pytest.raises(Infeasible, match=r"precision=float8: .*A100.* has no float8 matrix products; use one of"):
        _step(Cluster.parse("dgx-a100-80"), "float8")
