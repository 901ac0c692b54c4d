"""Find a zoo model by name: a family or a published size, with arguments that change its configuration.

`gpt-39b`; `gpt:layers=12,hidden=768` (a family's defaults with some changed); `gpt-39b:layers=4` (a size with some changed).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor, nn

from shardwise.errors import ModelError
from shardwise.zoo import (
    amoebanet,
    bert,
    convlstm,
    dlrm,
    gpt,
    inception,
    llama,
    lstm,
    moe,
    resnet,
    resnet_v2,
    t5,
    unet,
    unet3d,
    vit,
)
from shardwise.zoo.listing import suggest_nearest


@dataclass(frozen=True, slots=True)
class Family:
    """The contents of a model file: `example_batch(config, batch_size, seed=0)` is deterministic, `loss(output, batch)` a scalar."""

    make_config: Callable[..., Any]
    make_model: Callable[[Any], nn.Module]
    sizes: dict[str, Any]
    example_batch: Callable[..., dict[str, Tensor]]
    loss: Callable[[Any, dict[str, Tensor]], Tensor]


FAMILIES: dict[str, Family] = {
    "gpt": Family(gpt.GPTConfig, gpt.GPT, gpt.SIZES, gpt.example_batch, gpt.compute_loss),
    "llama": Family(llama.LlamaConfig, llama.Llama, llama.SIZES, llama.example_batch, llama.compute_loss),
    "bert": Family(bert.BertConfig, bert.Bert, bert.SIZES, bert.example_batch, bert.compute_loss),
    "t5": Family(t5.T5Config, t5.T5, t5.SIZES, t5.example_batch, t5.compute_loss),
    "vit": Family(vit.ViTConfig, vit.ViT, vit.SIZES, vit.example_batch, vit.compute_loss),
    "moe": Family(moe.MoEConfig, moe.MoEGPT, moe.SIZES, moe.example_batch, moe.compute_loss),
    "lstm": Family(lstm.LSTMConfig, lstm.LSTMLanguageModel, lstm.SIZES, lstm.example_batch, lstm.compute_loss),
    "resnet": Family(resnet.ResNetConfig, resnet.ResNet, resnet.SIZES, resnet.example_batch, resnet.compute_loss),
    "wide-resnet": Family(resnet.WideResNetConfig, resnet.ResNet, resnet.WIDE_SIZES, resnet.example_batch, resnet.compute_loss),
    "resnet-v2": Family(resnet_v2.ResNetV2Config, resnet_v2.ResNetV2, resnet_v2.SIZES, resnet.example_batch, resnet.compute_loss),
    "unet": Family(unet.UNetConfig, unet.UNet, unet.SIZES, unet.example_batch, unet.compute_loss),
    "inception": Family(inception.GoogLeNetConfig, inception.GoogLeNet, inception.SIZES, inception.example_batch, inception.compute_loss),
    "amoebanet-d": Family(amoebanet.AmoebaNetConfig, amoebanet.AmoebaNet, amoebanet.SIZES, amoebanet.example_batch, amoebanet.compute_loss),
    "unet3d": Family(unet3d.UNet3DConfig, unet3d.UNet3D, unet3d.SIZES, unet3d.example_batch, unet3d.compute_loss),
    "convlstm": Family(convlstm.ConvLSTMConfig, convlstm.ConvLSTM, convlstm.SIZES, convlstm.example_batch, convlstm.compute_loss),
    "dlrm": Family(dlrm.DLRMConfig, dlrm.DLRM, dlrm.SIZES, dlrm.example_batch, dlrm.compute_loss),
}


def published_sizes() -> dict[str, tuple[Family, Any]]:
    """Return every published size by name, with the family that builds it."""
    return {name: (family, config) for family in FAMILIES.values() for name, config in family.sizes.items()}


def find(text: str, sequence: int | None = None) -> tuple[Family, Any]:
    """Return the family and configuration of a zoo name; `sequence` replaces the configuration's.

    Raises:
        ModelError: an unknown name, argument or value, with the nearest known one; a sequence for a model that has none.

    >>> find("gpt-tiny:layers=2")[1].layers
    2
    """
    name, _, arguments = text.partition(":")
    published = published_sizes()
    if name in published:
        family, config = published[name]
    elif name in FAMILIES:
        family, config = FAMILIES[name], FAMILIES[name].make_config()
    else:
        raise ModelError(f"model {name} is unknown{suggest_nearest(name, (*published, *FAMILIES))}")
    changes = _parse_arguments(name, config, arguments) if arguments else {}
    if sequence is not None:
        if not hasattr(config, "sequence"):
            raise ModelError(f"--sequence {sequence} does not apply to {name}, which has no sequence; leave it out")
        changes["sequence"] = sequence
    return family, replace(config, **changes) if changes else config


def _parse_arguments(name: str, config: Any, text: str) -> dict[str, Any]:
    kinds = {field.name: type(getattr(config, field.name)) for field in fields(config)}
    arguments: dict[str, Any] = {}
    for item in text.split(","):
        key, equals, value = (word.strip() for word in item.partition("="))
        if not equals or not value:
            raise ModelError(f"{item.strip()!r} in the arguments of {name} must be key=value, as in {name}:{next(iter(kinds))}=...")
        if key not in kinds:
            raise ModelError(f"{name} has no argument {key}{suggest_nearest(key, kinds)}")
        if key in arguments:
            raise ModelError(f"{name} is given {key} twice; give it once")
        arguments[key] = _parse_value(name, key, value, kinds[key])
    return arguments


_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", tuple: "whole numbers, as in 3x4x6x3"}


def _parse_value(name: str, key: str, value: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False, "on": True, "off": False}[value.lower()]
        if kind is tuple:  # as sizes are written in layouts
            return tuple(int(count) for count in value.split("x"))
        return kind(value)
    except (KeyError, ValueError):
        raise ModelError(f"{name}: {key} = {value} must be {_TYPE_NAMES.get(kind, kind.__name__)}") from None
