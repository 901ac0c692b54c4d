"""Program: notation, effects, walk and check. Every refusal is provoked by a broken twin of a program that passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ProgramError
from shardwise.plan.ir.action import parse_action, parse_value
from shardwise.plan.ir.check import check, final_contents
from shardwise.plan.ir.program import Action, Compute, ComputeOp, Program, Recv, Send, Value, chain_links, effects_of, walk_actions
from shardwise.schedules import NAMES, build
from tests.support.schedule_sizes import fit

PAIR = "rank 0: 0F0 x(0,1,0)>1 0F1 x(0,1,1)>1 g(1,0,0)<1 0B0 g(1,0,1)<1 0B1\n" + (
    "rank 1: x(0,1,0)<0 1F0 1B0 g(1,0,0)>0 x(0,1,1)<0 1F1 1B1 g(1,0,1)>0"
)
sizes = st.tuples(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 5))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    name, num_ranks, num_microbatches = draw(sizes)
    num_stages, num_microbatches = fit(name, num_ranks, num_microbatches)
    pairs = [(p, q) for q in range(num_stages) for p in range(q)]
    links = tuple(sorted(draw(st.sets(st.sampled_from(pairs))))) if pairs else ()
    return build(name, num_stages, num_microbatches, links, rendezvous=draw(st.booleans()))


def all_to_all_sum(num_ranks: int) -> Program:
    """Every rank sends its summand of `chunk(r)`, a value of its own, to every other; each adds them into `sum(0)`."""
    rows = []
    for r in range(num_ranks):
        others = [q for q in range(num_ranks) if q != r]
        rows.append(tuple([Send(Value("sum", (0,)), q) for q in others] + [Recv(Value("sum", (0,)), q, add=True) for q in others]))
    everyone = {Value("sum", (0,)): dict.fromkeys(range(num_ranks), 1)}
    return Program("sum", 0, tuple({Value("sum", (0,)): {r: 1}} for r in range(num_ranks)), tuple(rows), (everyone,) * num_ranks)


def edit(program: Program, rank: int, row: list[Action]) -> Program:
    return replace(program, actions=tuple(tuple(row) if r == rank else old for r, old in enumerate(program.actions)))


def without(program: Program, *texts: str) -> Program:
    return replace(program, actions=tuple(tuple(a for a in row if str(a) not in texts) for row in program.actions))


@pytest.mark.parametrize("text", ["0F0", "12I34", "x(0,1,3)>1", "g(3,0,2)<3", "chunk(2)+<0", "flag()>2", "dw(4)>1"])
def test_an_action_reads_as_it_prints(text: str) -> None:
    assert str(parse_action(text)) == text


@pytest.mark.parametrize("text", ["F0", "0X1", "x(0,1,3)", "x(0,1,3)=1", "x(0,,1)>1", "x(a)>1", "0F-1", ""])
def test_an_action_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ProgramError, match="is none of 0F3"):
        parse_action(text)
    with pytest.raises(ProgramError, match="is not name"):
        parse_value("x(0")


@given(programs())
def test_a_program_reads_as_it_prints(program: Program) -> None:
    assert Program.parse(str(program)) == program


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_a_collective_reads_as_it_prints_and_checks(num_ranks: int) -> None:
    program = all_to_all_sum(num_ranks)
    assert Program.parse(str(program)) == program
    check(program)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rank 0: 0F0 zero", "line 1: action 'zero'"),
        ("program a\nrank 0: 0F0\nrank 0: 0B0", "line 3: rank 0 is given twice"),
        ("rank 1: 0F0", "no line for rank 0"),
        ("rank 999999999: 0F0", "no line for rank 0"),
        ("rank 0: 999999999F0", "1000000000 stages, but only 1 computes"),
        ("", "no line for rank 0"),
        ("ranks 0: 0F0", "line 1: 'ranks 0: 0F0' starts with none of"),
        ("links 0-1\nrank 0: 0F0", "line 1: link '0-1'"),
        ("stages two\nrank 0: 0F0", "line 1: stages 'two'"),
        ("rank 0: 0F0\nwants 0: dw(0)=²", "line 2: .* is not value=contributions"),
        ("rank 0: 0F" + "9" * 5000, "line 1: action"),
        ("rank 0: 0F0\nwants 0: dw(0)", "line 2: 'dw.0.' is not value=contributions"),
        ("stages 1\nrank 0: 1F0", "rank 0 step 0: 1F0 is not of the stages 0 to 0"),
        ("rank 0: 0F0 x(0,1,0)>3", "rank 0 step 1: .* names a rank outside 0 to 0"),
        ("rank 0: 0F0 x(0,1,0)>0", "rank 0 step 1: .* of a rank with itself"),
        ("links 1>0\nrank 0: 0F0 1F0", "link 1>0 must go from a lower to a higher"),
        ("links 0>1 0>1\nrank 0: 0F0 1F0", "named twice"),
    ],
)
def test_text_that_is_wrong_is_refused_with_its_place(text: str, reason: str) -> None:
    with pytest.raises(ProgramError, match=reason):
        Program.parse(text)


def test_comments_stages_links_and_wants_may_be_written() -> None:
    program = Program.parse("program mine # a name\nstages 2\nlinks\nrank 0: 0F0 0B0 1F0 1B0 # both\nwants 0: dw(1)=0")
    assert program.links == ()
    assert program.num_stages == 2
    assert program.wants == ({Value("dw", (1,)): {0: 1}},)
    check(program)


def names(values: tuple[Value, ...]) -> str:
    return " ".join(map(str, values))


def test_effects_of_a_stage_with_skip_links() -> None:
    program = Program("u", 4, ({},), ((),), ({},), ((0, 1), (0, 3), (1, 2), (2, 3)))
    f0, f3, b0, b3 = (
        effects_of(Compute(op, s, 5), program) for op, s in ((ComputeOp.F, 0), (ComputeOp.F, 3), (ComputeOp.B, 0), (ComputeOp.B, 3))
    )
    assert (names(f0.reads), names(f0.writes)) == ("", "x(0,1,5) x(0,3,5) saved(0,5)")
    assert (names(f3.reads), names(f3.writes), names(f3.frees)) == ("x(0,3,5) x(2,3,5)", "saved(3,5)", "x(0,3,5) x(2,3,5)")
    assert (names(b3.reads), names(b3.writes), names(b3.adds)) == ("saved(3,5)", "g(3,0,5) g(3,2,5)", "dw(3)")
    assert (names(b0.reads), names(b0.writes), names(b0.frees)) == ("saved(0,5) g(1,0,5) g(3,0,5)", "", names(b0.reads))


def test_effects_of_a_split_backward_equal_those_of_the_whole() -> None:
    program = Program("u", 3, ({},), ((),), ({},))
    whole, i, w = (effects_of(Compute(op, 1, 0), program) for op in (ComputeOp.B, ComputeOp.I, ComputeOp.W))
    half = {Value("half", (1, 0))}
    assert i.reads == whole.reads
    assert i.frees == whole.frees
    assert set(i.writes) - half == set(whole.writes)
    assert w.adds == whole.adds
    assert set(w.reads) == set(w.frees) == half


def test_a_send_moves_a_link_value_and_copies_any_other() -> None:
    program = build("gpipe", 2, 1)
    assert effects_of(parse_action("x(0,1,0)>1"), program).frees == (Value("x", (0, 1, 0)),)
    assert effects_of(parse_action("g(1,0,0)>0"), program).frees == (Value("g", (1, 0, 0)),)
    assert effects_of(parse_action("dw(0)>1"), program).frees == ()


@given(programs())
def test_walk_yields_every_action_once_in_each_ranks_order(program: Program) -> None:
    seen: list[list[Action]] = [[] for _ in program.actions]
    for rank, action in walk_actions(program):
        seen[rank].append(action)
    assert tuple(map(tuple, seen)) == program.actions


@given(programs())
def test_nothing_but_gradients_is_left_at_the_end(program: Program) -> None:
    every = dict.fromkeys(program.microbatches, 1)
    for rank, held in enumerate(final_contents(program)):
        assert held == {Value("dw", (stage,)): every for stage in program.stages_of[rank]}


@given(programs(), st.data())
def test_a_program_with_any_one_action_less_or_twice_is_refused(program: Program, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, program.num_ranks - 1))
    step = data.draw(st.integers(0, len(program.actions[rank]) - 1))
    row = list(program.actions[rank])
    with pytest.raises(ProgramError):
        check(edit(program, rank, row[:step] + row[step + 1 :]))
    with pytest.raises(ProgramError):
        check(edit(program, rank, row[: step + 1] + row[step:]))


def test_the_pair_that_the_broken_twins_come_from_is_right() -> None:
    check(Program.parse(PAIR))


def broken(old: str, new: str) -> Program:
    assert PAIR.count(old) == 1
    return Program.parse(PAIR.replace(old, new))


def test_a_lost_microbatch_is_named() -> None:
    lost = without(Program.parse(PAIR), "0B1", "g(1,0,1)>0", "g(1,0,1)<1")
    with pytest.raises(ProgramError, match=r"rank 0 step 6 \(its end\): wanted dw\(0\) lacks contribution 1"):
        check(lost)


def test_a_stage_without_any_backward_is_named() -> None:
    program = replace(Program.parse("rank 0: 0F0"), wants=({Value("dw", (0,)): {0: 1}},))
    with pytest.raises(ProgramError, match=r"wanted dw\(0\) is not there"):
        check(program)


def test_a_freed_value_that_is_read_again_is_named_with_who_freed_it() -> None:
    with pytest.raises(ProgramError, match=r"rank 1 step 3: 1B0 reads saved\(1,0\), which is not held: 1B0 at step 2 freed it"):
        check(broken("1B0 ", "1B0 1B0 "))


def test_a_compute_before_its_receive_is_named_with_where_it_comes() -> None:
    with pytest.raises(ProgramError, match=r"rank 1 step 0: 1F0 reads x\(0,1,0\), .*it comes only at step 1 with x\(0,1,0\)<0"):
        check(broken("x(0,1,0)<0 1F0", "1F0 x(0,1,0)<0"))


def test_a_value_that_nobody_makes_is_named() -> None:
    with pytest.raises(ProgramError, match=r"rank 1 step 0: 1F0 reads x\(0,1,0\), .*no action of this rank makes or receives it"):
        check(broken("x(0,1,0)<0 1F0", "1F0"))


def test_a_forward_that_runs_twice_is_named() -> None:
    with pytest.raises(ProgramError, match=r"rank 0 step 2: 0F0 makes saved\(0,0\), which is held"):
        check(broken("0F0 x(0,1,0)>1", "0F0 x(0,1,0)>1 0F0"))


def test_a_receive_without_its_send_is_named() -> None:
    with pytest.raises(ProgramError, match=r"rank 0 step 5: g\(1,0,0\)\+<1 waits for rank 1 to send it; rank 1 has ended"):
        check(broken("g(1,0,0)<1", "g(1,0,0)<1 g(1,0,0)+<1"))


def test_a_sum_in_which_one_summand_is_twice_is_named() -> None:
    good = all_to_all_sum(2)
    value = Value("sum", (0,))
    bad = replace(good, actions=(good.actions[0] + (Recv(value, 1, add=True),), (Send(value, 0), *good.actions[1])))
    with pytest.raises(ProgramError, match=r"rank 0 step 3 \(its end\): wanted sum\(0\) has contribution 1 twice"):
        check(bad)


def test_a_backward_that_reads_a_doubled_gradient_is_named() -> None:
    both = {Value("g", (1, 0, 0)): {0: 2}}
    program = Program("doubled", 2, (both,), (tuple(map(parse_action, ["0F0", "0B0"])),), ({},))
    with pytest.raises(ProgramError, match=r"rank 0 step 1: 0B0 reads g\(1,0,0\), which has contribution 0 twice"):
        check(program)


def test_a_send_that_nobody_receives_is_named() -> None:
    good = all_to_all_sum(2)
    bad = edit(good, 1, [*good.actions[1], Send(Value("sum", (0,)), 0)])
    with pytest.raises(ProgramError, match=r"rank 1 step 2: sum\(0\)>0 is never received; rank 0 needs sum\(0\)<1"):
        check(bad)


def test_ranks_that_wait_for_one_another_are_named() -> None:
    with pytest.raises(ProgramError, match=r"rank 0 step 0: g\(1,0,0\)<1 waits for rank 1 to send it; rank 1 is at step 0: x\(0,1,0\)<0"):
        check(broken("0F0 x(0,1,0)>1 0F1 x(0,1,1)>1 g(1,0,0)<1", "g(1,0,0)<1 0F0 x(0,1,0)>1 0F1 x(0,1,1)>1"))


def test_two_ranks_that_send_to_each_other_first_block_only_under_rendezvous() -> None:
    program = all_to_all_sum(2)
    check(program)
    with pytest.raises(ProgramError, match=r"where a send waits for its receive\n  rank 0 step 0: sum\(0\)>1 waits for rank 1 to receive"):
        check(program, rendezvous=True)


def test_a_program_needs_the_same_number_of_ranks_everywhere() -> None:
    with pytest.raises(ProgramError, match="for 1, 2 and 1 ranks"):
        Program("uneven", 0, ({},), ((), ()), ({},))


def test_links_default_to_the_chain() -> None:
    assert Program("a", 4, (), (), ()).links == chain_links(4) == ((0, 1), (1, 2), (2, 3))
    assert chain_links(1) == chain_links(0) == ()
