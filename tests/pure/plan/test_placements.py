"""The integer programme against trying everything, with and without a memory budget; and the placements that are known to be right."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwise.errors import Infeasible, LayoutError, UsageError
from shardwise.model.graph import Graph
from shardwise.model.sharding.axis_values import FixedShards, OtherAxes
from shardwise.model.sharding.propagate import propagate
from shardwise.model.sharding.sharding import Prices
from shardwise.plan.ir.placement import D, P, Placement, R, Shard, is_shard
from tests.support.enumeration import Everything
from tests.support.gpt_graph import gpt
from tests.support.placements_oracle import Assignment, Budget, exceptions, solve_placements
from tests.support.placements_oracle.tables import Axis, Moves, prune
from tests.support.small_graphs import alexnet, chain, convolutions, experts

pytest.importorskip("highspy")

EXACT = 1e-6
# A GPU among eight with fast links; what follows the bytes decides, latency little.
GPU = Prices(flops_per_s=5e13, memory_bytes_per_s=1.5e12, link_bytes_per_s=1e11, latency_s=2e-5)

KINDS = st.sampled_from(("linear", "linear", "biased", "add", "mm", "t", "softmax", "gelu", "norm", "embedding", "square"))
SHAPES = st.tuples(KINDS, st.integers(0, 4), st.integers(0, 4))
LINKS = st.sampled_from((3e7, 1e9, 1e11))
WAYS = st.sampled_from(("features", "sequence", "anything"))


def axis_of(graph: Graph, prices: Prices, way: str, n: int = 2) -> Axis:
    """The axis as `solve_placements` sees it; `way`: which labels may be cut."""
    axis = Axis(graph, "tensor", n, prices, FixedShards(), OtherAxes(), way != "features")
    if way == "anything":
        axis.weight_label_meanings = None
    return axis


def solved(graph: Graph, prices: Prices, way: str, budget: Budget | None = None, n: int = 2) -> Assignment:
    cut = ("tensor",) if way == "anything" else ()
    return solve_placements(
        graph, {"tensor": n}, prices=prices, budget=budget, sequence=way != "features", batch_cut=cut, fold=False, gap=0.0
    )


def stored_of(graph: Graph, found: Assignment) -> dict[str, Placement]:
    values = {v.name: v.value for v in (*graph.parameters, *graph.buffers)}
    return {values[name]: Shard(dim) for name, dim in found.shards["tensor"]}


def countable(shapes: list[tuple[str, int, int]], way: str, most: int) -> Graph:
    """The chain of as many of the first operators as leave at most so many placements to try."""
    for length in range(len(shapes), 1, -1):
        graph = chain(shapes[:length])
        if Everything(axis_of(graph, GPU, way)).count <= most:
            return graph
    return chain(shapes[:1])


def check_optimum(graph: Graph, prices: Prices, way: str) -> None:
    found = solved(graph, prices, way)
    everything = Everything(axis_of(graph, prices, way))
    mine = everything.cost_of(dict(found.labels["tensor"]), stored_of(graph, found))
    assert found.cost_s == pytest.approx(mine, rel=1e-9)
    # Nothing is cheaper than what was found; and it is found again where a little more may be spent.
    assert everything.cheapest(mine * (1 - EXACT)) == mine * (1 - EXACT)
    assert everything.cheapest(mine * (1 + EXACT)) == pytest.approx(mine, rel=EXACT)
    assert found.solved[0].bound_s <= mine * (1 + EXACT)
    assert found.gap <= EXACT


@settings(max_examples=200, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=3), LINKS, WAYS)
def test_the_optimum_is_that_of_the_enumeration(shapes: list[tuple[str, int, int]], link: float, way: str) -> None:
    check_optimum(countable(shapes, way, 20_000), Prices(1e8, 1e10, link, 1e-6), way)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(("conv", "relu", "bn", "pool", "add")), min_size=1, max_size=3), LINKS, WAYS)
def test_the_optimum_of_convolutions_is_that_of_the_enumeration(kinds: list[str], link: float, way: str) -> None:
    while len(kinds) > 1 and Everything(axis_of(convolutions(kinds), GPU, way)).count > 20_000:
        kinds = kinds[:-1]
    check_optimum(convolutions(kinds), Prices(1e8, 1e10, link, 1e-6), way)


@settings(max_examples=60, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=3), LINKS, WAYS, st.floats(-0.3, 1.0))
def test_the_optimum_within_a_budget_is_that_of_the_enumeration(
    shapes: list[tuple[str, int, int]], link: float, way: str, part: float
) -> None:
    prices = Prices(1e8, 1e10, link, 1e-6)
    graph = countable(shapes, way, 1_000)
    tried = list(Everything(axis_of(graph, prices, way)).all())
    sizes = [one.size_bytes for one in tried]
    least = min(sizes)
    size = least + part * (max(sizes) - least)
    assume(size > 0 and all(abs(size - one) > 1e-6 * size for one in sizes))
    fitting = [one for one in tried if one.size_bytes <= size]
    if not fitting:
        with pytest.raises(Infeasible, match=f"the least is {least / 2**30:.3f} GiB"):
            solved(graph, prices, way, Budget(size))
        return
    found = solved(graph, prices, way, Budget(size))
    best = min(one.seconds for one in fitting)
    assert found.cost_s == pytest.approx(best, rel=EXACT)
    mine = next(one for one in tried if one.words == dict(found.labels["tensor"]) and _forms(one.stored) == stored_of(graph, found))
    assert found.memory.total == pytest.approx(mine.size_bytes, rel=1e-9)
    assert found.memory.total <= size


def _forms(stored: dict[str, Placement]) -> dict[str, Placement]:
    return {value: form for value, form in stored.items() if form is not R}


@settings(max_examples=60, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=4), LINKS, WAYS)
def test_of_equal_placements_the_one_that_holds_least(shapes: list[tuple[str, int, int]], link: float, way: str) -> None:
    prices = Prices(1e8, 1e10, link, 1e-6)
    graph = countable(shapes, way, 1000)
    tried = list(Everything(axis_of(graph, prices, way)).all())
    best = min(one.seconds for one in tried)
    least = min(one.size_bytes for one in tried if one.seconds <= best * (1 + 1e-9))
    assert solved(graph, prices, way).memory.total <= least * 1.002


@settings(max_examples=60, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=6), LINKS, WAYS)
def test_propagation_reproduces_the_placement(shapes: list[tuple[str, int, int]], link: float, way: str) -> None:
    prices = Prices(1e8, 1e10, link, 1e-6)
    graph = chain(shapes)
    found = solved(graph, prices, way)
    again = propagate(graph, {"tensor": 2}, found.shards, sequence=way != "features", labels=found.labels)
    assert again.labels == found.sharding.labels
    assert again.shards["tensor"] == found.shards["tensor"]
    said = exceptions(graph, {"tensor": 2}, found, sequence=way != "features")
    short = propagate(graph, {"tensor": 2}, found.shards, sequence=way != "features", labels=said)
    assert (short.labels, short.input_placements, short.placements) == (
        found.sharding.labels,
        found.sharding.input_placements,
        found.sharding.placements,
    )


FORGOTTEN = ((P, R), (Shard(1), R), (P, Shard(1)), (Shard(1), D))


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_a_programme_that_forgets_a_move_is_told_from_enumeration(
    forgotten: tuple[Placement, Placement], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken twin: with one price missing, some graph of a few is placed worse than its optimum."""
    right = Moves._price

    def free(self: Moves, value: str, source: Placement, target: Placement) -> float:
        return 0.0 if (source, target) == forgotten else right(self, value, source, target)

    prices = Prices(1e8, 1e10, 1e8, 1e-6)
    graphs = [chain([(kind, i, i) for i, kind in enumerate(row)]) for row in (("linear",), ("linear", "linear"), ("linear", "softmax"))]
    cases = [(graph, way) for graph in graphs for way in ("features", "anything")]
    best = [Everything(axis_of(graph, prices, way)).cheapest() for graph, way in cases]
    monkeypatch.setattr(Moves, "_price", free)
    worse = 0
    for (graph, way), least in zip(cases, best, strict=True):
        found = solved(graph, prices, way)
        true = Everything(axis_of(graph, prices, way)).cost_of(dict(found.labels["tensor"]), stored_of(graph, found))
        worse += true > least * (1 + EXACT) or found.solved[0].bound_s < least * (1 - EXACT)
    assert worse


