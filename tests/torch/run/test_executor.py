"""What the executor works out before a step: when receives are posted, and which action completes a gradient."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.plan.ir.program import Compute, ComputeOp, Program, Recv
from shardwise.plan.ir.schedule_sizes import SCHEDULES
from shardwise.run.gradients.deferred_buffers import runs_out_of_order
from shardwise.run.step.dispatch import HANDLERS, action_kind
from shardwise.run.step.executor import Executor
from shardwise.run.step.transfers import RECEIVE_LOOKAHEAD, receives_posted_before
from shardwise.schedules import build


@st.composite
def _programs(draw: Any) -> Program:
    name = draw(st.sampled_from(SCHEDULES))
    ranks, chunks = draw(st.integers(1, 4)), draw(st.integers(2, 3)) if name == "interleaved" else 2 if name == "zb-v" else 1
    microbatches = 2 if name == "gems-mast" else 2 * draw(st.integers(1, 4))
    return build(name, ranks * chunks, microbatches, chunks=chunks)


@settings(max_examples=60, deadline=None)
@given(_programs())
def test_receives_are_posted_once_and_in_time(program: Program) -> None:
    """Every receive is posted once, not after it is needed, not more than some computes ahead, and in the order of the program."""
    for row in program.actions:
        posts = [(step, receive) for step, receives in enumerate(receives_posted_before(row)) for receive in receives]
        assert [receive for _, receive in posts] == [i for i, a in enumerate(row) if isinstance(a, Recv)]
        for step, receive in posts:
            assert step <= receive
            assert sum(isinstance(a, Compute) for a in row[step:receive]) <= RECEIVE_LOOKAHEAD


@settings(max_examples=60, deadline=None)
@given(_programs(), st.data())
def test_a_gradient_is_complete_after_the_last_action_that_adds_to_it(program: Program, data: st.DataObject) -> None:
    """By enumeration: parameters of one stage, of several, late and not."""

    class Late:
        def __init__(self, names: frozenset[str]) -> None:
            self.names = names

    class Runner:
        def __init__(self, late: Late | None) -> None:
            self.delayed_gradients = late

    for row in program.actions:
        stages = sorted({a.stage for a in row if isinstance(a, Compute)})
        names = [f"p{i}" for i in range(4)]
        learned = {s: frozenset(data.draw(st.sets(st.sampled_from(names)))) for s in stages}
        late = {s: frozenset(data.draw(st.sets(st.sampled_from(sorted(learned[s]) or ["p0"])))) & learned[s] for s in stages}
        executor: Any = Executor.__new__(Executor)
        executor.runners = {s: Runner(Late(late[s])) for s in stages}
        found = executor._completed_parameters(row, learned)
        for name in names:
            adds = [
                i
                for i, a in enumerate(row)
                if isinstance(a, Compute)
                and (
                    (a.op in (ComputeOp.B, ComputeOp.I) and name in learned[a.stage])  # also of a late one, some part may come at once
                    or (a.op is ComputeOp.W and name in late[a.stage])
                )
            ]
            assert [i for i, done in enumerate(found) if name in done] == adds[-1:]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_handlers(name: str) -> None:
    program = build(name, 4, 2, chunks=2 if name in ("interleaved", "zb-v") else 1)
    assert {action_kind(a) for row in program.actions for a in row} <= HANDLERS.keys()
    assert runs_out_of_order(program, 0) is (name in ("chimera", "gems-mast", "gems-master"))
