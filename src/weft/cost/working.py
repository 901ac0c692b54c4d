"""Bytes that there are while one operator's backward runs, beside what was kept for it: gradients, and what its formula makes on the way.

In: an operator, its tensors as it reads them. Out: bytes, found by watching torch's kernels for processors and by reading
torch/csrc/autograd/FunctionsManual.cpp. Not modelled: the order in which a formula frees what it made.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from math import prod

from weft.model.cores import drops_scores
from weft.model.graph import DTYPE_BYTES, Operator, Tensor
from weft.model.work import kind_of, packet, transformed

# Their gradient is their operand's, in the same memory.
_SAME = frozenset(
    "view reshape _unsafe_view view_as reshape_as transpose permute t numpy_T mT swapaxes swapdims movedim unsqueeze squeeze alias "
    "unflatten flatten contiguous identity add sub cat stack sum".split()
)
# Products of their operands: of an operand that is repeated the gradient is as large as the result before it is summed.
_BROADCAST = frozenset("mul div where maximum minimum".split())
# What formulas make besides gradients, in sizes of the first operand: powers and products of them, what is turned round to be summed up
# backwards, masks of where the largest stands and how many there are.
_MAKES = {"pow": 2.0, "abs": 1.0, "cumsum": 2.0, "cumprod": 3.2, "amax": 1.3, "amin": 1.3, "instance_norm": 1.0}
_SCATTERS = frozenset("gather take_along_dim".split())  # their gradient is added up where its elements came from
_FROM_REAL = frozenset("fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn".split())


def working_bytes(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str], held: Set[str], extra_bytes: float) -> float:
    """Of an operator that has a gradient. `held`: parameters, whose gradients are counted where they are kept. `extra_bytes`: what it
    keeps that is no value of the graph."""
    name, out = packet(op), tensors[op.outputs[0]]
    made = sum(tensors[v].size_bytes for v in op.outputs if v in grads)
    learns = [v for v in dict.fromkeys(op.inputs) if v in grads]
    into = [v for v in learns if v not in held]
    is_same = name in _SAME or (kind_of(op) == "view" and name in ("to", "_to_copy"))
    if is_same or (name in ("to", "_to_copy") and tensors[op.inputs[0]].dtype == out.dtype):
        # Operands that were repeated get a sum of their own.
        return made + sum(tensors[v].size_bytes for v in into if name in ("add", "sub") and tensors[v].size < out.size)
    if name in _BROADCAST:
        size = made + sum(max(tensors[v].size_bytes, out.size_bytes) for v in learns)
        return size + 2.0 * out.size_bytes * (name == "div" and len(op.inputs) > 1 and op.inputs[1] in grads)
    size = made + sum(tensors[v].size_bytes for v in into)
    if not op.inputs:
        return size
    x = tensors[op.inputs[0]]
    if name == "cross_entropy_loss":  # the gradient of what it kept
        return size + extra_bytes
    if kind_of(op) == "attention":  # scores again, and their gradient
        scores = x.size_bytes / x.shape[-1] * tensors[op.inputs[1]].shape[-2]
        if drops_scores(op):  # gradients before and after softmax, in float32 at least; of queries and keys there are none yet
            values = tensors[op.inputs[2]].size_bytes
            return values + 2.0 * max(1.0, 4.0 / DTYPE_BYTES[x.dtype]) * scores
        return size + min(extra_bytes, 2.0 * scores)
    if kind_of(op) == "recurrent":  # of gates and states, a step at a time
        return size + 2.0 * out.size_bytes
    if name in ("fft_rfft", "fft_ihfft"):  # backward is of complex numbers throughout, at full length
        at, length = transformed(op, tensors)
        return size + 16.0 * prod(out.shape) / out.shape[at] * length
    if name in _FROM_REAL and x.is_float:
        return size + out.size_bytes
    if x.dtype.startswith("complex") and name in ("exp", "tanh", "sigmoid", "sqrt"):  # the conjugate of what was kept
        size += x.size_bytes
    if name in _SCATTERS and x.dtype == "bfloat16":  # what is added up in narrow numbers is added up in float32
        size += 2 * x.size_bytes
    return size + _MAKES.get(name, 0.0) * x.size_bytes


_TURNS_GRADIENT = {"gelu": 2.0, "softmax": 1.0, "_softmax": 1.0, "log_softmax": 1.0, "layer_norm": 1.0, "group_norm": 1.0, "linear": 1.0}


def turned_bytes(op: Operator, tensors: Mapping[str, Tensor]) -> float:
    """Bytes that processors take besides where the gradient comes in another order than what was kept lies in: kernels that go over memory
    as it lies have it copied; oneDNN's of GELU has what it makes copied, too."""
    return _TURNS_GRADIENT.get(packet(op), 0.0) * tensors[op.outputs[0]].size_bytes
