"""Resolve Hugging Face models: `hf:config.json` (a configuration), `hf:folder` (with the pretrained weights in it), `hf:name` (the hub).

The class is the first of the file's `architectures`, or the usual head of its kind of model. Not supported: audio and multi-modal inputs,
weights that would be unpickled, configurations with code in another repository.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ModelError, format_error
from shardwise.plan.ir.toml_text import parse_json
from shardwise.zoo import shared_layers
from shardwise.zoo.listing import suggest_nearest
from shardwise.zoo.resolved import ResolvedModel

_WEIGHTS = "*.safetensors"

_HUB_NAME = re.compile(r"(?!.*\.json$)[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
DEFAULT_BATCH = 8
DEFAULT_SEQUENCE = 512
# The usual heads of a kind of model, tried in this order where the file names no class.
_HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
)
_TWO_STACKS_HEADS = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",)
# Encoders that have a causal head as well, but are usually trained with a masked one.
_MASKED = frozenset(("albert", "bert", "big_bird", "camembert", "convbert", "electra", "ernie", "megatron-bert", "roberta", "roformer"))
# Endings of the classes for which example batches can be generated.
_NEXT_TOKEN = ("ForCausalLM", "LMHeadModel")
_OUTPUT_TEXT = ("ForConditionalGeneration",)
_MASKED_TOKENS = ("ForMaskedLM",)
_CLASSES = ("ForSequenceClassification", "ForTokenClassification", "ForImageClassification")


def from_config(text: str, batch: int | None = None, sequence: int | None = None) -> ResolvedModel:
    """Resolve the model of a `config.json`. `sequence` is the tokens of a sample, by default the model's own limit, 512 at most.

    Raises:
        ModelError: `transformers` is missing, the file cannot be read or names no model that can be trained here.
    """
    file = text.removeprefix("hf:")
    library = _import_transformers(text)
    path = Path(file).expanduser()
    from_hub = not path.exists() and _HUB_NAME.fullmatch(file) is not None
    config = _hub_configuration(library, file) if from_hub else _read_configuration(library, file)
    weights = file if from_hub else str(path) if any(path.glob(_WEIGHTS)) else None
    kind = _model_class(library, config, file)
    inputs = _batch_maker(config, kind, file, sequence)

    def example_batch(size: int) -> dict[str, Tensor]:
        if size < 1:
            raise ModelError(f"a batch of {size} samples; it must have at least 1")
        return inputs(size)

    def make() -> nn.Module:
        try:
            copied = copy.deepcopy(config)  # models write to their configuration
            module: nn.Module = (kind(copied) if weights is None else _load_pretrained(kind, weights, copied)).train()
        except Exception as error:
            raise ModelError(f"{file}: {kind.__name__} cannot be made of this configuration: {format_error(error)}") from error
        return module

    return ResolvedModel(text, make, example_batch, None, batch or DEFAULT_BATCH, classes=getattr(config, "num_labels", None))


def _import_transformers(text: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ModelError(f"{text} needs the package transformers ({error}); install shardwise[hf]") from error


def _read_configuration(library: Any, file: str) -> Any:
    path = Path(file).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ModelError(f"there is no file {file}; MODEL is hf:path/to/config.json, or hf:FOLDER with weights beside it")
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is no JSON: {error}") from error
    kind = values.pop("model_type", None) if isinstance(values, dict) else None
    if kind is None:
        raise ModelError(f'{file} has no "model_type"; it must be the config.json of a Hugging Face model')
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    if kind not in auto.CONFIG_MAPPING_NAMES:
        near = suggest_nearest(kind, auto.CONFIG_MAPPING_NAMES, fallback="; another version may know it, or use file.py:factory")
        raise ModelError(f"{file}: model_type {kind} is unknown to transformers {library.__version__}{near}")
    values.setdefault("experts_implementation", "eager")  # supports every dtype; a capture replaces it by `shardwise.capture.experts`
    try:
        config = auto.CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:
        raise ModelError(f"{file} is no configuration of {kind}: {format_error(error)}") from error
    return _for_training(config)


def _hub_configuration(library: Any, name: str) -> Any:
    """Return the configuration of a model of the hub, or of its cache on this machine."""
    try:
        config = library.AutoConfig.from_pretrained(name)
    except Exception as error:
        raise ModelError(
            f"there is no file or folder {name}, and transformers does not get a model of that name: {format_error(error)}; give "
            f"hf:config.json or "
            "hf:FOLDER, or a name of the hub where there is a network"
        ) from error
    config.experts_implementation = "eager"
    return _for_training(config)


def _load_pretrained(kind: Any, weights: str, config: Any) -> nn.Module:
    """Load a model with its weights converted to float32; nothing is unpickled."""
    logs = importlib.import_module("transformers.utils.logging")
    bars = logs.is_progress_bar_enabled()
    logs.disable_progress_bar()
    try:
        module: nn.Module = kind.from_pretrained(weights, config=config, dtype=torch.float32, use_safetensors=True)
    finally:
        if bars:
            logs.enable_progress_bar()
    return module


def _for_training(config: Any) -> Any:
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "bos_token_id", None) or getattr(config, "pad_token_id", None) or 0
    return config


def _model_class(library: Any, config: Any, file: str) -> Any:
    """Return the class that the file names first, or the one with the usual head."""
    for name in config.architectures or ():
        cls = getattr(library, name, None)
        if cls is None:
            near = suggest_nearest(name, dir(library), fallback="; change or leave out architectures")
            raise ModelError(f"{file}: transformers {library.__version__} has no class {name}{near}")
        return cls
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    heads = _TWO_STACKS_HEADS if getattr(config, "is_encoder_decoder", False) else _HEADS[1:] if config.model_type in _MASKED else _HEADS
    for head in heads:
        mapping = getattr(auto, head)
        if type(config) in mapping:
            return mapping[type(config)]
    raise ModelError(
        f'{file}: {config.model_type} has no head that shardwise can feed; name a class in "architectures", or use file.py:factory'
    )


def _batch_maker(config: Any, kind: Any, file: str, sequence: int | None) -> Callable[[int], dict[str, Tensor]]:
    """Return a function that makes a batch of n samples, chosen by the main input and the training task of the class."""
    name, takes = kind.__name__, getattr(kind, "main_input_name", "input_ids")
    if not name.endswith((*_NEXT_TOKEN, *_OUTPUT_TEXT, *_MASKED_TOKENS, *_CLASSES)):
        endings = ", ".join(f"...{ending}" for ending in (*_NEXT_TOKEN, *_OUTPUT_TEXT, *_MASKED_TOKENS, *_CLASSES))
        raise ModelError(f"{file}: shardwise cannot make up what {name} learns; it can for {endings}; else use file.py:factory")
    if takes == "pixel_values" and name.endswith("ForImageClassification"):
        return _image_batch_maker(config, file, sequence)
    if takes != "input_ids" or name.endswith("ForImageClassification"):
        raise ModelError(f"{file}: {name} takes {takes}; shardwise makes up text and images only, so use file.py:factory")
    text = config.get_text_config()
    limit = max(getattr(text, "max_position_embeddings", None) or 0, 0)  # XLNet says -1, for none
    length = sequence or min(limit or getattr(text, "n_positions", None) or DEFAULT_SEQUENCE, DEFAULT_SEQUENCE)
    if limit and length > limit:
        raise ModelError(f"--sequence {length} is more than the {limit} positions of {file}; use {limit} or fewer, or raise them there")
    size_of = {"vocabulary": text.vocab_size, "labels": getattr(config, "num_labels", 2)}

    def tokens(size: int) -> dict[str, Tensor]:
        ids_BS = shared_layers.random_tokens((size, length), size_of["vocabulary"], seed=0)
        if name.endswith(_NEXT_TOKEN):  # these shift the labels themselves
            labels = ids_BS.clone()
        elif name.endswith(_OUTPUT_TEXT):
            labels = shared_layers.random_tokens((size, length), size_of["vocabulary"], seed=1)
        elif name.endswith(_MASKED_TOKENS):
            labels = shared_layers.masked_token_labels(ids_BS, seed=1)
        elif name.endswith("ForTokenClassification"):
            labels = shared_layers.random_classes(size * length, size_of["labels"], seed=1).view(size, length)
        else:
            labels = shared_layers.random_classes(size, size_of["labels"], seed=1)
        return {"input_ids": ids_BS, "labels": labels}

    return tokens


def _image_batch_maker(config: Any, file: str, sequence: int | None) -> Callable[[int], dict[str, Tensor]]:
    if sequence is not None:
        raise ModelError(f"--sequence {sequence} does not apply to {file}, a model of images; leave it out")
    side = getattr(config, "image_size", None) or 224
    height, width = side if isinstance(side, tuple | list) else (side, side)

    def images(size: int) -> dict[str, Tensor]:
        batch = shared_layers.random_images((size, config.num_channels, height, width), config.num_labels, seed=0)
        return {"pixel_values": batch["pixels"], "labels": batch["labels"]}

    return images
