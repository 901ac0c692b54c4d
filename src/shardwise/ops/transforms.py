"""Batched linear algebra, Fourier transforms and distances: operators that treat each matrix, signal or row of a batch alike."""

from __future__ import annotations

from collections.abc import Set

from shardwise.ops.operator import Operator
from shardwise.ops.record import SAVES_INTEGERS, Backward, Op, Shape, Tensors
from shardwise.ops.rule import BLOCKED, Rule, leading_labels, shardable_labels
from shardwise.ops.saved_tensors import Saved, all_inputs, inputs_and_output, integer_inputs
from shardwise.ops.vocabulary import AutocastPolicy, GradientMemory, Linearity


def _batched_matrix_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of inverses, determinants, factorizations, solves: matrix by matrix."""
    count = len(ins[0]) - 2
    if (
        count < 0
        or any(len(s) != len(ins[0]) or s[:count] != ins[0][:count] for s in ins)
        or any(s[:count] != ins[0][:count] for s in outs)
    ):
        return None
    return Rule(tuple(leading_labels(s, count) for s in ins), tuple(leading_labels(s, count) for s in outs))


def _matrix_norm_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of norms over one dimension or two, which are removed or kept with size 1."""
    default = (-2, -1) if op.target.split(".")[1] == "linalg_matrix_norm" else None
    dims = (*op.args, None, None)[2] if len(op.args) > 2 else dict(op.kwargs).get("dim", default)
    over = tuple(range(len(ins[0]))) if dims is None else dims if isinstance(dims, tuple) else (dims,)
    reduced = [int(d) % max(len(ins[0]), 1) for d in over]
    labels = shardable_labels(ins[0], reduced)
    out = labels if len(outs[0]) == len(labels) else tuple(x for i, x in enumerate(labels) if i not in reduced)
    return Rule((labels,), (out,)) if len(out) == len(outs[0]) else None


def _stft_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of short-time Fourier transforms: signal by signal, with one window for all."""
    if len(ins[0]) <= (2 if op.target.startswith("aten.istft") else 1):
        return None
    return Rule((leading_labels(ins[0], 1), *((BLOCKED,) * len(s) for s in ins[1:])), tuple(leading_labels(s, 1) for s in outs))


def _pairwise_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of cosine similarity and distances along one dimension, which is removed or kept with size 1."""
    rank = max(map(len, ins))
    dim = -1
    if op.target.split(".")[1] == "cosine_similarity":
        axis = op.args[2] if len(op.args) > 2 else dict(op.kwargs).get("dim", 1)
        dim = int(axis)  # type: ignore[call-overload]
    elif ins[0] != ins[1]:
        return None
    if not rank:
        return None
    aligned = [(1,) * (rank - len(s)) + s for s in ins]
    full = tuple(map(max, *aligned))
    labels = shardable_labels(full, (dim % rank,))
    rows = [
        tuple(x if n == m else BLOCKED for x, n, m in zip(labels, s, full, strict=True))[rank - len(i) :]
        for s, i in zip(aligned, ins, strict=True)
    ]
    out = labels if len(outs[0]) == rank else tuple(x for i, x in enumerate(labels) if i != dim % rank)
    return Rule(tuple(rows), (out,))


def _fft_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of Fourier transforms: every dimension passes through except the transformed ones."""
    name, rank = op.target.split(".")[1], len(ins[0])
    last: tuple[int, ...] = (-2, -1) if name.endswith("2") else tuple(range(rank)) if name.endswith("n") else (-1,)
    sizes = op.args[1] if len(op.args) > 1 else None
    default = tuple(range(-len(sizes), 0)) if isinstance(sizes, tuple) and name.endswith("n") else last
    axes = op.args[2] if len(op.args) > 2 else dict(op.kwargs).get("dim", None)
    dims = default if axes is None or axes == () else axes if isinstance(axes, tuple) else (axes,)
    transformed_dims = {int(d) % rank for d in dims}
    labels = shardable_labels(ins[0], transformed_dims)
    return Rule((labels,), (labels,))


def fft_dim_and_length(op: Operator, tensors: Tensors) -> tuple[int, int]:
    """Return (dimension, length to which it is cut or padded) of a one-dimensional Fourier transform."""
    options = dict(op.kwargs)
    dim = op.args[2] if len(op.args) > 2 else options.get("dim", -1)
    at = dim if isinstance(dim, int) else -1
    length = op.args[1] if len(op.args) > 1 else options.get("n")
    return at, length if isinstance(length, int) else tensors[op.inputs[0]].shape[at]


def _matrix_power_autocast(op: Operator, tensors: Tensors) -> AutocastPolicy:
    """Return the policy of a product for powers that multiply matrices."""
    power = op.args[1]
    return AutocastPolicy.LOW_PRECISION if isinstance(power, int) and abs(power) > 1 else AutocastPolicy.NONE


def _saved_padded(op: Operator, tensors: Tensors, grads: Set[str]) -> Saved:
    """Return the input, or the bytes of its cut or padded copy."""
    x, (at, length) = tensors[op.inputs[0]], fft_dim_and_length(op, tensors)
    padded = x.size_bytes / x.shape[at] * length
    return all_inputs(op, tensors, grads) if padded == x.size_bytes else ((), padded)


OPS = (
    Op(
        """
        cholesky cholesky_inverse cholesky_solve inverse linalg_cholesky linalg_cholesky_ex linalg_eigh linalg_eigvalsh linalg_inv
        linalg_inv_ex linalg_qr linalg_solve linalg_svd linalg_svdvals
        """,
        _batched_matrix_rule, autocast=AutocastPolicy.FLOAT32,
    ),
    Op(
        """
        det linalg_det linalg_matrix_exp linalg_slogdet linalg_solve_triangular logdet matrix_exp slogdet
        """,
        _batched_matrix_rule,
    ),
    Op("linalg_matrix_power", _batched_matrix_rule, autocast=_matrix_power_autocast),
    Op("linalg_pinv", _batched_matrix_rule, autocast=AutocastPolicy.LOW_PRECISION_OUTPUT),
    Op(
        """
        _lu_with_info geqrf linalg_cond linalg_eig linalg_eigvals linalg_householder_product linalg_lstsq linalg_matrix_rank
        linalg_tensorinv linalg_tensorsolve lu_solve ormqr pinverse qr svd triangular_solve
        """,
        autocast=AutocastPolicy.FLOAT32,
    ),
    Op("linalg_norm linalg_matrix_norm", _matrix_norm_rule, backward=Backward(inputs_and_output)),
    Op("cosine_similarity pairwise_distance", _pairwise_rule),
    Op("stft", _stft_rule, autocast=AutocastPolicy.FLOAT32),
    Op("istft", _stft_rule),
    Op(
        "fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn", _fft_rule, linear=Linearity.JOINT,
        backward=Backward(integer_inputs, GradientMemory.SPECTRUM), autocast=AutocastPolicy.FLOAT32,
    ),
    Op(
        "fft_rfft fft_ihfft", _fft_rule, linear=Linearity.JOINT, backward=Backward(_saved_padded, GradientMemory.PADDED_SPECTRUM),
        autocast=AutocastPolicy.FLOAT32,
    ),
    Op(
        "fft_hfft fft_irfft fft_irfft2 fft_irfftn", _fft_rule, linear=Linearity.JOINT, backward=SAVES_INTEGERS,
        autocast=AutocastPolicy.FLOAT32,
    ),
    Op("fft_rfft2 fft_rfftn", _fft_rule, linear=Linearity.JOINT, autocast=AutocastPolicy.FLOAT32),
)  # fmt: skip
