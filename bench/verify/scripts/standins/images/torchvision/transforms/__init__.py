"""Images of PIL to tensors."""

import random
import sys

import numpy as np
import torch
from PIL import Image, ImageEnhance


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
        self.mean, self.std = (torch.tensor(x, dtype=torch.get_default_dtype()).reshape(-1, 1, 1) for x in (mean, std))

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


class RandomCrop:
    def __init__(self, size, padding=0):
        self.size, self.padding = size, padding

    def __call__(self, image):
        wide, high = (side + 2 * self.padding for side in image.size)
        padded = Image.new(image.mode, (wide, high))
        padded.paste(image, (self.padding, self.padding))
        left, top = random.randint(0, wide - self.size), random.randint(0, high - self.size)
        return padded.crop((left, top, left + self.size, top + self.size))


class RandomApply:
    def __init__(self, transforms, p=0.5):
        self.transforms, self.p = transforms, p

    def __call__(self, image):
        return Compose(self.transforms)(image) if random.random() < self.p else image


class RandomGrayscale:
    def __init__(self, p=0.1):
        self.p = p

    def __call__(self, image):
        return image.convert("L").convert("RGB") if random.random() < self.p else image


class ColorJitter:
    """Brightness, contrast and saturation; hues stay."""

    def __init__(self, brightness=0, contrast=0, saturation=0, hue=0):
        self.ranges = brightness, contrast, saturation

    def __call__(self, image):
        for kind, most in zip((ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color), self.ranges, strict=True):
            image = kind(image).enhance(random.uniform(max(0, 1 - most), 1 + most))
        return image


class ToPILImage:
    def __call__(self, x):
        return Image.fromarray((x * 255).clamp(0, 255).byte().permute(1, 2, 0).numpy())


transforms = sys.modules[__name__]  # which some import from this module under its own name
