"""A schedule of the user's own in a layout: what it costs, and how a plan carries it. The named schedules are the oracle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cli.schedule import without_transfers
from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.timing import link_times_s, price, simulate_time, simulate_timeline
from shardwise.errors import ConfigError, LayoutError, ProgramError, UsageError
from shardwise.plan.ir.custom_schedule import read_actions
from shardwise.plan.ir.program import Compute, Program, chain_links
from shardwise.plan.layout import Layout
from shardwise.plan.microbatches import partial_batch_sizes
from shardwise.plan.plan import LayoutCandidate, Plan
from shardwise.plan.plan_file import format_plan, parse_plan
from shardwise.schedules import NAMES, build, check_custom, program_of, schedule_of
from shardwise.simulate.memory import in_flight
from shardwise.solve.constraints import parse_constraints
from shardwise.solve.search import search
from tests.support.gpt_graph import gpt

GPU = Device("gpu", "gpu", (("float32", 1e12), ("bfloat16", 4e12)), 1e11, 1e12, 1.0, 5e-6)
GPUS = Cluster("gpus", GPU, (ClusterLevel("node", 4, NetworkLink(3e-6, 2e11)), ClusterLevel("cluster", 4, NetworkLink(1e-5, 1e10))))
CORES = Cluster.parse("1xcpu-8")
BOTH = ("chimera", "gems-mast", "gems-master")


def sizes(name: str) -> list[tuple[int, int]]:
    """Ranks and microbatches of a schedule."""
    counts = (2,) if name == "gems-mast" else (2, 4, 6) if name in BOTH else (1, 3, 4, 7)
    return [(p, m) for p in (2, 3, 4) for m in counts]


def own(layout: Layout, whole: bool) -> Layout:
    """A layout under the same schedule from a file, with its transfers where `whole`."""
    program = build(layout.schedule, layout.num_stages, layout.microbatches, chunks=layout.chunks)
    return layout.with_schedule("mine.txt", str(program if whole else without_transfers(program)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("whole", [False, True])
def test_a_named_schedule_from_a_file_is_priced_and_timed_as_by_name(name: str, whole: bool) -> None:
    graph = gpt(8)
    for p, m in sizes(name):
        layout = Layout(pipeline=p, microbatches=m, schedule=name, chunks=2 if name == "interleaved" else 1)
        mine = own(layout, whole)
        for batch in (8 * m, 8 * m + 1):  # equal and unequal microbatches
            pricer = Pricer(graph, GPUS, batch)
            first, second = (simulate_time(pricer, price(pricer, one)) for one in (layout, mine))
            assert second.sites == first.sites
            assert second.prediction == first.prediction, (p, m)
            assert simulate_timeline(pricer, second).spans == simulate_timeline(pricer, first).spans


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_inner_layouts_and_memory_choices_are_priced_as_by_name(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    p, m = data.draw(st.sampled_from(sizes(name)))
    layout = Layout(
        data=data.draw(st.sampled_from([1, 2])), tensor=data.draw(st.sampled_from([1, 2])), pipeline=p, microbatches=m, schedule=name,
        chunks=2 if name == "interleaved" else 1, zero=data.draw(st.integers(0, 3)),
        recompute=data.draw(st.sampled_from(["none", "selective", "full", "full:1"])),
        offload=data.draw(st.sampled_from(["none", "optimizer"])),
    )  # fmt: skip
    pricer = Pricer(gpt(8), GPUS, 4 * m * layout.data)
    written, named = (simulate_time(pricer, price(pricer, one)).prediction for one in (own(layout, False), layout))
    if layout.zero in (1, 2):  # updated weights are waited for before the first action of a schedule of one's own
        assert written.step_time_s >= named.step_time_s
        assert written.memory == named.memory
    else:
        assert written == named


@pytest.mark.parametrize("name", NAMES)
def test_the_program_that_runs_is_that_of_the_name(name: str) -> None:
    for p, m in sizes(name):
        layout = Layout(pipeline=p, microbatches=m, schedule=name, chunks=2 if name == "interleaved" else 1)
        skips = tuple(sorted({*chain_links(layout.num_stages), (0, layout.num_stages - 1)}))
        for links in (chain_links(layout.num_stages), skips):
            for rendezvous in (False, True):
                found = program_of(own(layout, False), links, rendezvous)
                assert replace(found, name=name) == program_of(layout, links, rendezvous)
        named, written = (schedule_of(one) for one in (layout, own(layout, False)))
        assert (written.stages_of, written.ranks_of) == (named.stages_of, named.ranks_of)


def test_memory_follows_what_the_program_keeps() -> None:
    """Rank 0 of the first keeps three microbatches, of the second one; the same model otherwise."""
    graph, texts = gpt(8), ("0F0 0F1 0F2 0B2 0B1 0B0\n1F0 1F1 1F2 1B2 1B1 1B0", "0F0 0B0 0F1 0B1 0F2 0B2\n1F0 1B0 1F1 1B1 1F2 1B2")
    pricer = Pricer(graph, GPUS, 12)
    layouts = [Layout(pipeline=2, microbatches=3).with_schedule("mine.txt", text) for text in texts]
    assert [in_flight(Program.parse(text)) for text in texts] == [(3, 3), (1, 1)]
    found = [price(pricer, layout).prediction.memory.activations for layout in layouts]
    named = [price(pricer, Layout(pipeline=2, microbatches=3, schedule=s)).prediction.memory.activations for s in ("gpipe", "sequential")]
    assert found == named


@pytest.mark.parametrize("cluster", [GPUS, CORES], ids=["gpus", "cores"])
@pytest.mark.parametrize("kept", ["", "0DROP0 0R0", "0OFFLOAD0 0LOAD0"])
def test_what_a_file_moves_or_repeats_takes_its_time(cluster: Cluster, kept: str) -> None:
    """One microbatch through two stages: rank 0 waits for its gradient, or for what it moves there and back, whichever is later."""
    layout = Layout(pipeline=2, microbatches=1).with_schedule("mine.txt", f"0F0 {kept} 0B0\n1F0 1B0")
    pricer = Pricer(gpt(8), cluster, 4)
    priced = price(pricer, layout)
    first, last = priced.costs
    (sent,) = link_times_s(pricer, priced).values()
    copy = pricer.stage_state(layout, priced.sites, 0).offloaded_bytes * pricer.devices.copies(layout).seconds_per_byte
    mine = {"": 0.0, "0DROP0 0R0": first.forward_s, "0OFFLOAD0 0LOAD0": 2 * copy}[kept]
    there = 2 * sent + last.forward_s + last.backward_s
    assert simulate_timeline(pricer, priced).total_s == pytest.approx(first.forward_s + max(mine, there) + first.backward_s)
    alone = Layout(microbatches=1).with_schedule("mine.txt", f"0F0 {kept} 0B0")
    times = [simulate_time(pricer, price(pricer, one)).prediction.step_time_s for one in (alone, Layout())]
    whole = price(pricer, alone).costs[0]
    copy = pricer.stage_state(alone, (), 0).offloaded_bytes * pricer.devices.copies(alone).seconds_per_byte
    mine = {"": 0.0, "0DROP0 0R0": whole.forward_s, "0OFFLOAD0 0LOAD0": 2 * copy}[kept]
    assert times[0] - times[1] == pytest.approx(mine, rel=1e-6, abs=1e-12)


UNEVEN = "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1 1F2 2F2 2B2 1B2"  # two of three stages on one rank


def test_ranks_may_have_unequal_numbers_of_stages() -> None:
    layout = Layout(pipeline=2, microbatches=3).with_schedule("mine.txt", UNEVEN)
    assert (layout.num_stages, schedule_of(layout).stages_of) == (3, ((0,), (1, 2)))
    pricer = Pricer(gpt(8), GPUS, 12)
    best = simulate_time(pricer, price(pricer, layout))
    own_work = [sum(best.costs[s].forward_s + best.costs[s].backward_s for s in mine) for mine in schedule_of(layout).stages_of]
    shown = dict(best.prediction.parts)
    assert shown["compute"] + shown["tensor"] == pytest.approx(3 * max(own_work))
    assert parse_plan(format_plan(search(gpt(8), GPUS, 12, "gpt", layout=layout))).layout == layout


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0 0F1\n1F0 1F1", "stage 0 has no backward; write 0B0 on one rank"),
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1", "stage 1 has no backward on microbatch 1; write 1B1 on one rank"),
        ("0F0 0F2 0B0 0B2\n1F0 1F2 1B0 1B2", "its microbatches are 0, 2; number them from 0 without gaps"),
        ("0F0 0F1 0B0 0B1\n2F0 2F1 2B0 2B1", "stage 1 has no forward; write 1F0 on one rank"),
        ("0F0 0F1 0B0 0B1\nrank 1: 1F0", "number all or none"),
        ("rank 0: 0F0 0B0\nrank 1:", "rank 1 computes nothing"),
        ("0F0 0X1", "line 1: action '0X1' is none of"),
        ("chunk(0)>1\nchunk(0)<0", "it has no computes, so it is no schedule"),
        ("rank 0: 0F0 0B0\nwants 0: dw(0)=", "leave the lines `wants` out"),
        ("rank 0: 0F0 0B0\ngiven 0: dw(0)=0", "leave the lines `given` out"),
    ],
)
def test_what_trains_nothing_is_refused_before_anything_starts(text: str, reason: str) -> None:
    with pytest.raises(ProgramError, match=r"mine\.txt: ") as caught:
        Layout(pipeline=2, microbatches=2).with_schedule("mine.txt", text)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0 0F1 0B0 0B1\n1B0 1F0 1F1 1B1", r"rank 1 step 0: 1B0 reads saved\(1,0\), which only 1F0 at step 1 makes; write 1F0 before"),
        ("0F0 0F1 0B0 0B1 0F1 0B1\n1F0 1F1 1B0 1B1", "mine.txt: rank 0 step 4: 0F1, and rank 0 has 0F1 at step 1; leave one of them out"),
        ("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", r"mine\.txt: no rank can go on\n  rank 0 step 1: 0B0 waits for 1B0, step 3 of rank 1\n"),
    ],
)
def test_a_refuted_schedule_says_rank_step_and_reason(text: str, reason: str) -> None:
    layout = Layout(pipeline=2, microbatches=2).with_schedule("mine.txt", text)
    with pytest.raises(ProgramError, match=reason):
        check_custom(layout)
    with pytest.raises(ProgramError, match=reason):
        search(gpt(4), GPUS, 8, "gpt", layout=layout)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("pipeline=3 microbatches=2", "schedule=mine.txt has actions of 2 ranks, and pipeline=3; use pipeline=2"),
        ("pipeline=2 microbatches=4", "schedule=mine.txt runs 2 microbatches, and microbatches=4; use microbatches=2"),
        ("pipeline=2 microbatches=2 chunks=3", "chunks=3, and schedule=mine.txt has 2 stages; leave chunks out"),
        ("pipeline=2 microbatches=2 inner=2x1/1x2", "schedule=mine.txt with stages that are arranged differently"),
    ],
)
def test_a_layout_that_it_is_not_for_says_the_numbers(words: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    with pytest.raises(LayoutError) as caught:
        Layout.parse(f"{words} schedule=mine.txt")
    assert reason in str(caught.value)


def test_a_layout_reads_the_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "# mine: no \"quotes\" harm\n0F0 0F1 0B0 0B1\n1F0 1B0\t1F1 1B1  # \\ and '''\n"
    Path("mine.txt").write_text(text)
    layout = Layout.parse("pipeline=2 microbatches=2 schedule=mine.txt")
    assert str(layout) == "data=1 tensor=1 pipeline=2 microbatches=2 schedule=mine.txt"
    assert Layout.parse(str(layout)) == layout
    Path("mine.txt").unlink()
    with pytest.raises(UsageError, match=r"cannot read mine\.txt"):
        Layout.parse(str(layout))
    assert layout.num_stages == 2
    plan = Plan(layout, "gpt", "here", 8, stages=("h.1",), candidates=(LayoutCandidate(layout, None, "slow"),))
    written = format_plan(plan)
    assert parse_plan(written) == plan
    assert text in parse_plan(written).layout.actions
    assert replace(layout, schedule="gpipe").actions == ""


def test_a_plan_file_says_where_its_schedule_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan without the text reads the file; one that names another schedule beside the text is refused, never half of both."""
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("0F0 0B0\n1F0 1B0")
    plan = Plan(Layout.parse("pipeline=2 schedule=mine.txt"), "gpt", "here", 8, stages=("h.1",))
    written = format_plan(plan)
    head, _, _ = written.partition("[schedules]")
    assert parse_plan(head) == plan
    with pytest.raises(ConfigError, match=r'has "mine.txt", and \[layout\] schedule = "gpipe"; set that, or remove the table'):
        parse_plan(written.replace('schedule = "mine.txt"', 'schedule = "gpipe"'))
    with pytest.raises(ProgramError, match=r"plan.toml: mine.txt: line 1: action '0Y0' is none of"):
        parse_plan(written.replace("0B0", "0Y0"))


