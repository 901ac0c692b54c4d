"""Custom schedules, written by the user. In: computes (and transfers), links of a model's stages. Out: the program that runs, proven."""

from __future__ import annotations

from dataclasses import replace

from shardwise.errors import ProgramError
from shardwise.plan.ir.program import Links, Program, Recv, Send
from shardwise.plan.layout import Layout
from shardwise.schedules.diagnosis import diagnose_error, prove_program
from shardwise.schedules.lower import complete_with_transfers


def program_for_links(program: Program, links: Links, rendezvous: bool = False) -> Program:
    """Return the program for stages with these links: transfers are added along the links, unless it has its own.

    >>> from shardwise.plan.ir.custom_schedule import custom_program
    >>> print(program_for_links(custom_program("mine.txt", "0F0 0B0\\n1F0 1B0"), ((0, 1),)))
    program mine.txt
    rank 0: 0F0 x(0,1,0)>1 g(1,0,0)<1 0B0
    rank 1: x(0,1,0)<0 1F0 1B0 g(1,0,0)>0

    Raises:
        ProgramError: its own transfers are for other links.
    """
    if not any(isinstance(action, (Send, Recv)) for row in program.actions for action in row):
        return complete_with_transfers(replace(program, links=links), rendezvous)
    if tuple(sorted(program.links)) != tuple(sorted(links)):
        has, wanted = (" ".join(f"{p}>{q}" for p, q in pairs) or "none" for pairs in (program.links, links))
        raise ProgramError(
            f"{program.name} has transfers along the links {has}, and the stages of this model send along {wanted}; leave its transfers "
            f"out, and they are added along those, or write them for a line `links {wanted}`"
        )
    return program


def check_custom(layout: Layout, links: Links | None = None, rendezvous: bool = False) -> None:
    """Prove a layout's schedule if it is custom; the caller of `build` proves a built-in one.

    Args:
        links: (producer, consumer) pairs of stages; by default those of the schedule itself.

    Raises:
        ProgramError: refuted, with the rank, the step and the reason.
    """
    if (written := layout.program) is not None:
        stage_links = written.links if links is None else links
        try:
            program = program_for_links(written, stage_links, rendezvous)
        except ProgramError as error:
            raise diagnose_error(replace(written, links=stage_links), error) from None
        prove_program(program, rendezvous, replace(written, links=stage_links))
