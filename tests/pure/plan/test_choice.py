"""Choices of all-reduce algorithms: what they say for a size, their text, and that a plan file keeps them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cluster.cluster import Cluster, MeasuredTable
from shardwise.cost.network.collectives import MARGIN, algorithm_times
from shardwise.cost.network.network import RankGroup
from shardwise.errors import UsageError
from shardwise.plan.ir.choice import NAMES, NATIVE, AllReduceChoices
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import format_plan, read_plan, write_plan
from shardwise.solve.moves.all_reduce_choice import candidate_algorithms, choose_gradient_all_reduce, explain_all_reduce

NAME = st.sampled_from(NAMES)
CHOICES = st.builds(
    lambda sizes, names, above: AllReduceChoices(tuple(zip(sorted(sizes), names, strict=False)), above),
    st.sets(st.integers(0, 10**12), max_size=5),
    st.lists(NAME, min_size=5, max_size=5),
    NAME,
)


@given(CHOICES, st.integers(0, 10**12))
def test_the_first_row_that_is_large_enough_says(choices: AllReduceChoices, size: int) -> None:
    fitting = [name for up_to, name in choices.rows if size <= up_to]
    assert choices.algorithm_for(size) == (fitting[0] if fitting else choices.default)
    assert set(choices.names) == {name for _, name in choices.rows} | {choices.default}


@given(CHOICES)
def test_the_text_reads_back(choices: AllReduceChoices) -> None:
    assert AllReduceChoices.parse(str(choices)) == choices


def test_a_plan_keeps_its_choices(tmp_path: Path) -> None:
    plan = Plan(
        Layout(data=4, all_reduce="auto"),
        "gpt:layers=4",
        "here",
        8,
        sums=AllReduceChoices(((4096, "tree"), (10**6, "ring")), "hierarchical"),
    )
    write_plan(plan, tmp_path / "plan.toml")
    read = read_plan(tmp_path / "plan.toml")
    assert read.sums == plan.sums
    assert read.all_reduce.algorithm_for(5000) == "ring"
    named = replace(plan, layout=Layout(data=4, all_reduce="double_tree"))
    write_plan(named, tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml").all_reduce == AllReduceChoices(default="double_tree")
    assert "[sums]" not in format_plan(replace(plan, sums=AllReduceChoices()))


def test_a_wrong_choice_in_a_plan_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    write_plan(Plan(Layout(data=4), "gpt:layers=4", "here", 8, sums=AllReduceChoices(((4096, "tree"),))), path)
    path.write_text(path.read_text().replace("tree to", "treee to"))
    with pytest.raises(UsageError, match=r"treee is unknown \(did you mean tree\?\)"):
        read_plan(path)


def test_auto_is_native_where_nothing_beats_it() -> None:
    assert choose_gradient_all_reduce(Cluster.parse("2xp4d.24xlarge"), Layout(data=16)) == AllReduceChoices()
    assert choose_gradient_all_reduce(Cluster.parse("1xcpu-2"), Layout(data=2)) == AllReduceChoices()
    assert choose_gradient_all_reduce(Cluster.parse("4xcpu-2"), Layout(data=8)).algorithm_for(1 << 25) == "hierarchical"
    assert choose_gradient_all_reduce(Cluster.parse("4xcpu-2"), Layout(data=4, tensor=2)) == AllReduceChoices()  # one replica a host
    assert (
        choose_gradient_all_reduce(Cluster.parse("2xcpu-2"), Layout(data=2, pipeline=2)).algorithm_for(1 << 20) == "hierarchical"
    )  # replicas inside, stages between
    assert choose_gradient_all_reduce(Cluster.parse("4xcpu-2"), Layout(data=8, all_reduce="ring")) == AllReduceChoices()


@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_groups_beside_one_another_share_a_machine_s_port(stride: int) -> None:
    """What all groups send out of a machine passes its port, whatever the algorithm: a ring of 128 machines in 8 groups at once was priced
    as if each had the port alone, at a quarter of the library's own ring. By bytes through the port nothing is faster."""
    machines, size = 16, 25 << 20
    cluster = Cluster.parse(f"{machines}xp3.16xlarge")
    group = RankGroup(8 * machines // stride, stride, 8 * machines)
    link = cluster.levels[-1].link
    # Of each sum all but a machine's share goes out of it and comes back as sums: the least that any all-reduce sends.
    least = stride * 2 * (machines - 1) / machines * size / (link.bandwidth_bytes_per_s * link.efficiency)
    for name, seconds in algorithm_times(cluster, group).items():
        assert seconds(size) >= 0.99 * least, name


@pytest.mark.parametrize("layout", ["data=2", "data=4 tensor=2", "data=8", "data=3 tensor=2", "data=2 pipeline=2"])
@pytest.mark.parametrize("machines", ["1xcpu-2", "4xcpu-2", "4xcpu-8", "measured", "128xp3.16xlarge", "2xdgx-h100"])
def test_the_choice_is_never_dearer_than_what_else_is_weighed(machines: str, layout: str) -> None:
    """But for the margin by which a program must beat the library's own."""
    cluster = Cluster.parse("4xcpu-2" if machines == "measured" else machines)
    if machines == "measured":
        points = tuple((float(4**k), 2e-5 + 4**k * 1e-9) for k in range(4, 14))
        cluster = replace(cluster, tables=tuple(MeasuredTable(name, 2, points) for name in ("send", "exchange", "add", "step")))
    wanted = Layout.parse(layout)
    if wanted.num_ranks > cluster.num_devices * (cluster.node_size if cluster.kind.shares_hosts else 1):
        pytest.skip("more ranks than the machines have")
    group = RankGroup(wanted.data, wanted.tensor, wanted.num_ranks)
    times, chosen, weighed = (
        algorithm_times(cluster, group),
        choose_gradient_all_reduce(cluster, wanted),
        candidate_algorithms(cluster, wanted),
    )
    for size in (256, 4096, 10**5, 1 << 20, 25 << 20, 1 << 28):
        mine = chosen.algorithm_for(size)
        assert mine in weighed
        others = {name: times[name](size) * (1 - MARGIN if name == NATIVE else 1.0) for name in weighed if name in times}
        assert not others or others[mine] <= 1.01 * min(others.values()), (size, others)
        assert all(name in weighed for name in re.findall(r", by (\w+) it would take", explain_all_reduce(cluster, wanted, chosen, size)))
