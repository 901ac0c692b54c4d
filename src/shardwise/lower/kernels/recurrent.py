"""Recurrent layers and cells with sharded hidden units: a rank has its units' part of every gate.

Arguments are those of torch's operator, with weights, biases and states sharded; the output sequence is gathered if requested. Each step
gathers the hidden state, which the next step's products read, and its backward reduce-scatters that state's gradients: those of the next
step and those of the output's readers. So a layer's output is available to the next layer at no further cost. Not modeled: projections,
dropout between layers, packed sequences.

Shape letters: B samples, S steps, H hidden units, L layers times directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.lower.redistribute import redistribute
from shardwise.plan.ir.placement import D, Shard
from shardwise.world.world import Group

States = tuple[Tensor, ...]
# (input gates, hidden gates, this rank's states) -> its states after the step, the hidden one first
Step = Callable[[Tensor, Tensor, States], States]


def _lstm_step(x: Tensor, h: Tensor, states: States) -> States:
    i, f, g, o = (x + h).chunk(4, dim=-1)
    cell = torch.sigmoid(f) * states[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru_step(x: Tensor, h: Tensor, states: States) -> States:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, dim=-1), h.chunk(3, dim=-1)
    z = torch.sigmoid(xz + hz)
    n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
    return ((states[0] - n) * z + n,)


def _rnn_step(squash: Callable[[Tensor], Tensor]) -> Step:
    return lambda x, h, states: (squash(x + h),)


STEPS: dict[str, Step] = {"lstm": _lstm_step, "gru": _gru_step, "rnn_tanh": _rnn_step(torch.tanh), "rnn_relu": _rnn_step(torch.relu)}


def _cast_operands(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Cast operands as autocast does for recurrent operators."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [x.to(dtype) if x.is_floating_point() else x for x in tensors]


def recurrent_layers(group: Group, form: Shard, kind: str, gathers_output: bool, *args: Any) -> tuple[Tensor, ...]:
    """Run layers over a sequence. `form`: unit sharding of states (L, B, H); `gathers`: return the output of all units."""
    x, states, weights, has_biases, num_layers, _, _, is_bidirectional, samples_first = args
    states = list(states) if isinstance(states, list | tuple) else [states]
    count = len(states)
    x, *states_and_weights = _cast_operands([x, *states, *weights])
    states, weights = states_and_weights[:count], states_and_weights[count:]
    each, directions, time = 4 if has_biases else 2, 2 if is_bidirectional else 1, 1 if samples_first else 0
    last: list[States] = []
    local_outputs: list[Tensor] = []
    for number in range(num_layers * directions):
        if number % directions == 0:
            read, outs, local_outputs = x, [], []
        weights_here = [*weights[number * each : (number + 1) * each], None, None][:4]
        reverse = number % directions == 1
        goes_on = gathers_output or number < (num_layers - 1) * directions
        begin = tuple(s[number] for s in states)
        all_steps, steps, end = _run_direction((group, form), STEPS[kind], read, begin, weights_here, time, reverse, goes_on)
        outs.append(all_steps)
        local_outputs.append(steps)
        last.append(end)
        if len(outs) == directions and goes_on:
            x = torch.cat(outs, dim=-1) if is_bidirectional else outs[0]
    out = x if gathers_output else torch.cat(local_outputs, dim=-1) if is_bidirectional else local_outputs[0]
    return (out, *(torch.stack([end[i] for end in last]) for i in range(count)))


def _run_direction(
    ranks: tuple[Group, Shard],
    step: Step,
    x: Tensor,
    states: States,
    weights: Sequence[Any],
    time: int,
    reverse: bool,
    gathers_output: bool,
) -> tuple[Tensor, Tensor, States]:
    """Run one layer in one direction: return (outputs of all units where they are read, this rank's outputs, its final states)."""
    group, form = ranks
    w_input, w_hidden, b_input, b_hidden = weights
    gates, unit_shard = F.linear(x, w_input, b_input), Shard(1, form.lengths)
    gathered, local = [], []
    hidden = redistribute(states[0], unit_shard, D, group)
    for t in range(x.shape[time]):
        at = x.shape[time] - 1 - t if reverse else t
        states = step(gates.select(time, at), F.linear(hidden, w_hidden, b_hidden), states)
        if gathers_output or t + 1 < x.shape[time]:
            hidden = redistribute(states[0], unit_shard, D, group)
        gathered.append(hidden)
        local.append(states[0])
    stride = -1 if reverse else 1
    local_steps = torch.stack(local[::stride], dim=time)
    return torch.stack(gathered[::stride], dim=time) if gathers_output else local_steps, local_steps, states


def recurrent_cell(kind: str, first: int, length: int, *args: Any) -> Tensor | tuple[Tensor, ...]:
    """Run one step. `first`, `length`: this rank's units of the hidden state, which is replicated."""
    x, states, w_input, w_hidden, *biases = args
    b_input, b_hidden = (*biases, None, None)[:2]
    has_several_states = isinstance(states, list | tuple)
    hidden, *other_states = states if has_several_states else [states]
    state = (hidden.narrow(1, first, length), *other_states)
    new_states = STEPS[kind](F.linear(x, w_input, b_input), F.linear(hidden, w_hidden, b_hidden), state)
    return new_states if has_several_states else new_states[0]
