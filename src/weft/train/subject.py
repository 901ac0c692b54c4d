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

from weft.errors import ConfigError
from weft.run.build import Traced
from weft.train.config import Config
from weft.train.corpus import Corpus, byte_frequency_loss
from weft.train.data import Batch, Source, Synthetic, Text, TextRows, tensors
from weft.train.images import Images, image_form
from weft.train.order import Order
from weft.train.packed import PackedText, packed_text
from weft.train.reading.images import ImageFiles
from weft.train.reading.pixels import preparer_of
from weft.train.reading.tables import Rows as TableRows
from weft.train.reading.tables import read_rows, tables_of
from weft.train.tables import table_of
from weft.zoo.resolve import Resolved, resolve

Form = Callable[[TextRows], Batch]
Rows = Text | PackedText
POSITIONS = "position_ids"  # restart at 0 at the start of a document


@dataclass(frozen=True)
class Subject:
    """`example`: a global batch, for capture. `tokens_per_step`: of all ranks; samples if the data are no tokens.

    `byte_frequency_loss`: nats a byte of the best prediction from byte frequencies in the validation text; 0 without text.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor] | None
    source: Source
    example: Batch
    tokens_per_step: int
    byte_frequency_loss: float = 0.0
    captured: Traced | None = None  # the model, if it was captured before the ranks were forked


def sequence_of(config: Config) -> int | None:
    """Sequence length that a named model is built for; None without text, and for a factory in a file, which makes its own batch."""
    is_file = ".py:" in config.model.name or config.model.name.endswith(".py")
    return config.data.sequence if config.data.is_text and not is_file else None


def subject_of(config: Config, corpus: Corpus | None) -> Subject:
    """Resolve the model and the data of a configuration.

    Raises:
        ModelError, ConfigError: an unknown model, one that does not take text, too little text.
    """
    batch = config.train.batch
    resolved = resolve(config.model.name, batch, sequence_of(config))
    if corpus is None:
        example = resolved.batch(batch)
        first = next(tensors(example))
        tokens = first.numel() if first.dim() == 2 and not first.is_floating_point() else batch
        return Subject(resolved.make, resolved.loss, Synthetic(example), example, tokens)
    if corpus.images:
        return _of_images(config, corpus, resolved)
    if corpus.rows:
        return _of_table(config, corpus, resolved)
    text = rows_of_text(config, corpus)
    source = Formed(text, text_form(resolved, config.data.packing == "documents"))
    return Subject(
        resolved.make,
        resolved.loss,
        source,
        source.train(0, range(batch)),
        batch * config.data.sequence,
        byte_frequency_loss(text.validation_tokens()) if isinstance(text, Text) and corpus.written is None else 0.0,
    )


def _of_images(config: Config, corpus: Corpus, resolved: Resolved) -> Subject:
    data, batch, images = config.data, config.train.batch, corpus.image_set
    if resolved.classes is not None and len(images.classes) > resolved.classes:
        raise ConfigError(
            f"{config.model.name} tells {resolved.classes} classes apart, and the images in {corpus.origin} have {len(images.classes)}: "
            f"give it as many (classes={len(images.classes)} of a named model, num_labels in an hf: configuration)"
        )
    form, names = image_form(resolved, data.mean, data.std)
    order = Order(images.num_train, batch, data.validation_fraction, data.seed, held_out=images.num_validation)
    if order.num_samples < 1 or order.num_validation < 1:
        raise ConfigError(f"{images.num_train} image in {corpus.origin}; training and validation need at least one each")
    files = ImageFiles(Path(corpus.path), corpus.digest)
    source = Images(files, order, form, names, data.augment, preparer_of(data.preprocess))
    return Subject(resolved.make, resolved.loss, source, source.validation(0, range(batch)), batch)


def _of_table(config: Config, corpus: Corpus, resolved: Resolved) -> Subject:
    data, batch = config.data, config.train.batch
    features, labels = read_rows(Path(corpus.path), corpus.digest)
    order = Order(corpus.size, batch, data.validation_fraction, data.seed)
    if order.num_samples < 1 or order.num_validation < 1:
        raise ConfigError(f"{corpus.size} row in {corpus.origin}; training and validation need at least one each")
    if data.scale:  # by the training rows alone
        held_out = np.isin(np.arange(corpus.size), order.first_validation(corpus.size))
        features = tables_of(data.preprocess).scaled(features[~held_out], features)
    source = table_of(resolved, order, features, labels, TableRows(**(corpus.rows or {})).features)
    return Subject(resolved.make, resolved.loss, source, source.train(0, range(batch)), batch)


def rows_of_text(config: Config, corpus: Corpus) -> Rows:
    """Build the text samples of a configuration.

    Raises:
        ConfigError: too little text.
    """
    data, batch = config.data, config.train.batch
    if corpus.written is None:
        return Text(corpus.tokens(), data.sequence, batch, data.validation_fraction, data.seed)
    store = corpus.store()
    packing = data.packing if data.packing != "auto" else "windows" if store.learned is None else "none"
    if packing == "windows":
        return Text(store.tokens, data.sequence, batch, data.validation_fraction, data.seed, store.learned)
    return packed_text(store, data.sequence, batch, data.validation_fraction, data.seed, together=packing == "documents")


@dataclass(frozen=True)
class Formed:
    """Text in the batch format that a model takes."""

    text: Rows
    form: Form

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


def text_form(resolved: Resolved, restart: bool = False) -> Form:
    """Derive a model's text batch format from its example batch; `resets_positions`: with positions within documents.

    `input_ids` and `labels`: if the example's labels equal the inputs, the model shifts them itself, as Hugging Face's causal
    models do; if they are the next tokens, text has such labels, too. A pair of such tensors: likewise.

    Raises:
        ConfigError: any other batch, including labels that are neither (no next-token prediction); or a model without positions.
    """
    example = resolved.batch(2)
    match example:
        case {"input_ids": Tensor() as inputs, "labels": Tensor() as labels, **rest} if not rest:
            shifted = _shifted(inputs, labels)
            if shifted is not None:
                if restart:
                    _check_positions(resolved)
                return lambda rows: {
                    "input_ids": rows.inputs,
                    "labels": rows.targets if shifted else rows.labels,
                    **({} if rows.positions is None else {POSITIONS: rows.positions}),
                }
        case (Tensor() as inputs, Tensor() as labels) if not restart:
            shifted = _shifted(inputs, labels)
            if shifted is not None:
                return lambda rows: (rows.inputs, rows.targets if shifted else rows.labels)
    has = ", ".join(example) if isinstance(example, dict) else f"{type(example).__name__} of {len(list(tensors(example)))} tensors"
    takes = f"that are no text and its next tokens; use a language model{', with arguments by name' if restart else ''}"
    raise ConfigError(
        f'{resolved.name} takes batches of {has} {takes}, or data.source = "synthetic" to train on the batch that comes with the model'
    )


def with_positions(resolved: Resolved, config: Config) -> Resolved:
    """Add positions to a model's example batches, if the batches of the configuration have them."""
    if config.data.packing != "documents" or config.data.source == "synthetic":
        return resolved

    def added(batch: Any) -> Any:
        if not isinstance(batch, dict) or not isinstance(ids := batch.get("input_ids"), Tensor):
            return batch  # which `text_form` refuses
        return {**batch, POSITIONS: torch.arange(ids.shape[1]).expand_as(ids).contiguous()}

    form = resolved.form
    return replace(resolved, batch=lambda size: added(resolved.batch(size)), form=form and (lambda size: added(form(size))))


def _check_positions(resolved: Resolved) -> None:
    """Raise ConfigError if a model's forward takes no positions, which mark document boundaries."""
    takes = inspect.signature(Traced.of(resolved.make).model.forward).parameters
    if POSITIONS not in takes:
        raise ConfigError(
            f'{resolved.name} takes no {POSITIONS}, so documents in one sample would see one another; use data.packing = "none", which '
            f'pads, "windows", which has no boundaries, or a model whose forward takes {POSITIONS}'
        )


def _shifted(inputs: Tensor, labels: Tensor) -> bool | None:
    """Return whether labels are the next tokens (True) or the inputs (False); None if neither."""
    if inputs.shape != labels.shape or inputs.dim() != 2 or inputs.dtype != torch.int64:
        return None
    if torch.equal(inputs, labels):
        return False
    return True if inputs.shape[1] > 1 and torch.equal(inputs[:, 1:], labels[:, :-1]) else None
