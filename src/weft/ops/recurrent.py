"""Recurrent layers, and cells that make one step of them."""

from __future__ import annotations

from collections.abc import Callable, Set
from math import prod

from weft.ops.keeps import Keeps, Kept
from weft.ops.operator import Operator
from weft.ops.record import Made, Op, Recurrence, Shape, Tensors
from weft.ops.rule import BLOCKED, Along, Labels, Rule

UNITS = "h"
RECURRENT_KEEPS = 5.0  # gates and cell state of every step and layer, in its output's size (LSTM; fewer for the others)


def _cell(num_states: int) -> Made:
    """One step of a recurrence: samples can be cut, weights come whole."""

    def rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
        if any(len(s) != 2 for s in ins[: 1 + num_states]):
            return None
        x = ("b" if ins[0][0] > 1 else BLOCKED, BLOCKED)
        return Rule((*[x] * (1 + num_states), *((BLOCKED,) * len(s) for s in ins[1 + num_states :])), tuple(x for _ in outs))

    return rule


def _layers(num_states: int) -> Made:
    """Samples can be cut; states are (layers, samples, width), weights come whole. Packed sequences have no rule."""

    def rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
        if len(ins[0]) != 3 or not isinstance(op.args[-1], bool):
            return None
        x = ("b", BLOCKED, BLOCKED) if op.args[-1] else (BLOCKED, "b", BLOCKED)
        state = (BLOCKED, "b", BLOCKED)
        rows: list[Labels] = [x] + [state] * num_states + [(BLOCKED,) * len(s) for s in ins[1 + num_states :]]
        return Rule(tuple(rows), (x, *([state] * num_states)))

    return rule


def _units(num_states: int, gates: int, is_cell: bool) -> Callable[[Operator, list[Shape], list[Shape]], tuple[Along, ...]]:
    """Hidden units: weights and biases are as many runs of them as there are gates, the output as there are directions. With projections,
    whose hidden states are narrower than cells, none are cut."""

    def along(op: Operator, ins: list[Shape], outs: list[Shape]) -> tuple[Along, ...]:
        weights = ins[1 + num_states :]
        units = outs[-1][-1]
        if any(s[0] != gates * units for s in weights):
            return ()
        run = ((0, units),)
        # A cell reads the whole hidden state; layers gather it themselves.
        states = [(i, len(ins[i]) - 1, run) for i in range(2 if is_cell else 1, 1 + num_states)]
        read = [(1 + num_states + i, 0, run * gates) for i in range(len(weights))]
        outputs = [(len(ins) + i, len(s) - 1, run * (s[-1] // units)) for i, s in enumerate(outs)]
        return (Along(UNITS, (*states, *read, *outputs)),)

    return along


def matrices(op: Operator, tensors: Tensors, states: int = 0) -> list[Shape]:
    """Shapes of the matrices of weights: of a layer two for each direction. The `states` of a cell are no such matrices."""
    return [tensors[v].shape for v in op.inputs[1 + states :] if len(tensors[v].shape) == 2]


def num_layers(op: Operator, tensors: Tensors) -> float:
    """Layers of a recurrent operator; both directions of one make its output together."""
    directions = 2 if len(op.args) > 1 and op.args[-2] is True else 1
    return len(matrices(op, tensors)) / 2 / directions


def gathered_steps(op: Operator, tensors: Tensors) -> tuple[int, float]:
    """(how often a hidden state is gathered, its bytes): at the start, and in each step of each layer and direction."""
    x, state = tensors[op.inputs[0]].shape, tensors[op.outputs[-1]]
    return state.shape[0] * (x[1 if op.args[-1] is True else 0] + 1), state.size_bytes / state.shape[0]


def _flops(states: int) -> Callable[[Operator, Tensors], float]:
    """2 x (weights) a step and layer. `states`: of a cell."""

    def flops(op: Operator, tensors: Tensors) -> float:
        steps = prod(tensors[op.inputs[0]].shape[:-1])
        return sum(2.0 * steps * prod(shape) for shape in matrices(op, tensors, states))

    return flops


def _keeps_gates(states: int, gates: int) -> Keeps:
    """Of a cell: input and states, and its gates or else what it makes."""

    def keeps(op: Operator, tensors: Tensors, grads: Set[str]) -> Kept:
        read = dict.fromkeys((*op.inputs[: 1 + states], *op.outputs[: 0 if gates else 1]))
        return tuple(read), float(gates * tensors[op.outputs[0]].size_bytes)

    return keeps


def _keeps_steps(op: Operator, tensors: Tensors, grads: Set[str]) -> Kept:
    """Of layers: input, weights and output, and gates and cell states of every step."""
    inputs, out = tuple(dict.fromkeys(op.inputs)), op.outputs[0]
    weights = tuple(v for v in inputs[1:] if len(tensors[v].shape) == 2)
    return (*inputs[:1], *weights, out), RECURRENT_KEEPS * tensors[out].size_bytes * num_layers(op, tensors)


def _drops(op: Operator) -> bool:
    """Dropout between layers."""
    return any(isinstance(arg, float) and arg > 0 for arg in op.args)


def _layered(names: str, states: int, gates: int, single: float = 0.0) -> Op:
    return Op(
        names, _layers(states), along=_units(states, gates, False), lowering="units", draws=_drops, kind="recurrent", flops=_flops(0),
        recurrence=Recurrence(states, single=single), keeps=_keeps_steps, autocast="lower",
    )  # fmt: skip


def _celled(names: str, states: int, gates: int = 0, runs: int = 1) -> Op:
    # Products inside of a cell are narrow under autocast, so that the state decides which this operand is.
    return Op(
        names, _cell(states), along=_units(states, runs, True), lowering="units", kind="recurrent", flops=_flops(states),
        recurrence=Recurrence(states, is_cell=True), keeps=_keeps_gates(states, gates), decides=states if gates else None,
        autocast="" if gates else "narrow",
    )  # fmt: skip


OPS = (
    _layered("lstm", 2, 4),
    _layered("gru", 1, 3, single=1.0),
    _layered("rnn_tanh rnn_relu", 1, 1, single=1 / 3),
    _celled("lstm_cell", 2, gates=5, runs=4),
    _celled("gru_cell", 1, gates=6, runs=3),
    _celled("rnn_tanh_cell rnn_relu_cell", 1),
)
