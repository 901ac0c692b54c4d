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
from weft.model.graph import Graph, Operator, Ref, Tensor

FLOPS_A_BYTE = 8.0  # that one core makes while it moves a byte: some 50 GFLOP/s beside 6 GB/s
MATMUL_KINDS = ("linear", "attention", "convolution", "recurrent")
RECURRENT_KEEPS = 5.0  # gates and cell state of every step and layer, in its output's size (LSTM; fewer for the others)

_CELL_KEEPS = {
    "lstm_cell": 5,
    "gru_cell": 6,
}  # states that a cell's backward keeps beside what it read: its gates; others keep their output


@dataclass(frozen=True, slots=True)
class Work:
    """One operator, whole, for the graph's batch.

    `kind`: linear, attention, convolution, recurrent, elementwise, activation, norm, batch_norm, softmax, gather, make or view.
    `flops` and `backward_flops`: of matrix products. `bytes` and `backward_bytes`: read and written. `keeps`: values that backward
    needs; `extra_bytes`: tensors that backward needs and that are no value of the graph (masks, logarithms of softmax). `weight_bytes`:
    of a product's operands that are the same for every sample, once for each step of a recurrence, known to whoever knows what follows the
    samples. `scores`: of attention, and `channels`: of each group of a convolution in narrow groups, known to whoever knows its ranks.
    `steps`: of a recurrence that run one by one, as many small operators.
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


def _kinds() -> dict[str, str]:
    names = {
        "linear": "linear mm matmul bmm addmm baddbmm einsum dot mv addmv _grouped_mm grouped_mm tensordot",
        "convolution": "conv1d conv2d conv3d convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d",
        "attention": "scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math",
        "recurrent": "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
        "activation": "gelu silu tanh sigmoid exp erf mish softplus elu selu pow sqrt rsqrt cos sin log log1p log_sigmoid logsigmoid "
        "log_sigmoid_forward hardswish exp2 expm1 atan2",
        "norm": "layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm native_group_norm",
        "batch_norm": "batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional instance_norm "
        "cudnn_batch_norm",
        "softmax": "softmax _softmax _safe_softmax log_softmax _log_softmax cross_entropy_loss logsumexp",
        "gather": "embedding index index_select gather nll_loss nll_loss_forward nll_loss_nd take_along_dim",
        "make": "arange zeros ones full empty zeros_like ones_like full_like empty_like scalar_tensor new_zeros new_ones new_full "
        "lift_fresh_copy tril triu one_hot eye linspace",
        "view": "view reshape _unsafe_view transpose permute t unsqueeze squeeze expand expand_as select slice split chunk unbind "
        "detach split_with_sizes tensor_split alias unflatten flatten movedim narrow numpy_T view_as unfold diagonal swapaxes swapdims mT "
        "identity real imag view_as_real broadcast_tensors broadcast_to meshgrid",
    }
    return {name: kind for kind, packed in names.items() for name in packed.split()}


KINDS = _kinds()
# What an elementwise operator's backward keeps; those of neither list keep nothing (add), or are told apart below (mul).
_OUTPUT = "relu tanh sigmoid exp exp2 expm1 sqrt rsqrt reciprocal softmax _softmax _safe_softmax log_softmax _log_softmax"
_BOTH = "cumprod prod logcumsumexp logsumexp amax amin norm linalg_vector_norm linalg_matrix_norm linalg_norm"
_CHOOSES = "max min topk sort msort kthvalue mode median nanmedian cummax cummin"  # where they tell which, that is all that is kept
_NOTHING = (
    "add sub rsub neg cat stack sum mean clone contiguous to _to_copy type_as pad constant_pad_nd roll flip repeat repeat_interleave "
    "fill zeros_like copy masked_fill masked_scatter where bitwise_not logical_not eq ne lt le gt ge "
    "upsample_nearest1d upsample_nearest2d upsample_bilinear2d cumsum round "
    "floor ceil pixel_shuffle slice_scatter select_scatter index_put scatter scatter_add im2col col2im "
    "trapezoid diff fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_irfft fft_irfft2 fft_irfftn fft_hfft fft_fftshift "
    "fft_ifftshift view_as_complex conj resolve_conj"
)
_PADDED = frozenset("fft_rfft fft_ihfft".split())  # of numbers of one dimension, whose length may be given
KEEPS_OUTPUT, KEEPS_NOTHING = frozenset(_OUTPUT.split()), frozenset(_NOTHING.split())
KEEPS_BOTH, CHOOSES = frozenset(_BOTH.split()), frozenset(_CHOOSES.split())


def packet(op: Operator) -> str:
    """`aten.linear.default` -> `linear`."""
    parts = op.target.split(".")
    return parts[1] if len(parts) > 1 else op.target


def kind_of(op: Operator) -> str:
    """Kind of an operator: what its speed depends on; elementwise where it is not listed."""
    if op.function is not None:
        return op.function.kind
    name = packet(op)
    if name in ("dropout", "feature_dropout", "alpha_dropout") and not drops(op):
        return "view"
    return KINDS.get(name, "elementwise")


def drops(op: Operator) -> bool:
    """Whether a dropout operator does anything."""
    chance = op.args[1] if len(op.args) > 1 else 0.5
    training = op.args[2] if len(op.args) > 2 else True
    return bool(training) and isinstance(chance, int | float) and chance > 0


def operator_flops(op: Operator, tensors: dict[str, Tensor]) -> float:
    """FLOPs of a matrix-product-like operator, 2 a multiply-add; 0 for the rest.

    Linear, matmul, einsum: 2 x (size of the product space). Convolution: 2 x outputs x (kernel x channels of a group). Attention:
    2·L·S·(E + Ev) a head. Recurrent: 2 x (weights) a step and layer.
    """
    if op.function is not None:
        return op.function.flops
    kind, name = kind_of(op), packet(op)
    if kind not in MATMUL_KINDS:
        return 0.0
    shapes = [tensors[v].shape for v in op.inputs]
    out = tensors[op.outputs[0]].size
    if kind == "attention":
        query, key, value = shapes[:3]
        return 2.0 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    if kind == "convolution":
        return 2.0 * (prod(shapes[0]) if is_transposed(op) else out) * prod(shapes[1][1:])
    if kind == "recurrent":
        steps = prod(shapes[0][:-1])
        return sum(2.0 * steps * prod(shape) for shape in _recurrent_weights(op, tensors))
    if name == "einsum":
        return _einsum_flops(str(op.args[0]), shapes)
    first = shapes[1] if name in ("addmm", "baddbmm", "addmv") else shapes[0]
    return 2.0 * out * (first[-1] if first else 1)


def is_transposed(op: Operator) -> bool:
    """Whether a convolution is the transposed one, which spreads each place of its input over a window."""
    name = packet(op)
    return "transpose" in name or (name in ("convolution", "_convolution") and len(op.args) > 6 and op.args[6] is True)


def num_steps(op: Operator, tensors: Mapping[str, Tensor]) -> int:
    """Times that an operator goes over its weights: the length of a recurrence's sequences, 1 for the rest."""
    shape = tensors[op.inputs[0]].shape if op.inputs else ()
    return shape[1 if op.args[-1] is True else 0] if kind_of(op) == "recurrent" and len(shape) == 3 else 1


