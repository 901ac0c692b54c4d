"""Bytes that there are while one operator's backward runs, beside what was kept for it: gradients, and what its formula makes on the way.

In: an operator, its tensors as it reads them. Out: bytes, found by watching torch's kernels for processors and by reading
torch/csrc/autograd/FunctionsManual.cpp. Not modelled: the order in which a formula frees what it made.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from math import prod

from weft.model.graph import DTYPE_BYTES, Operator, Tensor
from weft.model.work import kind_of
from weft.ops import record_of
from weft.ops.attention import drops_scores
from weft.ops.transforms import transformed


def working_bytes(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str], held: Set[str], extra_bytes: float) -> float:
    """Of an operator that has a gradient. `held`: parameters, whose gradients are counted where they are kept. `extra_bytes`: what it
    keeps that is no value of the graph."""
    record, out = record_of(op), tensors[op.outputs[0]]
    gradient_bytes = sum(tensors[v].size_bytes for v in op.outputs if v in grads)
    learns = [v for v in dict.fromkeys(op.inputs) if v in grads]
    into = [v for v in learns if v not in held]
    in_place = record.gradient in ("same", "summed")
    if in_place or (record.moves == "cast" and tensors[op.inputs[0]].dtype == out.dtype):
        # Operands that were repeated get a sum of their own.
        return gradient_bytes + sum(tensors[v].size_bytes for v in into if record.gradient == "summed" and tensors[v].size < out.size)
    if record.gradient == "broadcast":
        size = gradient_bytes + sum(max(tensors[v].size_bytes, out.size_bytes) for v in learns)
        return size + 2.0 * out.size_bytes * (record.linear == "numerator" and len(op.inputs) > 1 and op.inputs[1] in grads)
    size = gradient_bytes + sum(tensors[v].size_bytes for v in into)
    if not op.inputs:
        return size
    x = tensors[op.inputs[0]]
    if record.fuses_softmax:  # the gradient of what it kept
        return size + extra_bytes
    if kind_of(op) == "attention":  # scores again, and their gradient
        scores = x.size_bytes / x.shape[-1] * tensors[op.inputs[1]].shape[-2]
        if drops_scores(op):  # gradients before and after softmax, in float32 at least; of queries and keys there are none yet
            values = tensors[op.inputs[2]].size_bytes
            return values + 2.0 * max(1.0, 4.0 / DTYPE_BYTES[x.dtype]) * scores
        return size + min(extra_bytes, 2.0 * scores)
    if kind_of(op) == "recurrent":  # of gates and states, a step at a time
        return size + 2.0 * out.size_bytes
    if record.gradient == "padded":  # backward is of complex numbers throughout, at full length
        at, length = transformed(op, tensors)
        return size + 16.0 * prod(out.shape) / out.shape[at] * length
    if record.gradient == "spectrum" and x.is_float:
        return size + out.size_bytes
    if x.dtype.startswith("complex") and record.conjugates:  # the conjugate of what was kept
        size += x.size_bytes
    if record.gradient == "scattered" and x.dtype == "bfloat16":  # what is added up in narrow numbers is added up in float32
        size += 2 * x.size_bytes
    return size + record.makes * x.size_bytes
