"""Image preprocessing: encoded bytes are decoded, cropped, resized, mirrored and normalised to float32 BCHW.

Crops are drawn by the caller, so that both implementations, Pillow on the CPU and DALI on a GPU, do the same.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from shardwise.errors import ConfigError, RunError, format_error
from shardwise.train.data.reading.records import import_optional


class Crop(NamedTuple):
    """A box as fractions of an image's width and height, and whether it is mirrored horizontally. `is_centred`: the largest centred box
    with the aspect ratio of the output."""

    left: float = 0.0
    top: float = 0.0
    right: float = 1.0
    bottom: float = 1.0
    is_mirrored: bool = False
    is_centred: bool = False


@dataclass(frozen=True)
class PixelForm:
    """Output format: channels (1 or 3), height and width; (value - mean) / std of each channel, values from 0 to 1."""

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Preparer(Protocol):
    """Makes BCHW of encoded images; `where` names them in errors."""

    def __call__(self, contents: Sequence[bytes], where: Sequence[str], crops: Sequence[Crop], form: PixelForm) -> Tensor: ...


def box_of(crop: Crop, width: int, height: int, form: PixelForm) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) of a crop in whole pixels, at least one in each direction.

    >>> box_of(Crop(is_centred=True), 200, 100, PixelForm(3, 50, 50, (0,), (1,)))
    (50, 0, 150, 100)
    """
    left, top, right, bottom = map(round, _crop_box(crop, width, height, form))
    left, top = min(left, width - 1), min(top, height - 1)
    return left, top, max(left + 1, right), max(top + 1, bottom)


def _crop_box(crop: Crop, width: int, height: int, form: PixelForm) -> tuple[float, float, float, float]:
    if crop.is_centred:
        scale = min(width / form.width, height / form.height)
        wide, high = scale * form.width, scale * form.height
        left, top = (width - wide) / 2, (height - high) / 2
        return left, top, left + wide, top + high
    return crop.left * width, crop.top * height, crop.right * width, crop.bottom * height


def prepare_with_pillow(contents: Sequence[bytes], where: Sequence[str], crops: Sequence[Crop], form: PixelForm) -> Tensor:
    """Preprocess with Pillow and its antialiased bilinear filter, as torchvision's `Resize` on images does."""
    library = import_optional("PIL.Image", 'data.source = "images"')
    batch = np.empty((len(contents), form.height, form.width, form.channels), np.float32)
    for row, (content, name, crop) in enumerate(zip(contents, where, crops, strict=True)):
        try:
            image = library.open(io.BytesIO(content)).convert("RGB" if form.channels == 3 else "L")
            image = image.crop(box_of(crop, image.width, image.height, form))
            image = image.resize((form.width, form.height), library.Resampling.BILINEAR)
        except Exception as error:  # Pillow's decoders raise many kinds, and one of its own for absurd sizes
            raise RunError(
                f"{name} is no image that Pillow can read: {format_error(error)}; mend it, or leave it out and begin again"
            ) from error
        pixels = np.asarray(image, np.float32).reshape(form.height, form.width, form.channels)
        batch[row] = pixels[:, ::-1] if crop.is_mirrored else pixels
    mean, std = (np.asarray(x, np.float32) for x in (form.mean, form.std))
    return torch.from_numpy((batch / np.float32(255) - mean) / std).permute(0, 3, 1, 2).contiguous()


class DaliPreparer:
    """Preprocessing with DALI, which decodes, crops and resizes on the GPU. Untested: it was written without a GPU."""

    def __init__(self) -> None:
        self._fn: Any = import_optional("nvidia.dali.fn", 'data.preprocess = "device" for images')
        self._types: Any = import_optional("nvidia.dali.types", 'data.preprocess = "device" for images')
        self._pipeline: Any = import_optional("nvidia.dali.pipeline", 'data.preprocess = "device" for images')

    def __call__(self, contents: Sequence[bytes], where: Sequence[str], crops: Sequence[Crop], form: PixelForm) -> Tensor:
        torch_plugin = import_optional("nvidia.dali.plugin.pytorch", 'data.preprocess = "device" for images')
        fn, types = self._fn, self._types
        pipe = self._pipeline.Pipeline(batch_size=len(contents), num_threads=2, device_id=torch.cuda.current_device())
        with pipe:
            files = fn.external_source(name="files")
            start, end, mirror = (fn.external_source(name=name) for name in ("start", "end", "mirror"))
            kind = types.RGB if form.channels == 3 else types.GRAY
            image = fn.decoders.image(files, device="mixed", output_type=kind)
            image = fn.slice(image, start=start, end=end, axis_names="HW")
            image = fn.resize(image, size=[form.height, form.width], interp_type=types.INTERP_LINEAR, antialias=True)
            mean, std = ([255 * x for x in values] for values in (form.mean, form.std))
            pipe.set_outputs(fn.crop_mirror_normalize(image, mean=mean, std=std, mirror=mirror, output_layout="CHW", dtype=types.FLOAT))
        pipe.build()
        sizes = [image_size(content) for content in contents]
        boxes = [box_of(crop, width, height, form) for crop, (width, height) in zip(crops, sizes, strict=True)]
        pipe.feed_input("files", [np.frombuffer(content, np.uint8) for content in contents])
        pipe.feed_input("start", [np.asarray([top, left], np.int32) for left, top, _, _ in boxes])
        pipe.feed_input("end", [np.asarray([bottom, right], np.int32) for _, _, right, bottom in boxes])
        pipe.feed_input("mirror", [np.asarray(int(crop.is_mirrored), np.int32) for crop in crops])
        (outputs,) = pipe.run()
        pixels = torch.empty((len(contents), form.channels, form.height, form.width), device="cuda")
        torch_plugin.feed_ndarray(outputs.as_tensor(), pixels)
        return pixels


def image_size(content: bytes) -> tuple[int, int]:
    """Return (width, height) of an image, from its header."""
    size: tuple[int, int] = import_optional("PIL.Image", 'data.source = "images"').open(io.BytesIO(content)).size
    return size


def preparer_of(where: str) -> Preparer:
    """Return the preparer for `data.preprocess`: "cpu" or "device". Raises ConfigError if a package is missing."""
    if where == "cpu":
        import_optional("PIL.Image", 'data.source = "images"')
        return prepare_with_pillow
    try:
        return DaliPreparer()
    except ConfigError as error:
        raise ConfigError(f'{error}; or use data.preprocess = "cpu", which makes the same of images') from error
