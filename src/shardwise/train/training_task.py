"""The training task of a configuration: how to build the model, batches in the format that it takes, and its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.capture.nesting import tensors_in
from shardwise.errors import ConfigError
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.train.config import TrainingConfig
from shardwise.train.corpus import Corpus, byte_frequency_loss
from shardwise.train.data.image_batches import ImageBatches, image_form
from shardwise.train.data.packed_text import PackedText, packed_text
from shardwise.train.data.reading.images import ImageFiles
from shardwise.train.data.reading.pixels import preparer_of
from shardwise.train.data.reading.tables import TableRows as TableRows
from shardwise.train.data.reading.tables import read_rows, table_reader_of
from shardwise.train.data.sample_order import SampleOrder
from shardwise.train.data.sources import Batch, BatchSource, SyntheticSource, TextRows, TextWindows
from shardwise.train.data.table_batches import table_batches_of
from shardwise.zoo.resolve import ResolvedModel, resolve

BatchFormat = Callable[[TextRows], Batch]
TextSource = TextWindows | PackedText
POSITIONS = "position_ids"  # restart at 0 at the start of a document


@dataclass(frozen=True)
class TrainingTask:
    """`example`: a global batch, for capture. `tokens_per_step`: of all ranks; samples if the data are no tokens.

    `byte_frequency_loss`: nats a byte of the best prediction from byte frequencies in the validation text; 0 without text.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor] | None
    source: BatchSource
    example: Batch
    tokens_per_step: int
    byte_frequency_loss: float = 0.0
    captured: CachedModelSource | None = None  # the model, if it was captured before the ranks were forked


def sequence_length_of(config: TrainingConfig) -> int | None:
    """Sequence length that a named model is built for; None without text, and for a factory in a file, which makes its own batch."""
    is_file = ".py:" in config.model.name or config.model.name.endswith(".py")
    return config.data.sequence if config.data.is_text and not is_file else None


def training_task_of(config: TrainingConfig, corpus: Corpus | None) -> TrainingTask:
    """Resolve the model and the data of a configuration.

    Raises:
        ModelError, ConfigError: an unknown model, one that does not take text, too little text.
    """
    batch = config.train.batch
    resolved = resolve(config.model.name, batch, sequence_length_of(config))
    if corpus is None:
        example = resolved.batch(batch)
        first = next(tensors_in(example))
        tokens = first.numel() if first.dim() == 2 and not first.is_floating_point() else batch
        return TrainingTask(resolved.make, resolved.loss, SyntheticSource(example), example, tokens)
    if corpus.images:
        return _image_task(config, corpus, resolved)
    if corpus.rows:
        return _table_task(config, corpus, resolved)
    text = text_source_of(config, corpus)
    source = FormattedText(text, text_form(resolved, config.data.packing == "documents"))
    return TrainingTask(
        resolved.make,
        resolved.loss,
        source,
        source.train(0, range(batch)),
        batch * config.data.sequence,
        byte_frequency_loss(text.validation_tokens()) if isinstance(text, TextWindows) and corpus.written is None else 0.0,
    )


def _image_task(config: TrainingConfig, corpus: Corpus, resolved: ResolvedModel) -> TrainingTask:
    data, batch, images = config.data, config.train.batch, corpus.image_set
    if resolved.classes is not None and len(images.classes) > resolved.classes:
        raise ConfigError(
            f"{config.model.name} tells {resolved.classes} classes apart, and the images in {corpus.origin} have {len(images.classes)}: "
            f"give it as many (classes={len(images.classes)} of a named model, num_labels in an hf: configuration)"
        )
    form, names = image_form(resolved, data.mean, data.std)
    order = SampleOrder(images.num_train, batch, data.validation_fraction, data.seed, num_held_out=images.num_validation)
    if order.num_samples < 1 or order.num_validation < 1:
        raise ConfigError(f"{images.num_train} image in {corpus.origin}; training and validation need at least one each")
    files = ImageFiles(Path(corpus.path), corpus.digest)
    source = ImageBatches(files, order, form, names, data.augment, preparer_of(data.preprocess))
    return TrainingTask(resolved.make, resolved.loss, source, source.validation(0, range(batch)), batch)


def _table_task(config: TrainingConfig, corpus: Corpus, resolved: ResolvedModel) -> TrainingTask:
    data, batch = config.data, config.train.batch
    features, labels = read_rows(Path(corpus.path), corpus.digest)
    order = SampleOrder(corpus.size, batch, data.validation_fraction, data.seed)
    if order.num_samples < 1 or order.num_validation < 1:
        raise ConfigError(f"{corpus.size} row in {corpus.origin}; training and validation need at least one each")
    if data.scale:  # by the training rows alone
        held_out = np.isin(np.arange(corpus.size), order.first_validation(corpus.size))
        features = table_reader_of(data.preprocess).standardize(features[~held_out], features)
    source = table_batches_of(resolved, order, features, labels, TableRows(**(corpus.rows or {})).features)
    return TrainingTask(resolved.make, resolved.loss, source, source.train(0, range(batch)), batch)