def num_layers(op: Operator, tensors: Mapping[str, Tensor]) -> float:
    """Layers of a recurrent operator; both directions of one make its output together."""
    directions = 2 if len(op.args) > 1 and op.args[-2] is True else 1
    return num_matrices(op, tensors) / 2 / directions


def num_matrices(op: Operator, tensors: Mapping[str, Tensor]) -> int:
    """Matrices of weights of a recurrent operator: two for each layer and direction."""
    return len(_recurrent_weights(op, tensors))


def _cell_states(name: str) -> int:
    """How many states a cell, one step of a recurrence, reads beside its input; 0 for an operator that makes all of the steps."""
    return 0 if not name.endswith("_cell") else 2 if name == "lstm_cell" else 1


def _recurrent_weights(op: Operator, tensors: Mapping[str, Tensor]) -> list[tuple[int, ...]]:
    """Shapes of the matrices of a recurrent operator; the states of a cell are no matrices of weights."""
    shapes = (tensors[v].shape for v in op.inputs[1 + _cell_states(packet(op)) :])
    return [shape for shape in shapes if len(shape) == 2]


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
    if packet(op).endswith("_like") or packet(op).startswith("new_"):
        return float(written)  # of what it is made like only the shape is read
    read = sum(tensors[v].size_bytes for v in dict.fromkeys(op.inputs))
    # The fused loss also writes the logarithms of the softmax, which backward keeps.
    return float(written + read + (tensors[op.inputs[0]].size_bytes if packet(op) == "cross_entropy_loss" else 0))


def _einsum_flops(equation: str, shapes: list[tuple[int, ...]]) -> float:
    """Two operands: the whole product space once; more: one such product for each operand after the first."""
    sizes: dict[str, int] = {}
    for term, shape in zip(equation.replace(" ", "").partition("->")[0].split(","), shapes, strict=False):
        head, dots, tail = term.partition("...")
        names = [*head, *(f"_{i}" for i in range(len(shape) - len(head) - len(tail))), *tail] if dots else [*term]
        sizes.update(zip(names, shape, strict=False))
    return 2.0 * prod(sizes.values()) * max(1, len(shapes) - 1)


