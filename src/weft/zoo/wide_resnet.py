"""Wide ResNet (Zagoruyko & Komodakis 2016) as Alpa trains it: a ResNet with more channels and a wider 3x3 convolution.

Input: `pixels` BCHW. Output: logits BV. The batch has `labels` B as well.
"""

from __future__ import annotations

from functools import partial

from weft.zoo import resnet

Config = partial(resnet.Config, base=160, width=2)
_DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def _alpa(depth: int, base: int, width: int) -> resnet.Config:
    """Return a size of the table of Wide-ResNet models of Zheng et al. 2022 (Alpa): depth, channels of the first stage, width factor."""
    return resnet.Config(blocks=_DEPTHS[depth], base=base, width=width)


SIZES = {
    "wide-resnet-tiny": resnet.Config(blocks=(1, 1, 1, 1), base=16, width=2, image=32, classes=16),
    "wide-resnet-250m": _alpa(50, 160, 2),
    "wide-resnet-500m": _alpa(50, 224, 2),
    "wide-resnet-1b": _alpa(50, 320, 2),
    "wide-resnet-2b": _alpa(50, 448, 2),
    "wide-resnet-4b": _alpa(50, 640, 2),
    "wide-resnet-6.8b": _alpa(50, 320, 16),
    "wide-resnet-13b": _alpa(101, 320, 16),
}
