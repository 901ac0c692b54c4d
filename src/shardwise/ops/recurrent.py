"""Recurrent layers (LSTM, GRU, RNN) and single-step cells."""

from __future__ import annotations

from collections.abc import Callable, Set
from math import prod

from shardwise.ops.operator import Operator
from shardwise.ops.record import Backward, Op, Product, RandomDraw, Recurrence, RuleOfShapes, Shape, Tensors
from shardwise.ops.rule import BLOCKED, FusedLabel, Labels, Rule
from shardwise.ops.saved_tensors import Saved, SavedRule
from shardwise.ops.vocabulary import AutocastPolicy, CostKind, LoweringKind

HIDDEN_UNITS = "h"
RECURRENT_WORKSPACE = 2.0  # gates and states of one step in backward, in output sizes
RECURRENT_SAVED_FACTOR = 5.0  # gates and cell states of every step and layer, in output sizes (LSTM; fewer for the others)


def _cell_rule(num_states: int) -> RuleOfShapes:
    """Return the rule of one step: samples can be sharded, weights cannot."""

    def rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
        if any(len(s) != 2 for s in ins[: 1 + num_states]):
            return None
        x = ("b" if ins[0][0] > 1 else BLOCKED, BLOCKED)
        return Rule((*[x] * (1 + num_states), *((BLOCKED,) * len(s) for s in ins[1 + num_states :])), tuple(x for _ in outs))

    return rule


def _layers_rule(num_states: int) -> RuleOfShapes:
    """Return the rule of layers: samples can be sharded; states are (layers, samples, width). Packed sequences have no rule."""

    def rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
        if len(ins[0]) != 3 or not isinstance(op.args[-1], bool):
            return None
        input_labels = ("b", BLOCKED, BLOCKED) if op.args[-1] else (BLOCKED, "b", BLOCKED)
        state = (BLOCKED, "b", BLOCKED)
        rows: list[Labels] = [input_labels] + [state] * num_states + [(BLOCKED,) * len(s) for s in ins[1 + num_states :]]
        return Rule(tuple(rows), (input_labels, *([state] * num_states)))

    return rule


def _hidden_unit_labels(
    num_states: int, gates: int, is_cell: bool
) -> Callable[[Operator, list[Shape], list[Shape]], tuple[FusedLabel, ...]]:
    """Return the label of hidden units: weights and biases have one run of them per gate, the output one per direction. With projections,
    whose hidden states are narrower than cells, units are not sharded."""

    def along(op: Operator, ins: list[Shape], outs: list[Shape]) -> tuple[FusedLabel, ...]:
        weights = ins[1 + num_states :]
        units = outs[-1][-1]
        if any(s[0] != gates * units for s in weights):
            return ()
        run = ((0, units),)
        # A cell reads the full hidden state; layers gather it themselves.
        states = [(i, len(ins[i]) - 1, run) for i in range(2 if is_cell else 1, 1 + num_states)]
        read = [(1 + num_states + i, 0, run * gates) for i in range(len(weights))]
        outputs = [(len(ins) + i, len(s) - 1, run * (s[-1] // units)) for i, s in enumerate(outs)]
        return (FusedLabel(HIDDEN_UNITS, (*states, *read, *outputs)),)

    return along


def weight_matrices(op: Operator, tensors: Tensors, num_states: int = 0) -> list[Shape]:
    """Return the shapes of the weight matrices: two per layer and direction. `states`: inputs of a cell that are states."""
    return [tensors[v].shape for v in op.inputs[1 + num_states :] if len(tensors[v].shape) == 2]


def num_layers(op: Operator, tensors: Tensors) -> float:
    """Return the number of layers; both directions of one share its output."""
    directions = 2 if len(op.args) > 1 and op.args[-2] is True else 1
    return len(weight_matrices(op, tensors)) / 2 / directions


def gathered_steps(op: Operator, tensors: Tensors) -> tuple[int, float]:
    """Return (number of gathers of a hidden state, bytes of one): at the start, and in each step of each layer and direction."""
    x, state = tensors[op.inputs[0]].shape, tensors[op.outputs[-1]]
    return state.shape[0] * (x[1 if op.args[-1] is True else 0] + 1), state.size_bytes / state.shape[0]


def _recurrent_flops(states: int) -> Callable[[Operator, Tensors], float]:
    """Return the FLOPs function: 2 x weights per step and layer. `states`: of a cell."""

    def flops(op: Operator, tensors: Tensors) -> float:
        steps = prod(tensors[op.inputs[0]].shape[:-1])
        return sum(2.0 * steps * prod(shape) for shape in weight_matrices(op, tensors, states))

    return flops


def _saved_gates(states: int, gates: int) -> SavedRule:
    """Return the saved-tensors rule of a cell: input and states, and its gates or else its output."""

    def keeps(op: Operator, tensors: Tensors, grads: Set[str]) -> Saved:
        read = dict.fromkeys((*op.inputs[: 1 + states], *op.outputs[: 0 if gates else 1]))
        return tuple(read), float(gates * tensors[op.outputs[0]].size_bytes)

    return keeps


def _saved_steps(op: Operator, tensors: Tensors, grads: Set[str]) -> Saved:
    """Return input, weights and output of layers, and the bytes of gates and cell states of every step."""
    inputs, out = tuple(dict.fromkeys(op.inputs)), op.outputs[0]
    weights = tuple(v for v in inputs[1:] if len(tensors[v].shape) == 2)
    return (*inputs[:1], *weights, out), RECURRENT_SAVED_FACTOR * tensors[out].size_bytes * num_layers(op, tensors)


def _has_dropout(op: Operator) -> bool:
    """Return whether there is dropout between layers."""
    return any(isinstance(arg, float) and arg > 0 for arg in op.args)


def _layer_record(names: str, states: int, gates: int, single: float = 0.0, keeps_state: bool = False) -> Op:
    """Return the record of layers. `keeps_state`: under autocast the hidden state, and so the output, has the first state's dtype."""
    return Op(
        names, _layers_rule(states), along=_hidden_unit_labels(states, gates, False), kind=CostKind.RECURRENT,
        product=Product(_recurrent_flops(0)), draw=RandomDraw(_has_dropout), recurrence=Recurrence(states, serial_fraction=single),
        backward=Backward(_saved_steps), lowering=LoweringKind.HIDDEN_UNITS,
        autocast=AutocastPolicy.LAST_STATE if keeps_state else AutocastPolicy.LOW_PRECISION,
    )  # fmt: skip


def _cell_record(names: str, states: int, gates: int = 0, runs: int = 1) -> Op:
    # Products inside a cell are narrow under autocast, so the output has the dtype of the state.
    return Op(
        names, _cell_rule(states), along=_hidden_unit_labels(states, runs, True), kind=CostKind.RECURRENT,
        product=Product(_recurrent_flops(states)), recurrence=Recurrence(states, is_cell=True),
        backward=Backward(_saved_gates(states, gates)), lowering=LoweringKind.HIDDEN_UNITS,
        autocast=AutocastPolicy.LAST_STATE if gates else AutocastPolicy.LOW_PRECISION_OUTPUT,
    )  # fmt: skip


OPS = (
    _layer_record("lstm", 2, 4),
    _layer_record("gru", 1, 3, single=1.0, keeps_state=True),
    _layer_record("rnn_tanh rnn_relu", 1, 1, single=1 / 3),
    _cell_record("lstm_cell", 2, gates=5, runs=4),
    _cell_record("gru_cell", 1, gates=6, runs=3),
    _cell_record("rnn_tanh_cell rnn_relu_cell", 1),
)
