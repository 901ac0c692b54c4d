"""Resolve MODEL, as users write it: a zoo name, `path/file.py:factory`, or `hf:config.json`.

The result says how to make the module, its example batches and its loss. Nothing is allocated before `make` is called, and only `hf:` names
of the hub are downloaded.
"""

from __future__ import annotations

from typing import Any

from shardwise.errors import ModelError, UsageError
from shardwise.zoo import names
from shardwise.zoo.from_file import from_file
from shardwise.zoo.hugging_face import from_config
from shardwise.zoo.resolved import ResolvedModel

__all__ = ["ResolvedModel", "resolve"]


def resolve(text: str, batch: int | None = None, sequence: int | None = None) -> ResolvedModel:
    """Resolve a MODEL text. `batch` is the default batch size, `sequence` the number of tokens of a sample where the model has a choice.

    Raises:
        UsageError: `batch` or `sequence` below 1.
        ModelError: an unknown name, a file that is missing or raises, a configuration without a known model; with the nearest known
            names and the remedy.

    >>> resolve("gpt-tiny", batch=2).example()["input_ids"].shape
    torch.Size([2, 32])
    """
    for name, value in (("batch", batch), ("sequence", sequence)):
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value} must be at least 1")
    if text.startswith("hf:"):
        return from_config(text, batch, sequence)
    if ".py:" in text or text.endswith(".py"):
        return from_file(text, batch, sequence)
    return _from_zoo(text, batch, sequence)


def _from_zoo(text: str, batch: int | None, sequence: int | None) -> ResolvedModel:
    family, config = names.find(text, sequence)

    def example_batch(size: int) -> Any:
        if size < 1:
            raise ModelError(f"a batch of {size} samples; it must have at least 1")
        return family.example_batch(config, size)

    classes = getattr(config, "classes", None)
    return ResolvedModel(text, lambda: family.make_model(config), example_batch, family.loss, batch or 8, classes=classes)
