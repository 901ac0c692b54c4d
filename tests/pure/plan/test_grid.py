"""Tensor ranks in a grid: as text, as mesh axes, what each axis cuts and sends (the closed form of the 2-D algorithm), and what the planner
does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cli.changes import parse_changes, refit_layout
from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.cost.network.network import RankGroup, collective_s
from shardwise.cost.operators import build_inventory as gather_module
from shardwise.cost.step import Pricer
from shardwise.errors import Infeasible, LayoutError, UsageError
from shardwise.model.graph import Graph, Operator, Ref, Tensor, Variable
from shardwise.model.sharding import propagate as propagate_module
from shardwise.model.sharding.axis_nesting import AxisDecisions
from shardwise.model.sharding.propagate import propagate
from shardwise.model.sharding.sharding import Sharding
from shardwise.plan.ir.grid import NESTED, grids_of, parse_grid
from shardwise.plan.ir.patterns import expand_shards
from shardwise.plan.ir.placement import R, is_shard
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import format_plan, parse_plan
from shardwise.solve.constraints import parse_constraints
from shardwise.solve.moves import grids
from shardwise.solve.search import search
from shardwise.solve.space import SearchSpace
from tests.support.gpt_graph import gpt

GPU = Device("gpu", "gpu", (("float32", 1e12), ("bfloat16", 4e12)), 1e11, 1e12, 1.0, 5e-6)
NODE = Cluster("node", GPU, (ClusterLevel("node", 8, NetworkLink(3e-6, 2e11)),))
NODES = Cluster("nodes", GPU, (ClusterLevel("node", 4, NetworkLink(3e-6, 2e11)), ClusterLevel("cluster", 2, NetworkLink(1e-5, 1e10))))
FACTOR = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}  # of (n - 1) / n of the whole: what each rank sends


def chain(widths: tuple[int, ...], batch: int) -> Graph:
    """Linear layers without biases with a ReLU after each, and the sum of all that comes out."""
    tensors = {"x": Tensor((batch, widths[0]), "float32")}
    parameters, operators, value = [], [], "x"
    for i, (a, b) in enumerate(pairwise(widths)):
        weight, out, active = f"w{i}", f"y{i}", f"z{i}"
        tensors |= {weight: Tensor((b, a), "float32"), out: Tensor((batch, b), "float32"), active: Tensor((batch, b), "float32")}
        parameters.append(Variable(weight, weight, tensors[weight], trainable=True))
        operators.append(Operator(f"linear{i}", "aten.linear.default", (Ref(value), Ref(weight)), (), (out,), f"l.{i}/linear"))
        operators.append(Operator(f"relu{i}", "aten.relu.default", (Ref(out),), (), (active,), f"l.{i}/relu"))
        value = active
    tensors["loss"] = Tensor((), "float32")
    operators.append(Operator("sum", "aten.sum.default", (Ref(value),), (), ("loss",), "/sum"))
    inputs = (Variable("x", "x", tensors["x"], batched=True),)
    return Graph(tuple(parameters), (), inputs, (), tuple(operators), tensors, "loss", batch)


# As text, and as mesh axes.


@given(st.lists(st.integers(1, 9), min_size=2, max_size=3), st.integers(1, 3))
def test_a_layout_prints_as_it_is_read(sizes: list[int], data: int) -> None:
    text = "x".join(map(str, sizes))
    layout = Layout.parse(f"data={data} tensor={text}")
    assert layout.tensor == prod(sizes)
    assert layout.num_ranks == data * prod(sizes)
    assert Layout.parse(str(layout)) == layout
    assert prod(n for _, n in layout.tensor_axes) == layout.tensor
    cut = [n for n in sizes if n > 1]
    assert bool(layout.grid) is (len(cut) > 1), "ranks along one axis are a line, whatever it is called"
    plan = Plan(layout, "gpt", "here", 12 * data)
    assert parse_plan(format_plan(plan)) == plan


@pytest.mark.parametrize("ranks", range(1, 65))
def test_every_grid_is_there_once(ranks: int) -> None:
    sides = [n for n in range(1, ranks + 1) if ranks % n == 0]
    every = {"x".join(map(str, s)) for k in (2, 3) for s in product(sides, repeat=k) if prod(s) == ranks and 1 not in s}
    found = grids_of(ranks)
    assert len(found) == len(set(found))
    assert set(found) == every
    assert all(Layout(grid=grid).tensor == ranks for grid in found)


def test_the_last_axis_is_the_closest() -> None:
    layout = Layout.parse("data=2 tensor=2x3x2 pipeline=2")
    mesh = layout.mesh
    assert mesh.group(0, "depth") == (0, 1)
    assert mesh.group(0, "columns") == (0, 2, 4)
    assert mesh.group(0, "rows") == (0, 6)
    assert mesh.group(0, "data") == (0, 12)
    assert mesh.group(0, *mesh.stage_axes) == tuple(range(24))
    pricer = Pricer(gpt(1), NODE, 8)
    assert [(g.size, g.stride) for g in (pricer.group(layout, axis) for axis in ("depth", "columns", "rows", "data"))] == [
        (2, 1), (3, 2), (2, 6), (2, 12),
    ]  # fmt: skip
    assert pricer.group(layout, "data", "rows") == RankGroup(4, 6, 48)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tensor=2x", r"tensor=2x: '' is not the number of ranks along an axis"),
        ("tensor=0x2", r"tensor=0x2: '0' is not the number of ranks along an axis of a grid, 1 or more; use a count"),
        ("tensor=2x2x2x2", r"tensor=2x2x2x2 has 4 axes, and a grid has at most 3"),
        ("tensor=2xtwo", r"'two' is not the number of ranks"),
        ("tensor=-2x2", r"'-2' is not the number"),
        ("grid=2x2", r"unknown layout key grid"),
        ("pipeline=2 inner=2x2/4x1 tensor=2x2", r"tensor=2x2 with inner=2x2/4x1 is not supported"),
    ],
)
def test_grids_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        Layout.parse(text)


def test_a_grid_of_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(LayoutError, match="a grid of 2x2 has 4 tensor ranks, and tensor=6"):
        Layout(tensor=6, grid="2x2")
    with pytest.raises(LayoutError, match="has 4 tensor ranks, and tensor=8"):
        replace(Layout.parse("tensor=2x2"), tensor=8)


# What each axis cuts.


def test_rows_and_columns_cut_the_two_sides_of_every_weight_in_turn() -> None:
    """Agarwal et al. 1995, as AxoNN has it: the transposed arrangement in every second layer, so that nothing is redistributed."""
    widths = (512, 2048, 512, 2048, 512)
    graph = chain(widths, 256)
    found = propagate(graph, {"rows": 2, "columns": 4})
    rows, columns = dict(found.shards["rows"]), dict(found.shards["columns"])
    assert rows == {"w0": 0, "w1": 1, "w2": 0, "w3": 1}
    assert columns == {name: 1 - dim for name, dim in rows.items()}
    assert not [m for m in found.redistributions if {m.forward, m.backward} - {"", "slice", "all_reduce"} and m.value != "x"]
    for i, (a, b) in enumerate(pairwise(widths)):
        shape = found.local_shape(f"w{i}", (b, a))
        assert shape == ((b // 2, a // 4) if i % 2 == 0 else (b // 4, a // 2))


def sent(pricer: Pricer, layout: Layout) -> dict[tuple[str, str], float]:
    """(axis, way) -> float32 bytes that each rank sends in a microbatch, as they are priced."""
    parts, sizes = pricer.sharded_inventory(layout), dict(layout.tensor_axes)
    found: dict[tuple[str, str], float] = {}
    for way, (_, which) in (("forward", parts.forward), ("backward", parts.backward)):
        for k in which:
            one = parts.collectives[k]
            n = sizes[one.axis]
            found[one.axis, way] = found.get((one.axis, way), 0.0) + FACTOR[one.name] * one.size_bytes * (n - 1) / n
    return found


def closed_form(widths: tuple[int, ...], batch: int, rows: int, columns: int) -> dict[tuple[str, str], float]:
    """A layer's output is summed over the axis that cuts its inputs, its input's gradient over the axis that cuts its outputs; each of
    the two is in pieces of the other axis. 2 (n - 1) / n of it for each rank. The first layer's input has no gradient."""
    found = {(axis, way): 0.0 for axis in ("rows", "columns") for way in ("forward", "backward")}
    size = {"rows": rows, "columns": columns}
    for i, (a, b) in enumerate(pairwise(widths)):
        inputs, outputs = ("columns", "rows") if i % 2 == 0 else ("rows", "columns")
        found[inputs, "forward"] += 2 * (size[inputs] - 1) / size[inputs] * 4 * batch * b / size[outputs]
        if i:
            found[outputs, "backward"] += 2 * (size[outputs] - 1) / size[outputs] * 4 * batch * a / size[inputs]
    return found


