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

from shardwise.errors import ProgramError
from shardwise.plan.ir.program import Compute, Manage, ManageOp, Value
from shardwise.run.residency.layer_modules import reads_written_buffer
from shardwise.run.residency.recompute import mark_recomputing
from shardwise.run.step.stage_runner import SavedActivations

if TYPE_CHECKING:
    from shardwise.run.step.dispatch import ActionRunner, StepState
    from shardwise.run.step.executor import Executor

Forward = Callable[..., SavedActivations]


def choose_forward(executor: Executor, action: Compute) -> Forward:
    """Return the forward function of a stage and microbatch: plain, recorded for offload, or without saved activations for recompute."""
    runner = executor.runner(action)
    residency_ops = {
        a.op
        for a in executor.program.actions[executor.rank]
        if isinstance(a, Manage) and (a.stage, a.microbatch) == (action.stage, action.microbatch)
    }
    if ManageOp.DROP in residency_ops:
        if reads_written_buffer(runner.local):
            raise ProgramError(
                f"{executor.program.name} recomputes stage {action.stage}, which reads a buffer that the model writes: the recompute "
                "would read what later microbatches wrote; offload it, or cut the model elsewhere"
            )

        def forward_without_saving(*args: Any) -> SavedActivations:
            with torch.no_grad():
                return runner.forward(*args)

        return forward_without_saving
    if ManageOp.OFFLOAD in residency_ops:

        def forward_recorded(*args: Any) -> SavedActivations:
            if not torch.is_grad_enabled():
                return runner.forward(*args)
            with executor.host.record_saved() as offloaded:
                state = runner.forward(*args)
            state.offloaded = offloaded
            return state

        return forward_recorded
    return runner.forward


def offload_saved(executor: Executor, action: Manage, step: int) -> ActionRunner:
    return _transfer_runner(executor.host.offload, *_slots_of(executor, action, "saved", "host"))


def load_saved(executor: Executor, action: Manage, step: int) -> ActionRunner:
    return _transfer_runner(executor.host.load, *_slots_of(executor, action, "host", "saved"))


def _transfer_runner(move: Callable[[Any], object], source: int, target: int) -> ActionRunner:
    """Return a function that transfers saved activations from slot `source` to slot `target`."""

    def run(running: StepState) -> None:
        state: SavedActivations = running.slots[source]
        assert state.offloaded is not None
        move(state.offloaded)
        running.slots[target] = state

    return run


def drop_saved(executor: Executor, action: Manage, step: int) -> ActionRunner:
    saved, inputs = _slots_of(executor, action, "saved", "inputs")

    def run(running: StepState) -> None:
        state: SavedActivations = running.slots[saved]
        running.slots[inputs] = [x.detach() for x in state.received]

    return run


def recompute(executor: Executor, action: Compute, step: int) -> ActionRunner:
    s, m = action.stage, action.microbatch
    saved, inputs = executor.slot(Value("saved", (s, m))), executor.slot(Value("inputs", (s, m)))
    runner, draw = executor.runner(action), executor.draw

    def run(running: StepState) -> None:
        draw.microbatch = m
        received: list[Tensor] = running.slots[inputs]
        with mark_recomputing(draw, runner.memory), torch.enable_grad() if running.is_training else nullcontext():
            running.slots[saved] = runner.forward(running.inputs[m], received, running.wants_input_gradients)

    return run


def unshard_weights(executor: Executor, action: Manage, step: int) -> ActionRunner:
    return lambda running: executor.gathered.unshard(action.stage)


def reshard_weights(executor: Executor, action: Manage, step: int) -> ActionRunner:
    return lambda running: executor.gathered.reshard(action.stage)


def reduce_gradients(executor: Executor, action: Manage, step: int) -> ActionRunner:
    """Reduce gradients over data replicas; buckets with complete gradients are being reduced already."""
    names = executor.trainable_by_stage[action.stage]

    def run(running: StepState) -> None:
        if executor.gradients is not None:
            executor.gradients.reduce(names)

    return run


def _slots_of(executor: Executor, action: Manage, *names: str) -> tuple[int, ...]:
    assert action.microbatch is not None  # of a stage and a microbatch
    return tuple(executor.slot(Value(name, (action.stage, action.microbatch))) for name in names)
