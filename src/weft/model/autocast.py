"""What torch's bfloat16 autocast on processors makes of a graph: which values come out in 16 bits, which operands are cast first.

In: a graph as it was traced, in float32. Out: the same graph with the dtypes that a run's tensors have. Every operator of torch's table
(aten/src/ATen/autocast_mode.h, the lists for CPU) is of one of three kinds: products cast what they read to bfloat16, losses, transforms
and decompositions to float32, `cat` and `stack` to the widest that they are given. The rest is not touched: types are promoted, norms have
their input's. Not modelled: recurrent layers, inside of which the widths differ; they count as products.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from weft.model.graph import Graph, Operator, Tensor, Word
from weft.model.work import packet

_LOWER = frozenset(
    "linear matmul mm bmm addmm baddbmm addbmm einsum tensordot linalg_vecdot conv1d conv2d conv3d conv_tbc conv_transpose1d "
    "conv_transpose2d conv_transpose3d _convolution scaled_dot_product_attention lstm gru rnn_tanh rnn_relu".split()
)
_WIDER = frozenset(
    "avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d max_pool3d fractional_max_pool2d fractional_max_pool3d max_unpool2d "
    "max_unpool3d binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss ctc_loss "
    "hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss "
    "nll_loss2d nll_loss_nd poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss reflection_pad1d reflection_pad2d "
    "replication_pad1d replication_pad2d replication_pad3d grid_sampler grid_sampler_2d grid_sampler_3d polar prod quantile "
    "nanquantile stft cdist trace view_as_complex cholesky cholesky_inverse cholesky_solve inverse pinverse lu_solve qr svd "
    "triangular_solve fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn "
    "fft_irfftn fft_hfft fft_ihfft linalg_cholesky linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh linalg_eigvals "
    "linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_qr linalg_solve "
    "linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve".split()
)
# These have their first operand's type, whatever that of their weights.
_FIRST = frozenset(
    "layer_norm native_layer_norm group_norm native_group_norm batch_norm native_batch_norm _native_batch_norm_legit "
    "_native_batch_norm_legit_functional instance_norm rms_norm prelu".split()
)
_APART = frozenset(("broadcast_tensors", "meshgrid"))  # each result is of one operand
# Cells, one step of a recurrence: products inside them are narrow, so that the state decides which this operand is.
_STATE = {"gru_cell": 1, "lstm_cell": 2}


def cast(op: Operator, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What an operator reads in another type than it has, by value: as autocast hands it over. `tensors`: as they are in the run."""
    to = wanted(op)
    if not to:
        return {}
    found = {v: tensors[v] for v in op.inputs if tensors[v].dtype in ("float32", "bfloat16") and tensors[v].dtype != to}
    return {v: replace(t, dtype=to) for v, t in found.items()}


def wanted(op: Operator) -> str:
    """The dtype that autocast casts an operator's operands to; "" for none."""
    name = packet(op)
    if op.autocast == "off":
        return ""
    return "bfloat16" if name in _LOWER else "float32" if name in _WIDER else ""


def autocast(graph: Graph) -> Graph:
    """The graph with the dtypes that its tensors have under autocast."""
    tensors = dict(graph.tensors)
    for op in graph.operators:
        all_alike = packet(op) not in _APART and _narrow(op, tensors)
        for i, v in enumerate(op.outputs[:1] if packet(op) in _FIRST else op.outputs):  # statistics are float32
            if tensors[v].dtype == "float32" and (all_alike or (packet(op) in _APART and tensors[op.inputs[i]].dtype == "bfloat16")):
                tensors[v] = replace(tensors[v], dtype="bfloat16")
    return replace(graph, tensors=tensors)


def _narrow(op: Operator, tensors: Mapping[str, Tensor]) -> bool:
    """Whether what an operator makes of floating point is bfloat16."""
    to = wanted(op)
    if to or any(isinstance(a, Word) and a.kind == "dtype" for a in (*op.args, *dict(op.kwargs).values())):
        return to == "bfloat16"
    name = packet(op)
    if name in ("rnn_tanh_cell", "rnn_relu_cell") and op.autocast != "off":
        return True
    decide = op.inputs[:1] if name in _FIRST else op.inputs
    if name in _STATE and op.autocast != "off":
        decide = op.inputs[_STATE[name] : _STATE[name] + 1]
    return _promoted(tensors[v] for v in decide if tensors[v].dtype in ("float32", "bfloat16"))


def _promoted(floats: Iterable[Tensor]) -> bool:
    """Whether tensors of one number, which do not widen others, and all others come to bfloat16."""
    floats = list(floats)
    decide = [t for t in floats if t.shape] or floats
    return bool(decide) and all(t.dtype == "bfloat16" for t in decide)
