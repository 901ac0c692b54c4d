"""Every legal layout. In: a cluster, a batch, constraints as text. Out: layouts, or `Infeasible` naming what leaves none.

A constraint is `key<=8`, `<`, `=`, `!=`, `>=` or `>` with a key of the layout, or `ranks`. On processors any number of ranks is tried,
each with its share of the cores or fewer; on GPUs all devices are used, or as many as the batch lets, where it does not divide.
Not searched: layouts that `Layout` does not have yet, and microbatch counts beyond `MOST_MICROBATCHES`.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

from weft.cluster.cluster import Cluster
from weft.errors import Infeasible, UsageError
from weft.plan.layout import CHOICES, Layout

MOST_MICROBATCHES = 512
PRECISIONS = ("float32", "bfloat16")  # float64 only where it is asked for
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "=": operator.eq,
}  # fmt: skip
_WORD = re.compile(r"([a-z_]+)(<=|>=|!=|==|=|<|>)(\S+)")


@dataclass(frozen=True, slots=True)
class Constraint:
    """One condition on one key of the layout."""

    key: str
    relation: str
    value: int | str

    def __str__(self) -> str:
        return f"{self.key}{self.relation}{self.value}"

    def admits(self, value: int | str) -> bool:
        if isinstance(self.value, int) and isinstance(value, int):
            return _COMPARE[self.relation](value, self.value)
        return (value == self.value) is (self.relation == "=")


def parse_constraints(text: str) -> tuple[Constraint, ...]:
    """Read `tensor<=8 pipeline=4 precision=float32`.

    >>> [str(c) for c in parse_constraints("tensor<=8, pipeline=4")]
    ['tensor<=8', 'pipeline=4']

    Raises:
        UsageError: a word that is no constraint, an unknown key (names the nearest), a value of the wrong type.
        Infeasible: constraints on one key that no value meets, by name.
    """
    known = {f.name: f.type for f in fields(Layout)} | {"ranks": "int"}
    found = []
    for word in text.replace(",", " ").split():
        match = _WORD.fullmatch(word)
        if match is None:
            raise UsageError(f"constraint {word!r} is not KEY<=VALUE, KEY=VALUE or KEY>=VALUE; for example tensor<=8")
        key, relation, given = match[1], match[2].replace("==", "="), match[3]
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            raise UsageError(
                f"constraint {word} has the unknown key {key}{f' (did you mean {near[0]}?)' if near else ''}; known: {', '.join(known)}"
            )
        if known[key] == "int":
            if not given.isdigit():
                raise UsageError(f"constraint {word}: {key} is a whole number, for example {key}<=4")
            found.append(Constraint(key, relation, int(given)))
        else:
            if relation not in ("=", "!="):
                raise UsageError(f"constraint {word}: {key} is a word; use {key}=... or {key}!=...")
            if given not in CHOICES[key]:
                near = difflib.get_close_matches(given, CHOICES[key], n=1, cutoff=0.5)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise UsageError(f"constraint {word}: {given} is unknown{hint}; use one of {', '.join(CHOICES[key])}")
            found.append(Constraint(key, relation, given))
    for key in {c.key for c in found}:
        mine = [c for c in found if c.key == key]
        values: Sequence[int | str]
        if key in CHOICES:
            values = CHOICES[key]
        else:
            limits = [c.value for c in mine if isinstance(c.value, int)]
            least = 0 if key in ("zero", "threads") else 1
            values = sorted({least, *(max(least, v + d) for v in limits for d in (-1, 0, 1))})
            values = [v for v in values if isinstance(v, int) and (key != "zero" or v <= 1)]
        if not any(all(c.admits(v) for c in mine) for v in values):
            raise Infeasible(f"no {key} meets {' and '.join(str(c) for c in mine)}; drop one of them")
    return tuple(found)


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def rank_counts(cluster: Cluster) -> list[int]:
    """How many ranks to try: every count on a small cluster, else the whole of it first, then its halves."""
    n = cluster.num_devices
    if n <= 16:
        return list(range(n, 0, -1))
    return list(reversed(divisors(n)))


def wanted_ranks(cluster: Cluster, constraints: Sequence[Constraint]) -> list[int]:
    """The numbers of ranks that the constraints on `ranks` admit; one that is named exactly is tried even where cores are fewer."""
    mine = [c for c in constraints if c.key == "ranks"]
    exact = [c.value for c in mine if c.relation == "=" and isinstance(c.value, int)]
    counts = exact[:1] if exact and cluster.is_cpu else rank_counts(cluster)
    return [n for n in counts if all(c.admits(n) for c in mine)]


def layouts(cluster: Cluster, batch_size: int, constraints: Sequence[Constraint] = (), num_layers: int = 1 << 30) -> Iterator[Layout]:
    """Every legal layout that the constraints admit, most ranks first. `num_layers`: places for stages, at most that many.

    On a large cluster fewer ranks than devices are only given where all of them give none.
    """

    def admits(key: str, value: int | str) -> bool:
        return all(c.admits(value) for c in constraints if c.key == key)

    precisions = [p for p, _ in cluster.device.peak_flops if p in PRECISIONS and admits("precision", p)]
    if any(c.key == "precision" and c.relation == "=" and c.value == "float64" for c in constraints):
        precisions = ["float64"]
    given = False
    for ranks in wanted_ranks(cluster, constraints):
        if given and cluster.num_devices > 16:
            return
        for tensor in divisors(ranks):
            if tensor > cluster.node_size or not admits("tensor", tensor):
                continue
            for pipeline in divisors(ranks // tensor):
                if pipeline > num_layers or not admits("pipeline", pipeline):
                    continue
                data = ranks // tensor // pipeline
                if batch_size % data or not admits("data", data):
                    continue
                for layout in _choices(cluster, batch_size, data, tensor, pipeline, precisions, admits):
                    given = True
                    yield layout


def _choices(
    cluster: Cluster,
    batch_size: int,
    data: int,
    tensor: int,
    pipeline: int,
    precisions: list[str],
    admits: Callable[[str, int | str], bool],
) -> Iterator[Layout]:
    ranks = data * tensor * pipeline
    share = cluster.threads_of(ranks)
    threads = [0]
    if cluster.is_cpu and any(not admits("threads", t) for t in threads):
        threads = []
    if cluster.is_cpu:
        threads += [t for t in divisors(share) if t < share and admits("threads", t)]
        if not threads and admits("threads", share):
            threads = [share]
    for microbatches in divisors(batch_size // data):
        if microbatches > MOST_MICROBATCHES or not admits("microbatches", microbatches):
            continue
        for schedule in ("gpipe", "1f1b") if pipeline > 1 and microbatches > 1 else ("1f1b",):
            if pipeline > 1 and not admits("schedule", schedule):
                continue
            for zero in (0, 1) if data > 1 else (0,):
                if not admits("zero", zero):
                    continue
                for recompute in ("none", "full"):
                    if not admits("recompute", recompute):
                        continue
                    for precision in precisions:
                        for count in threads:
                            yield Layout(data, tensor, pipeline, microbatches, schedule, zero, recompute, precision, count)