@pytest.mark.parametrize("grid", ["2x2", "2x4", "4x2"])
def test_what_each_axis_sends_is_the_closed_form(grid: str) -> None:
    widths, batch = (2048, 4096, 2048, 4096, 2048), 512
    graph = chain(widths, batch)
    layout = Layout.parse(f"tensor={grid}")
    rows, columns = parse_grid(grid)
    found = sent(Pricer(graph, NODE, batch), layout)
    want = closed_form(widths, batch, rows, columns)
    assert {key: found.get(key, 0.0) for key in want} == pytest.approx(want)


def test_broken_twin_what_is_in_pieces_is_priced_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_module, "num_shards_during_move", lambda sharding, op, move: 1)
    widths, batch = (2048, 4096, 2048, 4096, 2048), 512
    found = sent(Pricer(chain(widths, batch), NODE, batch), Layout.parse("tensor=2x4"))
    want = closed_form(widths, batch, 2, 4)
    assert all(found.get(key, 0.0) >= 1.9 * bytes_ for key, bytes_ in want.items())


def test_each_axis_is_priced_on_its_own_links() -> None:
    """Columns are neighbours in a node; rows of eight ranks in nodes of four go over the network."""
    widths, batch = (2048, 4096, 2048), 512
    pricer, layout = Pricer(chain(widths, batch), NODES, batch), Layout.parse("tensor=2x4")
    forward, backward = pricer.operator_seconds(layout)[2:]
    inside, between = RankGroup(4, 1, 8), RankGroup(2, 4, 8)
    talk = pricer.devices.layer_collectives(layout)
    slower, shown = talk.slowdown, talk.exposed_backward
    first = collective_s(NODES, "all_reduce", 4.0 * batch * 4096 / 2, inside)
    second = collective_s(NODES, "all_reduce", 4.0 * batch * 2048 / 4, between)
    assert float(forward.sum()) == pytest.approx(slower * (first + second))
    assert float(backward.sum()) == pytest.approx(slower * shown * collective_s(NODES, "all_reduce", 4.0 * batch * 4096 / 2, inside))


