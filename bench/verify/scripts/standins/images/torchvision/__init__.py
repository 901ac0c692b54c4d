"""The part of torchvision that the scripts use, over images made here: it needs a download, and does not load beside every torch."""

from torchvision import datasets, models, transforms, utils

__all__ = ["datasets", "models", "transforms", "utils"]