def closure(graph: Graph, start: set[str], reads: Callable[[Operator], Sequence[str]] = lambda op: op.inputs) -> set[str]:
    """Values that depend on those of `start`, by what `reads` names of each operator's inputs."""
    found = set(start)
    for op in graph.operators:
        if any(value in found for value in reads(op)):
            found.update(op.outputs)
    return found


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
    found = {v.value for v in graph.inputs if v.batched}
    if graph.batch_size < 2:
        return closure(graph, found)
    for op in graph.operators:
        if packet(op) in ("expand", "expand_as", "broadcast_to", "repeat") and tensors[op.inputs[0]].shape[:1] != rows:
            found.update(v for v in op.outputs if tensors[v].shape[:1] == rows)
    found = closure(graph, found)
    starts = {v for op in graph.operators if not op.inputs for v in op.outputs if tensors[v].shape[:1] == rows} - found
    if not starts:
        return found
    met = [v for op in graph.operators if any(w in found and tensors[w].shape[:1] == rows for w in op.inputs) for v in op.inputs]
    return closure(graph, found | starts.intersection(met))


def storages(graph: Graph, copied: Collection[str] = frozenset()) -> dict[str, str]:
    """For every value, the value whose memory it is: views share their source's, but for those that are `copied`."""
    root: dict[str, str] = {}
    for op in graph.operators:
        same = kind_of(op) == "view" or (
            packet(op) in ("to", "_to_copy", "contiguous") and graph.tensors[op.inputs[0]].dtype == graph.tensors[op.outputs[0]].dtype
        )
        apart = packet(op) in ("broadcast_tensors", "meshgrid")  # a view of each
        for i, value in enumerate(op.outputs):
            source = op.inputs[i if apart else 0] if same and op.inputs and value not in copied else value
            root[value] = root.get(source, source)
    return root