def test_a_grid_divides_work_weights_and_optimizer_like_a_line() -> None:
    """Of products whose weights both axes cut."""
    graph = chain((2048,) * 5, 512)
    pricer = Pricer(graph, NODE, 512)
    whole = pricer.stages(Layout())[0]
    for text in ("tensor=2x2", "tensor=2x4", "tensor=2x2x2"):
        layout = Layout.parse(text)
        (one,) = pricer.stages(layout)
        assert one.memory.alone.parameters == pytest.approx(whole.memory.alone.parameters / layout.tensor)
        assert one.memory.alone.optimizer == pytest.approx(whole.memory.alone.optimizer / layout.tensor)


# Depth.


def nested(sharding: Sharding) -> set[tuple[str, int]]:
    """(value, dim) that depth cuts in pieces of another axis."""
    found = set()
    for value, forms in sharding.placements.items():
        mine = forms.get(NESTED, R)
        if is_shard(mine) and any(form == mine for axis, form in forms.items() if axis != NESTED):
            found.add((value, mine.dim))
    return found


@pytest.mark.parametrize("sequence", [False, True])
def test_depth_cuts_pieces_once_more_only_where_they_are_never_put_together(sequence: bool) -> None:
    graph = gpt(layers=2, hidden=1024, heads=16, sequence=512, vocabulary=4096)
    found = propagate(graph, {"rows": 2, "columns": 2, "depth": 2}, sequence=sequence)
    twice = nested(found)
    assert {v.name for v in graph.parameters if (v.value, 0) in twice} >= {"h.0.q.weight", "h.1.up.weight", "h.1.up.bias"}
    moved = {(m.value, form.dim) for m in found.redistributions if m.axis != NESTED for form in (m.source, m.target) if is_shard(form)}
    assert not twice & moved
    for value, dim in twice:
        assert graph.tensors[value].shape[dim] % 4 == 0
        assert found.local_shape(value, graph.tensors[value].shape)[dim] == graph.tensors[value].shape[dim] // 4


