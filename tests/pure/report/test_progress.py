"""Bars on a terminal, for what takes a while."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from shardwise.report.progress import show_progress


def terminal() -> tuple[io.StringIO, Console]:
    paper = io.StringIO()
    return paper, Console(file=paper, force_terminal=True, width=80)


def test_what_takes_a_while_is_drawn_and_taken_away() -> None:
    paper, console = terminal()
    with show_progress("planning [much]", 4, console, after_s=0.0) as done:
        done()
        until = time.monotonic() + 10
        while "planning" not in paper.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
    assert "planning [much]" in paper.getvalue()
    assert paper.getvalue().endswith("\x1b[2K")  # the line is empty again


def test_of_blocks_inside_of_one_another_the_outermost_is_drawn() -> None:
    (paper, console), (inside, other) = terminal(), terminal()
    for text in ("planning", "pricing"):  # and again, once the first has ended
        with show_progress(text, None, console, after_s=0.0):
            with show_progress("inside", None, other, after_s=0.0) as done:
                done()
            until = time.monotonic() + 10
            while text not in paper.getvalue() and time.monotonic() < until:
                time.sleep(0.01)
        assert text in paper.getvalue()
    assert inside.getvalue() == ""


def test_what_is_quick_is_not() -> None:
    paper, console = terminal()
    with show_progress("planning", None, console, after_s=60.0) as done:
        done()
    assert paper.getvalue() == ""


def test_an_error_passes_through() -> None:
    paper, console = terminal()
    with pytest.raises(ValueError, match="no"), show_progress("planning", None, console, after_s=60.0):
        raise ValueError("no")
    assert paper.getvalue() == ""


def test_nothing_is_drawn_where_there_is_no_terminal() -> None:
    with show_progress("planning", after_s=0.0) as done:  # the tests' standard error is none
        done()
