"""Dtypes under autocast of every operator that torch has samples of, as our records say and as torch makes them."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("torch.distributed.tensor._ops.strategy_validation", reason="this PyTorch has no brute force over cuts")
pytest.importorskip("expecttest", reason="PyTorch's samples need it")

from bench.verify.rules.autocast import wrong_dtypes
from shardwise.model.strides import autocast_dtypes
from shardwise.ops.vocabulary import AutocastPolicy

SAMPLED = (
    "einsum tensordot nn.functional.pad nn.functional.prelu linalg.matrix_power linalg.pinv cov corrcoef index_fill masked_fill "
    "select_scatter diagonal_scatter expand_as reshape_as nn.functional.layer_norm softmax nn.functional.linear"
).split()
# Told narrower than they are where a number of float32 stands among tensors of 16 bits; backward's and decomposed operators aside.
KNOWN = ("aten.addr.default", "aten.column_stack.default")


def test_sampled_operators_have_the_dtypes_that_autocast_gives_them() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(wrong_dtypes(SAMPLED, 3))
    assert len(found) > 100
    assert [wrong for wrong in found if wrong is not None and wrong.loses_bits] == []
    assert sum(wrong is not None for wrong in found) <= 2  # a few padded shapes have kernels of their own


def test_broken_twin_products_taken_for_elementwise_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocast_dtypes, "autocast_policy", lambda op, tensors: AutocastPolicy.NONE)
    assert any(wrong is not None for wrong in wrong_dtypes(["nn.functional.linear"], 1))


def test_all_operators_are_told_as_wide_as_they_are() -> None:
    """A value that is told narrower than it is could not be sent between stages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(wrong_dtypes((), 4))
    assert len(found) > 4000
    wrong = [one for one in found if one is not None and one.loses_bits and not one.call.startswith(KNOWN)]
    assert [one for one in wrong if "_backward" not in one.call and "native_" not in one.call] == []