def test_broken_twin_depth_without_the_rule_cuts_what_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were every piece cut once more, some would be put together along the other axis alone, out of order."""
    graph = gpt(layers=2, hidden=1024, heads=16, sequence=512, vocabulary=4096)

    def anything(decided: AxisDecisions, sizes: dict[str, int], *_: object) -> object:
        return (
            {v: {f.dim: sizes[a] for a, f in by.items() if is_shard(f)} for v, by in decided.placements.items()},
            frozenset(),
            frozenset(),
        )

    monkeypatch.setattr(propagate_module, "nested_dims", anything)
    found = propagate(graph, {"rows": 2, "columns": 2, "depth": 2})
    moved = {(m.value, form.dim) for m in found.redistributions if m.axis != NESTED for form in (m.source, m.target) if is_shard(form)}
    assert nested(found) & moved


def test_cuts_by_hand_that_two_axes_want() -> None:
    graph = gpt(layers=1)
    up = (("h.0.up.weight", 0),)
    with pytest.raises(LayoutError, match=r"dimension 0 of h.0.up.weight \[256, 64\] over columns=2, and another axis cuts it already"):
        propagate(graph, {"rows": 2, "columns": 2}, {"rows": up, "columns": up})
    with pytest.raises(LayoutError, match=r"over columns=300, which leaves ranks without a piece"):
        propagate(graph, {"rows": 2, "columns": 300}, {"columns": up})


@pytest.mark.parametrize("batch", [2, 512])
def test_cuts_that_were_found_are_kept_whatever_else_would_be_cheaper(batch: int) -> None:
    """A plan is found for one batch and prices, and run with others: with a few samples weights would rather be gathered."""
    widths, sizes = (512, 2048, 512, 2048, 512), {"rows": 2, "columns": 2, "depth": 2}
    found = propagate(chain(widths, 512), sizes)
    again = propagate(chain(widths, batch), sizes, found.shards)
    assert {axis: set(cuts) for axis, cuts in again.shards.items()} == {axis: set(cuts) for axis, cuts in found.shards.items()}
    assert {name for name, dim in found.shards["depth"] if (name, dim) in found.shards["rows"]}
    for value, _ in nested(again):
        assert not [
            m for m in again.redistributions if m.value == value and m.axis != NESTED and (is_shard(m.source) or is_shard(m.target))
        ]


def test_broken_twin_cuts_that_nobody_keeps_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    widths, sizes = (16, 16, 16, 16), {"rows": 2, "depth": 2}
    shards = dict.fromkeys(sizes, (("w0", 0), ("w1", 1), ("w2", 0)))
    assert propagate(chain(widths, 2), sizes, shards).shards == shards
    monkeypatch.setattr(propagate_module, "reserve_for_later_axes", lambda later, given, fixed: ({}, {}))
    with pytest.raises(LayoutError, match="another axis cuts it already; only depth cuts pieces once more"):
        propagate(chain(widths, 2), sizes, shards)


# The planner.

WIDE = chain((16384,) * 9, 256)
DGX = Cluster.parse("1xdgx-a100-40")


def test_the_planner_finds_a_grid_where_it_sends_less() -> None:
    """Square layers: in a line a rank sends 2 (n - 1) / n of a whole activation for every two layers and way, in a grid of pieces."""
    plan = search(WIDE, DGX, 256, "wide")
    assert plan.layout.grid in grids_of(8)
    assert plan.prediction is not None
    lines = [c.prediction.step_time_s for c in plan.candidates if c.layout.tensor == 8 and not c.layout.grid and c.prediction is not None]
    assert min(lines) > plan.prediction.step_time_s
    assert min(lines) == search(WIDE, DGX, 256, "wide", "tensor=8x1").prediction.step_time_s  # type: ignore[union-attr]
    assert dict(plan.reasons)["grid"].startswith(f"tensor={plan.layout.grid}: the best priced plan with tensor=8 takes")
    best = min(
        search(WIDE, DGX, 256, "wide", layout=replace(plan.layout, grid=grid)).prediction.step_time_s  # type: ignore[union-attr]
        for grid in grids_of(8)
    )
    assert plan.prediction.step_time_s <= 1.005 * best  # times within 0.4 % are the same
    assert plan.bound_gap is not None
    assert plan.prediction.step_time_s / (1 + plan.bound_gap) <= best * (1 + 1e-9)


@pytest.mark.parametrize(("batch", "cluster"), [(256, "dgx-a100-40"), (8192, "dgx-a100-80")])
def test_the_plan_is_the_best_of_every_grid_and_number_of_microbatches(batch: int, cluster: str) -> None:
    graph, machines = chain((16384,) * 9, batch), Cluster.parse(cluster)
    plan = search(graph, machines, batch, "wide")
    assert plan.prediction is not None
    for tensor, microbatches in product((4, 8), (1, 2, 4)):
        data = machines.num_devices // tensor
        for grid in ("", *grids_of(tensor)):
            for zero in (0, 1, 3) if data > 1 else (0,):
                layout = Layout(data, tensor, 1, microbatches, zero=zero, precision="bfloat16", grid=grid)
                try:
                    found = search(graph, machines, batch, "wide", layout=layout).prediction
                except Infeasible:
                    continue
                assert found is not None
                assert plan.prediction.step_time_s <= 1.005 * found.step_time_s, layout


def test_a_grid_that_is_asked_for_may_reach_over_nodes() -> None:
    plan = search(WIDE, NODES, 256, "wide", "tensor=2x4 precision=bfloat16")
    assert str(plan.layout).split()[:3] == ["data=1", "tensor=2x4", "pipeline=1"]
    assert {axis for axis, _ in plan.shards} == {"rows", "columns"}


def test_the_planner_finds_a_grid_over_nodes_where_no_line_reaches() -> None:
    """Weights of which a node's ranks cannot hold their part twice: one replica over both nodes, its rows in different ones."""
    few = replace(GPU, memory_bytes=6e9)
    machines = replace(NODES, device=few)
    plan = search(WIDE, machines, 256, "wide", "pipeline=1 offload=none recompute=none precision=bfloat16")
    assert plan.prediction is not None
    assert plan.layout.grid
    assert plan.layout.num_ranks == 8
    assert plan.layout.tensor == 8
    for line in ("data=2 tensor=4 zero=2", "data=2 tensor=4 zero=3"):
        with pytest.raises(Infeasible):
            search(WIDE, machines, 256, "wide", layout=Layout.parse(f"{line} precision=bfloat16"))
    # Where a line inside of nodes is faster than what a grid sends between them, none is tried.
    pricer, space = Pricer(WIDE, NODES, 256), SearchSpace(NODES, 256, parse_constraints("pipeline=1"))
    assert not grids.multi_node_grid_spaces(pricer, space, 1e-3)
    assert all(one.admits("data", 1) and one.grid for one in grids.multi_node_grid_spaces(pricer, space, 1e3))


