"""Work of each operator of a `Graph`: FLOPs, bytes read and written, tensors saved for backward.

FLOPs count the multiplications and additions of matrix-product-like operators only (2 per multiply-add), attention in full even where it is
causal, as is customary (Narayan et al. 2021, equation 3). Everything else is priced by its bytes. An autograd function of the user's costs
what the operators of its forward and backward take one by one. Not modeled: compiler-fused kernels, sparsity.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardwise.model.dataflow import propagate_forward
from shardwise.model.gradients import differentiable_values
from shardwise.model.graph import Graph, Operator, Tensor
from shardwise.ops import is_identity, record_of, windows_of
from shardwise.ops.sliding_window import SlidingWindow
from shardwise.ops.vocabulary import AutocastPolicy, CostKind, ViewKind

FLOPS_PER_BYTE = 8.0  # of one core: some 50 GFLOP/s over 6 GB/s
WINDOW_START_TAPS = 12.0  # time to begin a window, in entries of it
MATMUL_KINDS = ("linear", "attention", "convolution", "recurrent")


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """Work of one operator, unsharded, for the graph's batch.

    `kind`: linear, attention, convolution, recurrent, elementwise, activation, norm, batch_norm, softmax, gather, make or view. `flops` and
    `backward_flops`: of matrix products. `bytes` and `backward_bytes`: read and written. `saved`: values that backward needs;
    `extra_bytes`: tensors that backward needs and that are no value of the graph (masks, logarithms of softmax). `weight_bytes`: of a
    product's operands that are the same for every sample, once per step of a recurrence (filled in by callers that know the batch
    dimensions). `scores`: of attention, and `channels`: per group of a convolution in narrow groups (filled in by callers that know the
    ranks). `steps`: of a recurrence that run serially, as many small operators. `taps` and `backward_taps`: window entries read one by
    one, in additions of one number. `cast_bytes` and `backward_cast_bytes`: read and written by casts of operands and of their gradients.
    """

    kind: str
    flops: float = 0.0
    backward_flops: float = 0.0
    bytes: float = 0.0
    backward_bytes: float = 0.0
    saved: tuple[str, ...] = ()
    extra_bytes: float = 0.0
    weight_bytes: float = 0.0
    scores: float = 0.0
    channels: float = 0.0
    steps: float = 0.0
    cast_bytes: float = 0.0
    backward_cast_bytes: float = 0.0
    taps: float = 0.0
    backward_taps: float = 0.0


def kind_of(op: Operator) -> str:
    """Return the kind of an operator, on which its speed depends."""
    if op.function is not None:
        return op.function.kind
    return (CostKind.VIEW if is_identity(op) else record_of(op).kind).value


def operator_flops(op: Operator, tensors: dict[str, Tensor]) -> float:
    """FLOPs of a matrix-product-like operator, 2 per multiply-add; 0 for the rest.

    Linear, matmul, einsum: 2 x (size of the product space). Convolution: 2 x outputs x (kernel x channels of a group). Attention: 2·L·S·(E
    + Ev) per head. Recurrent: 2 x (weights) per step and layer.
    """
    if op.function is not None:
        return op.function.flops
    flops = record_of(op).product.flops
    return flops(op, tensors) if flops is not None else 0.0


def num_steps(op: Operator, tensors: Mapping[str, Tensor]) -> int:
    """Return how often an operator reads its weights: the sequence length of a recurrence, 1 for the rest."""
    shape = tensors[op.inputs[0]].shape if op.inputs else ()
    return shape[1 if op.args[-1] is True else 0] if record_of(op).recurrence and len(shape) == 3 else 1


def operator_bytes(op: Operator, tensors: dict[str, Tensor]) -> float:
    """Bytes that an operator reads and writes in forward; 0 for a view, only the looked-up rows for a gather."""
    kind = kind_of(op)
    if kind == "view":
        return 0.0
    if op.function is not None:
        return op.function.bytes
    written = sum(tensors[v].size_bytes for v in op.outputs)
    if kind == "gather":
        return 2.0 * written
    record = record_of(op)
    if not record.output.reads_values:
        return float(written)  # only the shape of its input is read
    read = sum(tensors[v].size_bytes for v in dict.fromkeys(op.inputs))
    # The fused loss also writes the log-softmax, which is saved for backward.
    return float(written + read + (tensors[op.inputs[0]].size_bytes if record.backward.saves_log_softmax else 0))


def values_following_batch(graph: Graph) -> set[str]:
    """Return values whose size follows the number of samples: all that depend on a batched input; those expanded to as many rows (learned
    queries); constants of as many rows (the initial state of a recurrence) that are read together with such values."""
    rows, tensors = (graph.batch_size,), graph.tensors
    values = {v.value for v in graph.inputs if v.batched}
    if graph.batch_size < 2:
        return propagate_forward(graph.operators, values)
    for op in graph.operators:
        if record_of(op).view.kind in (ViewKind.EXPAND, ViewKind.REPEAT) and tensors[op.inputs[0]].shape[:1] != rows:
            values.update(v for v in op.outputs if tensors[v].shape[:1] == rows)
    values = propagate_forward(graph.operators, values)
    starts = {v for op in graph.operators if not op.inputs for v in op.outputs if tensors[v].shape[:1] == rows} - values
    if not starts:
        return values
    co_read = [v for op in graph.operators if any(w in values and tensors[w].shape[:1] == rows for w in op.inputs) for v in op.inputs]
    return propagate_forward(graph.operators, values | starts.intersection(co_read))


def storage_roots(graph: Graph, copied: Collection[str] = frozenset()) -> dict[str, str]:
    """Return, for every value, the value whose memory it shares: views share their source's, except those that are `copied`."""
    root: dict[str, str] = {}
    for op in graph.operators:
        record = record_of(op)
        aliases = kind_of(op) == "view" or (
            record.view.kind in (ViewKind.CONTIGUOUS, ViewKind.CAST)
            and graph.tensors[op.inputs[0]].dtype == graph.tensors[op.outputs[0]].dtype
        )
        one_view_each = record.autocast == AutocastPolicy.PER_OPERAND
        for i, value in enumerate(op.outputs):
            source = op.inputs[i if one_view_each else 0] if aliases and op.inputs and value not in copied else value
            root[value] = root.get(source, source)
    return root


