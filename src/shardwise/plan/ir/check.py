"""Proof of a `Program`: it is run on contributions instead of tensors.

Returned is what each rank holds at the end, or the first rank, step and reason why the program is wrong. A pipeline's contribution is a
microbatch, a collective's is a rank's summand. Not proven: that numbers come out in the same order of addition, and how long anything
takes. Costs some 15 microseconds an action: check the chosen program, not every candidate.
"""

from __future__ import annotations

from collections import deque

from shardwise.errors import ProgramError
from shardwise.plan.ir.program import WEIGHTS, Content, Program, Recv, Send, Value, walk_effects

_FOR_BACKWARD = frozenset({"saved", "half", "host", "inputs"})  # written by a forward, and freed by a backward


def final_contents(program: Program, rendezvous: bool = False) -> tuple[dict[Value, dict[int, int]], ...]:
    """Return [rank] -> the values it holds at the end, with how many times each contribution is in them.

    >>> program = Program.parse("rank 0: 0F0 0B0 0F1 0B1")
    >>> {str(value): content for value, content in final_contents(program)[0].items()}
    {'dw(0)': {0: 1, 1: 1}}

    Raises:
        ProgramError: all that `walk_actions` refuses; a compute whose input does not hold its microbatch exactly once; a send
            that nobody receives.
    """
    state: list[dict[Value, dict[int, int]]] = [{value: dict(content) for value, content in held.items()} for held in program.initial]
    wire: dict[tuple[int, int, Value], deque[tuple[int, dict[int, int]]]] = {}
    for rank, step, action, e in walk_effects(program, rendezvous):
        here = state[rank]
        if isinstance(action, Send):
            content = here[action.value]
            # A value that stays may be added to later, and the message must not change.
            wire.setdefault((rank, action.to, action.value), deque()).append((step, content if e.frees else dict(content)))
        elif isinstance(action, Recv):
            _, got = wire[action.source, rank, action.value].popleft()
            if action.add:
                got = dict(got)
                _add_contributions(got, here[action.value])
            here[action.value] = got
        else:
            counts = {} if action.microbatch is None else {action.microbatch: 1}
            if counts:
                for value in e.reads:
                    if here[value] != counts and value.name != WEIGHTS:
                        reason = _describe_difference(here[value], counts)
                        raise ProgramError(f"{program.name}: rank {rank} step {step}: {action} reads {value}, which {reason}")
            else:
                for value in e.reads:
                    _add_contributions(counts, here[value])
            for value in e.writes:
                here[value] = counts
            for value in e.adds:
                _add_contributions(here.setdefault(value, {}), counts)
        for value in e.frees:
            del here[value]
    for (rank, to, value), sent in wire.items():
        if sent:
            raise ProgramError(
                f"{program.name}: rank {rank} step {sent[0][0]}: {Send(value, to)} is never received; rank {to} needs {Recv(value, rank)}"
            )
    return tuple(state)


def check(program: Program, rendezvous: bool = False) -> None:
    """Prove that the program runs to its end and leaves what it wants: each contribution exactly as often as wanted.

    Raises:
        ProgramError: refused by `final_contents`; a wanted value that is missing, lacks a contribution or has it twice; values saved
            for a backward that is missing, in a stage that has others.
    """
    final = final_contents(program, rendezvous)
    trained_stages = {value.index[0] for wanted in program.wants for value in wanted if value.name in ("dw", "grad")}
    for rank, wanted in enumerate(program.wants):
        for value, content in wanted.items():
            got = final[rank].get(value)
            reason = "is not there" if got is None else _describe_difference(got, content)
            if reason:
                reason += _first_excess(program, rendezvous, value, content)
                raise ProgramError(f"{program.name}: rank {rank} step {len(program.actions[rank])} (its end): wanted {value} {reason}")
    for rank, values in enumerate(final):
        for value in values:
            if value.name in _FOR_BACKWARD and value.index[0] in trained_stages:
                s, m = value.index
                at = f"rank {rank} step {len(program.actions[rank])} (its end)"
                raise ProgramError(
                    f"{program.name}: {at}: {value} is still held; a forward of stage {s} on microbatch {m} has no backward of its own, so "
                    "leave it out"
                )


def _first_excess(program: Program, rendezvous: bool, value: Value, wanted: Content) -> str:
    """Describe the action that first added to `value` what was in it already; empty where none did."""
    state = [dict(held.get(value, {})) for held in program.initial]
    wire: dict[tuple[int, int], deque[dict[int, int]]] = {}
    for rank, step, action, _ in walk_effects(program, rendezvous):
        if not isinstance(action, (Send, Recv)) or action.value != value:
            continue
        if isinstance(action, Send):
            wire.setdefault((rank, action.to), deque()).append(dict(state[rank]))
            continue
        got = wire[action.source, rank].popleft()
        if action.add:
            _add_contributions(got, state[rank])
            excess = next((c for c in sorted(got) if got[c] > max(1, wanted.get(c, 0))), None)
            if excess is not None:
                return f"; rank {rank} step {step}: {action} brings contribution {excess} {_format_times(got[excess])}"
        state[rank] = got
    return ""


def _describe_difference(got: Content, wanted: Content) -> str:
    """Describe what is wrong with `got`; empty where nothing is."""
    if got == wanted:
        return ""
    reasons = []
    for contribution in sorted({*got, *wanted}):
        have, want = got.get(contribution, 0), wanted.get(contribution, 0)
        if have > want:
            reasons.append(
                f"has contribution {contribution} {_format_times(have)}" + ("" if want == 1 else f" instead of {_format_times(want)}")
            )
        elif have < want:
            reasons.append(f"lacks contribution {contribution}" + (f" (has it {_format_times(have)})" if have else ""))
    others = f" and {len(reasons) - 4} more" if len(reasons) > 4 else ""
    return ", ".join(reasons[:4]) + others


def _format_times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _add_contributions(total: dict[int, int], more: Content) -> None:
    for contribution, count in more.items():
        total[contribution] = total.get(contribution, 0) + count