def test_few_layouts_are_tried_in_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that planning takes about as long as without: counted, not timed."""
    tried: list[str] = []
    in_grids = grids.arrange_in_grids

    def counting(*args: object) -> object:
        for layout, least in in_grids(*args):  # type: ignore[arg-type]
            tried.append(str(layout))
            yield layout, least

    monkeypatch.setattr("shardwise.solve.branch_and_bound.arrange_in_grids", counting)
    search(WIDE, DGX, 256, "wide")
    assert 1 <= len(tried) <= grids.MAX_LAYOUTS * grids.MAX_GRIDS
    tried.clear()
    search(WIDE, DGX, 256, "wide", "tensor<=2")
    search(WIDE, DGX, 256, "wide", "tensor=8x1")
    assert not tried


def test_constraints_on_grids() -> None:
    assert [str(c) for c in parse_constraints("tensor=2x4 pipeline=2")] == ["tensor=8", "tensor=2x4", "pipeline=2"]
    for text, kind, said in (
        ("tensor<=2x4", UsageError, "a grid has no order"),
        ("tensor=2x", LayoutError, "is not the number of ranks"),
        ("tensor=2x4 tensor=4x2", Infeasible, "no grid meets tensor=2x4 and tensor=4x2"),
        ("tensor=2x4 tensor<=4", Infeasible, "no tensor meets tensor=8 and tensor<=4"),
        ("grid=2x4", UsageError, "unknown key grid"),
    ):
        with pytest.raises(kind, match=said):
            parse_constraints(text)
    with pytest.raises(Infeasible, match="no layout of 8 devices for a batch of 256 under 'tensor=3x2 ranks=8'"):
        search(WIDE, DGX, 256, "wide", "tensor=3x2 ranks=8")


def test_whatif_arranges_tensor_ranks_and_puts_them_in_a_line_again() -> None:
    (change,) = parse_changes(["tensor=2x4"])
    assert change.grid == (8, "2x4")
    old = Layout.parse("data=2 tensor=2x2")
    assert refit_layout(old, {"tensor": 4}, 8, 16, 16)[0] == Layout(data=2, tensor=4)
    assert refit_layout(Layout.parse("data=2 spatial=2x2"), {"spatial": "4"}, 8, 2, 2)[0] == Layout.parse("data=2 spatial=4")
    assert refit_layout(old, {"tensor": 8, "grid": "2x4"}, 8, 16, 16)[0] == Layout.parse("tensor=2x4 microbatches=2")
    assert refit_layout(old, {"zero": 1}, 8, 16, 16)[0] == Layout.parse("data=2 tensor=2x2 zero=1")


@settings(max_examples=10, deadline=None)
@given(st.sampled_from([2, 4]), st.sampled_from(["2x2", "2x4", "4x2", "2x2x2", "2x1x2"]), st.booleans())
def test_a_price_by_hand_is_finite_and_its_parts_add_up(layers: int, grid: str, sequence: bool) -> None:
    layout = Layout.parse(f"tensor={grid} sequence_parallel={'on' if sequence else 'off'}")
    plan = search(
        gpt(layers, hidden=256, heads=8), replace(NODE, levels=(ClusterLevel("node", 8, NetworkLink(3e-6, 2e11)),)), 8, "gpt", layout=layout
    )
    assert plan.prediction is not None
    assert sum(s for _, s in plan.prediction.parts) == pytest.approx(plan.prediction.step_time_s)
    assert plan.layout == layout


@pytest.mark.parametrize(("grid", "cluster"), [("3x5", "15 devices of gb200-nvl72"), ("2x2x2", "dgx-a100-80"), ("5", "5xcpu-8")])
def test_a_plan_that_is_read_again_takes_as_long(grid: str, cluster: str) -> None:
    """A plan says how weights are cut, and its price is that of the placement which follows from these cuts: where few weights divide it
    was that of the search's own, 0.5 % off."""
    graph, machines = gpt(4, hidden=384, heads=6, sequence=128, vocabulary=50255, batch=15), Cluster.parse(cluster)
    plan = search(graph, machines, 15, "gpt", f"tensor={grid} data=1 pipeline=1 sequence_parallel=on")
    again = parse_plan(format_plan(plan))
    shards = expand_shards(again.shards, (v.name for v in (*graph.parameters, *graph.buffers)))
    read = search(graph, machines, 15, "gpt", layout=again.layout, shards=shards, stages=again.stages)
    assert plan.prediction == read.prediction
