"""Constraints of a search: conditions on keys of the layout, from text.

A constraint is `key<=8`, `<`, `=`, `!=`, `>=` or `>` with a key of the layout, or `ranks`; `tensor=2x4` says how many tensor ranks there
are and how they are arranged, which a count leaves open.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from shardwise.errors import Infeasible, UsageError, did_you_mean
from shardwise.plan.ir.axis import parse_spatial
from shardwise.plan.ir.compression import Compression
from shardwise.plan.ir.custom_schedule import is_schedule_file
from shardwise.plan.ir.grid import normalize_grid
from shardwise.plan.layout import Layout
from shardwise.plan.layout_words import CHOICES, refuse_word
from shardwise.plan.residency import LAYER_WORDS, LayerChoice

_RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "=": operator.eq,
}  # fmt: skip
_CONSTRAINT = re.compile(r"([a-z_]+)(<=|>=|!=|==|=|<|>)(\S+)")


@dataclass(frozen=True, slots=True)
class Constraint:
    """One condition on one key of the layout."""

    key: str
    relation: str
    value: int | str

    def __str__(self) -> str:
        if self.key == "grid":
            return f"tensor{self.relation}{self.value or 'a line'}"
        return f"{self.key}{self.relation}{self.value}"

    def admits(self, value: int | str) -> bool:
        if isinstance(self.value, int) and isinstance(value, int):
            return _RELATIONS[self.relation](value, self.value)
        return (value == self.value) is (self.relation == "=")


def constraints_for_samples(text: str, samples_note: str | None) -> tuple[Constraint, ...]:
    """Return the constraints of `text`; also no division of the batch, where `samples_note` says that samples are not in dimension 0.

    Raises:
        UsageError, Infeasible: as `parse_constraints`.
    """
    parsed = parse_constraints(text)
    if samples_note is None:
        return parsed
    try:
        return parse_constraints(f"{text} data=1 microbatches=1")
    except Infeasible as error:
        raise Infeasible(f"{error}: {samples_note}") from error


def parse_constraints(text: str) -> tuple[Constraint, ...]:
    """Read `tensor<=8 pipeline=4 precision=float32`.

    >>> [str(c) for c in parse_constraints("tensor<=8, pipeline=4")]
    ['tensor<=8', 'pipeline=4']

    Raises:
        UsageError: a word that is no constraint, an unknown key (names the nearest), a value of the wrong type.
        Infeasible: constraints on one key that no value meets, by name.
    """
    types = {f.name: f.type for f in fields(Layout) if f.name not in ("grid", "inner", "shares", "actions", "collective")} | {
        "ranks": "int"
    }
    constraints: list[Constraint] = []
    for word in text.replace(",", " ").split():
        match = _CONSTRAINT.fullmatch(word)
        if match is None:
            raise UsageError(f"constraint {word!r} is not KEY<=VALUE, KEY=VALUE or KEY>=VALUE; for example tensor<=8")
        key, relation, value = match[1], match[2].replace("==", "="), match[3]
        if key not in types:
            raise UsageError(f"constraint {word} has the unknown key {key}{did_you_mean(key, types)}; known: {', '.join(types)}")
        if key == "tensor" and "x" in value:
            if relation != "=":
                raise UsageError(f"constraint {word}: a grid has no order; use tensor={value}, or a count such as tensor<=8")
            tensor, grid = normalize_grid(value, 1)
            constraints += [Constraint(key, "=", tensor), Constraint("grid", "=", grid)]
        elif types[key] == "int":
            if not value.isdigit():
                raise UsageError(f"constraint {word}: {key} is a whole number, for example {key}<=4")
            constraints.append(Constraint(key, relation, int(value)))
        else:
            constraints.append(Constraint(key, relation, _parse_word_value(word, key, relation, value)))
    _check_satisfiable(constraints)
    return tuple(constraints)


def _parse_word_value(word: str, key: str, relation: str, text: str) -> str:
    """Return the value of a constraint `word` on a key whose values are words, in its canonical form."""
    if relation not in ("=", "!="):
        raise UsageError(f"constraint {word}: {key} is a word; use {key}=... or {key}!=...")
    if key == "spatial":
        parse_spatial(text)
        return text
    if key == "compress":
        return str(Compression.parse(text))
    if key == "schedule" and is_schedule_file(text):
        raise UsageError(f"constraint {word}: a search orders microbatches by name; run a file of actions with --layout {word!r}")
    if reason := refuse_word(key, text):
        raise UsageError(f"constraint {word}: {reason}")
    if key not in LAYER_WORDS or text in CHOICES[key]:
        return text
    if relation != "=":  # of some layers
        raise UsageError(f"constraint {word}: layers are asked for, not left out; use {key}={text}, or none of {key}")
    return str(LayerChoice.parse(key, text))


def _check_satisfiable(constraints: Sequence[Constraint]) -> None:
    """Raise Infeasible for constraints on one key that no value meets."""
    for key in {c.key for c in constraints}:
        of_key = [c for c in constraints if c.key == key]
        values: Sequence[int | str]
        if key in ("compress", "grid", "spatial"):
            values = ["none", *(c.value for c in of_key)]
        elif key in CHOICES:
            values = [*CHOICES[key], *(c.value for c in of_key)]
        else:
            named = [c.value for c in of_key if isinstance(c.value, int)]
            minimum = 0 if key in ("zero", "threads", "staleness", "servers", "shard") else 1
            values = sorted({minimum, *(max(minimum, v + d) for v in named for d in (-1, 0, 1))})
            values = [v for v in values if isinstance(v, int) and (key != "zero" or v <= 3)]
        if not any(all(c.admits(v) for c in of_key) for v in values):
            raise Infeasible(f"no {key} meets {' and '.join(str(c) for c in of_key)}; drop one of them")
