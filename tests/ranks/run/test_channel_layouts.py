"""Channels and filters of convolutions cut over an axis of their own: equal to the serial model, divided, refused where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardwise
from shardwise.errors import LayoutError
from shardwise.zoo.resolve import resolve

MODELS = Path(__file__).parents[2].joinpath("support", "spatial_models.py")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("unet", "channel=2"),
        ("unet_volume", "channel=3"),
        ("cells", "data=2 channel=2 zero=3"),
        ("conv_lstm", "channel=2 microbatches=2"),
        ("unet", "channel=2 spatial=2"),
        ("resnet:blocks=2,base=4,image=30,classes=4", "channel=2 tensor=2"),
        ("resnet:blocks=2,base=4,image=30,classes=4", "channel=2 pipeline=2 microbatches=2"),
    ],
)
def test_a_layout_that_cuts_channels_equals_serial(name: str, layout: str) -> None:
    model = resolve(name if ":" in name else f"{MODELS}:{name}")
    found = shardwise.verify(
        model.make, layout, model.batch(8 if ":" in name else model.default_batch), loss=model.loss, cut_everything=True
    )
    assert found.ok, found
    assert found.tolerance == 1e-9
    assert found.divided["channel"]["parameters"] > 0.5
    assert found.divided["channel"]["flops"] > 0.5


@pytest.mark.parametrize("name", ["gpt-tiny", f"hf:{Path(__file__).parents[2]}/torch/hf/gpt2.json"])  # whose loss pads labels
def test_a_model_without_images_has_no_channels(name: str) -> None:
    if ":" in name:
        pytest.importorskip("transformers")
    model = resolve(name)
    with pytest.raises(LayoutError, match="no convolution of this model has 2 channels or more"):
        shardwise.verify(model.make, "channel=2", model.batch(2), loss=model.loss)
