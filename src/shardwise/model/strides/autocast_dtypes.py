"""Dtypes under torch's 16-bit autocast on CPUs: which values are 16-bit, which operands are cast first.

From a graph as traced in float32 to the same graph with the dtypes of a run; float16 is written as bfloat16, which has the same width.
Every operator of torch's table (aten/src/ATen/autocast_mode.h, the lists for CPU) is of one of three kinds: products cast inputs to
bfloat16, losses, transforms and decompositions to float32, `cat` and `stack` to the widest input. Others are not touched: types are
promoted, norms have their input's. Not modeled: recurrent layers, whose widths differ inside; they count as products.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from shardwise.model.gradients import parameters_with_gradient
from shardwise.model.graph import Graph, Operator, Tensor, Word, written_buffers
from shardwise.ops import autocast_policy, record_of
from shardwise.ops.vocabulary import AutocastPolicy, LoweringKind

CAST, HELD = "cast", "held"  # autocast over weights of 32 bits, and over weights that are held in 16


def cast_operands(op: Operator, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return, by value, the operands that autocast casts, in their new dtype. `tensors`: with the dtypes of the run."""
    to = autocast_dtype(op, tensors)
    if not to:
        return {}
    casted = {v: tensors[v] for v in op.inputs if tensors[v].dtype in ("float32", "bfloat16") and tensors[v].dtype != to}
    return {v: replace(t, dtype=to) for v, t in casted.items()}


def autocast_dtype(op: Operator, tensors: Mapping[str, Tensor]) -> str:
    """Return the dtype to which autocast casts an operator's operands; "" for none."""
    if op.autocast == "off":
        return ""
    return {AutocastPolicy.LOW_PRECISION: "bfloat16", AutocastPolicy.FLOAT32: "float32"}.get(autocast_policy(op, tensors), "")


def narrow_parameters(graph: Graph) -> frozenset[str]:
    """Return the names of the parameters that 16-bit precisions hold in 16 bits: trained in float32, and not written by the model itself.

    Weights of batch norms stay in float32, like the running statistics that their kernels read beside them, and so do those of norms
    whose input is float32 (a residual stream that frozen weights or the batch began), whose kernels take no narrower ones.
    """
    statistical = {v for op in graph.operators if record_of(op).lowering == LoweringKind.BATCH_NORM for v in op.inputs}
    wide = statistical | written_buffers(graph)
    trained = parameters_with_gradient(graph) - wide
    narrow = {v.value: v.name for v in graph.parameters if v.trainable and v.value in trained and v.tensor.dtype == "float32"}
    tensors = apply_autocast(graph, frozenset(narrow.values())).tensors
    norms = [op for op in graph.operators if record_of(op).autocast == AutocastPolicy.FIRST_OPERAND]
    wide = {v for op in norms if tensors[op.inputs[0]].dtype == "float32" for v in op.inputs[1:]}
    return frozenset(name for value, name in narrow.items() if value not in wide)


def apply_autocast(graph: Graph, held_narrow: Collection[str] = ()) -> Graph:
    """Return the graph with the dtypes that its tensors have under autocast, where parameters of the names `held_narrow` have 16 bits."""
    tensors = dict(graph.tensors)
    tensors.update({v.value: replace(tensors[v.value], dtype="bfloat16") for v in graph.parameters if v.name in held_narrow})
    for op in graph.operators:
        policy = autocast_policy(op, tensors)
        all_narrow = policy != AutocastPolicy.PER_OPERAND and _is_narrow(op, tensors)
        for i, v in enumerate(op.outputs[:1] if policy == AutocastPolicy.FIRST_OPERAND else op.outputs):  # statistics are float32
            if tensors[v].dtype == "float32" and (
                all_narrow or (policy == AutocastPolicy.PER_OPERAND and tensors[op.inputs[i]].dtype == "bfloat16")
            ):
                tensors[v] = replace(tensors[v], dtype="bfloat16")
    return replace(graph, tensors=tensors)


def _is_narrow(op: Operator, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether an operator's floating-point outputs are bfloat16."""
    to = autocast_dtype(op, tensors)
    if to or any(isinstance(a, Word) and a.kind == "dtype" for a in (*op.args, *dict(op.kwargs).values())):
        return to == "bfloat16"
    record, policy = record_of(op), autocast_policy(op, tensors)
    if policy == AutocastPolicy.LOW_PRECISION_OUTPUT and op.autocast != "off":
        return True
    decide = op.inputs[:1] if policy == AutocastPolicy.FIRST_OPERAND else op.inputs
    if policy == AutocastPolicy.LAST_STATE and record.recurrence is not None and op.autocast != "off":
        decide = op.inputs[record.recurrence.num_states :][:1]
    return _promotes_to_bfloat16(tensors[v] for v in decide if tensors[v].dtype in ("float32", "bfloat16"))


def _promotes_to_bfloat16(floats: Iterable[Tensor]) -> bool:
    """Return whether type promotion gives bfloat16; scalars do not widen other tensors."""
    floats = list(floats)
    decide = [t for t in floats if t.shape] or floats
    return bool(decide) and all(t.dtype == "bfloat16" for t in decide)
