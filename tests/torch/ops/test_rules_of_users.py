"""Operators whose dimensions an argument tells, not their shapes: each way that a rule offers, in 2 and 3 parts, is the operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import shardwise.capture.patches.ctc  # noqa: F401  # whose operator is among them
from shardwise.ops import rule_of
from tests.support.rule_cases import Case, case, check, choices


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def cell(name: str, gates: int, states: int) -> Case:
    held = [real(6, 2) for _ in range(states)]
    weights = (real(gates * 2, 4), real(gates * 2, 2), real(gates * 2), real(gates * 2))
    return case(f"{name}.default", real(6, 4), held if states == 2 else held[0], *weights)


def square(*lead: int) -> Tensor:
    return real(*lead, 4, 4) + 4 * torch.eye(4, dtype=torch.float64)


def mask(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.5


def unpooled() -> Case:
    pooled, places = torch.nn.functional.max_pool2d(real(6, 4, 4, 4), 2, return_indices=True)
    return case("max_unpool2d.default", pooled, places, [4, 4])


def transcripts() -> Case:
    lengths, targets = torch.tensor([8, 7, 8, 6, 8, 2]), torch.randint(1, 5, (6, 3))
    said = real(8, 6, 5).log_softmax(-1)
    return case("shardwise.ctc_loss.default", said, targets, lengths, torch.tensor([3, 2, 0, 1, 3, 3]), 0, True)


def counted() -> Case:
    lengths = torch.tensor([3, 2, 0, 1, 3, 3])
    return case("shardwise.ctc_lengths.default", lengths, lengths.clone())


BAGS = torch.tensor([0, 4]), False, 0, False  # where they begin, and sums of them

# (name, the call, labels that are offered over 2 ranks)
CASES: list[tuple[str, Callable[[], Case], set[str]]] = [
    ("layer norm over two dimensions", lambda: case("layer_norm.default", real(6, 4, 6), [4, 6]), {"b-1"}),
    ("layer norm over all", lambda: case("layer_norm.default", real(4, 6), [4, 6]), set()),
    ("layer norm with weights", lambda: case("layer_norm.default", real(6, 4, 6), [4, 6], real(4, 6), real(4, 6)), {"b-1"}),
    ("RMS norm over two dimensions", lambda: case("rms_norm.default", real(2, 6, 4, 6), [4, 6]), {"b-2", "b-1"}),
    ("renorm of rows", lambda: case("renorm.default", real(6, 4), 2, 0, 1.0), {"d"}),
    ("renorm of columns", lambda: case("renorm.default", real(6, 4), 1, -1, 0.5), {"d"}),
    ("a product with dots", lambda: case("einsum.default", "...i,ij->...j", [real(2, 6, 4), real(4, 6)]), {"A", "B", "i", "j"}),
    ("dots that broadcast", lambda: case("einsum.default", "b...,...->b...", [real(6, 1, 4), real(2, 4)]), {"A", "B", "b"}),
    ("a result that is left out", lambda: case("einsum.default", "bi,ij", [real(6, 4), real(4, 2)]), {"b", "i", "j"}),
    ("a matrix and a vector", lambda: case("matmul.default", real(2, 6, 4), real(4)), {"b0", "n", "k"}),
    ("a vector and matrices", lambda: case("matmul.default", real(4), real(2, 4, 6)), {"b0", "m", "k"}),
    ("two vectors", lambda: case("matmul.default", real(6), real(6)), {"k"}),
    ("tensors made alike", lambda: case("broadcast_tensors.default", [real(6, 1, 4), real(2, 4), real(4)]), {"d0", "d1", "d2"}),
    ("LSTM cell", lambda: cell("lstm_cell", 4, 2), {"b"}),
    ("GRU cell", lambda: cell("gru_cell", 3, 1), {"b"}),
    ("RNN cell", lambda: cell("rnn_tanh_cell", 1, 1), {"b"}),
    ("windows", lambda: case("unfold.default", real(6, 4, 8), -1, 4, 2), {"d0", "d1"}),
    ("a diagonal", lambda: case("diagonal.default", real(4, 6, 2, 4), 0, 0, 3), {"d1", "d2"}),
    ("diagonals made", lambda: case("diag_embed.default", real(6, 2, 4)), {"d0", "d1"}),
    ("a grid", lambda: case("meshgrid.indexing", [real(6), real(4)], indexing="xy"), {"d0", "d1"}),
    ("weights by direction and length", lambda: case("_weight_norm.default", real(6, 4, 2), real(6, 1, 1), 0), {"d"}),
    ("lengths of another dimension", lambda: case("_weight_norm.default", real(6, 4, 2), real(1, 1, 2), 2), {"d"}),
    ("inverses", lambda: case("linalg_inv.default", square(6, 2)), {"d0", "d1"}),
    ("determinants", lambda: case("slogdet.default", square(6)), {"d0"}),
    ("one determinant", lambda: case("logdet.default", square()), set()),
    ("solutions", lambda: case("linalg_solve.default", square(6), real(6, 4, 2)), {"d0"}),
    ("solutions by triangles", lambda: case("linalg_solve_triangular.default", square(6), real(6, 4, 2), upper=True), {"d0"}),
    ("short transforms", lambda: case("stft.default", real(6, 16), 8, 4, 8, torch.hann_window(8).double(), return_complex=True), {"d0"}),
    ("triplets", lambda: case("triplet_margin_loss.default", real(6, 4), real(6, 4), real(6, 4)), {"n"}),
    ("triplets, summed", lambda: case("triplet_margin_loss.default", *(real(6, 4) for _ in "abc"), 1.0, 2.0, 1e-6, False, 2), {"n"}),
    ("pairs", lambda: case("cosine_embedding_loss.default", real(6, 4), real(6, 4), real(6).sign(), 0.1, 0), {"n"}),
    ("margins of classes", lambda: case("multi_margin_loss.default", real(6, 4), torch.arange(6) % 4), {"n"}),
    ("ranks", lambda: case("margin_ranking_loss.default", real(6, 4), real(6, 4), real(6, 4).sign()), {"d0", "d1"}),
    ("hinges, summed", lambda: case("hinge_embedding_loss.default", real(6, 4), real(6, 4).sign(), 1.0, 2), {"d0", "d1"}),
    ("counts", lambda: case("poisson_nll_loss.default", real(6, 4), real(6, 4).abs(), True, False, 1e-8, 1), {"d0", "d1"}),
    ("cosines", lambda: case("cosine_similarity.default", real(6, 4, 2), real(6, 4, 2)), {"d0", "d2"}),
    ("distances of pairs", lambda: case("pairwise_distance.default", real(6, 4), real(6, 4), 2.0, 1e-6, True), {"d0"}),
    ("buckets", lambda: case("bucketize.Tensor", real(6, 4), torch.arange(4.0).double()), {"d0", "d1"}),
    ("sorted into", lambda: case("searchsorted.Tensor", torch.arange(4.0).double(), real(6, 4)), {"d0", "d1"}),
    ("cosines of what broadcasts", lambda: case("cosine_similarity.default", real(6, 4, 2), real(8, 6, 4, 1), -2), {"d0", "d1", "d3"}),
    ("cosines with one row", lambda: case("cosine_similarity.default", real(6, 4), real(4), 1), {"d0"}),
    ("sorted into rows of their own", lambda: case("searchsorted.Tensor", real(6, 4).sort(-1).values, real(6, 2)), {"d0", "d1"}),
    ("a norm of vectors", lambda: case("linalg_norm.default", real(6, 4, 2), None, [1]), {"d0", "d2"}),
    ("a norm of matrices", lambda: case("linalg_norm.ord_str", real(6, 4, 2), "fro", [0, 2], True), {"d1"}),
    ("a norm of all", lambda: case("linalg_norm.default", real(6, 4)), set()),
    ("matrix norms", lambda: case("linalg_matrix_norm.default", real(6, 4, 2), 1), {"d0"}),
    ("matrix norms by name", lambda: case("linalg_matrix_norm.str_ord", real(2, 4, 6), "nuc", [0, 1]), {"d2"}),
    ("blocks of a product", lambda: case("kron.default", real(6, 1), real(2, 4)), {"d0", "e1"}),
    ("filled in order", lambda: case("masked_scatter.default", real(6, 4), mask(6, 4), real(5, 6)), {"n"}),
    ("rows filled in order", lambda: case("masked_scatter.default", real(6, 2, 4), mask(6, 2, 1), real(12, 4)), {"n"}),
    ("bags of rows", lambda: case("embedding_bag.default", real(9, 4), torch.arange(6) % 9, torch.tensor([0, 2, 3]), False, 1), {"e"}),
    ("weighed bags", lambda: case("embedding_bag.default", real(9, 4), torch.arange(6), *BAGS, real(6)), {"e"}),
    ("transcripts", lambda: transcripts(), {"n"}),
    ("the largest of all", lambda: case("max.default", real(6, 4).round()), {"d0", "d1"}),
    ("the least over samples", lambda: case("amin.default", real(6, 4, 2).round(), [0, 2], True), {"d0", "d1", "d2"}),
    ("a tensor product", lambda: case("tensordot.default", real(6, 4, 2), real(2, 8, 4), [1, 2], [2, 0]), {"d0.0", "d1.1", "k0", "k1"}),
    ("what a mask picks set to a number", lambda: case("index_put.default", real(6, 4), [mask(6, 4)], real()), {"d0", "d1"}),
    ("rows that a mask picks", lambda: case("index_put.default", real(6, 2, 4), [mask(6, 2)], real(4)), {"d0", "d1", "d2"}),
    ("moved to the end", lambda: case("movedim.int", real(6, 4, 2), 0, -1), {"d0", "d1", "d2"}),
    ("moved, two", lambda: case("movedim.intlist", real(6, 4, 2, 3), [0, 3], [2, 0]), {"d0", "d1", "d2", "d3"}),
    ("tiles", lambda: case("tile.default", real(6, 4, 2), [2, 1]), {"d0", "d2"}),
    ("an adjoint", lambda: case("adjoint.default", real(6, 4, 2)), {"d0", "d1", "d2"}),
    ("a quantile", lambda: case("quantile.scalar", real(6, 4), 0.3, 1), {"d0"}),
    ("a median", lambda: case("median.dim", real(6, 5), 1), {"d0"}),
    ("a sum without NaN", lambda: case("nansum.default", real(6, 4), [1]), {"d0", "d1"}),
    ("filled at places", lambda: case("index_fill.int_Scalar", real(6, 4), 1, torch.tensor([0, 2]), 1.0), {"d0"}),
    ("turned", lambda: case("rot90.default", real(6, 4, 4), 1, [1, 2]), {"d0"}),
    ("shifted by half", lambda: case("fft_fftshift.default", real(6, 4), [1]), {"d0"}),
    ("a cross product", lambda: case("linalg_cross.default", real(6, 3), real(6, 3), dim=-1), {"d0"}),
    ("a dot of complex numbers", lambda: case("vdot.default", real(6), real(6)), {"k"}),
    ("an inner product", lambda: case("inner.default", real(6, 2, 4), real(8, 4)), {"b-2", "b-1", "m", "k"}),
    ("put back where it was the largest", lambda: unpooled(), {"n", "c"}),
    ("patches into channels", lambda: case("pixel_unshuffle.default", real(6, 2, 4, 4), 2), {"n"}),
    ("smoothed when made smaller", lambda: case("_upsample_bilinear2d_aa.vec", real(6, 2, 8, 8), [4, 4], False, None), {"n", "c"}),
    ("volumes sampled", lambda: case("grid_sampler.default", real(2, 4, 4, 4, 4), real(2, 2, 2, 2, 3), 0, 0, False), {"n", "c"}),
    ("BCE, summed", lambda: case("binary_cross_entropy_with_logits.default", real(6, 4), real(6, 4), None, None, 2), {"d0", "d1"}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "labels"), [(m, x) for _, m, x in CASES], ids=[name for name, *_ in CASES])
def test_cut_by_any_label_it_is_the_operator(make: Callable[[], Case], labels: set[str]) -> None:
    torch.manual_seed(0)
    made = make()
    assert rule_of(made.op, made.graph.tensors) is not None
    assert {choice.label for choice in choices(made, 2)} == labels
    assert not check(made, (2, 3))