def test_names_that_cannot_stand_in_a_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LayoutError, match="would pass for the schedule of that name; rename it, for example to"):
        Layout().with_schedule("gpipe", "0F0 0B0")
    with pytest.raises(LayoutError, match="no spaces and no commas"):
        Layout().with_schedule("my own.txt", "0F0 0B0")
    with pytest.raises(LayoutError, match=r"is a file, which has not been read; Layout.parse\("):
        Layout(schedule="mine.txt")
    with pytest.raises(LayoutError, match="schedule=1f1bb is unknown"):
        Layout.parse("schedule=1f1bb")
    with pytest.raises(UsageError, match=r"run a file of actions with --layout 'schedule=mine.txt'"):
        parse_constraints("schedule=mine.txt")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_fewer_microbatches_are_the_first_of_them_in_the_same_order(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    p, m = data.draw(st.sampled_from(sizes(name)))
    layout = own(Layout(pipeline=p, microbatches=m, schedule=name, chunks=2 if name == "interleaved" else 1), data.draw(st.booleans()))
    few = data.draw(st.integers(schedule_of(layout).min_microbatches, m))
    less = layout.with_microbatches(few)
    check_custom(less)
    assert less.program is not None
    assert layout.program is not None
    assert less.program.stages_of == layout.program.stages_of
    for mine, whole in zip(less.program.actions, layout.program.actions, strict=True):
        rows = [[a for a in row if isinstance(a, Compute) and a.microbatch < few] for row in (mine, whole)]
        assert rows[0] == rows[1]


def test_a_small_batch_runs_in_as_few_microbatches_as_leave_no_replica_without() -> None:
    gems = own(Layout(pipeline=2, microbatches=4, schedule="gems-master"), False)
    plain = own(Layout(pipeline=2, microbatches=4), False)
    fewest = schedule_of(gems).min_microbatches
    assert (fewest, schedule_of(plain).min_microbatches) == (2, 1)
    assert partial_batch_sizes(3, gems, 16, fewest) == (2, 1)
    assert partial_batch_sizes(9, gems, 16, fewest) == (3, 3, 3)
    assert partial_batch_sizes(3, plain, 16, 1) == (3,)


def test_a_file_with_a_byte_order_mark_is_read_without_it(tmp_path: Path) -> None:
    """As editors on Windows write it, with their line ends."""
    (tmp_path / "mine.txt").write_bytes(b"\xef\xbb\xbf0F0 0B0\r\n1F0 1B0\r\n")
    assert Program.parse(read_actions(tmp_path / "mine.txt")).actions == Program.parse("0F0 0B0\n1F0 1B0").actions


def test_an_error_repeats_the_beginning_of_a_long_word() -> None:
    with pytest.raises(ProgramError, match=r"'0F9{38}\.\.\. \(5002 characters\)'") as raised:
        Program.parse(f"0F{'9' * 5000}")
    assert len(str(raised.value)) < 400