def test_pruning_leaves_what_nothing_dominates() -> None:
    graph = chain([("linear", 0, 0), ("softmax", 1, 0)])
    axis = axis_of(graph, GPU, "anything")
    for op in graph.operators:
        every = axis.strategies(op)
        kept = prune(every)
        for choice in every:
            assert any(
                other.output_placements == choice.output_placements
                and other.cost_s <= choice.cost_s
                and all(a is None or a == b for a, b in zip(other.input_placements, choice.input_placements, strict=True))
                for other in kept
            )
    twice = axis.strategies(graph.operators[0]) * 2
    assert prune(twice) == prune(twice[: len(twice) // 2])


@pytest.mark.parametrize("fold", [True, False])
def test_a_gpt_is_cut_as_in_megatron(fold: bool) -> None:
    graph = gpt(layers=4, hidden=1024, heads=16, sequence=512, vocabulary=51200, batch=8)
    found = solve_placements(graph, {"tensor": 8}, prices=GPU, fold=fold)
    cut = dict(found.shards["tensor"])
    for i in range(4):
        assert {name: cut.get(f"h.{i}.{name}.weight") for name in ("q", "k", "v", "up", "proj", "down")} == {
            **dict.fromkeys(("q", "k", "v", "up"), 0),
            **dict.fromkeys(("proj", "down"), 1),
        }, "by columns, then by rows"
    labels = {op.target.split(".")[1]: found.labels["tensor"][op.site] for op in graph.operators}
    assert labels["scaled_dot_product_attention"] == "h"
    assert labels["cross_entropy_loss"] == "c"
    inside = [m for m in found.sharding.redistributions if m.value not in graph.operators[0].outputs]
    assert {(m.forward, m.backward) for m in inside} == {("", "all_reduce")}, "two all-reduces forward a layer stand in the products"
    assert found.gap <= EXACT
    assert found.solved[0].num_kinds == (len(graph.operators) - 3 * 20 if fold else len(graph.operators)), "20 a layer"


def test_bytes_of_a_megatron_layer_in_closed_form() -> None:
    """The bytes that one more layer adds: after Korthikanti et al. 2022, section 4.2, without dropout and with fused attention."""
    B, S, D, heads, n = 8, 512, 1024, 16, 8
    more, fewer = (
        solve_placements(gpt(layers, D, heads, S, 51200, B), {"tensor": n}, prices=GPU, budget=Budget(1e15)).memory for layers in (5, 4)
    )
    # Whole: both norms' inputs and results. Cut: queries, keys, values, attention's result, and the wide layer before and after its gelu.
    kept = 4 * B * S * D * (4 + (3 + 1 + 4 + 4) / n) + 4 * B * heads * S / n
    assert more.activations - fewer.activations == pytest.approx(kept)
    weights = 12 * D * D / n + (3 * D + 4 * D) / n + 2 * D + 4 * D  # matrices; biases of columns; biases of rows; two norms
    assert more.parameters - fewer.parameters == pytest.approx(4 * weights)
    assert (more.gradients - fewer.gradients, more.optimizer - fewer.optimizer) == pytest.approx((4 * weights, 8 * weights))


def test_a_budget_counts_what_is_in_flight_and_what_zero_divides() -> None:
    graph = gpt(layers=2, hidden=1024, heads=16, sequence=512, vocabulary=51200, batch=8)
    one = solve_placements(graph, {"tensor": 8}, prices=GPU, budget=Budget(1e15)).memory
    more = solve_placements(graph, {"tensor": 8}, prices=GPU, budget=Budget(1e15, optimizer=8 / 4, scale=3)).memory
    half = solve_placements(graph, {"tensor": 8}, prices=GPU, budget=Budget(1e15, precision="bfloat16")).memory
    assert (more.optimizer, more.activations) == pytest.approx((one.optimizer / 4, 3 * one.activations), rel=1e-3)
    assert half.activations < one.activations


def test_layers_alike_cost_what_layers_apart_cost() -> None:
    graph = gpt(layers=5, hidden=512, heads=8, sequence=128, vocabulary=4096, batch=8)
    alike, apart = (solve_placements(graph, {"tensor": 4}, prices=GPU, fold=fold) for fold in (True, False))
    assert alike.cost_s == pytest.approx(apart.cost_s, rel=1e-6)
    assert alike.solved[0].bound_s == pytest.approx(apart.solved[0].bound_s, rel=1e-6)
    assert alike.solved[0].num_columns < apart.solved[0].num_columns / 2


def test_a_budget_between_is_used_by_placing_layers_apart() -> None:
    graph = gpt(layers=4, hidden=512, heads=8, sequence=128, vocabulary=512, batch=8)
    free = solve_placements(graph, {"tensor": 4}, prices=GPU)
    with pytest.raises(Infeasible, match="the least is") as refused:
        solve_placements(graph, {"tensor": 4}, prices=GPU, budget=Budget(free.memory.total / 3))
    least = float(str(refused.value).split("the least is ")[1].split(" GiB")[0]) * 2**30
    size = (least + free.memory.total) / 2
    tight = solve_placements(graph, {"tensor": 4}, prices=GPU, budget=Budget(size))
    assert tight.memory.total <= size < free.memory.total
    assert tight.cost_s >= free.cost_s
    assert tight.solved[0].bound_s <= tight.cost_s * (1 + EXACT)


def test_alexnet_is_cut_by_data_in_convolutions_and_by_model_in_fully_connected_layers() -> None:
    """Krizhevsky 2014: "One weird trick"."""
    graph = alexnet(batch=256)
    found = solve_placements(graph, {"ranks": 8}, prices=GPU, batch_cut=["ranks"])
    cut = dict(found.shards["ranks"])
    for op in graph.operators:
        name = op.target.split(".")[1]
        label = found.labels["ranks"][op.site].rstrip("+")
        if name in ("conv2d", "max_pool2d"):
            assert label == "n", "samples"
        if name == "linear":
            assert label in ("o", "i"), "features"
    assert not {name for name in cut if name.startswith("conv")}
    assert {"fc0.weight", "fc1.weight"} <= set(cut)
    data = propagate(graph, {"data": 8}, prices=GPU)
    assert data.shards["data"] == ()


def test_experts_are_spread_where_tokens_are() -> None:
    """Expert parallelism: the experts' dimension is cut, and tokens are cut over the same axis outside of them."""
    graph = experts(tokens=32768, hidden=1024, inner=4096, count=8)
    found = solve_placements(graph, {"ranks": 8}, prices=GPU, batch_cut=["ranks"])
    cut = dict(found.shards["ranks"])
    assert cut == {"up": 0, "down": 0}, "every rank has experts of its own"
    labels = {op.name: found.labels["ranks"][op.site].rstrip("+") for op in graph.operators}
    assert labels["first"] == "b" == labels["second"]
    assert labels["before"] == labels["after"] == "b-1", "tokens are cut around them"
    assert any("all_to_all" in (m.forward, m.backward) for m in found.sharding.redistributions)


def test_earlier_axes_keep_what_they_cut() -> None:
    graph = gpt(layers=2, hidden=2048, heads=16, sequence=512, vocabulary=1024, batch=8)
    found = solve_placements(graph, {"data": 2, "tensor": 2, "tensor2": 2}, prices=GPU, budget=Budget(1e12))
    assert [one.axis for one in found.solved] == ["tensor", "tensor2"]
    assert all(found.sharding.labels[op.name]["data"] for op in graph.operators)
    for value, forms in found.sharding.placements.items():
        dims = [form for form in forms.values() if is_shard(form)]
        assert len(dims) == len(set(dims)), f"{value}: one dimension over two axes"
    local = sum(4 * v.tensor.size for v in graph.parameters)
    for v in graph.parameters:
        assert not is_shard(found.sharding.placements[v.value]["data"])
    pieces = sum(
        4 * v.tensor.size / 2 ** sum(is_shard(form) for form in found.sharding.placements[v.value].values()) for v in graph.parameters
    )
    assert found.memory.parameters == pytest.approx(pieces)
    assert found.memory.parameters < local


def test_shards_that_are_given_are_kept() -> None:
    graph = gpt(layers=1)
    wanted = (("h.0.up.weight", 0), ("h.0.up.bias", 0), ("h.0.down.weight", 1))
    found = solve_placements(graph, {"tensor": 2}, shards={"tensor": wanted}, prices=GPU)
    assert set(found.shards["tensor"]) == set(wanted)
    with pytest.raises(LayoutError, match="has no such parameter"):
        solve_placements(graph, {"tensor": 2}, shards={"tensor": (("nothing", 0),)})


@pytest.mark.parametrize(
    ("sizes", "cut", "message"),
    [({"tensor": 0}, (), "tensor=0; every axis needs"), ({"tensor": 2}, ("data",), "batch_cut names the axis data")],
)
def test_wrong_axes_are_refused(sizes: dict[str, int], cut: Sequence[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        solve_placements(gpt(layers=1), sizes, batch_cut=cut)


@pytest.mark.parametrize(("key", "value"), [("size_bytes", 0.0), ("size_bytes", float("nan")), ("scale", -1.0), ("weight", float("inf"))])
def test_impossible_budgets_are_refused(key: str, value: float) -> None:
    with pytest.raises(UsageError, match="memory budget"):
        Budget(**{key: value})


def test_without_time_nothing_is_found_and_it_is_said() -> None:
    with pytest.raises(Infeasible, match="no placement was found within 1e-09 s, though one may exist"):
        solve_placements(gpt(layers=2), {"tensor": 2}, limit_s=1e-9, fold=False)


def test_labels_that_cannot_be_cut_are_refused() -> None:
    graph = gpt(layers=1)
    with pytest.raises(LayoutError, match=r"the plan cuts 'z' of .* over tensor=2, but what can be cut is"):
        propagate(graph, {"tensor": 2}, labels={"tensor": {graph.operators[1].site: "z"}})


@settings(max_examples=100, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=6), LINKS, WAYS, st.sampled_from((2, 4, 8)))
def test_the_sharding_moves_what_was_priced(shapes: list[tuple[str, int, int]], link: float, way: str, n: int) -> None:
    """The redistributions and sums of gradients that propagation writes down cost what the programme said."""
    prices = Prices(1e8, 1e10, link, 1e-6)
    check_moves(chain(shapes), prices, way, n)


def test_a_form_that_is_there_whole_is_not_gathered_twice() -> None:
    """An unread product needs y0 whole; then the summands of its gradient are cheapest from there, not gathered again from the pieces."""
    found = check_moves(chain([("linear", 0, 0), ("mm", 1, 0), ("linear", 1, 0)]), Prices(1e8, 1e10, 3e7, 1e-6), "features")
    assert [(m.source, m.target) for m in found.sharding.redistributions if m.value == "y0"] == [(Shard(1), R), (R, D)]


def check_moves(graph: Graph, prices: Prices, way: str, n: int = 2) -> Assignment:
    link = prices.link_bytes_per_s
    found = solved(graph, prices, way, n=n)
    everything = Everything(axis_of(graph, prices, way, n))
    moves_s = sum(everything.move(m.value, m.source, m.target) for m in found.sharding.redistributions)
    sums_s = sum(
        2 * v.tensor.size_bytes * (n - 1) / n / link for v in graph.parameters if "tensor" in found.sharding.gradient_axes.get(v.value, ())
    )
    cost = found.solved[0].cost
    touched = sum(everything.touch(v.value, found.sharding.placements[v.value]["tensor"]) for v in graph.parameters)
    assert moves_s + sums_s + touched == pytest.approx(cost.moves_s + cost.states_s, rel=1e-6)
    return found
