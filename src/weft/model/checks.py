"""Checks of values while a model is traced: `if labels.max() >= limit: raise ...`, `assert mask.any()`. In: the frame of code that asks
whether a tensor without values is true. Out: what it is where the check passes, or None where anything else hangs on it.

Only the statement itself is read: an `if` that does nothing but raise, or an `assert`. As other checks of values (see
`weft.model.deferred.assertions`), these are not repeated in a run. Not modelled: conditions kept under a name, and checks
made of conditions of which one must be true and another must not, where Python does not say which it asks.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from types import FrameType

_Place = tuple[int | None, int | None, int | None, int | None]


def passing(frame: FrameType | None) -> bool | None:
    """What the tensor that this frame asks for is, where all goes well."""
    if frame is None:
        return None
    place: _Place = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    return _checks(frame.f_code.co_filename).get(place)


@lru_cache(maxsize=64)
def _checks(file: str) -> dict[_Place, bool]:
    """By place of a condition that a check asks for, or of the whole check (Python's versions name either): what it is where it passes."""
    found: dict[_Place, bool] = {}
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        wanted = True
        if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise) and all(map(_is_plain, node.body[:-1])):
            wanted = False
        elif not isinstance(node, ast.Assert):
            continue
        conditions = dict(_conditions(node.test, wanted))
        found.update(conditions)
        if len(set(conditions.values())) == 1:
            found[_place(node)] = found[_place(node.test)] = next(iter(conditions.values()))
    return found


def _is_plain(statement: ast.stmt) -> bool:
    """Whether it does no more than to put the error's words together."""
    return isinstance(statement, ast.Assign) and all(isinstance(target, ast.Name) for target in statement.targets)


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
