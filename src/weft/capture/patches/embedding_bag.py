"""`F.embedding_bag` of bags of equal length (`input` [N, L]).

Torch: its operator takes all indices in one row with offsets, in which nothing tells what belongs to which sample.
Wanted: look-ups and a reduction. With options of which torch's operator alone knows the meaning it is called as it is.
Test: tests/torch/test_patches.py::embedding_bag
Until: not known
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from weft.capture.patches.patch import Patch


def _embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """Bags of equal length, one for each sample (`input` [N, L]), by look-ups and a reduction.

    Torch's operator takes all indices in one row with offsets, in which nothing tells what belongs to which sample.
    """
    if input.dim() != 2 or not input.shape[1] or padding_idx is not None or max_norm is not None or scale_grad_by_freq:
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset,
            padding_idx,
        )  # fmt: skip
    rows = F.embedding(input, weight, sparse=sparse)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[..., None]
    return rows.max(1).values if mode == "max" else rows.mean(1) if mode == "mean" else rows.sum(1)


PATCH = Patch(calls={F.embedding_bag: _embedding_bag})
