"""The key `staleness`: what it goes with, what it costs, and that no search takes it by itself."""

from __future__ import annotations

import pytest

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.cost.step import Pricer
from shardwise.errors import Infeasible, LayoutError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import format_plan, parse_plan
from shardwise.solve.constraints import parse_constraints
from shardwise.solve.search import search
from shardwise.solve.space import SearchSpace
from tests.support.gpt_graph import gpt

CPU = Device("c", "cpu", (("float32", 1e11), ("bfloat16", 1e11), ("float64", 5e10)), 64e9, 20e9)
GRAPH = gpt(3, hidden=64, batch=8)


def _hosts(bandwidth_bytes_per_s: float) -> Cluster:
    """Two, one rank each."""
    link = NetworkLink(1e-4, bandwidth_bytes_per_s, protocol="gloo")
    return Cluster("hosts", CPU, (ClusterLevel("node", 1, NetworkLink(1e-6, 1e10)), ClusterLevel("network", 2, link)))


def test_it_is_read_and_written_back() -> None:
    layout = Layout.parse("data=2 staleness=3 all_reduce=parameter_server")
    assert layout.staleness == 3
    assert Layout.parse(str(layout)) == layout
    assert str(Layout.parse("data=2 staleness=0")) == "data=2 tensor=1 pipeline=1"
    plan = Plan(layout, "m", "here", 4, ())
    assert parse_plan(format_plan(plan)).layout == layout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("staleness=1", "data=1 has one; use data=2 or more"),
        ("data=2 context=2 staleness=1", "context=2 with staleness=1 is not supported; use context=1"),
        ("data=2 schedule=zb-v staleness=1", "chunks=2 .* use chunks=1"),
        ("data=2 schedule=zb-h1 staleness=1", "schedule=zb-h1 .* use schedule=1f1b or schedule=gpipe"),
        ("data=2 expert=2 staleness=1", "expert=2 .* use expert=1"),
        ("data=2 zero=1 staleness=2", "zero=1 with staleness=2 is not supported; use zero=0, or staleness=0"),
        ("data=2 offload=optimizer staleness=1", "offload=optimizer .* use offload=none or offload=activations"),
        ("data=2 compress=int8 staleness=1", "compress=int8 .* use compress=none"),
        ("data=2 staleness=-1", "staleness is a whole number"),
        ("data=2 stalenes=1", "did you mean staleness"),
    ],
)
def test_what_cannot_be_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        Layout.parse(text)


def test_it_counts_steps() -> None:
    with pytest.raises(LayoutError, match="staleness=-2"):
        Layout(data=2, staleness=-2)


def _costs(bandwidth: float, staleness: int) -> tuple[float, float, float]:
    """(seconds of sums that show, bytes of gradients, seconds of a step's compute and update)."""
    (cost,) = Pricer(GRAPH, _hosts(bandwidth), 8).stages(Layout(data=2, microbatches=2, staleness=staleness))
    return cost.gradients_s, cost.memory.alone.gradients, 2 * (cost.forward_s + cost.backward_s) + cost.optimizer_s


@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_sums_hide_behind_a_step(staleness: int) -> None:
    """As far as a step is long, of which the network moves a part; more steps under way hide no more, since their sums pass too."""
    pricer = Pricer(GRAPH, _hosts(1e6), 8)
    size = 4.0 * GRAPH.num_trainable
    whole = pricer.collective("all_reduce", size, pricer.group(Layout(data=2), "data"))
    shown, memory, step = _costs(1e6, staleness)
    assert shown == pytest.approx(whole - pricer.devices.overlap(Layout(data=2)) * step)
    at_once, once, _ = _costs(1e6, 0)
    assert shown < at_once
    assert memory == (staleness + 1) * once
    assert _costs(1e9, staleness)[0] == 0.0 < _costs(1e9, 0)[0]


def test_no_search_takes_it_by_itself() -> None:
    plan = search(GRAPH, _hosts(1e6), 8, "gpt", "data=2")
    assert plan.layout.staleness == 0
    assert {c.layout.staleness for c in plan.candidates} == {0}


def test_a_constraint_asks_for_it() -> None:
    """And then every layout has it: the fewest steps that are admitted."""
    for words, want in (("staleness=2", 2), ("staleness>=3", 3), ("staleness<=4", 0), ("staleness>0", 1)):
        space = SearchSpace(_hosts(1e6), 8, parse_constraints(words))
        found = [layout for base in space.bases() for layout in space.variants(base)]
        assert {layout.staleness for layout in found} == {want}
        assert want == 0 or {(layout.tensor, layout.pipeline, layout.zero) for layout in found} == {(1, 1, 0)}
    plan = search(GRAPH, _hosts(1e6), 8, "gpt", "staleness=1")
    assert (plan.layout.staleness, plan.layout.data) == (1, 2)
    assert {c.layout.staleness for c in plan.candidates} == {1}
    with pytest.raises(Infeasible):
        search(GRAPH, _hosts(1e6), 8, "gpt", "staleness=1 tensor=2")
