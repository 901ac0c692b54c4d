"""What each operator of a `Graph` costs: FLOPs, bytes it moves, what backward keeps. In: a graph. Out: one `Work` an operator.

FLOPs count the multiplications and additions of matrix-product-like operators only (2 a multiply-add), attention in full even
where it is causal, as is the custom (Narayan et al. 2021, equation 3). Everything else is priced by the bytes that it moves.
A function with a backward of the user's own costs what the operators of both take, each by itself. Not modelled: kernels that a compiler
fuses, and sparsity.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from weft.model.gradients import learns_by
from weft.model.graph import Graph, Operator, Tensor
from weft.ops import idle, record_of, windows_of
from weft.ops.sliding_window import Sliding

FLOPS_A_BYTE = 8.0  # that one core makes while it moves a byte: some 50 GFLOP/s beside 6 GB/s
WINDOW_BEGINS = 12.0  # entries of a window that are as long as it takes to begin one
MATMUL_KINDS = ("linear", "attention", "convolution", "recurrent")


@dataclass(frozen=True, slots=True)
class Work:
    """One operator, whole, for the graph's batch.

    `kind`: linear, attention, convolution, recurrent, elementwise, activation, norm, batch_norm, softmax, gather, make or view.
    `flops` and `backward_flops`: of matrix products. `bytes` and `backward_bytes`: read and written. `keeps`: values that backward
    needs; `extra_bytes`: tensors that backward needs and that are no value of the graph (masks, logarithms of softmax). `weight_bytes`:
    of a product's operands that are the same for every sample, once for each step of a recurrence, known to whoever knows what follows the
    samples. `scores`: of attention, and `channels`: of each group of a convolution in narrow groups, known to whoever knows its ranks.
    `steps`: of a recurrence that run one by one, as many small operators.
    `taps` and `backward_taps`: entries of windows that are read one by one, in additions of one number.
    `cast_bytes` and `backward_cast_bytes`: read and written to have operands, and then their gradients, in another dtype.
    """

    kind: str
    flops: float = 0.0
    backward_flops: float = 0.0
    bytes: float = 0.0
    backward_bytes: float = 0.0
    keeps: tuple[str, ...] = ()
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
    """Kind of an operator: what its speed depends on."""
    if op.function is not None:
        return op.function.kind
    return "view" if idle(op) else record_of(op).kind


def operator_flops(op: Operator, tensors: dict[str, Tensor]) -> float:
    """FLOPs of a matrix-product-like operator, 2 a multiply-add; 0 for the rest.

    Linear, matmul, einsum: 2 x (size of the product space). Convolution: 2 x outputs x (kernel x channels of a group). Attention:
    2·L·S·(E + Ev) a head. Recurrent: 2 x (weights) a step and layer.
    """
    if op.function is not None:
        return op.function.flops
    flops = record_of(op).flops
    return flops(op, tensors) if flops is not None else 0.0


def num_steps(op: Operator, tensors: Mapping[str, Tensor]) -> int:
    """Times that an operator goes over its weights: the length of a recurrence's sequences, 1 for the rest."""
    shape = tensors[op.inputs[0]].shape if op.inputs else ()
    return shape[1 if op.args[-1] is True else 0] if record_of(op).recurrence and len(shape) == 3 else 1


def operator_bytes(op: Operator, tensors: dict[str, Tensor]) -> float:
    """Bytes that an operator reads and writes in forward; a view moves none, a look-up only what it finds."""
    kind = kind_of(op)
    if kind == "view":
        return 0.0
    if op.function is not None:
        return op.function.bytes
    written = sum(tensors[v].size_bytes for v in op.outputs)
    if kind == "gather":
        return 2.0 * written
    record = record_of(op)
    if not record.reads:
        return float(written)  # of what it is made like only the shape is read
    read = sum(tensors[v].size_bytes for v in dict.fromkeys(op.inputs))
    # The fused loss also writes the logarithms of the softmax, which backward keeps.
    return float(written + read + (tensors[op.inputs[0]].size_bytes if record.fuses_softmax else 0))


def closure(graph: Graph, start: set[str], reads: Callable[[Operator], Sequence[str]] = lambda op: op.inputs) -> set[str]:
    """Values that depend on those of `start`, by what `reads` names of each operator's inputs."""
    reached = set(start)
    for op in graph.operators:
        if any(value in reached for value in reads(op)):
            reached.update(op.outputs)
    return reached


def differentiable(graph: Graph) -> set[str]:
    """Values whose gradient backward computes: trainable parameters, and what depends on them and on what the loss depends.

    Complex numbers have gradients as real ones do. See `learns_by` for what has none.
    """
    start = {v.value for v in graph.parameters if v.trainable}
    reached = closure(graph, start, lambda op: learns_by(op) if any(graph.tensors[v].can_learn for v in op.outputs) else ())
    wanted = {graph.loss, *graph.outputs}
    for op in reversed(graph.operators):
        if not wanted.isdisjoint(op.outputs):
            wanted.update(learns_by(op))
    return {value for value in reached & wanted if graph.tensors[value].can_learn}