def text_source_of(config: TrainingConfig, corpus: Corpus) -> TextSource:
    """Build the text samples of a configuration.

    Raises:
        ConfigError: too little text.
    """
    data, batch = config.data, config.train.batch
    if corpus.written is None:
        return TextWindows(corpus.tokens(), data.sequence, batch, data.validation_fraction, data.seed)
    store = corpus.store()
    packing = data.packing if data.packing != "auto" else "windows" if store.loss_mask is None else "none"
    if packing == "windows":
        return TextWindows(store.tokens, data.sequence, batch, data.validation_fraction, data.seed, store.loss_mask)
    return packed_text(store, data.sequence, batch, data.validation_fraction, data.seed, shares_samples=packing == "documents")


@dataclass(frozen=True)
class FormattedText:
    """Text in the batch format that a model takes."""

    text: TextSource
    form: BatchFormat

    @property
    def num_samples(self) -> int:
        return self.text.num_samples

    @property
    def num_validation(self) -> int:
        return self.text.num_validation

    def train(self, step: int, rows: Sequence[int]) -> Batch:
        return self.form(self.text.train(step, rows))

    def validation(self, number: int, rows: Sequence[int]) -> Batch:
        return self.form(self.text.validation(number, rows))


def text_form(resolved: ResolvedModel, resets_positions: bool = False) -> BatchFormat:
    """Derive a model's text batch format from its example batch; `resets_positions`: with positions within documents.

    `input_ids` and `labels`: if the example's labels equal the inputs, the model shifts them itself, as Hugging Face's causal
    models do; if they are the next tokens, text has such labels, too. A pair of such tensors: likewise.

    Raises:
        ConfigError: any other batch, including labels that are neither (no next-token prediction); or a model without positions.
    """
    example = resolved.batch(2)
    match example:
        case {"input_ids": Tensor() as inputs, "labels": Tensor() as labels, **rest} if not rest:
            shifted = _are_labels_shifted(inputs, labels)
            if shifted is not None:
                if resets_positions:
                    _check_positions(resolved)
                return lambda rows: {
                    "input_ids": rows.inputs,
                    "labels": rows.targets if shifted else rows.labels,
                    **({} if rows.positions is None else {POSITIONS: rows.positions}),
                }
        case (Tensor() as inputs, Tensor() as labels) if not resets_positions:
            shifted = _are_labels_shifted(inputs, labels)
            if shifted is not None:
                return lambda rows: (rows.inputs, rows.targets if shifted else rows.labels)
    has = ", ".join(example) if isinstance(example, dict) else f"{type(example).__name__} of {len(list(tensors_in(example)))} tensors"
    takes = f"that are no text and its next tokens; use a language model{', with arguments by name' if resets_positions else ''}"
    raise ConfigError(
        f'{resolved.name} takes batches of {has} {takes}, or data.source = "synthetic" to train on the batch that comes with the model'
    )


def with_positions(resolved: ResolvedModel, config: TrainingConfig) -> ResolvedModel:
    """Add positions to a model's example batches, if the batches of the configuration have them."""
    if config.data.packing != "documents" or config.data.source == "synthetic":
        return resolved

    def added(batch: Any) -> Any:
        if not isinstance(batch, dict) or not isinstance(ids := batch.get("input_ids"), Tensor):
            return batch  # which `text_form` refuses
        return {**batch, POSITIONS: torch.arange(ids.shape[1]).expand_as(ids).contiguous()}

    form = resolved.empty_batch
    return replace(resolved, batch=lambda size: added(resolved.batch(size)), empty_batch=form and (lambda size: added(form(size))))


def _check_positions(resolved: ResolvedModel) -> None:
    """Raise ConfigError if a model's forward takes no positions, which mark document boundaries."""
    takes = inspect.signature(CachedModelSource.from_model(resolved.make).model.forward).parameters
    if POSITIONS not in takes:
        raise ConfigError(
            f'{resolved.name} takes no {POSITIONS}, so documents in one sample would see one another; use data.packing = "none", which '
            f'pads, "windows", which has no boundaries, or a model whose forward takes {POSITIONS}'
        )


def _are_labels_shifted(inputs: Tensor, labels: Tensor) -> bool | None:
    """Return whether labels are the next tokens (True) or the inputs (False); None if neither."""
    if inputs.shape != labels.shape or inputs.dim() != 2 or inputs.dtype != torch.int64:
        return None
    if torch.equal(inputs, labels):
        return False
    return True if inputs.shape[1] > 1 and torch.equal(inputs[:, 1:], labels[:, :-1]) else None
