"""TOML with line numbers of keys, values from the command line, and writing, which the standard library's reader leaves out.

The writer supports strings, integers, floats, booleans, lists and tables of them, in sections.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.errors import did_you_mean
from shardwise.plan.ir.toml_text import parse_toml, quote_string

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")
_KEY = re.compile(r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")


def parse_value(text: str, is_text: bool) -> Any:
    """Parse a value of the command line: TOML, or bare text. `is_text`: the key takes text, so that 10 is "10"."""
    if not (is_text and not text.startswith(('"', "'"))):
        try:
            read = parse_toml(f"value = {text}")
            if list(read) == ["value"]:
                return read["value"]
        except tomllib.TOMLDecodeError:
            pass
    return text


def line_of(text: str, path: Sequence[str]) -> int:
    """Line number (from 1) of a section or key; the section's if the key has no line of its own; 0 if neither is found."""
    section: list[str] = []
    header = 0
    for number, line in enumerate(text.splitlines(), 1):
        if match := _HEADER.match(line):
            section = _split_key(match[1])
            if section == list(path):
                return number
            if section == list(path[: len(section)]):
                header = number
        elif match := _KEY.match(line):
            full = [*section, *_split_key(match[1])]
            if full == list(path):
                return number
            # `train = {steps = 1}`, and `train.steps = 1` if the section is looked up.
            if full == list(path[: len(full)]) or (full[: len(path)] == list(path) and not header):
                header = number
    return header


def _split_key(key: str) -> list[str]:
    return [word.strip(" \t\"'") for word in key.split(".")]


def suggest_nearest(word: str, words: Sequence[str]) -> str:
    """Return `; did you mean X?`, or nothing if no known word is close."""
    return did_you_mean(word, words, cutoff=0.6, form="; {}")


def dump(tree: Mapping[str, Mapping[str, Any]]) -> str:
    """Write sections of keys as TOML; None is left out.

    >>> print(dump({"train": {"steps": 3, "betas": (0.9, 0.95), "clip": None}}), end="")
    [train]
    steps = 3
    betas = [0.9, 0.95]
    """
    blocks = []
    for name, section in tree.items():
        lines = [f"{key} = {_format_value(value)}" for key, value in section.items() if value is not None]
        blocks.append("\n".join([f"[{name}]", *lines]) + "\n")
    return "\n".join(blocks)


def _format_value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            if math.isnan(value) or math.isinf(value):
                return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
            text = repr(value)
            return text if any(c in text for c in ".e") else f"{text}.0"
        case str():
            return quote_string(value)
        case dict():
            return (
                "{"
                + ", ".join(f"{key if _BARE.fullmatch(key) else quote_string(key)} = {_format_value(item)}" for key, item in value.items())
                + "}"
            )
        case list() | tuple():
            return f"[{', '.join(_format_value(item) for item in value)}]"
        case _:
            raise TypeError(f"{type(value).__name__} has no place in TOML")
