"""A schedule of the user's own for the stages of a model. In: its computes (and transfers), links. Out: the program that runs, proven."""

from __future__ import annotations

from dataclasses import replace

from weft.errors import ProgramError
from weft.plan.layout import Layout
from weft.plan.own import Own
from weft.plan.program import Links, Program
from weft.schedules.lower import complete
from weft.schedules.refuted import prove, reworded


def linked(own: Own, links: Links, rendezvous: bool = False) -> Program:
    """Its program for stages that are linked so: transfers are put in, unless it has its own.

    >>> from weft.plan.own import own_of
    >>> print(linked(own_of("mine.txt", "0F0 0B0\\n1F0 1B0"), ((0, 1),)))
    program mine.txt
    rank 0: 0F0 x(0,1,0)>1 g(1,0,0)<1 0B0
    rank 1: x(0,1,0)<0 1F0 1B0 g(1,0,0)>0

    Raises:
        ProgramError: transfers of its own that are for other links.
    """
    program = own.program
    if not own.has_transfers:
        return complete(replace(program, links=links), rendezvous)
    if tuple(sorted(program.links)) != tuple(sorted(links)):
        has, wanted = (" ".join(f"{p}>{q}" for p, q in one) or "none" for one in (program.links, links))
        raise ProgramError(
            f"{program.name} has transfers along the links {has}, and the stages of this model hand on {wanted}; leave its transfers out, "
            f"and they are put in along those, or write them for a line `links {wanted}`"
        )
    return program


def check_own(layout: Layout, links: Links | None = None, rendezvous: bool = False) -> None:
    """Prove a layout's schedule, where it is one of the user's own; one by name is proven by whoever makes it.

    Args:
        links: which stage feeds which; by default as the schedule itself has it.

    Raises:
        ProgramError: refuted, with the rank, the step and the reason.
    """
    if own := layout.own:
        along = own.program.links if links is None else links
        try:
            program = linked(own, along, rendezvous)
        except ProgramError as error:
            raise reworded(replace(own.program, links=along), error) from None
        prove(program, rendezvous, replace(own.program, links=along))