def batched(graph: Graph) -> set[str]:
    """Values whose size follows the number of samples: everything that depends on a batched input; what is repeated for as many (learned
    queries); what is made of numbers alone (the state in which a recurrence begins), is as long and is read together with such."""
    rows, tensors = (graph.batch_size,), graph.tensors
    values = {v.value for v in graph.inputs if v.batched}
    if graph.batch_size < 2:
        return closure(graph, values)
    for op in graph.operators:
        if record_of(op).moves in ("expand", "repeat") and tensors[op.inputs[0]].shape[:1] != rows:
            values.update(v for v in op.outputs if tensors[v].shape[:1] == rows)
    values = closure(graph, values)
    starts = {v for op in graph.operators if not op.inputs for v in op.outputs if tensors[v].shape[:1] == rows} - values
    if not starts:
        return values
    met = [v for op in graph.operators if any(w in values and tensors[w].shape[:1] == rows for w in op.inputs) for v in op.inputs]
    return closure(graph, values | starts.intersection(met))


def storages(graph: Graph, copied: Collection[str] = frozenset()) -> dict[str, str]:
    """For every value, the value whose memory it is: views share their source's, but for those that are `copied`."""
    root: dict[str, str] = {}
    for op in graph.operators:
        record = record_of(op)
        aliases = kind_of(op) == "view" or (
            record.moves in ("rows", "cast") and graph.tensors[op.inputs[0]].dtype == graph.tensors[op.outputs[0]].dtype
        )
        apart = record.autocast == "apart"  # a view of each
        for i, value in enumerate(op.outputs):
            source = op.inputs[i if apart else 0] if aliases and op.inputs and value not in copied else value
            root[value] = root.get(source, source)
    return root


def work(graph: Graph, cast: Callable[[Operator, Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None) -> dict[str, Work]:
    """The work of every operator, by its name. `cast`: what it reads in another dtype than it has, see `weft.model.storage.autocast`."""
    grads, tensors = differentiable(graph), graph.tensors
    by_operator = {}
    for op in graph.operators:
        read = cast(op, tensors) if cast else {}
        done = _work(op, {**tensors, **read} if read else tensors, grads)
        if read:
            moved = {v: float(tensors[v].size_bytes + t.size_bytes) for v, t in read.items()}
            back = sum(size for v, size in moved.items() if v in grads) if done.backward_bytes else 0.0
            done = replace(done, cast_bytes=sum(moved.values()), backward_cast_bytes=back)
        by_operator[op.name] = done
    return by_operator


def _work(op: Operator, tensors: dict[str, Tensor], grads: set[str]) -> Work:
    kind, record = kind_of(op), record_of(op)
    if kind == "view":
        return Work("view")
    inputs = tuple(dict.fromkeys(op.inputs))
    flops = operator_flops(op, tensors)
    into = [v for v in inputs if v in grads]
    moved = operator_bytes(op, tensors)
    if not any(v in grads for v in op.outputs):
        return Work(kind, flops, 0.0, moved, taps=taps(op, tensors)[0])
    if op.function is not None:
        does, values = op.function, (*op.inputs, *op.outputs)
        saved = tuple(dict.fromkeys(values[i] for i in does.keeps))
        return Work(kind, flops, does.backward_flops, moved, does.backward_bytes, saved, does.extra_bytes)
    keeps, extra = record.keeps(op, tensors, grads)
    through = (*op.outputs, *into) if kind == "gather" else (*op.outputs, *into, *keeps)
    back = sum(tensors[v].size_bytes for v in through) + extra * (2 if record.fuses_softmax else 1)
    back_flops = 0.0
    if kind in MATMUL_KINDS:
        # A product differentiates to one product for each operand; attention also forms its scores again.
        operands = {"attention": 2.5, "recurrent": 2.0}.get(kind, float(sum(1 for v in into if len(tensors[v].shape) > 1)))
        back_flops = flops * operands
    forward_taps, backward_taps = taps(op, tensors)
    return Work(kind, flops, back_flops, moved, back, keeps, extra, taps=forward_taps, backward_taps=backward_taps)


def taps(op: Operator, tensors: Mapping[str, Tensor]) -> tuple[float, float]:
    """Entries that windows without products read, forward and backward, in additions of one number: outputs x entries of a window, and
    what each window takes to begin."""
    windows = record_of(op).windows
    if windows is None or not any(windows.tap):
        return 0.0, 0.0
    entries = prod(window.kernel for window in windows_of(op, tensors).values() if isinstance(window, Sliding))
    each = tensors[op.outputs[0]].size * (entries + WINDOW_BEGINS)
    return each * windows.tap[0], each * windows.tap[1]


def stage_work(works: Mapping[str, Work], stages: Iterable[Sequence[Operator]]) -> tuple[float, ...]:
    """How much work a forward of each stage is against the others: its FLOPs, and those that its bytes are worth."""
    return tuple(sum(works[op.name].flops + FLOPS_A_BYTE * works[op.name].bytes for op in operators) for operators in stages)


def model_flops(graph: Graph) -> float:
    """FLOPs of one training step on the graph's batch: three times those of forward; recomputation is not counted.

    For a GPT of l layers, hidden size h, sequence s, vocabulary V and batch B: 72·B·s·l·h²·(1 + s/(6h) + V/(12·l·h)), which is
    equation 3 of Narayan et al. 2021 without its recomputation (72 in place of 96).
    """
    return 3.0 * sum(operator_flops(op, graph.tensors) for op in graph.operators)
