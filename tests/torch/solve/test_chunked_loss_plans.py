"""Plans with losses in chunks: taken where logits fill the memory, priced with one more forward of the head, no stage begins within."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardwise
from shardwise.errors import Infeasible
from shardwise.zoo.resolve import resolve

A100_FLOPS = 312e12


def test_the_planner_takes_chunks_where_logits_fill_the_memory() -> None:
    model = resolve("gpt:layers=1,hidden=64,heads=1,sequence=8192,vocabulary=100000")
    limits = "ranks=1 threads=0 precision=float32"
    chosen = shardwise.plan(model.make, model.batch(1), loss=model.loss, cluster="1xcpu-2", constraints=limits)
    assert chosen.layout.loss_chunks > 1
    assert any(key == "loss_chunks" and "loss_chunks=" in words for key, words in chosen.reasons)
    with pytest.raises(Infeasible):  # the same as a whole
        shardwise.plan(model.make, model.batch(1), loss=model.loss, cluster="1xcpu-2", layout=replace(chosen.layout, loss_chunks=1))


def test_the_planner_takes_none_where_logits_are_few() -> None:
    few = resolve("gpt:layers=1,hidden=64,heads=1,sequence=128,vocabulary=1000")
    limits = "ranks=1 threads=0 precision=float32"
    assert shardwise.plan(few.make, few.batch(1), loss=few.loss, cluster="1xcpu-2", constraints=limits).layout.loss_chunks == 1


def test_it_costs_one_more_forward_of_the_head() -> None:
    tokens, hidden, classes = 8 * 1024, 1024, 32768
    model = resolve(f"gpt:layers=1,hidden={hidden},heads=8,sequence=1024,vocabulary={classes}")
    as_whole, in_chunks = (
        shardwise.plan(
            model.make, model.batch(8), loss=model.loss, cluster="1xdgx-a100-80", layout=f"precision=bfloat16-mixed loss_chunks={count}"
        ).prediction
        for count in (1, 4)
    )
    assert as_whole is not None
    assert in_chunks is not None
    product_s = 2.0 * tokens * hidden * classes / A100_FLOPS
    assert product_s < in_chunks.step_time_s - as_whole.step_time_s < 4 * product_s  # and the softmax, and weights read again
    logits = 2.0 * tokens * classes
    assert as_whole.memory.total - in_chunks.memory.total > 1.5 * logits


def test_no_stage_begins_between_the_head_and_its_loss() -> None:
    model = resolve("gpt:layers=1,hidden=8,heads=1,sequence=256,vocabulary=4096")
    plan = shardwise.plan(
        model.make, model.batch(4), loss=model.loss, cluster="1xcpu-8", layout="pipeline=2 microbatches=4 loss_chunks=2"
    )  # most of the work is the head's: without chunks its loss may be a stage of its own
    assert plan.stages[-1] not in ("/flatten", "/flatten#1", "/cross_entropy_loss")
