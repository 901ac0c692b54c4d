"""Workspace of one operator's backward besides saved tensors: gradients, and temporaries of its formula.

In: an operator, its tensors as it reads them. Out: bytes, measured on torch's CPU kernels and derived from
torch/csrc/autograd/FunctionsManual.cpp. Not modelled: the order in which a formula frees its temporaries.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from math import prod

from shardwise.model.graph import DTYPE_BYTES, Operator, Tensor
from shardwise.model.work import kind_of
from shardwise.ops import record_of
from shardwise.ops.attention import has_score_dropout
from shardwise.ops.transforms import fft_dim_and_length


def working_bytes(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str], persistent_values: Set[str], extra_bytes: float) -> float:
    """Return the workspace of an operator that has a gradient. `persistent_values`: parameters, whose gradients are counted elsewhere.
    `extra_bytes`: saved tensors that are no value of the graph."""
    record, out = record_of(op), tensors[op.outputs[0]]
    gradient_bytes = sum(tensors[v].size_bytes for v in op.outputs if v in grads)
    differentiable = [v for v in dict.fromkeys(op.inputs) if v in grads]
    inner = [v for v in differentiable if v not in persistent_values]
    in_place = record.gradient in ("same", "summed")
    if in_place or (record.view_kind == "cast" and tensors[op.inputs[0]].dtype == out.dtype):
        # Gradients of broadcast operands are reduced into a separate tensor.
        return gradient_bytes + sum(tensors[v].size_bytes for v in inner if record.gradient == "summed" and tensors[v].size < out.size)
    if record.gradient == "broadcast":
        size = gradient_bytes + sum(max(tensors[v].size_bytes, out.size_bytes) for v in differentiable)
        return size + 2.0 * out.size_bytes * (record.linear == "numerator" and len(op.inputs) > 1 and op.inputs[1] in grads)
    size = gradient_bytes + sum(tensors[v].size_bytes for v in inner)
    if not op.inputs:
        return size
    x = tensors[op.inputs[0]]
    if record.fuses_softmax:  # the gradient of its saved tensors
        return size + extra_bytes
    if kind_of(op) == "attention":  # recomputed scores, and their gradient
        scores = x.size_bytes / x.shape[-1] * tensors[op.inputs[1]].shape[-2]
        if has_score_dropout(op):  # gradients before and after softmax, in float32 or wider; none of queries and keys yet
            values = tensors[op.inputs[2]].size_bytes
            return values + 2.0 * max(1.0, 4.0 / DTYPE_BYTES[x.dtype]) * scores
        return size + min(extra_bytes, 2.0 * scores)
    if kind_of(op) == "recurrent":  # gates and states of one step
        return size + 2.0 * out.size_bytes
    if record.gradient == "padded":  # backward works on complex numbers of full length
        dim, length = fft_dim_and_length(op, tensors)
        return size + 16.0 * prod(out.shape) / out.shape[dim] * length
    if record.gradient == "spectrum" and x.is_float:
        return size + out.size_bytes
    if x.dtype.startswith("complex") and record.conjugates_saved:  # the conjugate of a saved tensor
        size += x.size_bytes
    if record.gradient == "scattered" and x.dtype == "bfloat16":  # bfloat16 accumulates in float32
        size += 2 * x.size_bytes
    return size + record.backward_temporaries * x.size_bytes
