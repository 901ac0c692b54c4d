"""TOML that others wrote, within bounds. In: text. Out: a dict, or one kind of error for whatever is wrong with it.

The standard library's reader takes numbers of any length, on which Python gives up with another error, and keys of any depth, on which it
spends time that grows with its square, and whoever reads the result recursion without end.
"""

from __future__ import annotations

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
    if found := _DEEP.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise tomllib.TOMLDecodeError(f"line {line}: a key of more than {DEEPEST} dots")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in brackets
        raise tomllib.TOMLDecodeError(str(error).partition(";")[0]) from error
