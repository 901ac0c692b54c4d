"""Batches of table rows: features BF, scaled by statistics of the training rows, and labels B (or B1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.train.data.sample_order import Numbers, OrderedSource, SampleOrder
from shardwise.train.data.sources import Batch, batch_entries, batch_from_entries
from shardwise.zoo.resolved import ResolvedModel


@dataclass(frozen=True)
class TableBatches(OrderedSource[Batch]):
    """Batches of rows in the format of a model's example: a dict of two tensors or a tuple."""

    features: Tensor
    labels: Tensor
    order: SampleOrder
    names: tuple[Any, Any]

    def _read(self, samples: Numbers) -> Batch:
        index = torch.from_numpy(samples)
        return batch_from_entries({self.names[0]: self.features[index], self.names[1]: self.labels[index]})


def table_batches_of(
    resolved: ResolvedModel, order: SampleOrder, features: npt.NDArray[np.float32], labels: npt.NDArray[np.float32], names: Sequence[str]
) -> TableBatches:
    """Put rows in the format of a model's example batch: features BF, and labels B (class ids or regression targets) or B1.

    Raises:
        ConfigError: a model that takes other batches or another number of features; class ids that are no integers.
    """
    example = batch_entries(resolved.batch(2))
    wide = [(name, x) for name, x in example if isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point()]
    label_entries = [(name, x) for name, x in example[1:] if isinstance(x, Tensor) and x.dim() in (1, 2)]
    if len(example) != 2 or not wide or wide[0] != example[0] or not label_entries:
        raise ConfigError(f"{resolved.name} takes no batches of features (BF) and labels (B); give a file.py:factory with such a batch")
    if wide[0][1].shape[1] != features.shape[1]:
        raise ConfigError(
            f"{resolved.name} takes {wide[0][1].shape[1]} features, and the table has {features.shape[1]}: {', '.join(names)}; choose them "
            "with data.features, or make the model for so many"
        )
    targets = torch.from_numpy(labels.copy())
    label_name, label = label_entries[0]
    if not label.is_floating_point():
        least, largest, classes = float(targets.min()), float(targets.max()), resolved.classes
        if not torch.equal(targets, targets.round()) or least < 0 or (classes and largest >= classes):
            raise ConfigError(
                f"{resolved.name} tells classes apart, and labels are no numbers of its classes: they go from {least:g} to {largest:g}"
            )
        targets = targets.long()
    return TableBatches(torch.from_numpy(features), targets.view(-1, *[1] * (label.dim() - 1)), order, (wide[0][0], label_name))
