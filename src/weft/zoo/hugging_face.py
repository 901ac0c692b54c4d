"""`hf:config.json`: a Hugging Face model from its configuration file. In: the text. Out: `Resolved`. Nothing is downloaded.

The class is the first of the file's `architectures`, or the usual head of its kind of model. Not modelled: pretrained weights,
audio and multi-modal inputs, configurations whose code lies in another repository.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.zoo import parts
from weft.zoo.names import nearest
from weft.zoo.resolved import Resolved

DEFAULT_BATCH = 8
# The usual head of a kind of model, tried in this order where the file names no class.
_HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
)
# Encoders that have a causal head as well, but are known by another.
_MASKED = frozenset(("albert", "bert", "big_bird", "camembert", "convbert", "electra", "ernie", "megatron-bert", "roberta", "roformer"))


def from_config(text: str, batch: int | None = None, sequence: int | None = None) -> Resolved:
    """The model of a `config.json`. `sequence` is the tokens of a sample, by default the model's own limit, 512 at most.

    Raises:
        ModelError: `transformers` is missing, the file cannot be read or means no model that can be trained here.
    """
    file = text.removeprefix("hf:")
    library = _library(text)
    config = _configuration(library, file)
    kind = _class(library, config, file)
    inputs = _inputs(config, kind, file, sequence)

    def example_batch(size: int) -> dict[str, Tensor]:
        if size < 1:
            raise ModelError(f"a batch of {size} samples; it must have at least 1")
        return inputs(size)

    def make() -> nn.Module:
        module: nn.Module = kind(_configuration(library, file)).train()
        return module

    return Resolved(text, make, example_batch, None, batch or DEFAULT_BATCH)


def _library(text: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ModelError(f"{text} needs the package transformers ({error}); install weft[hf]") from error


def _configuration(library: Any, file: str) -> Any:
    path = Path(file).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ModelError(f"there is no file {file}; MODEL is hf:path/to/config.json, nothing is downloaded")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is no JSON: {error}") from error
    kind = values.pop("model_type", None) if isinstance(values, dict) else None
    if kind is None:
        raise ModelError(f'{file} has no "model_type"; it must be the config.json of a Hugging Face model')
    known = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    if kind not in known:
        raise ModelError(f"{file}: model_type {kind} is unknown to transformers {library.__version__}{nearest(kind, known)}")
    try:
        config = library.AutoConfig.for_model(kind, **values)
    except Exception as error:
        raise ModelError(f"{file} is no configuration of {kind}: {type(error).__name__}: {error}") from error
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "bos_token_id", None) or getattr(config, "pad_token_id", None) or 0
    return config


def _class(library: Any, config: Any, file: str) -> Callable[[Any], nn.Module]:
    for name in config.architectures or ():
        found = getattr(library, name, None)
        if found is None:
            raise ModelError(f"{file}: transformers {library.__version__} has no class {name}; change or leave out architectures")
        return found  # type: ignore[no-any-return]
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    heads = _HEADS if config.model_type not in _MASKED else ("MODEL_FOR_MASKED_LM_MAPPING", *_HEADS)
    for head in heads:
        mapping = getattr(auto, head)
        if type(config) in mapping:
            return mapping[type(config)]  # type: ignore[no-any-return]
    raise ModelError(f'{file}: {config.model_type} has no head that weft can feed; name a class in "architectures"')


def _inputs(config: Any, kind: Any, file: str, sequence: int | None) -> Callable[[int], dict[str, Tensor]]:
    """What makes a batch of n samples: pixels and classes, or tokens and labels, by what the class calls its main input."""
    if getattr(kind, "main_input_name", "input_ids") == "pixel_values":
        return _images(config, kind, file, sequence)
    if getattr(kind, "main_input_name", "input_ids") != "input_ids":
        raise ModelError(f"{file}: {kind.__name__} takes {kind.main_input_name}; weft feeds models of text and images, use file.py:factory")
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    length = sequence or min(limit or 512, 512)
    if limit and length > limit and getattr(text, "model_type", "") in ("gpt2", "bert"):
        raise ModelError(f"--sequence {length} is more than the {limit} positions of {file}; use --sequence {limit} or fewer")
    name = kind.__name__

    def tokens(size: int) -> dict[str, Tensor]:
        ids = parts.random_tokens((size, length), text.vocab_size, seed=0)
        if name.endswith("ForSequenceClassification"):
            return {"input_ids": ids, "labels": parts.random_classes(size, config.num_labels, seed=1)}
        if name.endswith("ForMaskedLM"):
            return {"input_ids": ids, "labels": parts.some_labels(ids, seed=1)}
        if getattr(config, "is_encoder_decoder", False):
            return {"input_ids": ids, "labels": parts.random_tokens((size, length), text.vocab_size, seed=1)}
        return {"input_ids": ids, "labels": ids.clone()}

    return tokens


def _images(config: Any, kind: Any, file: str, sequence: int | None) -> Callable[[int], dict[str, Tensor]]:
    if sequence is not None:
        raise ModelError(f"--sequence {sequence} means nothing to {file}, a model of images; leave it out")
    if not kind.__name__.endswith("ForImageClassification"):
        raise ModelError(f"{file}: {kind.__name__} has labels of its own kind; use file.py:factory, or a ForImageClassification class")
    side = getattr(config, "image_size", None) or 224
    height, width = side if isinstance(side, tuple | list) else (side, side)

    def images(size: int) -> dict[str, Tensor]:
        pixels = torch.randn(size, config.num_channels, height, width, generator=torch.Generator().manual_seed(0))
        return {"pixel_values": pixels, "labels": parts.random_classes(size, config.num_labels, seed=1)}

    return images
