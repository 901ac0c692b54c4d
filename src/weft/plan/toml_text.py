"""TOML that others wrote, within bounds, and text for TOML of ours. In: text. Out: a dict, or one kind of error for what is wrong; text.

The standard library's reader takes numbers of any length, on which Python gives up with another error, and keys of any depth, on which it
spends time that grows with its square, and whoever reads the result recursion without end.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

DEEPEST = 64  # dots of a key
_DEEP = re.compile(rf"(?:[\w\"'-]+[ \t]*\.[ \t]*){{{DEEPEST}}}")


def loads(text: str) -> dict[str, Any]:
    """Raises TOMLDecodeError.

    >>> loads("a.b = 1")
    {'a': {'b': 1}}
    """
    if match := _DEEP.search(text):
        line = text.count("\n", 0, match.start()) + 1
        raise tomllib.TOMLDecodeError(f"line {line}: a key of more than {DEEPEST} dots")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in brackets
        raise tomllib.TOMLDecodeError(str(error).partition(";")[0]) from error


def quoted(text: str) -> str:
    """A TOML basic string; JSON's escapes are TOML's, except that TOML also wants DEL escaped.

    >>> quoted('a "b"')
    '"a \\\\"b\\\\""'
    """
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def quoted_key(text: str) -> str:
    """As TOML has a key: quoted where it has to be.

    >>> quoted_key("cpu-1"), quoted_key("two words")
    ('cpu-1', '"two words"')
    """
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else quoted(text)
