"""Images of classes that can be learned, made here; folders of images."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image


def made(count, seed, side=28, channels=1):
    """Images [count, side, side, channels] of bytes, and their classes of ten."""
    draw = np.random.default_rng(seed)
    classes = draw.permutation(np.arange(count) % 10)
    y, x = np.mgrid[0:side, 0:side] / side
    waves = [np.sin(6.3 * ((1 + c % 3) * x + (1 + c // 3) * y))[..., None] for c in range(10)]
    images = np.stack([127 + 80 * waves[c] + draw.normal(0, 16, (side, side, channels)) for c in classes])
    return images.clip(0, 255).astype(np.uint8), classes


class MNIST:
    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        images, classes = made(128 if train else 48, int(train))
        self.data, self.targets, self.transform = torch.from_numpy(images[..., 0]), torch.from_numpy(classes), transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image = Image.fromarray(self.data[index].numpy())
        return image if self.transform is None else self.transform(image), int(self.targets[index])


class CIFAR10(MNIST):
    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        images, classes = made(64 if train else 32, int(train), 32, 3)
        self.data, self.targets, self.transform = torch.from_numpy(images), torch.from_numpy(classes), transform


class FakeData:
    def __init__(self, size=1000, image_size=(3, 224, 224), num_classes=10, transform=None):
        self.images, self.classes = made(48, size, image_size[1], image_size[0])
        self.transform = transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.images[index])), int(self.classes[index])


class ImageFolder:
    def __init__(self, root, transform=None):
        self.classes = sorted(path.name for path in Path(root).iterdir() if path.is_dir())
        self.samples = [(path, i) for i, name in enumerate(self.classes) for path in sorted((Path(root) / name).glob("*.*"))]
        self.transform = transform

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, target = self.samples[index]
        image = Image.open(path).convert("RGB")
        return image if self.transform is None else self.transform(image), target
