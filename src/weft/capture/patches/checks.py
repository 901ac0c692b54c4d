"""Checks of values while a model is traced: `if labels.max() >= limit: raise ...`, `assert mask.any()`. In: the frame of code that asks
whether a tensor without values is true, or a number of it. Out: what it is where the check passes, or None where anything else hangs on it.

Only the statement itself is read: an `if` that does nothing but raise, print, warn or log, or an `assert`. As other checks of values (see
`weft.capture.patches.assertions`), these are not repeated in a run. Not modelled: numbers that `int()` and `float()` make of a tensor.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from types import FrameType

_LEVELS = ("debug", "info", "warning", "warn", "error", "critical", "exception", "warning_once", "warn_once")
_SAYING = {"warnings": ("warn",)} | dict.fromkeys(("logging", "logger", "log", "LOGGER", "LOG", "_logger"), _LEVELS)
_Place = tuple[int | None, int | None, int | None, int | None]


def passing(frame: FrameType | None) -> bool | None:
    """What the tensor that this frame asks for is, where all goes well."""
    if frame is None:
        return None
    places = list(islice(frame.f_code.co_positions(), frame.f_lasti // 2 + 1))
    checks = _checks(frame.f_code.co_filename)
    if not places or places[-1] not in checks:
        return None
    # Of a check made of several conditions Python may name the whole; the code before made what is asked.
    for place in reversed(places):
        if place not in checks:
            return None
        if checks[place] is not None:
            return checks[place]
    return None


@lru_cache(maxsize=64)
def _checks(file: str) -> dict[_Place, bool | None]:
    """By place of a condition that a check asks for, or of the whole check (Python's versions name either): what it is where it passes.

    None for a whole whose conditions are not all the same there.
    """
    found: dict[_Place, bool | None] = {}
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        wanted = True
        if isinstance(node, ast.If) and _only_speaks(node):
            wanted = False
        elif not isinstance(node, ast.Assert):
            continue
        conditions: dict[_Place, bool | None] = dict(_conditions(node.test, wanted))
        whole = next(iter(conditions.values())) if len(set(conditions.values())) == 1 else None
        found.update(dict.fromkeys(_within(node.test), whole) | {_place(node): whole} | conditions)
    return found


def _only_speaks(node: ast.If) -> bool:
    """Whether it does nothing but to raise an error, or to say something, and to put the words together."""
    *before, last = node.body
    if isinstance(last, ast.Raise):
        return all(_names(s) or _says(s) for s in before)
    return not node.orelse and _says(last) and all(_says(s) or isinstance(s, ast.Import | ast.ImportFrom) for s in before)


def _names(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and all(isinstance(target, ast.Name) for target in statement.targets)


def _says(statement: ast.stmt) -> bool:
    """Whether it is a call of `print`, `warnings.warn`, `logger.info` or another of their names."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    function = statement.value.func
    if isinstance(function, ast.Name):
        return function.id in ("print", "warn")
    return (
        isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.attr in _SAYING.get(function.value.id, ())
    )


def _within(test: ast.expr) -> Iterator[_Place]:
    """All that joins conditions."""
    if isinstance(test, ast.BoolOp | ast.UnaryOp):
        yield _place(test)
        for inside in ast.iter_child_nodes(test):
            if isinstance(inside, ast.expr):
                yield from _within(inside)


def _conditions(test: ast.expr, wanted: bool) -> Iterator[tuple[_Place, bool]]:
    """Every condition that `test` is made of by and, or, not; each so makes it `wanted`, or leaves it to the others."""
    if isinstance(test, ast.BoolOp):
        for operand in test.values:
            yield from _conditions(operand, wanted)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _conditions(test.operand, not wanted)
    else:
        yield _place(test), wanted


def _place(node: ast.expr | ast.stmt) -> _Place:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
