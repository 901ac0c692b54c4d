"""What a run trains, from its configuration: how to make the model, the batches in the form that it takes, its loss.

In: a `Config` and, for text, a `Corpus`. Out: `Subject`. Not modelled: tokenizers other than bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.run.build import Traced
from weft.train.config import Config
from weft.train.corpus import Corpus, byte_frequency_loss
from weft.train.data import Batch, Source, Synthetic, Text, tensors
from weft.zoo.resolve import Resolved, resolve

Form = Callable[[Tensor, Tensor], Batch]


@dataclass(frozen=True)
class Subject:
    """`example`: a batch of the whole size, for capture. `tokens_per_step`: of all ranks; samples where there are no tokens.

    `byte_frequency_loss`: nats a byte of knowing only how often each byte occurs in the validation text; 0 without text.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor] | None
    source: Source
    example: Batch
    tokens_per_step: int
    byte_frequency_loss: float = 0.0
    captured: Traced | None = None  # the model, where it was captured before the ranks were forked


def sequence_of(config: Config) -> int | None:
    """Tokens of a sample that a named model is made for; None without text, and for a file's factory, which makes its batch itself."""
    own = ".py:" in config.model.name or config.model.name.endswith(".py")
    return None if own or config.data.source != "text" else config.data.sequence


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
    data = config.data
    text = Text(corpus.tokens(), data.sequence, batch, data.validation_fraction, data.seed)
    source = Formed(text, text_form(resolved))
    return Subject(
        resolved.make,
        resolved.loss,
        source,
        source.train(0, range(batch)),
        batch * data.sequence,
        byte_frequency_loss(text.validation_tokens()),
    )


@dataclass(frozen=True)
class Formed:
    """Text in the form of batch that a model takes."""

    text: Text
    form: Form

    @property
    def num_samples(self) -> int:
        return self.text.num_samples

    @property
    def num_validation(self) -> int:
        return self.text.num_validation

    def train(self, step: int, rows: Sequence[int]) -> Batch:
        return self.form(*self.text.train(step, rows))

    def validation(self, number: int, rows: Sequence[int]) -> Batch:
        return self.form(*self.text.validation(number, rows))


def text_form(resolved: Resolved) -> Form:
    """How text becomes a batch for this model, read off its example batch.

    `input_ids` and `labels`: where the example's labels are the inputs, the model shifts them itself, as Hugging Face's causal
    models do; where they are the next tokens, so are text's. A pair of such tensors: likewise.

    Raises:
        ConfigError: any other batch, labels that are neither included: the model does not predict the next token.
    """
    example = resolved.batch(2)
    match example:
        case {"input_ids": Tensor() as inputs, "labels": Tensor() as labels, **rest} if not rest:
            shifted = _shifted(inputs, labels)
            if shifted is not None:
                return lambda x, y: {"input_ids": x, "labels": y if shifted else x}
        case (Tensor() as inputs, Tensor() as labels):
            shifted = _shifted(inputs, labels)
            if shifted is not None:
                return lambda x, y: (x, y if shifted else x)
    has = ", ".join(example) if isinstance(example, dict) else f"{type(example).__name__} of {len(list(tensors(example)))} tensors"
    raise ConfigError(
        f"{resolved.name} takes batches of {has} that are no text and its next tokens; use a language model, "
        'or data.source = "synthetic" to train on the batch that comes with the model'
    )


def _shifted(inputs: Tensor, labels: Tensor) -> bool | None:
    """Whether labels are the next tokens (True) or the inputs (False); None where they are neither."""
    if inputs.shape != labels.shape or inputs.dim() != 2 or inputs.dtype != torch.int64:
        return None
    if torch.equal(inputs, labels):
        return False
    return True if inputs.shape[1] > 1 and torch.equal(inputs[:, 1:], labels[:, :-1]) else None
