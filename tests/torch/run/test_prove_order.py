"""Collectives of a backward meet in one order on all ranks, which a proof sees without processes."""

from __future__ import annotations

import pytest

import shardwise
from shardwise.errors import RunError
from shardwise.run.step import executors

pytest.importorskip("transformers")

from bench.common import architectures


def test_no_gradient_is_reduced_before_ranks_of_other_branches_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speech-to-text's branches complete a bucket on one rank before an exchange of the branches, on the other after it: over gloo ranks
    waited for one another for ever. Twin: buckets are reduced as soon as they are complete."""
    model = architectures.resolved("speech_to_text")
    batch = model.batch(2)
    assert shardwise.prove(model.make, "branch=2", batch, loss=model.loss, max_error_probability=0.1).ok
    monkeypatch.setattr(executors, "AT_END", executors.EACH)
    with pytest.raises(RunError, match="meet in different collectives"):
        shardwise.prove(model.make, "branch=2", batch, loss=model.loss, max_error_probability=0.1)
