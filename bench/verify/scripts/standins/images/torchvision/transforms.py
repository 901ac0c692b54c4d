"""Images of PIL to tensors."""

import random

import numpy as np
import torch
from PIL import Image


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for one in self.transforms:
            image = one(image)
        return image


class ToTensor:
    def __call__(self, image):
        pixels = torch.from_numpy(np.array(image)).to(torch.get_default_dtype()) / 255
        return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1)


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = (torch.tensor(x, dtype=torch.get_default_dtype())[:, None, None] for x in (mean, std))

    def __call__(self, x):
        return (x - self.mean) / self.std


class Lambda:
    def __init__(self, function):
        self.function = function

    def __call__(self, x):
        return self.function(x)


class Resize:
    def __init__(self, size, interpolation=None):
        self.size = size

    def __call__(self, image):
        if not isinstance(self.size, int):
            return image.resize(self.size[::-1], Image.Resampling.BILINEAR)
        scale = self.size / min(image.size)
        return image.resize([max(1, round(side * scale)) for side in image.size], Image.Resampling.BILINEAR)


class CenterCrop:
    def __init__(self, size):
        self.size = (size, size) if isinstance(size, int) else size

    def __call__(self, image):
        (width, height), (high, wide) = image.size, self.size
        left, top = (width - wide) // 2, (height - high) // 2
        return image.crop((left, top, left + wide, top + high))


class RandomResizedCrop:
    def __init__(self, size, scale=(0.08, 1.0)):
        self.size, self.scale = (size, size) if isinstance(size, int) else size, scale

    def __call__(self, image):
        part = random.uniform(*self.scale) ** 0.5
        width, height = (max(1, int(side * part)) for side in image.size)
        left, top = random.randint(0, image.size[0] - width), random.randint(0, image.size[1] - height)
        return image.resize(self.size[::-1], Image.Resampling.BILINEAR, (left, top, left + width, top + height))


class RandomHorizontalFlip:
    def __call__(self, image):
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image