def work(graph: Graph, cast: Callable[[Operator, Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None) -> dict[str, Work]:
    """The work of every operator, by its name. `cast`: what it reads in another dtype than it has, see `weft.model.autocast`."""
    grads, tensors = differentiable(graph), graph.tensors
    found = {}
    for op in graph.operators:
        read = cast(op, tensors) if cast else {}
        done = _work(op, {**tensors, **read} if read else tensors, grads)
        if read:
            moved = {v: float(tensors[v].size_bytes + t.size_bytes) for v, t in read.items()}
            back = sum(size for v, size in moved.items() if v in grads) if done.backward_bytes else 0.0
            done = replace(done, cast_bytes=sum(moved.values()), backward_cast_bytes=back)
        found[op.name] = done
    return found


def _work(op: Operator, tensors: dict[str, Tensor], grads: set[str]) -> Work:
    kind, name = kind_of(op), packet(op)
    if kind == "view":
        return Work("view")
    inputs = tuple(dict.fromkeys(op.inputs))
    flops = operator_flops(op, tensors)
    into = [v for v in inputs if v in grads]
    moved = operator_bytes(op, tensors)
    if not any(v in grads for v in op.outputs):
        return Work(kind, flops, 0.0, moved)
    if op.function is not None:
        does, values = op.function, (*op.inputs, *op.outputs)
        kept = tuple(dict.fromkeys(values[i] for i in does.keeps))
        return Work(kind, flops, does.backward_flops, moved, does.backward_bytes, kept, does.extra_bytes)
    keeps, extra = _keeps(op, name, kind, tensors, grads)
    through = (*op.outputs, *into) if kind == "gather" else (*op.outputs, *into, *keeps)
    back = sum(tensors[v].size_bytes for v in through) + extra * (2 if name == "cross_entropy_loss" else 1)
    back_flops = 0.0
    if kind in MATMUL_KINDS:
        # A product differentiates to one product for each operand; attention also forms its scores again.
        operands = {"attention": 2.5, "recurrent": 2.0}.get(kind, float(sum(1 for v in into if len(tensors[v].shape) > 1)))
        back_flops = flops * operands
    return Work(kind, flops, back_flops, moved, back, keeps, extra)


def _keeps(op: Operator, name: str, kind: str, tensors: dict[str, Tensor], grads: set[str]) -> tuple[tuple[str, ...], float]:
    """Values that backward keeps, and bytes of what it keeps that is no value of the graph."""
    inputs = tuple(dict.fromkeys(op.inputs))
    floats = tuple(v for v in inputs if tensors[v].can_learn)
    others = tuple(v for v in inputs if not tensors[v].can_learn)  # masks and indices
    out = op.outputs[0]
    if kind == "attention":
        query = tensors[inputs[0]]
        return (*inputs[:3], out), 4.0 * query.size / query.shape[-1]
    if kind == "recurrent":
        states = _cell_states(name)
        if states:
            gates = _CELL_KEEPS.get(name, 0)
            return tuple(dict.fromkeys((*op.inputs[: 1 + states], *op.outputs[: 0 if gates else 1]))), float(
                gates * tensors[out].size_bytes
            )
        weights = tuple(v for v in inputs[1:] if len(tensors[v].shape) == 2)
        return (*inputs[:1], *weights, out), RECURRENT_KEEPS * tensors[out].size_bytes * num_layers(op, tensors)
    if kind in ("linear", "convolution") or name in ("mul", "div"):
        bias = name in ("addmm", "baddbmm", "addmv")
        operands = [a.value for a in op.args if isinstance(a, Ref)][bias : bias + 2] if name != "einsum" else list(inputs)
        kept = [v for i, v in enumerate(operands) if any(o in grads for j, o in enumerate(operands) if j != i)]
        if len(operands) == 2 and operands[0] == operands[1]:
            kept = operands[:1]
        if name == "div" and len(operands) == 2 and operands[1] in grads:
            kept = operands
        return tuple(dict.fromkeys(kept)), 0.0
    if name == "cross_entropy_loss":
        return tuple(inputs[1:2]), float(tensors[inputs[0]].size_bytes)
    if name in KEEPS_OUTPUT:
        return (out,), 0.0
    if kind in ("norm", "batch_norm"):
        return (*inputs[:1], *op.outputs[1:3]), 0.0  # means and deviations, where they are values of the graph
    if kind == "gather":
        return (*inputs[: name in ("gather", "take_along_dim")], *others), 0.0
    if name in KEEPS_BOTH:
        return (*floats, out), 0.0
    if name in CHOOSES and len(op.outputs) > 1:
        return tuple(v for v in op.outputs if not tensors[v].can_learn), 0.0
    if name.startswith("adaptive_avg_pool") and all(n == 1 for n in tensors[out].shape[2:]):  # a mean
        return (), 0.0
    if name == "index_add":
        return tuple(op.inputs[1:]), 0.0
    if name in _PADDED:
        padded = _padded_bytes(op, tensors)
        return (inputs, 0.0) if padded == tensors[inputs[0]].size_bytes else ((), padded)
    if name in ("dropout", "native_dropout"):
        return (), 0.0  # backward draws again
    if name == "alpha_dropout":
        return (), float(tensors[out].size)  # which are kept, a byte each
    if "dropout" in name:
        return (), tensors[out].size_bytes / prod(tensors[out].shape[2:])  # channels are kept or dropped
    if "max_pool" in name:
        return inputs[:1], 0.0 if len(op.outputs) > 1 else 8.0 * tensors[out].size
    if name in KEEPS_NOTHING or kind == "make":
        return others, 0.0
    return floats, 0.0


def transformed(op: Operator, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Of a Fourier transform of one dimension: which it is, and the length to which that is cut or padded."""
    given = dict(op.kwargs)
    dim = op.args[2] if len(op.args) > 2 else given.get("dim", -1)
    at = dim if isinstance(dim, int) else -1
    length = op.args[1] if len(op.args) > 1 else given.get("n")
    return at, length if isinstance(length, int) else tensors[op.inputs[0]].shape[at]


def _padded_bytes(op: Operator, tensors: Mapping[str, Tensor]) -> float:
    """Bytes of what a transform reads once it is cut or padded."""
    x, (at, length) = tensors[op.inputs[0]], transformed(op, tensors)
    return x.size_bytes / x.shape[at] * length


def stage_work(works: Mapping[str, Work], stages: Iterable[Sequence[Operator]]) -> tuple[float, ...]:
    """How much work a forward of each stage is against the others: its FLOPs, and those that its bytes are worth."""
    return tuple(sum(works[op.name].flops + FLOPS_A_BYTE * works[op.name].bytes for op in operators) for operators in stages)


def model_flops(graph: Graph) -> float:
    """FLOPs of one training step on the graph's batch: three times those of forward; recomputation is not counted.

    For a GPT of l layers, hidden size h, sequence s, vocabulary V and batch B: 72·B·s·l·h²·(1 + s/(6h) + V/(12·l·h)), which is
    equation 3 of Narayan et al. 2021 without its recomputation (72 in place of 96).
    """
    return 3.0 * sum(operator_flops(op, graph.tensors) for op in graph.operators)
