"""What a plan says that a rank will hold is what it is measured to hold, within a tenth: transformers, recurrent layers and experts."""

from __future__ import annotations

import pytest

import weft
from weft.zoo.resolve import resolve

GPT = "gpt:layers=4,hidden=128,heads=4,sequence=128,vocabulary=256"
CASES = [
    (GPT, "data=2"),
    (GPT, "tensor=2"),
    (GPT, "data=2 zero=3"),
    (GPT, "pipeline=2 microbatches=4 schedule=zb-h1"),
    (GPT, "data=2 recompute=full"),
    (GPT, "microbatches=2 recompute=full:2"),
    (GPT, "offload=activations"),
    ("t5-tiny", "data=2"),  # attention under a mask that learns keeps its scores
    ("llama-tiny", "tensor=2"),
    ("moe-tiny", "pipeline=2 microbatches=4"),
    ("lstm-tiny", "data=2"),
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_predicted_memory_is_within_a_tenth_of_the_measured(name: str, layout: str) -> None:
    model = resolve(name)
    batch = model.batch(8 if name == GPT else 16)
    planned = weft.plan(model.make, batch, loss=model.loss, cluster="1xcpu-2", layout=layout)
    found = weft.verify(model.make, layout, batch, loss=model.loss, dtype="float32", steps=1)
    assert found.memory is not None
    assert planned.prediction is not None
    predicted = planned.prediction.memory
    total = predicted.total - predicted.margin
    assert total == pytest.approx(found.memory["total"], rel=0.1)
