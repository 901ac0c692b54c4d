"""What a program's actions do with what a rank holds: weights come and go, what was saved moves to the host, or is dropped and made again.

In: an executor and one action. Out: what `run/step/dispatch` runs. A forward whose result is dropped keeps nothing to begin with.

Not modelled: running a stage again that reads a buffer which is written while the model runs; it would read what came later.
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
    """How a stage and microbatch run forward: as always, recorded so that it can be moved, or without keeping anything."""
    runner = executor.runner(action)
    then = {
        a.op
        for a in executor.program.actions[executor.rank]
        if isinstance(a, Manage) and (a.stage, a.microbatch) == (action.stage, action.microbatch)
    }
    if ManageOp.DROP in then:
        if reads_written(runner.local):
            raise ProgramError(
                f"{executor.program.name} drops what stage {action.stage} saved, and the stage reads a buffer that the model writes: run "
                "again it would read what later microbatches wrote; offload it, or cut the model elsewhere"
            )

        def without(*args: Any) -> Kept:
            with torch.no_grad():
                return runner.forward(*args)

        return without
    if ManageOp.OFFLOAD in then:

        def recorded(*args: Any) -> Kept:
            if not torch.is_grad_enabled():
                return runner.forward(*args)
            with executor.host.recording() as moved:
                state = runner.forward(*args)
            state.moved = moved
            return state

        return recorded
    return runner.forward


def offload(executor: Executor, action: Manage, step: int) -> Run:
    return _moving(executor.host.out, *_places(executor, action, "saved", "host"))


def load(executor: Executor, action: Manage, step: int) -> Run:
    return _moving(executor.host.back, *_places(executor, action, "host", "saved"))


def _moving(move: Callable[[Any], object], source: int, target: int) -> Run:
    """What is kept goes from one place to another, and is held there."""

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
    """Sums over data replicas; buckets whose last gradient has come are under way already."""
    names = executor.learned[action.stage]

    def run(running: Running) -> None:
        if executor.gradients is not None:
            executor.gradients.reduce(names)

    return run


def _places(executor: Executor, action: Manage, *names: str) -> tuple[int, ...]:
    assert action.microbatch is not None  # of a stage and a microbatch
    return tuple(executor.slot(Value(name, (action.stage, action.microbatch))) for name in names)
