"""TOML and JSON input within bounds, parsed or one kind of error that states the position, and text for TOML output.

The standard library's TOML parser accepts numbers of any length, on which Python raises another error, and keys of any depth, on which it
spends quadratic time, and whose reader recurses without end. So does that of JSON for brackets in brackets.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, UsageError, did_you_mean

MAX_KEY_DEPTH = 64  # dots of a key, at most
_DEEP_KEY = re.compile(rf"(?:[\w\"'-]+[ \t]*\.[ \t]*){{{MAX_KEY_DEPTH}}}")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises TOMLDecodeError.

    >>> parse_toml("a.b = 1")
    {'a': {'b': 1}}
    """
    if match := _DEEP_KEY.search(text):
        line = text.count("\n", 0, match.start()) + 1
        raise tomllib.TOMLDecodeError(f"line {line}: a key of more than {MAX_KEY_DEPTH} dots")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in brackets
        raise tomllib.TOMLDecodeError(str(error).partition(";")[0]) from error


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError, also for brackets nested too deep.

    >>> parse_json('{"a": [1]}')
    {'a': [1]}
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("brackets are nested too deep") from error


def parse_document(text: str, where: str) -> dict[str, Any]:
    """Parse TOML that a user wrote. Raises `ConfigError`, with `where` and the line, if it is not TOML."""
    try:
        return parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not TOML: {error}") from error


def quote_string(text: str) -> str:
    """Quote a TOML basic string; JSON's escapes are TOML's, except that TOML also wants DEL escaped.

    >>> quote_string('a "b"')
    '"a \\\\"b\\\\""'
    """
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def quote_key(text: str) -> str:
    """Quote a TOML key where it has to be.

    >>> quote_key("cpu-1"), quote_key("two words")
    ('cpu-1', '"two words"')
    """
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else quote_string(text)


def read_user_file(path: str | Path, what: str, remedy: str = "") -> str:
    """Return the text of a file. Raises `UsageError` if it cannot be read, `ConfigError` if it is not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}: {error.strerror}{f'; {remedy}' if remedy else ''}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the {what} {path} is no text: byte {error.start} is not UTF-8") from error


def check_keys(where: str, table: Mapping[str, Any], keys: Collection[str], text: str = "") -> None:
    """Raise `ConfigError` for a key that is not among `keys`, with the nearest of them, and with its line if `text` is given."""
    for key in table:
        if key not in keys:
            line = next((f" (line {i})" for i, row in enumerate(text.splitlines(), 1) if re.match(rf"\s*\[*{re.escape(key)}\b", row)), "")
            raise ConfigError(f"{where}: unknown key {key}{line}{did_you_mean(key, keys)}; known: {', '.join(sorted(keys))}")
