"""Lists of names with ranges of numbers, and lists of counts with repetitions: format and parse.

    layers.0-6+layers.8      layers 0 to 6, and 8
    5x3/4                    5, 5, 5, 4

A name's parts are separated by dots. One part that is two numbers with a dash is a range of that part. A name of a model that itself has
such a part, or a character that is special in a list, is written as a pattern that matches it (`[-]`, `?`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from shardwise.errors import LayoutError

MAX_EXPANDED = 100_000  # names of a range, or counts of a list, at most
_MIN_RUN = 3  # names, at least, that are written as a range
_RANGE = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})(?![^.])")
_COUNTS = re.compile(r"([0-9]{1,6})(?:x([1-9][0-9]{0,5}))?")
_SPECIAL = re.compile(r"[*?\[]")
_SEPARATOR = re.compile(r"[+,/\s]")


def escape_name(name: str) -> str:
    """Escape a module's path for a list: characters that a list would parse otherwise become a pattern that matches them.

    >>> escape_name("h.3"), escape_name("blocks.0-1.3"), escape_name("a+b.0")
    ('h.3', 'blocks.0[-]1.3', 'a?b.0')
    """
    return _RANGE.sub(r"\1[-]\2", _SEPARATOR.sub("?", _SPECIAL.sub(r"[\g<0>]", name)))


def write_names(names: Iterable[str]) -> str:
    """Format names and patterns as one word, three or more with consecutive numbers as a range.

    >>> write_names(["h.0", "h.1", "h.2", "h.5", "x.*"])
    'h.0-2+h.5+x.*'
    >>> write_names(["0", "1", "2"]), write_names(["3"])
    ('0-2', '[3]')
    """
    text = "+".join(shorten_names(names))
    return text if read_counts(text) is None else f"[{text[0]}]{text[1:]}"  # a layer called 3 is not a count


def shorten_names(names: Iterable[str]) -> list[str]:
    """Shorten names: three or more with consecutive numbers become one range.

    >>> shorten_names(["0", "1", "2", "7"])
    ['0-2', '7']
    """
    words: list[str] = []
    run: list[list[str]] = []  # parts of names with consecutive numbers
    at = -1  # the part with the numbers
    for name in names:
        parts = name.split(".")
        part = _increasing_part(run[-1], parts) if run else -1
        if part >= 0 and at in (-1, part):
            at = part
            run.append(parts)
            continue
        words += _format_run(run, at)
        run, at = [parts], -1
    return [*words, *_format_run(run, at)]


def _increasing_part(before: Sequence[str], after: Sequence[str]) -> int:
    """Return the one part in which two names differ, if it is a number and then the next one; -1 otherwise."""
    differ = [i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
    if len(before) != len(after) or len(differ) != 1:
        return -1
    a, b = before[differ[0]], after[differ[0]]
    return differ[0] if _is_number(a) and _is_number(b) and int(b) == int(a) + 1 else -1


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdecimal() and len(part) < 10 and str(int(part)) == part


def _format_run(run: Sequence[Sequence[str]], at: int) -> list[str]:
    if len(run) < _MIN_RUN:
        return [".".join(parts) for parts in run]
    first, last = run[0], run[-1]
    return [".".join([*first[:at], f"{first[at]}-{last[at]}", *first[at + 1 :]])]


def read_names(text: str) -> tuple[str, ...]:
    """Parse the text of `write_names`, or names one by one.

    >>> read_names("h.0-2+h.5+x.*")
    ('h.0', 'h.1', 'h.2', 'h.5', 'x.*')

    Raises:
        LayoutError: a range that goes down, or of too many names.
    """
    names: list[str] = []
    for word in text.split("+"):
        match = _RANGE.search(word)
        if match is None:
            names.append(word)
            continue
        first, last = int(match[1]), int(match[2])
        if last < first:
            raise LayoutError(f"the range {word} goes from {first} down to {last}; write the smaller number first")
        if last - first >= MAX_EXPANDED:
            raise LayoutError(f"the range {word} names {last - first + 1} layers; at most {MAX_EXPANDED} are read")
        names += [f"{word[: match.start()]}{n}{word[match.end() :]}" for n in range(first, last + 1)]
    return tuple(names)


def write_counts(counts: Iterable[int]) -> str:
    """Format counts as one word, three or more equal ones as `COUNTxTIMES`.

    >>> write_counts([5, 5, 5, 4]), write_counts([3, 1])
    ('5x3/4', '3/1')
    """
    words: list[str] = []
    for count, equal in groupby(counts):
        times = len(list(equal))
        words += [f"{count}x{times}"] if times >= _MIN_RUN else [str(count)] * times
    return "/".join(words)


def read_counts(text: str) -> tuple[int, ...] | None:
    """Parse the text of `write_counts`, or counts one by one; None where it is something else.

    >>> read_counts("5x3/4"), read_counts("2"), read_counts("h.0")
    ((5, 5, 5, 4), (2,), None)

    Raises:
        LayoutError: too many counts.
    """
    counts: list[int] = []
    for word in text.split("/"):
        match = _COUNTS.fullmatch(word)
        if match is None:
            return None
        times = int(match[2] or 1)
        if len(counts) + times > MAX_EXPANDED:
            raise LayoutError(f"{text} counts layers of more than {MAX_EXPANDED} stages")
        counts += [int(match[1])] * times
    return tuple(counts)
