"""Batches of images and class labels in the shape that a model takes, with augmentation by random crop and flip.

The crop of a training image is a function of the seed and the sample's number through all epochs, so it is independent of the layout.
Decoding is in `train/data/reading/pixels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.train.data.reading.images import ImageFiles
from shardwise.train.data.reading.pixels import Crop, PixelForm, Preparer
from shardwise.train.data.sample_order import Numbers, OrderedSource, SampleOrder
from shardwise.train.data.sources import Batch, batch_entries, batch_from_entries
from shardwise.zoo.resolved import ResolvedModel

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as in torchvision
_MIN_CROP_AREA, _ASPECT_RATIOS, _TRIES = (
    0.08,
    (3 / 4, 4 / 3),
    10,
)  # of a random crop (Szegedy et al. 2015), as torchvision's RandomResizedCrop


@dataclass(frozen=True)
class ImageBatches(OrderedSource[Batch]):
    """Batches of images; `names`: names or positions of pixels and labels in a model's batch; `augment`: "none", "flip" or "crop" (which
    also flips)."""

    files: ImageFiles
    order: SampleOrder
    form: PixelForm
    names: tuple[Any, Any]
    augment: str
    preparer: Preparer

    def train(self, step: int, rows: Sequence[int]) -> Batch:
        return self._prepare_batch(
            self.order.train(step, rows), [self._draw_crop(number) for number in self.order.sample_numbers(step, rows).tolist()]
        )

    def _read(self, samples: Numbers) -> Batch:
        return self._prepare_batch(samples, [Crop(is_centred=True)] * len(samples))

    def _prepare_batch(self, samples: Numbers, crops: Sequence[Crop]) -> Batch:
        contents, where = zip(*self.files.read(samples.tolist()), strict=True)
        pixels = self.preparer(contents, where, crops, self.form)
        return batch_from_entries({self.names[0]: pixels, self.names[1]: torch.from_numpy(self.files.labels(samples).copy())})

    def _draw_crop(self, number: int) -> Crop:
        if self.augment == "none":
            return Crop(is_centred=True)
        draw = np.random.Generator(np.random.Philox(key=self.order.seed, counter=number))
        is_mirrored = bool(draw.random() < 0.5)
        if self.augment != "crop":
            return Crop(is_centred=True, is_mirrored=is_mirrored)
        for _ in range(_TRIES):
            area, shape = draw.uniform(_MIN_CROP_AREA, 1), exp(draw.uniform(log(_ASPECT_RATIOS[0]), log(_ASPECT_RATIOS[1])))
            width, height = sqrt(area * shape), sqrt(area / shape)
            if width <= 1 and height <= 1:
                left, top = draw.uniform(0, 1 - width), draw.uniform(0, 1 - height)
                return Crop(left, top, left + width, top + height, is_mirrored)
        return Crop(is_centred=True, is_mirrored=is_mirrored)


def image_form(resolved: ResolvedModel, mean: Sequence[float], std: Sequence[float]) -> tuple[PixelForm, tuple[Any, Any]]:
    """Derive the pixel format and entry names of a model's image batches from its example: floats BCHW and class ids B.

    Raises:
        ConfigError: any other batch.
    """
    example = batch_entries(resolved.batch(2))
    pixels = [(name, x) for name, x in example if isinstance(x, Tensor) and x.dim() == 4 and x.is_floating_point() and x.shape[1] in (1, 3)]
    labels = [(name, x) for name, x in example if isinstance(x, Tensor) and x.dim() == 1 and x.dtype == torch.int64]
    if len(example) != 2 or len(pixels) != 1 or len(labels) != 1:
        raise ConfigError(
            f"{resolved.name} does not take batches of images (BCHW, of 1 or 3 channels) and their classes (B); use a classifier of "
            'images, or data.source = "synthetic" to train on the batch that comes with the model'
        )
    channels, height, width = pixels[0][1].shape[1:]
    means, stds = (_values_per_channel(values, channels) for values in (mean or MEAN, std or STD))
    return PixelForm(channels, height, width, means, stds), (pixels[0][0], labels[0][0])


def _values_per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """Return one value a channel; their mean if there is one channel."""
    if len(values) == channels:
        return tuple(values)
    if channels == 1:
        return (sum(values) / len(values),)
    raise ConfigError(f"data.mean and data.std have {len(values)} values, and images have {channels} channels; give one for each")
