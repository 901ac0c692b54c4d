"""What a patch is: one thing that torch does otherwise than a captured graph needs, and what is done about it, in one file.

In: nothing. Out: `Patch`, and `Trace`, what a patch may ask of the trace under way. The docstring of a patch's file has four fields, which
a test reads: `Torch` (what it does), `Wanted` (what is needed), `Test` (which fails without it), `Until` (with which torch it can go).
Not modelled: two patches that want the same call; the first in the table that answers it has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.fx import GraphModule

from weft.capture.answers import Answers
from weft.capture.functions import Record
from weft.model.graph import Graph

Calls = Mapping[Any, Callable[..., Any]]
Block = AbstractContextManager[None]


@dataclass(frozen=True)
class Trace:
    """A model that is called under tracing, what of it is written down beside the operators, and what it is told of values.

    `memory`: what patches know from one call of the model to the next, which reads what the first left in attributes.
    """

    model: nn.Module
    record: Record
    answers: Answers
    memory: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Watch:
    """What one patch does with the calls of torch's Python interface in one trace.

    before: sees every call, `before(func, args, kwargs)`, may change the keywords in place, and may raise.
    calls: by function, what the model calls in its place; `NotImplemented` leaves the call to the next patch, or to torch.
    after: sees what every call made, `after(func, args, kwargs, result)`.
    """

    before: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None
    calls: Calls = field(default_factory=dict)
    after: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None] | None = None


@dataclass(frozen=True, slots=True)
class Patch:
    """What is done about one thing; fields that do nothing are left out.

    calls: by function of torch, what the model calls in its place; `NotImplemented` as for `Watch`.
    watch: the same with what one trace has told so far.
    while_called: a block in which the model is called.
    while_traced: a block in which `torch.export` runs.
    program: rewrites what `torch.export` made, in place.
    graph: the graph that is read in place of one.
    """

    calls: Calls = field(default_factory=dict)
    watch: Callable[[Trace], Watch] | None = None
    while_called: Callable[[Trace], Block] | None = None
    while_traced: Callable[[], Block] | None = None
    program: Callable[[GraphModule], None] | None = None
    graph: Callable[[Graph], Graph] | None = None
