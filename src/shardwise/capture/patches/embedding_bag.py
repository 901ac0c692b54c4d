"""`F.embedding_bag` of bags of equal length (`input` [N, L]).

Torch: its operator takes all indices in one flat row with offsets, which has no sample dimension.
Wanted: look-ups and a reduction. With other options torch's own operator is called.
Test: tests/torch/capture/test_patches.py::embedding_bag
Until: not known
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from shardwise.capture.patches.patch import Patch


def _embedding_bag(input: Tensor, weight: Tensor, *_: Any, mode: str = "mean", **options: Any) -> Any:
    if input.dim() != 2 or not input.shape[1] or options.get("scale_grad_by_freq"):
        return NotImplemented
    if options.get("padding_idx") is not None or options.get("max_norm") is not None:
        return NotImplemented
    rows = F.embedding(input, weight, sparse=options.get("sparse", False))
    if options.get("per_sample_weights") is not None:
        rows = rows * options["per_sample_weights"][..., None]
    return rows.max(1).values if mode == "max" else rows.mean(1) if mode == "mean" else rows.sum(1)


PATCH = Patch(replacements={F.embedding_bag: _embedding_bag})  # which passes its options by keyword
