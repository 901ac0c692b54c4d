"""The type of a patch: one behaviour of torch that a captured graph cannot have, and its replacement, in one file.

`Trace` is the state of the current trace that a patch may read. The docstring of a patch's file has four fields, which a test reads:
`Torch` (what it does), `Wanted` (what is needed), `Test` (which fails without it), `Until` (the torch version without need for it). If two
patches replace the same call, the first in the table that handles it wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.fx import GraphModule

from shardwise.capture.autograd_functions import TraceRecord
from shardwise.capture.branch_answers import BranchAnswers
from shardwise.model.graph import Graph

Replacements = Mapping[Any, Callable[..., Any]]
Block = AbstractContextManager[None]


@dataclass(frozen=True)
class Trace:
    """A model under tracing, the record beside its operators, and the answers to its branch questions.

    `memory`: state of patches across calls of the model; a second call may read what the first left in attributes. `own_parameters`: those
    of the model before torch replaced them for the trace; lists and closures that the model keeps still have them.
    """

    model: nn.Module
    record: TraceRecord
    answers: BranchAnswers
    memory: dict[str, Any] = field(default_factory=dict)
    own_parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallHooks:
    """Hooks of one patch on calls of torch's Python interface in one trace.

    before: runs before every call, `before(func, args, kwargs)`, may change the keywords in place, and may raise.
    replacements: by function; a result of `NotImplemented` leaves the call to the next patch, or to torch.
    after: runs after every call, `after(func, args, kwargs, result)`.
    """

    before: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None
    replacements: Replacements = field(default_factory=dict)
    after: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None] | None = None


@dataclass(frozen=True, slots=True)
class Patch:
    """One patch; unused fields are left out.

    replacements: by function of torch; `NotImplemented` as for `CallHooks`.
    make_call_hooks: makes the hooks of one trace.
    while_called: a block in which the model is called.
    while_traced: a block in which `torch.export` runs.
    rewrite_program: rewrites the module of an exported program, in place.
    rewrite_graph: rewrites the captured graph.
    """

    replacements: Replacements = field(default_factory=dict)
    make_call_hooks: Callable[[Trace], CallHooks] | None = None
    while_called: Callable[[Trace], Block] | None = None
    while_traced: Callable[[], Block] | None = None
    rewrite_program: Callable[[GraphModule], None] | None = None
    rewrite_graph: Callable[[Graph], Graph] | None = None
