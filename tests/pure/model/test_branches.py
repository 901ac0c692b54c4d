"""Parallel branches of a graph: where they are found, and which rank has which."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from shardwise.cluster.cluster import Cluster
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.timing import price
from shardwise.errors import LayoutError
from shardwise.model.graph import Graph, Operator, Ref, Tensor, Variable
from shardwise.model.sharding.propagate import propagate
from shardwise.model.sharding.sharding import shard_length
from shardwise.model.stages.branches import balance_branches, find_regions
from shardwise.plan.ir.placement import D, P, R, Shard, SingleOwner, dual_of
from shardwise.plan.ir.transition import TRANSITIONS, sent_fraction, transition_between
from shardwise.plan.layout import Layout


def made(*lines: str, batch: int = 8) -> Graph:
    """A graph of `y = f x w` lines: `mm` multiplies by a weight of its own, everything else adds or passes on what it is given."""
    operators, tensors, parameters = [], {"x": Tensor((batch, 4), "float32")}, []
    for line in lines:
        out, _, rest = line.partition(" = ")
        kind, *reads = rest.split()
        if kind == "mm":
            weight = f"w_{out}"
            tensors[weight] = Tensor((4, 4), "float32")
            parameters.append(Variable(weight, weight, tensors[weight], trainable=True))
            reads.append(weight)
        target = {"mm": "aten.linear.default", "add": "aten.add.Tensor", "tanh": "aten.tanh.default", "loss": "aten.mean.default"}[kind]
        operators.append(Operator(out, target, tuple(map(Ref, reads)), (), (out,), out))
        tensors[out] = Tensor(() if kind == "loss" else (batch, 4), "float32")
    inputs = (Variable("x", "x", tensors["x"], batched=True),)
    return Graph(tuple(parameters), (), inputs, (), tuple(operators), tensors, operators[-1].name, batch)


def names(graph: Graph) -> list[list[str]]:
    return [["".join(graph.operators[i].name for i in branch) for branch in region.branches] for region in find_regions(graph)]


def test_branches_between_a_fork_and_a_sum() -> None:
    graph = made("s = mm x", "a = mm s", "b = mm s", "c = tanh b", "d = mm c", "e = add a d", "f = mm e", "l = loss f")
    assert names(graph) == [["a", "bcd"]]


def test_sums_one_after_another_do_not_tie_branches_together() -> None:
    graph = made("s = mm x", "a = mm s", "b = mm s", "p = add a b", "c = mm s", "q = add p c", "z = mm q", "l = loss z")
    assert names(graph) == [["a", "b", "c"], ["a", "b"]]


def test_a_way_round_branches_does_not_hide_them() -> None:
    graph = made("s = mm x", "a = mm s", "b = mm s", "p = add a b", "c = mm p", "q = add s c", "l = loss q")
    assert names(graph) == [["a", "b"]]


def test_a_chain_and_a_residual_have_none() -> None:
    assert names(made("a = mm x", "b = mm a", "c = add b a", "l = loss c")) == []


def test_towers_from_the_batch_on_and_branches_within_them() -> None:
    graph = made(
        "a = mm x", "b = mm a", "c = mm a", "d = add b c", "e = mm d", "u = mm x", "v = mm u", "y = add e v", "z = mm y", "l = loss z"
    )  # fmt: skip
    assert names(graph) == [["abcde", "uv"], ["b", "c"]]
    taken = propagate(graph, {"branch": 2})
    (region,) = taken.regions
    assert {name for name, rank in region.rank_of.items() if rank == region.rank_of["a"]} == set("abcde")
    assert taken.placements["w_e"]["branch"] is SingleOwner(region.rank_of["e"])
    assert taken.placements["w_z"]["branch"] is D
    assert taken.gradient_axes == {"w_z": ("branch",), "x": ("branch",)} or taken.gradient_axes == {"w_z": ("branch",)}


def test_a_plan_says_who_owns_what() -> None:
    graph = made("s = mm x", "a = mm s", "b = mm s", "e = add a b", "f = mm e", "l = loss f")
    (region,) = propagate(graph, {"branch": 2}, {"branch": (("w_a", 1), ("w_b", 0))}).regions
    assert region.rank_of == {"a": 1, "b": 0, "e": 1} or region.rank_of == {"a": 1, "b": 0}
    assert propagate(graph, {"branch": 2}, {"branch": ()}).regions == ()
    with pytest.raises(LayoutError, match="gives w_a to rank 2 of branch=2; ranks count from 0 to 1"):
        propagate(graph, {"branch": 2}, {"branch": (("w_a", 2),)})


def test_a_model_without_branches_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="branch=2 gives parallel branches to ranks, and this model has no parallel branches"):
        propagate(made("a = mm x", "b = mm a", "l = loss b"), {"branch": 2})


@pytest.mark.parametrize("seed", range(20))
def test_balance_is_the_best_of_all_ways(seed: int) -> None:
    random = Random(seed)
    work, ranks = [random.choice((1.0, 2.5, 4.0, random.random() * 5)) for _ in range(random.randint(1, 7))], random.randint(1, 4)

    def most(given: tuple[int, ...]) -> float:
        return max(sum(w for w, r in zip(work, given, strict=True) if r == rank) for rank in range(ranks))

    assert most(balance_branches(work, ranks)) == pytest.approx(min(map(most, product(range(ranks), repeat=len(work)))))


def test_many_branches_are_within_the_bound_of_the_longest_first() -> None:
    """Graham (1969): at most 4/3 - 1/(3n) of the best."""
    random = Random(0)
    work = [random.random() for _ in range(60)]
    loads = [0.0] * 8
    for seconds, rank in zip(work, balance_branches(work, 8), strict=True):
        loads[rank] += seconds
    assert max(loads) <= (4 / 3 - 1 / 24) * max(sum(work) / 8, max(work))


def test_what_one_rank_owns_goes_there_and_back() -> None:
    one = SingleOwner(1)
    assert dual_of(one) is one
    assert str(one) == "O1"
    assert (transition_between(Shard(0), one).collective, transition_between(one, Shard(0)).collective) == ("gather", "scatter")
    assert {(a.__name__, b.__name__) for (a, b), row in TRANSITIONS.items() if SingleOwner in (a, b) and not row.is_allowed_in_forward} == {
        ("SingleOwner", "Replicate"), ("SingleOwner", "Partial"),
    }  # fmt: skip
    # Every rank reads all: together as many bytes as an all-gather. n values of n owners back: as a reduce-scatter of one.
    assert 4 * sent_fraction(Shard(0), one, 4) * 3 / 4 == sent_fraction(Shard(0), R, 4)
    assert sent_fraction(one, Shard(0), 4) == sent_fraction(P, Shard(0), 4)
    assert shard_length(Shard(0), 8, 4) == 2


def test_the_layout_has_branch_ranks_inside_data() -> None:
    layout = Layout.parse("data=2 branch=4 tensor=2 pipeline=3 microbatches=3")
    assert layout.axes == (("pipeline", 3), ("data", 2), ("branch", 4), ("tensor", 2))
    assert (layout.num_ranks, layout.replicas, layout.weight_ranks, layout.replica_ranks) == (48, 8, 8, 8)
    assert str(Layout.parse(str(layout))) == str(layout)
    assert layout.mesh.group(0, "branch") == (0, 2, 4, 6)  # neighbours, but for tensor ranks
    with pytest.raises(LayoutError, match="sample_parallel=on with branch=2 is not supported; use sample_parallel=off, or branch=1"):
        Layout.parse("branch=2 tensor=2 sample_parallel=on")


def test_prices_do_not_follow_from_what_was_priced_before() -> None:
    """A pricer keeps what layouts share: not which of two groups lies within a machine."""
    graph = made("s = mm x", "a = mm s", "b = mm s", "c = add a b", "d = mm c", "l = loss d", batch=16)
    cluster = Cluster.parse("4xdgx-h100")
    ways = [Layout.parse(f"data=16 branch=2 neighbours={word}") for word in ("branch", "data")]
    one = Pricer(graph, cluster, 64)
    together = [dict(price(one, layout).prediction.parts)["tensor"] for layout in ways]
    assert together[0] < together[1]
    assert together == [dict(price(Pricer(graph, cluster, 64), layout).prediction.parts)["tensor"] for layout in ways]