def operator_work(
    graph: Graph, cast_operands_of: Callable[[Operator, Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
) -> dict[str, OperatorWork]:
    """Return the work of every operator by name. `cast`: inputs read in another dtype, see `shardwise.model.strides.autocast_dtypes`."""
    grads, tensors = differentiable_values(graph), graph.tensors
    by_operator = {}
    for op in graph.operators:
        read = cast_operands_of(op, tensors) if cast_operands_of else {}
        op_work = _work_of(op, {**tensors, **read} if read else tensors, grads)
        if read:
            cast_bytes = {v: float(tensors[v].size_bytes + t.size_bytes) for v, t in read.items()}
            backward_bytes = sum(size for v, size in cast_bytes.items() if v in grads) if op_work.backward_bytes else 0.0
            op_work = replace(op_work, cast_bytes=sum(cast_bytes.values()), backward_cast_bytes=backward_bytes)
        by_operator[op.name] = op_work
    return by_operator


def _work_of(op: Operator, tensors: dict[str, Tensor], grads: set[str]) -> OperatorWork:
    kind, record = kind_of(op), record_of(op)
    if kind == "view":
        return OperatorWork("view")
    inputs = tuple(dict.fromkeys(op.inputs))
    flops = operator_flops(op, tensors)
    inputs_with_grad = [v for v in inputs if v in grads]
    num_bytes = operator_bytes(op, tensors)
    if not any(v in grads for v in op.outputs):
        return OperatorWork(kind, flops, 0.0, num_bytes, taps=window_taps(op, tensors)[0])
    if op.function is not None:
        function, values = op.function, (*op.inputs, *op.outputs)
        saved = tuple(dict.fromkeys(values[i] for i in function.saved))
        return OperatorWork(kind, flops, function.backward_flops, num_bytes, function.backward_bytes, saved, function.extra_bytes)
    keeps, extra_bytes = record.backward.saved(op, tensors, grads)
    accessed = (*op.outputs, *inputs_with_grad) if kind == "gather" else (*op.outputs, *inputs_with_grad, *keeps)
    backward_bytes = sum(tensors[v].size_bytes for v in accessed) + extra_bytes * (2 if record.backward.saves_log_softmax else 1)
    back_flops = 0.0
    if kind in MATMUL_KINDS:
        # A product has one backward product per operand; attention also recomputes its scores.
        operands = {"attention": 2.5, "recurrent": 2.0}.get(kind, float(sum(1 for v in inputs_with_grad if len(tensors[v].shape) > 1)))
        back_flops = flops * operands
    forward_taps, backward_taps = window_taps(op, tensors)
    return OperatorWork(
        kind, flops, back_flops, num_bytes, backward_bytes, keeps, extra_bytes, taps=forward_taps, backward_taps=backward_taps
    )


def window_taps(op: Operator, tensors: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return entries read by windows that are no products, forward and backward, in additions of one number: outputs x window entries, plus
    the start of each window."""
    windows = record_of(op).windows
    if windows is None or not any(windows.tap_cost):
        return 0.0, 0.0
    entries = prod(window.kernel for window in windows_of(op, tensors).values() if isinstance(window, SlidingWindow))
    each = tensors[op.outputs[0]].size * (entries + WINDOW_START_TAPS)
    return each * windows.tap_cost[0], each * windows.tap_cost[1]


def stage_work(works: Mapping[str, OperatorWork], stages: Iterable[Sequence[Operator]]) -> tuple[float, ...]:
    """Return the relative forward work of each stage: FLOPs, plus bytes at `FLOPS_PER_BYTE`."""
    return tuple(sum(works[op.name].flops + FLOPS_PER_BYTE * works[op.name].bytes for op in operators) for operators in stages)


def model_flops(graph: Graph) -> float:
    """FLOPs of one training step on the graph's batch: three times those of forward; recompute is not counted.

    For a GPT of l layers, hidden size h, sequence s, vocabulary V and batch B: 72·B·s·l·h²·(1 + s/(6h) + V/(12·l·h)), which is equation 3
    of Narayan et al. 2021 without its recompute (72 in place of 96).
    """
    return 3.0 * sum(operator_flops(op, graph.tensors) for op in graph.operators)
