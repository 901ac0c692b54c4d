"""Actions of a program and their notation: `0F3` computes, `0OFFLOAD3` and `0UNSHARD` manage memory, `x(0,1,3)>1` sends, `x(0,1,3)<0`
receives, `chunk(2)+<0` receives and adds.

What a long program has very many of is a named tuple: created and looked up in a fraction of a data class's time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from shardwise.errors import ProgramError


class ComputeOp(StrEnum):
    """Operation of a compute action on one stage and one microbatch."""

    F = "F"  # forward
    B = "B"  # the whole backward
    I = "I"  # backward, input gradients only  # noqa: E741
    W = "W"  # backward, parameter gradients only; after I
    R = "R"  # recompute the forward from saved inputs, for the backward


class ManageOp(StrEnum):
    """Operation of a manage action on its rank's memory. The first three are for a whole stage, the others for a stage and a microbatch."""

    UNSHARD = "UNSHARD"  # gather the stage's weights
    RESHARD = "RESHARD"  # free the gathered weights
    REDUCE_GRAD = "REDUCE_GRAD"  # reduce the stage's gradient over its data replicas, accumulating
    OFFLOAD = "OFFLOAD"  # copy tensors saved for the backward to the host's memory
    LOAD = "LOAD"  # copy them back
    DROP = "DROP"  # free saved tensors except the inputs


RECEIVE_LOOKAHEAD = 2  # computes before their use that a rank posts its receives
STAGE_OPS = frozenset({ManageOp.UNSHARD, ManageOp.RESHARD, ManageOp.REDUCE_GRAD})


class Value(NamedTuple):
    """A named value that a rank can hold: `Value("x", (0, 1, 5))` prints as `x(0,1,5)`."""

    name: str
    index: tuple[int, ...]  # type: ignore[assignment]  # a tuple's own method of that name is not used

    def __str__(self) -> str:
        return f"{self.name}({','.join(map(str, self.index))})"


class Compute(NamedTuple):
    """Run `op` of `stage` on `microbatch`: `1B2` is the backward of stage 1 on microbatch 2."""

    op: ComputeOp
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Manage:
    """Do `op` with the memory of `stage`, and of `microbatch` where it is for one: `1UNSHARD`, `1OFFLOAD2`.

    Raises:
        ProgramError: an op for a whole stage with a microbatch, or another without.
    """

    op: ManageOp
    stage: int
    microbatch: int | None = None

    def __post_init__(self) -> None:
        if (self.op in STAGE_OPS) != (self.microbatch is None):
            example = f"{self.stage}{self.op}" if self.op in STAGE_OPS else f"{self.stage}{self.op}{self.microbatch or 0}"
            subject = "a whole stage" if self.op in STAGE_OPS else "a stage and a microbatch"
            raise ProgramError(f"{self} is not an action: {self.op} is of {subject}, for example {example}")

    def __str__(self) -> str:
        return f"{self.stage}{self.op}" if self.microbatch is None else f"{self.stage}{self.op}{self.microbatch}"


class Send(NamedTuple):
    """Send `value` to rank `to`: `x(0,1,3)>1`."""

    value: Value
    to: int

    def __str__(self) -> str:
        return f"{self.value}>{self.to}"


class Recv(NamedTuple):
    """Receive `value` from rank `source`: `x(0,1,3)<0`; with `add` it is added to the value held: `chunk(2)+<0`."""

    value: Value
    source: int
    add: bool = False

    def __str__(self) -> str:
        return f"{self.value}{'+' if self.add else ''}<{self.source}"


Action = Compute | Manage | Send | Recv
Content = Mapping[int, int]  # contribution (a microbatch, or a rank's summand) -> how many times it is in the value
HeldValues = Mapping[Value, Content]
Links = tuple[tuple[int, int], ...]

_MAX_SHOWN_CHARACTERS = 40  # characters of a word that an error shows
_COMPUTE = re.compile(rf"(\d{{1,9}})([{''.join(ComputeOp)}])(\d{{1,9}})")
_MANAGE = re.compile(rf"(\d{{1,9}})({'|'.join(ManageOp)})(\d{{1,9}})?")
_VALUE = r"([A-Za-z_]\w*)\((\d{1,9}(?:,\d{1,9})*|)\)"
_TRANSFER = re.compile(_VALUE + r"(>|<|\+<)(\d{1,9})")
_ONE_VALUE = re.compile(_VALUE)


def chain_links(num_stages: int) -> Links:
    """Return the links of a chain, in which each stage feeds the next: `chain_links(3) == ((0, 1), (1, 2))`."""
    return tuple((s, s + 1) for s in range(num_stages - 1))


def parse_value(text: str) -> Value:
    """Parse a value as it prints.

    >>> parse_value("x(0,1,5)")
    Value(name='x', index=(0, 1, 5))
    """
    match = _ONE_VALUE.fullmatch(text)
    if not match:
        raise ProgramError(f"value {text!r} is not name(numbers), for example x(0,1,5)")
    return Value(match[1], _parse_numbers(match[2]))


def parse_action(text: str) -> Action:
    """Parse an action as it prints.

    >>> parse_action("1B2"), parse_action("chunk(2)+<0")
    (Compute(op=<ComputeOp.B: 'B'>, stage=1, microbatch=2), Recv(value=Value(name='chunk', index=(2,)), source=0, add=True))
    """
    if match := _COMPUTE.fullmatch(text):
        return Compute(ComputeOp(match[2]), int(match[1]), int(match[3]))
    if match := _MANAGE.fullmatch(text):
        return Manage(ManageOp(match[2]), int(match[1]), None if match[3] is None else int(match[3]))
    if match := _TRANSFER.fullmatch(text):
        value, peer = Value(match[1], _parse_numbers(match[2])), int(match[4])
        return Send(value, peer) if match[3] == ">" else Recv(value, peer, add=match[3] == "+<")
    shown = text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}... ({len(text)} characters)"
    raise ProgramError(
        f"action {shown!r} is none of 0F3 (also B, I, W, R), 0UNSHARD (also RESHARD, REDUCE_GRAD), 0OFFLOAD3 (also LOAD, DROP), "
        "x(0,1,3)>1 (send to rank 1), x(0,1,3)<0 (receive from rank 0), +< (and add)"
    )


def _parse_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",")) if text else ()
