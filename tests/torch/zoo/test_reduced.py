"""Reduced models and layouts: what divided still divides, what did not still does not, and proofs agree with those of whole plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import shardwise
from shardwise.errors import LayoutError
from shardwise.plan.layout import Layout
from shardwise.plan.reduced_layout import divisors_of, reduce_batch, reduce_layout
from shardwise.run.prove import rank_threads
from shardwise.run.prove.proof import Proof
from shardwise.zoo import names
from shardwise.zoo.reduced import reduce_name

WIDE = "gpt:layers=6,hidden=96,heads=8,sequence=12,vocabulary=50"


def test_a_layout_keeps_its_axes_and_choices() -> None:
    whole = Layout.parse("data=16 expert=4 tensor=2x4 pipeline=8 microbatches=32 schedule=interleaved chunks=3 zero=2 recompute=full")
    reduced = reduce_layout(whole)
    assert str(reduced) == str(
        Layout.parse("data=4 expert=2 tensor=2x2 pipeline=2 microbatches=4 schedule=interleaved chunks=2 zero=2 recompute=full")
    )
    assert reduce_layout(whole, 3).pipeline == 3
    with pytest.raises(LayoutError, match="unlike"):
        reduce_layout(Layout.parse("pipeline=2 inner=2x1/1x2 microbatches=2"))


def test_batches_that_do_not_divide_still_do_not() -> None:
    whole = Layout.parse("data=8 microbatches=4")
    reduced = reduce_layout(whole)
    assert reduce_batch(64, whole, reduced) % (reduced.data * reduced.microbatches) == 0
    assert reduce_batch(65, whole, reduced) % (reduced.data * reduced.microbatches) != 0


def test_a_model_keeps_what_is_divided() -> None:
    whole, before = Layout.parse("tensor=8 pipeline=2 microbatches=2"), names.find(WIDE)[1]
    reduced = reduce_layout(whole)
    after = names.find(reduce_name(WIDE, None, divisors_of(whole, reduced), reduced.pipeline))[1]
    assert after.layers == 2
    for key in ("hidden", "heads", "vocabulary", "sequence"):
        small, large = getattr(after, key), getattr(before, key)
        assert small < large
        assert (small % 2 == 0) == (large % 8 == 0), key  # vocabulary and sequence do not divide by 8
    assert after.hidden % after.heads == 0


def test_axes_that_divide_one_number_unlike_one_another_still_reduce_it() -> None:
    """16 heads divide by tensor=2 and not by expert=32, which both become two ranks: no smaller number does so."""
    whole = Layout.parse("data=64 expert=32 tensor=2 pipeline=4 microbatches=8")
    reduced = reduce_layout(whole)
    after = names.find(reduce_name("moe-70b", None, divisors_of(whole, reduced), reduced.pipeline))[1]
    assert (after.heads, after.experts) == (4, 8)
    assert after.hidden % after.heads == 0
    assert after.hidden <= 64


@pytest.mark.parametrize("is_broken", [False, True])
def test_reduced_proofs_agree_with_whole_ones(is_broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_broken:
        join_flat = rank_threads.join_flat

        def rotated(parts: Sequence[Any]) -> Any:
            return join_flat([*parts[1:], parts[0]] if parts[0].is_floating_point() else parts)

        monkeypatch.setattr(rank_threads, "join_flat", rotated)
    model = "gpt:layers=3,hidden=16,heads=4,sequence=6,vocabulary=12"
    torch.manual_seed(0)
    proofs = [
        shardwise.prove(model, "data=1 tensor=4 sequence_parallel=on", 4, max_error_probability=0.1, ranks_per_axis=ranks)
        for ranks in (0, 2)
    ]
    for proof in proofs:
        assert isinstance(proof, Proof)
        assert proof.ok is not is_broken, proof
