"""Find a zoo model by name: a family or a published size, with arguments that change its configuration.

`gpt-39b`; `gpt:layers=12,hidden=768` (a family's defaults with some changed); `gpt-39b:layers=4` (a size with some changed).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor, nn

from weft.errors import ModelError
from weft.zoo import (
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
    wide_resnet,
)


@dataclass(frozen=True, slots=True)
class Family:
    """The contents of a model file: `example_batch(config, batch_size, seed=0)` is deterministic, `loss(output, batch)` a scalar."""

    Config: Callable[..., Any]
    Model: Callable[[Any], nn.Module]
    SIZES: dict[str, Any]
    example_batch: Callable[..., dict[str, Tensor]]
    loss: Callable[[Any, dict[str, Tensor]], Tensor]


FAMILIES: dict[str, Family] = {
    "gpt": Family(gpt.Config, gpt.Model, gpt.SIZES, gpt.example_batch, gpt.loss),
    "llama": Family(llama.Config, llama.Model, llama.SIZES, llama.example_batch, llama.loss),
    "bert": Family(bert.Config, bert.Model, bert.SIZES, bert.example_batch, bert.loss),
    "t5": Family(t5.Config, t5.Model, t5.SIZES, t5.example_batch, t5.loss),
    "vit": Family(vit.Config, vit.Model, vit.SIZES, vit.example_batch, vit.loss),
    "moe": Family(moe.Config, moe.Model, moe.SIZES, moe.example_batch, moe.loss),
    "lstm": Family(lstm.Config, lstm.Model, lstm.SIZES, lstm.example_batch, lstm.loss),
    "resnet": Family(resnet.Config, resnet.Model, resnet.SIZES, resnet.example_batch, resnet.loss),
    "wide-resnet": Family(wide_resnet.Config, resnet.Model, wide_resnet.SIZES, resnet.example_batch, resnet.loss),
    "resnet-v2": Family(resnet_v2.Config, resnet_v2.Model, resnet_v2.SIZES, resnet.example_batch, resnet.loss),
    "unet": Family(unet.Config, unet.Model, unet.SIZES, unet.example_batch, unet.loss),
    "inception": Family(inception.Config, inception.Model, inception.SIZES, inception.example_batch, inception.loss),
    "amoebanet-d": Family(amoebanet.Config, amoebanet.Model, amoebanet.SIZES, amoebanet.example_batch, amoebanet.loss),
    "unet3d": Family(unet3d.Config, unet3d.Model, unet3d.SIZES, unet3d.example_batch, unet3d.loss),
    "convlstm": Family(convlstm.Config, convlstm.Model, convlstm.SIZES, convlstm.example_batch, convlstm.loss),
    "dlrm": Family(dlrm.Config, dlrm.Model, dlrm.SIZES, dlrm.example_batch, dlrm.loss),
}


def sizes() -> dict[str, tuple[Family, Any]]:
    """Return every published size by name, with the family that builds it."""
    return {name: (family, config) for family in FAMILIES.values() for name, config in family.SIZES.items()}


def find(text: str, sequence: int | None = None) -> tuple[Family, Any]:
    """Return the family and configuration of a zoo name; `sequence` replaces the configuration's.

    Raises:
        ModelError: an unknown name, argument or value, with the nearest known one; a sequence for a model that has none.

    >>> find("gpt-tiny:layers=2")[1].layers
    2
    """
    name, _, arguments = text.partition(":")
    published = sizes()
    if name in published:
        family, config = published[name]
    elif name in FAMILIES:
        family, config = FAMILIES[name], FAMILIES[name].Config()
    else:
        raise ModelError(f"model {name} is unknown{nearest(name, (*published, *FAMILIES))}")
    changes = _arguments(name, config, arguments) if arguments else {}
    if sequence is not None:
        if not hasattr(config, "sequence"):
            raise ModelError(f"--sequence {sequence} does not apply to {name}, which has no sequence; leave it out")
        changes["sequence"] = sequence
    return family, replace(config, **changes) if changes else config


def nearest(word: str, words: Iterable[str], fallback: str | None = None) -> str:
    """Return the end of an error message: `; did you mean a or b?`, or without a close match `fallback` (default: all known words)."""
    words = sorted(words)
    close = difflib.get_close_matches(word, words, n=3, cutoff=0.6)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return fallback if fallback is not None else f"; known: {', '.join(words)}"


def _arguments(name: str, config: Any, text: str) -> dict[str, Any]:
    kinds = {field.name: type(getattr(config, field.name)) for field in fields(config)}
    arguments: dict[str, Any] = {}
    for item in text.split(","):
        key, equals, value = (word.strip() for word in item.partition("="))
        if not equals or not value:
            raise ModelError(f"{item.strip()!r} in the arguments of {name} must be key=value, as in {name}:{next(iter(kinds))}=...")
        if key not in kinds:
            raise ModelError(f"{name} has no argument {key}{nearest(key, kinds)}")
        if key in arguments:
            raise ModelError(f"{name} is given {key} twice; give it once")
        arguments[key] = _value(name, key, value, kinds[key])
    return arguments


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", tuple: "whole numbers, as in 3x4x6x3"}


def _value(name: str, key: str, value: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False, "on": True, "off": False}[value.lower()]
        if kind is tuple:  # as sizes are written in layouts
            return tuple(int(count) for count in value.split("x"))
        return kind(value)
    except (KeyError, ValueError):
        raise ModelError(f"{name}: {key} = {value} must be {_KINDS.get(kind, kind.__name__)}") from None
