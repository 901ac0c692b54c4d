"""All-reduces of one's own, from a file: proven before they are in a layout, kept in the plan, refused by name where they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import LayoutError, ProgramError, UsageError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import format_plan, parse_plan

SWAP = "all_reduce\nrank 0: chunk(0)>1 chunk(0)+<1\nrank 1: chunk(0)>0 chunk(0)+<0\n"


def layout_of(text: str, words: str = "data=2") -> Layout:
    return Layout.parse(f"{words} all_reduce=swap.txt", {"swap.txt": text})


def test_a_layout_and_a_plan_carry_the_text() -> None:
    layout = layout_of(SWAP)
    assert str(layout).endswith("all_reduce=swap.txt")
    plan = Plan(layout, "gpt-tiny", "1xcpu-2", 8)
    assert parse_plan(format_plan(plan)).layout == layout
    assert (plan.all_reduce.default, plan.all_reduce.text) == ("swap.txt", SWAP)
    assert Layout.parse("data=2 all_reduce=ring").collective == ""


@pytest.mark.parametrize(
    ("text", "words", "kind", "reason"),
    [
        (SWAP.replace("chunk(0)+<1", "chunk(0)<1"), "data=2", ProgramError, r"swap\.txt: "),
        (SWAP.replace("chunk(0)>1 ", ""), "data=2", ProgramError, r"swap\.txt: .*no rank can move"),
        (SWAP.replace("chunk(0)>1", "chonk"), "data=2", ProgramError, r"swap\.txt: line 2: action 'chonk'"),
        (SWAP.replace("all_reduce", "all_gather").replace("+", ""), "data=2", Exception, r"swap\.txt: "),
        (SWAP, "data=3", LayoutError, r"all_reduce=swap.txt has actions of 2 ranks, and gradients are summed over 3; use data=2"),
        (SWAP, "data=2 zero=1", LayoutError, r"all_reduce=swap.txt zero=1: ZeRO scatters sums"),
        (SWAP, "data=2 compress=int8", LayoutError, "all_reduce"),
    ],
)
def test_what_is_refuted_or_does_not_fit_is_refused(text: str, words: str, kind: type[Exception], reason: str) -> None:
    with pytest.raises(kind, match=reason):
        layout_of(text, words)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*nothing\.txt"):
        Layout.parse(f"data=2 all_reduce={tmp_path}/nothing.txt")
    with pytest.raises(LayoutError, match="did you mean ring"):
        Layout.parse("data=2 all_reduce=rng")
