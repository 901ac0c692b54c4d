"""Handlers of residency actions: unshard and reshard weights, offload and load saved activations, or drop and recompute them.

In: an executor and one action. Out: what `run/step/dispatch` runs. A forward whose activations are to be recomputed saves none.

Not supported: recomputing a stage that reads a buffer which the model writes; it would read later values.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.errors import ProgramError
from weft.plan.program import Compute, Manage, ManageOp, Value
from weft.run.residency.layer_modules import reads_written
from weft.run.residency.recompute import recomputing
from weft.run.step.stage_runner import Kept

if TYPE_CHECKING:
    from weft.run.step.dispatch import Run, Running
    from weft.run.step.executor import Executor

Forward = Callable[..., Kept]


def forwarding(executor: Executor, action: Compute) -> Forward:
    """Return the forward function of a stage and microbatch: plain, recorded for offload, or without saved activations for recompute."""
    runner = executor.runner(action)
    residency_ops = {
        a.op
        for a in executor.program.actions[executor.rank]
        if isinstance(a, Manage) and (a.stage, a.microbatch) == (action.stage, action.microbatch)
    }
    if ManageOp.DROP in residency_ops:
        if reads_written(runner.local):
            raise ProgramError(
                f"{executor.program.name} recomputes stage {action.stage}, which reads a buffer that the model writes: the recompute "
                "would read what later microbatches wrote; offload it, or cut the model elsewhere"
            )

        def forward_without_saving(*args: Any) -> Kept:
            with torch.no_grad():
                return runner.forward(*args)

        return forward_without_saving
    if ManageOp.OFFLOAD in residency_ops:

        def forward_recorded(*args: Any) -> Kept:
            if not torch.is_grad_enabled():
                return runner.forward(*args)
            with executor.host.recording() as offloaded:
                state = runner.forward(*args)
            state.moved = offloaded
            return state

        return forward_recorded
    return runner.forward


def offload(executor: Executor, action: Manage, step: int) -> Run:
    return _moving(executor.host.out, *_places(executor, action, "saved", "host"))


def load(executor: Executor, action: Manage, step: int) -> Run:
    return _moving(executor.host.back, *_places(executor, action, "host", "saved"))


def _moving(move: Callable[[Any], object], source: int, target: int) -> Run:
    """Return a function that transfers saved activations from slot `source` to slot `target`."""

    def run(running: Running) -> None:
        state: Kept = running.held[source]
        assert state.moved is not None
        move(state.moved)
        running.held[target] = state

    return run


def drop(executor: Executor, action: Manage, step: int) -> Run:
    saved, inputs = _places(executor, action, "saved", "inputs")

    def run(running: Running) -> None:
        state: Kept = running.held[saved]
        running.held[inputs] = [x.detach() for x in state.received]

    return run


def again(executor: Executor, action: Compute, step: int) -> Run:
    s, m = action.stage, action.microbatch
    saved, inputs = executor.slot(Value("saved", (s, m))), executor.slot(Value("inputs", (s, m)))
    runner, draw = executor.runner(action), executor.draw

    def run(running: Running) -> None:
        draw.microbatch = m
        received: list[Tensor] = running.held[inputs]
        with recomputing(draw, runner.memory), torch.enable_grad() if running.train else nullcontext():
            running.held[saved] = runner.forward(running.inputs[m], received, running.want_inputs)

    return run


def unshard(executor: Executor, action: Manage, step: int) -> Run:
    return lambda running: executor.gathered.unshard(action.stage)


def reshard(executor: Executor, action: Manage, step: int) -> Run:
    return lambda running: executor.gathered.reshard(action.stage)


def reduce_grad(executor: Executor, action: Manage, step: int) -> Run:
    """Reduce gradients over data replicas; buckets with complete gradients are being reduced already."""
    names = executor.learned[action.stage]

    def run(running: Running) -> None:
        if executor.gradients is not None:
            executor.gradients.reduce(names)

    return run


def _places(executor: Executor, action: Manage, *names: str) -> tuple[int, ...]:
    assert action.microbatch is not None  # of a stage and a microbatch
    return tuple(executor.slot(Value(name, (action.stage, action.microbatch))) for name in names)
