"""TOML input within bounds, as a dict or one kind of error, and text for TOML output.

The standard library's parser accepts numbers of any length, on which Python raises another error, and keys of any depth, on which it spends
quadratic time, and whose reader recurses without end.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

from shardwise.errors import ConfigError

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
