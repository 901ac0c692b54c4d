"""What refutes a schedule in its own words: the rank, the step and the action are those of the file, and doing what is said mends it."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ProgramError
from shardwise.plan.ir.action import Compute
from shardwise.plan.ir.check import check
from shardwise.plan.ir.program import Program, chain_links
from shardwise.plan.ir.schedule_sizes import chunks_of
from shardwise.plan.ir.text import default_wants
from shardwise.schedules import SCHEDULES
from shardwise.schedules import computes_by_rank as rows_of
from shardwise.schedules.diagnosis import diagnose_error, prove_program
from shardwise.schedules.lower import complete_with_transfers

Rows = list[list[Compute]]
SMALL = st.tuples(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.sampled_from([2, 4]), st.integers(0, 2**32 - 1))


def of(name: str, ranks: int, microbatches: int) -> Rows:
    """The computes of a schedule by name."""
    chunks = chunks_of(name, 1)
    m = 2 if name == "gems-mast" else microbatches
    return rows_of(name, ranks * chunks, m, chain_links(ranks * chunks), chunks)


def bare(rows: Rows) -> Program:
    """Computes in these orders, as a file has them."""
    text = "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(rows))
    return Program.parse(text)


def said(rows: Rows) -> str:
    """Why these are refuted; empty where they are proven."""
    written = bare(rows)
    try:
        prove_program(complete_with_transfers(written), written=written)
    except ProgramError as error:
        return str(diagnose_error(written, error))
    return ""


@given(SMALL)
@settings(max_examples=60, deadline=None)
def test_doing_what_is_said_ends_in_a_proof(case: tuple[str, int, int, int]) -> None:
    """Of any order of the right computes: each reason names two actions of one rank that stand where it says, to be swapped round."""
    name, ranks, microbatches, seed = case
    rows = of(name, ranks, microbatches)
    for row in rows:
        random.Random(seed).shuffle(row)
    for _ in range(sum(map(len, rows)) ** 2):
        if not (reason := said(rows)):
            return
        waits = re.search(r"write (\w+) of rank (\d+), at step (\d+), before (\w+) at step (\d+): it can run", reason)
        reads = re.search(r"rank (\d+) step (\d+): (\w+) reads .*, which only (\w+) at step (\d+) makes; write \4 before it", reason)
        assert waits or reads, reason
        early, rank, later, late, step = (
            (waits[1], waits[2], waits[3], waits[4], waits[5]) if waits else (reads[4], reads[1], reads[5], reads[3], reads[2])  # type: ignore[index]
        )
        row = rows[int(rank)]
        assert (str(row[int(later)]), str(row[int(step)])) == (early, late)
        row.insert(int(step), row.pop(int(later)))
    raise AssertionError("the remedies never end")


@given(SMALL)
@settings(max_examples=60, deadline=None)
def test_what_is_missing_or_doubled_is_named(case: tuple[str, int, int, int]) -> None:
    name, ranks, microbatches, seed = case
    rng = random.Random(seed)
    rows = of(name, ranks, microbatches)
    rank = rng.choice([r for r, row in enumerate(rows) if row])
    step = rng.randrange(len(rows[rank]))
    action = rows[rank][step]
    other = rng.randrange(len(rows))
    twice = [list(row) for row in rows]
    twice[other].append(action)
    found = re.search(r"rank (\d+) step (\d+): (\w+), and rank (\d+) has (\w+) at step (\d+); leave one of them out", said(twice))
    assert found
    assert found[3] == found[5] == str(action)
    assert {(int(found[1]), int(found[2])), (int(found[4]), int(found[6]))} == {(rank, step), (other, len(twice[other]) - 1)}
    fewer = [list(row) for row in rows]
    fewer[rank].remove(action)
    reason = said(fewer)
    assert str(action) in reason or f"stage {action.stage}" in reason
    assert re.search(r"write|number stages", reason) or not reason  # a last stage without a microbatch is another, right schedule
    if not reason:
        assert bare(fewer).num_stages < bare(rows).num_stages


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0 0B0\n2F0 2B0", "no rank computes stage 1, and there is a stage 2; number stages from 0 without gaps"),
        ("0F0 1B0\n1F0 0B0", "rank 0 step 1: 1B0 needs what 1F0 leaves on rank 1; write both on one rank"),
        ("0F0 0B0 0W0", "rank 0 step 2: 0W0, and rank 0 has 0B0 at step 1; B is I and W in one, so leave either out"),
        ("0F0 0I0", "stage 0 has no weights part of the backward on microbatch 0; write 0W0 on rank 0, after 0I0"),
        ("0F0 0DROP0 0B0", "rank 0 step 2: 0B0 reads saved(0,0), which 0DROP0 at step 1 freed; write 0R0 between them"),
        ("0UNSHARD 0F0 0RESHARD 0B0", "rank 0 step 3: 0B0 reads w(0), which 0RESHARD at step 2 freed; write 0UNSHARD between them"),
        ("0F0 0LOAD0 0B0", "rank 0 step 1: 0LOAD0 reads host(0,0), which no action of this rank makes; leave 0LOAD0 out"),
    ],
)
def test_faults_by_name(text: str, reason: str) -> None:
    written = Program.parse(text)
    with pytest.raises(ProgramError) as caught:
        prove_program(complete_with_transfers(written), written=written)
    assert reason in str(caught.value)


def test_transfers_of_ones_own_keep_the_words_of_the_proof() -> None:
    written = Program.parse("0F0 x(0,1,0)>1 g(1,0,0)<1 0B0\nx(0,1,0)<0 1F0 1B0")
    with pytest.raises(ProgramError, match="g"):
        prove_program(replace(written, wants=default_wants(written.actions)), written=written)
    error = ProgramError("as it was")
    assert diagnose_error(written, error) is error


def test_a_forward_that_no_backward_takes_is_refuted() -> None:
    """It would be a microbatch that counts twice in the loss and in running statistics, and activations that nobody lets go."""
    written = Program.parse("0F0 0B0 0F1 0B1 0F0")
    with pytest.raises(ProgramError, match="rank 0 step 4: 0F0, and rank 0 has 0F0 at step 0; leave one of them out"):
        prove_program(complete_with_transfers(written), written=written)
    whole = Program.parse("0F0 0I0 0F1 0B1 0W0 0REDUCE_GRAD 0F0 0OFFLOAD0")
    with pytest.raises(ProgramError, match=r"rank 0 step 8 \(its end\): host\(0,0\) is still held; a forward of stage 0 on microbatch 0"):
        check(whole)
    check(Program.parse("0F0 0F1"))  # of forwards alone nothing is to be let go
