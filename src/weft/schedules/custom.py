"""A schedule of the user's own for the stages of a model. In: its computes (and transfers), links. Out: the program that runs, proven."""

from __future__ import annotations

from dataclasses import replace

from weft.errors import ProgramError
from weft.plan.layout import Layout
from weft.plan.program import Links, Program, Recv, Send
from weft.schedules.lower import complete
from weft.schedules.refuted import prove, reworded


def linked(program: Program, links: Links, rendezvous: bool = False) -> Program:
    """The program for stages that are linked so: transfers are put in along the links, unless it has its own.

    >>> from weft.plan.custom_schedule import custom_program
    >>> print(linked(custom_program("mine.txt", "0F0 0B0\\n1F0 1B0"), ((0, 1),)))
    program mine.txt
    rank 0: 0F0 x(0,1,0)>1 g(1,0,0)<1 0B0
    rank 1: x(0,1,0)<0 1F0 1B0 g(1,0,0)>0

    Raises:
        ProgramError: transfers of its own that are for other links.
    """
    if not any(isinstance(action, (Send, Recv)) for row in program.actions for action in row):
        return complete(replace(program, links=links), rendezvous)
    if tuple(sorted(program.links)) != tuple(sorted(links)):
        has, wanted = (" ".join(f"{p}>{q}" for p, q in one) or "none" for one in (program.links, links))
        raise ProgramError(
            f"{program.name} has transfers along the links {has}, and the stages of this model hand on {wanted}; leave its transfers out, "
            f"and they are put in along those, or write them for a line `links {wanted}`"
        )
    return program


def check_custom(layout: Layout, links: Links | None = None, rendezvous: bool = False) -> None:
    """Prove a layout's schedule, where it is one of the user's own; one by name is proven by whoever makes it.

    Args:
        links: which stage feeds which; by default as the schedule itself has it.

    Raises:
        ProgramError: refuted, with the rank, the step and the reason.
    """
    if (written := layout.program) is not None:
        along = written.links if links is None else links
        try:
            program = linked(written, along, rendezvous)
        except ProgramError as error:
            raise reworded(replace(written, links=along), error) from None
        prove(program, rendezvous, replace(written, links=along))
