"""The zoo by name: every family's module, and every size's. In: a name with arguments. Out: its module and configuration.

`gpt-39b`; `gpt:layers=12,hidden=768` (a family's defaults with some changed); `gpt-39b:layers=4` (a size with some changed).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any, Protocol, cast

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


class Family(Protocol):
    """What every model file has."""

    @property
    def Config(self) -> Callable[..., Any]: ...

    @property
    def Model(self) -> Callable[[Any], nn.Module]: ...

    @property
    def SIZES(self) -> dict[str, Any]: ...

    def example_batch(self, config: Any, batch_size: int, seed: int = 0) -> dict[str, Tensor]: ...

    def loss(self, output: Any, batch: dict[str, Tensor]) -> Tensor: ...


FAMILIES: dict[str, Family] = {
    "gpt": cast(Family, gpt),
    "llama": cast(Family, llama),
    "bert": cast(Family, bert),
    "t5": cast(Family, t5),
    "vit": cast(Family, vit),
    "moe": cast(Family, moe),
    "lstm": cast(Family, lstm),
    "resnet": cast(Family, resnet),
    "wide-resnet": cast(Family, wide_resnet),
    "resnet-v2": cast(Family, resnet_v2),
    "unet": cast(Family, unet),
    "inception": cast(Family, inception),
    "amoebanet-d": cast(Family, amoebanet),
    "unet3d": cast(Family, unet3d),
    "convlstm": cast(Family, convlstm),
    "dlrm": cast(Family, dlrm),
}


def sizes() -> dict[str, tuple[Family, Any]]:
    """Every size by name, with the family that builds it."""
    return {name: (family, config) for family in FAMILIES.values() for name, config in family.SIZES.items()}


def find(text: str, sequence: int | None = None) -> tuple[Family, Any]:
    """The family and configuration that a zoo name means; `sequence` replaces the configuration's.

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
    """The end of a message: `; did you mean a or b?`, or where none is near the `fallback`, by default all known words."""
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
