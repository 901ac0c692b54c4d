"""Memory that oneDNN's LSTM saves for backward, and numbers of recurrence steps without a fused kernel.

torch gives oneDNN one layer in one direction at a time. Its workspace (oneDNN, src/cpu/rnn/rnn_utils.cpp, `set_offsets`) has gates and
states of every step in rows that are padded to 64 bytes, and by 64 more if as many columns would conflict in a cache. Checked
against the sizes that torch reports, within a page for each part. Not modelled: layers with projections, which torch computes itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.cost.calibration.efficiency import onednn_library
from shardwise.model.graph import DTYPE_BYTES, Operator, Tensor
from shardwise.model.sharding.sharding import Sharding
from shardwise.model.work import num_steps
from shardwise.ops import record_of
from shardwise.ops.recurrent import HIDDEN_UNITS, num_layers, weight_matrices

# Memory that a step of an LSTM (two states besides the output) and of a GRU (one) saves, in sizes of a state.
STATES_PER_STEP = {2: 6.0, 1: 7.0}


def _row_bytes(columns: int, width: int) -> int:
    line = onednn_library().line // width
    filled = -(-columns // line) * line
    return width * (filled + line * (filled % onednn_library().together == 0))


def workspace_bytes(steps: int, samples: int, inputs: int, hidden: int, width: int) -> int:
    """Return the workspace of one layer in one direction; `width`: bytes of a value.

    For every step four gates and the output; for every step and the initial state, of this layer and the one below: the input,
    its gradient and the state's, as wide as the wider of input and state, and the cells with their gradient. Gradients are float32,
    the rest has the tensors' dtype.

    >>> workspace_bytes(64, 8, 320, 160, 4)
    6963200
    """
    wide = max(inputs, hidden)
    each = _row_bytes(4 * hidden, width) + _row_bytes(hidden, width)
    states = 2 * (_row_bytes(wide, width) + 2 * _row_bytes(wide, 4) + (width + 4) * hidden)
    return samples * (steps * each + (steps + 1) * states)


def is_lstm(op: Operator) -> bool:
    """Return whether a call is a whole LSTM."""
    recurrence = record_of(op).recurrence
    return recurrence is not None and not recurrence.is_cell and recurrence.num_states == 2


def missing_gradient_fraction(op: Operator) -> float:
    """Return the fraction of its weights' gradients that an operator's fullest moment of backward has not, or has in its workspace.

    All, but of recurrent layers: one layer and direction runs after another, and the fullest moment is the backward of the last one.
    """
    recurrence = record_of(op).recurrence
    if recurrence is None or recurrence.is_cell or len(op.args) < len(("input", "states", "weights", "biases", "layers")):
        return 1.0
    layers = op.args[4]
    return 1 - 1 / (layers * (1 + (op.args[-2] is True))) if type(layers) is int else 1.0


def lstm_bytes(op: Operator, tensors: Mapping[str, Tensor]) -> float:
    """Return the bytes saved besides an LSTM's input and output: workspaces, each direction's own output if there are two, values between
    layers, and between layers dropout masks with their results."""
    x, out = tensors[op.inputs[0]], tensors[op.outputs[0]]
    matrices = [tensors[v].shape for v in op.inputs[3:] if len(tensors[v].shape) == 2]
    is_bidirectional, samples_first = (flag is True for flag in op.args[-2:])
    directions = 1 + is_bidirectional
    hidden = matrices[1][1] if len(matrices) > 1 else out.shape[-1]
    layers = max(1, len(matrices) // (2 * directions))
    num_positions = x.size // x.shape[-1]
    samples = x.shape[0 if samples_first else 1] if len(x.shape) == 3 else 1
    drops = len(op.args) > 5 and isinstance(op.args[5], int | float) and op.args[5] > 0 and op.args[6] is True
    size = 0.0
    for layer in range(layers):
        inputs = directions * hidden if layer else x.shape[-1]
        size += directions * workspace_bytes(num_positions // samples, samples, inputs, hidden, DTYPE_BYTES[x.dtype])
        if layer < layers - 1:
            size += out.size_bytes * (1 + is_bidirectional * (not drops) + 2 * drops)
    return size + is_bidirectional * out.size_bytes


def lstm_backward_bytes(op: Operator, tensors: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the workspace of one layer in one direction in backward, as measured: gradients of its gates and states of all steps, and its
    weights in another layout (of bfloat16 their gradients in float32 too), twice where their columns conflict in a cache."""
    out, directions = tensors[op.outputs[0]], 1 + (op.args[-2] is True)
    matrices = [tensors[v] for v in op.inputs[3:] if len(tensors[v].shape) == 2][-2:]
    weights = float(sum(t.size_bytes for t in matrices))
    if out.dtype == "bfloat16":
        return 4.0 * out.size_bytes / directions, 3 * weights
    return 5.0 * out.size_bytes / directions, weights * (1 + (matrices[-1].shape[1] % onednn_library().together == 0))


def shards_hidden_units(sharding: Sharding | None, op: Operator) -> bool:
    """Return whether hidden units are sharded, so that they are all-gathered in every step."""
    return sharding is not None and HIDDEN_UNITS in sharding.labels[op.name].values() and record_of(op).over_steps


def extra_bytes(op: Operator, tensors: Mapping[str, Tensor], sharding: Sharding | None, alone: float, ways: float) -> float:
    """Return the bytes that a rank saves besides an operator's inputs and output: its share of `alone`. With sharded hidden units
    (`shardwise.lower.kernels.recurrent`) the inputs of its units' gates and full hidden states of every step, and outputs between
    layers."""
    if not alone or not shards_hidden_units(sharding, op):
        return alone / ways
    out, layers = tensors[op.outputs[0]].size_bytes, num_layers(op, tensors)
    return out * (layers * (STATES_PER_STEP[len(op.outputs) - 1] / ways + 1) + layers - 1)


def num_single_steps(op: Operator, tensors: Mapping[str, Tensor], each: bool = False) -> float:
    """Return the number of steps, in units of a GRU step, that torch runs one by one with a dozen small operators each: all but an LSTM's,
    which oneDNN fuses. `each`: no step is fused, as with sharded hidden units."""
    recurrence = record_of(op).recurrence
    if recurrence is None or not (recurrence.serial_fraction or each):
        return 0.0
    return (recurrence.serial_fraction or 1.0) * num_steps(op, tensors) * len(weight_matrices(op, tensors)) / 2
