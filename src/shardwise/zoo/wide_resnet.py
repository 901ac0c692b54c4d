"""Wide ResNet (Zagoruyko & Komodakis 2016) as Alpa trains it: a ResNet with more channels and a wider 3x3 convolution.

Input: `pixels` BCHW. Output: logits BV. The batch has `labels` B as well.
"""

from __future__ import annotations

from functools import partial

from shardwise.zoo import resnet

WideResNetConfig = partial(resnet.ResNetConfig, base=160, width=2)
_DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def _alpa_size(depth: int, base: int, width: int) -> resnet.ResNetConfig:
    """Return a size of the table of Wide-ResNet models of Zheng et al. 2022 (Alpa): depth, channels of the first stage, width factor."""
    return resnet.ResNetConfig(blocks=_DEPTHS[depth], base=base, width=width)


SIZES = {
    "wide-resnet-tiny": resnet.ResNetConfig(blocks=(1, 1, 1, 1), base=16, width=2, image=32, classes=16),
    "wide-resnet-250m": _alpa_size(50, 160, 2),
    "wide-resnet-500m": _alpa_size(50, 224, 2),
    "wide-resnet-1b": _alpa_size(50, 320, 2),
    "wide-resnet-2b": _alpa_size(50, 448, 2),
    "wide-resnet-4b": _alpa_size(50, 640, 2),
    "wide-resnet-6.8b": _alpa_size(50, 320, 16),
    "wide-resnet-13b": _alpa_size(101, 320, 16),
}
