"""Every legal layout. In: a cluster, a batch, constraints as text. Out: layouts, or `Infeasible` naming what leaves none.

A constraint is `key<=8`, `<`, `=`, `!=`, `>=` or `>` with a key of the layout, or `ranks`; `tensor=2x4` says how many tensor ranks there
are and how they are arranged, which a count leaves open. On processors any number of ranks is tried, each with its share of the cores or
fewer; on GPUs all devices are used, or as many as the batch lets, where it does not divide.

Each layout is there once, in one form: no sequence parallelism without tensor ranks, no ZeRO without replicas, no schedule without a
pipeline, no experts spread where the model has none. Gradients are compressed only where a constraint says so, since that changes the
result. Tensor ranks stand in a line, or as a constraint arranges them: the search arranges those of the leading layouts, and some on
several nodes. A `base` is what operators' seconds depend on; `variants` are its schedules and what trades time for memory. Not searched:
microbatch counts beyond `MOST_MICROBATCHES`, chunks beyond `MOST_CHUNKS` or of uneven size, more stages than layers and float64 unless
they are asked for.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import product
from math import isqrt, prod

from weft.cluster.cluster import Cluster
from weft.errors import Infeasible, LayoutError, UsageError, nearest
from weft.plan.axis import ATTENTION, BRANCH, DATA, PIPELINE, parse_spatial, spatial_ranks
from weft.plan.beside import COMPILE_WITH, INNER_WITH, STALE_WITH
from weft.plan.choice import AUTO
from weft.plan.compression import Compression
from weft.plan.custom_schedule import is_file
from weft.plan.grid import checked_grid, parse_grid
from weft.plan.layout import CHOICES, Layout, refuse_word
from weft.plan.precision import PRECISIONS as KNOWN
from weft.plan.residency import OF_LAYERS, LayerChoice, kind_of
from weft.plan.schedule_sizes import CHUNKED, SCHEDULES, chunks_of, refuse_sizes
from weft.schedules import schedule_of
from weft.solve.images import both_ways, divides

MOST_MICROBATCHES = 512
MOST_CHUNKS = 8
UNEVEN = 1.1  # layers of the largest of several stages a rank against the mean, at most
WASTED = 1 / 8  # of a step, that replicas with a sample less than others wait at most
PRECISIONS = ("float32", "float16", "bfloat16")  # others only where they are asked for: float64, and those that compute something else
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
        if self.key == "grid":
            return f"tensor{self.relation}{self.value or 'a line'}"
        return f"{self.key}{self.relation}{self.value}"

    def admits(self, value: int | str) -> bool:
        if isinstance(self.value, int) and isinstance(value, int):
            return _COMPARE[self.relation](value, self.value)
        return (value == self.value) is (self.relation == "=")


def limits_of(text: str, elsewhere: str | None) -> tuple[Constraint, ...]:
    """The constraints of `text`; also no division of the batch, where its samples lie `elsewhere` than in dimension 0.

    Raises:
        As `parse_constraints`.
    """
    parsed = parse_constraints(text)
    if elsewhere is None:
        return parsed
    try:
        return parse_constraints(f"{text} data=1 microbatches=1")
    except Infeasible as error:
        raise Infeasible(f"{error}: {elsewhere}") from error


def parse_constraints(text: str) -> tuple[Constraint, ...]:
    """Read `tensor<=8 pipeline=4 precision=float32`.

    >>> [str(c) for c in parse_constraints("tensor<=8, pipeline=4")]
    ['tensor<=8', 'pipeline=4']

    Raises:
        UsageError: a word that is no constraint, an unknown key (names the nearest), a value of the wrong type.
        Infeasible: constraints on one key that no value meets, by name.
    """
    types = {f.name: f.type for f in fields(Layout) if f.name not in ("grid", "inner", "shares", "actions")} | {"ranks": "int"}
    constraints: list[Constraint] = []
    for word in text.replace(",", " ").split():
        match = _WORD.fullmatch(word)
        if match is None:
            raise UsageError(f"constraint {word!r} is not KEY<=VALUE, KEY=VALUE or KEY>=VALUE; for example tensor<=8")
        key, relation, value = match[1], match[2].replace("==", "="), match[3]
        if key not in types:
            raise UsageError(f"constraint {word} has the unknown key {key}{nearest(key, types)}; known: {', '.join(types)}")
        if key == "tensor" and "x" in value:
            if relation != "=":
                raise UsageError(f"constraint {word}: a grid has no order; use tensor={value}, or a count such as tensor<=8")
            tensor, grid = checked_grid(value, 1)
            constraints += [Constraint(key, "=", tensor), Constraint("grid", "=", grid)]
        elif types[key] == "int":
            if not value.isdigit():
                raise UsageError(f"constraint {word}: {key} is a whole number, for example {key}<=4")
            constraints.append(Constraint(key, relation, int(value)))
        else:
            constraints.append(Constraint(key, relation, _word_of(word, key, relation, value)))
    _check_met(constraints)
    return tuple(constraints)


def _word_of(word: str, key: str, relation: str, text: str) -> str:
    """The value of a constraint `word` on a key whose values are words, in its one form."""
    if relation not in ("=", "!="):
        raise UsageError(f"constraint {word}: {key} is a word; use {key}=... or {key}!=...")
    if key == "spatial":
        parse_spatial(text)
        return text
    if key == "compress":
        return str(Compression.parse(text))
    if key == "schedule" and is_file(text):
        raise UsageError(f"constraint {word}: a search orders microbatches by name; run a file of actions with --layout {word!r}")
    if reason := refuse_word(key, text):
        raise UsageError(f"constraint {word}: {reason}")
    if key not in OF_LAYERS or text in CHOICES[key]:
        return text
    if relation != "=":  # of some layers
        raise UsageError(f"constraint {word}: layers are asked for, not left out; use {key}={text}, or none of {key}")
    return str(LayerChoice.parse(key, text))


def _check_met(constraints: Sequence[Constraint]) -> None:
    """Raise Infeasible for constraints on one key that no value meets."""
    for key in {c.key for c in constraints}:
        mine = [c for c in constraints if c.key == key]
        values: Sequence[int | str]
        if key in ("compress", "grid", "spatial"):
            values = ["none", *(c.value for c in mine)]
        elif key in CHOICES:
            values = [*CHOICES[key], *(c.value for c in mine)]
        else:
            limits = [c.value for c in mine if isinstance(c.value, int)]
            least = 0 if key in ("zero", "threads", "staleness", "servers") else 1
            values = sorted({least, *(max(least, v + d) for v in limits for d in (-1, 0, 1))})
            values = [v for v in values if isinstance(v, int) and (key != "zero" or v <= 3)]
        if not any(all(c.admits(v) for c in mine) for v in values):
            raise Infeasible(f"no {key} meets {' and '.join(str(c) for c in mine)}; drop one of them")


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def rank_counts(cluster: Cluster) -> list[int]:
    """How many ranks to try: every count on a small cluster, else the whole of it first, then its divisors (and see `fewer_counts`)."""
    n = cluster.num_devices
    if n <= 16:
        return list(range(n, 0, -1))
    return list(reversed(divisors(n)))


def fewer_counts(cluster: Cluster) -> list[int]:
    """Of a large cluster of GPUs, smaller jobs that may be faster than one on all of it: one of its units each, where its links are slow,
    then powers of two and units times those, most ranks first, where batch and model do not divide among all of them.

    >>> fewer_counts(Cluster.parse("5xdgx-h100"))
    [8, 32, 16, 4, 2, 1]
    """
    n = cluster.num_devices
    if n <= 16 or cluster.kind.shares_hosts or cluster.parts:
        return []
    units = [prod(level.size for level in cluster.levels[:depth]) for depth in range(1, len(cluster.levels))]
    powers = {unit << j for unit in (1, *units) for j in range(n.bit_length())}
    return list(dict.fromkeys(k for k in (*units, *sorted(powers, reverse=True)) if k < n))


def wanted_ranks(cluster: Cluster, constraints: Sequence[Constraint]) -> list[int]:
    """The numbers of ranks that the constraints on `ranks` admit; one that is named exactly is tried even where cores are fewer."""
    mine = [c for c in constraints if c.key == "ranks"]
    exact = [c.value for c in mine if c.relation == "=" and isinstance(c.value, int)]
    counts = exact[:1] if exact and (cluster.kind.shares_hosts or exact[0] <= cluster.num_devices) else rank_counts(cluster)
    return [n for n in counts if all(c.admits(n) for c in mine)]


@dataclass(frozen=True)
class Space:
    """The layouts of a batch on a cluster that constraints admit.

    `num_layers`: places for stages, at most that many. `num_chunks`: equal layers; more stages than those are tried only where they are
    asked for, and several stages a rank divide them nearly evenly. `experts`: of the model's widest layer, 1 where it has none.
    `fewer`: smaller jobs as well, where all devices give one (for objectives that a smaller job may win). `mixed_traffic`: whether
    products are so unlike that tensor ranks may better cut samples for some of them (`weft.solve.mixed_traffic`). `num_blocks`: of the
    model's layers that recomputation repeats. `images`, `contexts`: ways in which ranks may share an image, or a sequence
    (`weft.solve.images`); `attention`: how these attend to one another's positions, where that differs; `heads` that they may
    exchange.
    `branches`: among how many ranks the model's parallel branches may be given (`weft.solve.forks`).
    """

    cluster: Cluster
    batch_size: int
    constraints: Sequence[Constraint] = ()
    num_layers: int = 1 << 30
    num_chunks: int = 1 << 30
    experts: int = 1
    fewer: bool = False
    mixed_traffic: bool = False
    num_blocks: int = 1
    images: tuple[str, ...] = ()
    contexts: tuple[int, ...] = ()
    attention: tuple[str, ...] = (AUTO,)
    heads: int = 1
    branches: tuple[int, ...] = ()

    def admits(self, key: str, value: int | str) -> bool:
        return all(c.admits(value) for c in self.constraints if c.key == key)

    def check(self) -> None:
        """Raise `Infeasible` where the device has no known precision."""
        peaks = [p for p, _ in self.cluster.device.peak_flops]
        if not any(p in peaks for p in (*PRECISIONS, "float64")):
            planned = ", ".join((*PRECISIONS, "float64"))
            raise Infeasible(
                f"{self.cluster.device.name} has peak_flops of {', '.join(peaks)} alone, and plans are in {planned}; give it one"
            )

    @property
    def sums(self) -> str:
        """The algorithm that sums gradients: the first that is admitted, since nothing else depends on it."""
        return next(name for name in CHOICES["all_reduce"] if self.admits("all_reduce", name))

    @property
    def compress(self) -> str:
        """How gradients are compressed: as a constraint names it."""
        return next((str(c.value) for c in self.constraints if c.key == "compress" and c.relation == "="), "none")

    @property
    def grid(self) -> str | None:
        """How tensor ranks are arranged where a constraint says it: "" in a line; None where none does."""
        return next((str(c.value) for c in self.constraints if c.key == "grid"), None)

    @property
    def lend(self) -> str:
        """Whether ranks that wait lend their cores: what a constraint leaves of it."""
        return next(word for word in CHOICES["lend"] if self.admits("lend", word))

    @property
    def batch_norm(self) -> str:
        """Whose statistics batch norm takes: the whole batch's unless a constraint asks otherwise, since that trains something else."""
        return "local" if self.asked("batch_norm", "local") else "exact"

    def fewest(self, key: str) -> int:
        """The least number that constraints admit of a key that no search raises by itself."""
        most = max((int(c.value) for c in self.constraints if c.key == key), default=0)
        return next(k for k in range(most + 2) if self.admits(key, k))

    def asked(self, key: str, value: int | str) -> bool:
        """Whether a constraint names exactly this value."""
        return any(c.key == key and c.relation == "=" and c.value == value for c in self.constraints)

    def words(self, key: str) -> tuple[str, ...]:
        """The words of a key that are admitted: those of all layers, and those of some that a constraint names."""
        named = [str(c.value) for c in self.constraints if c.key == key and c.value not in CHOICES[key]] if key in OF_LAYERS else []
        return tuple(word for word in dict.fromkeys((*CHOICES.get(key, ()), *named)) if self.admits(key, word))

    def precisions(self) -> list[str]:
        have = [p for p, _ in self.cluster.device.peak_flops]
        if self.cluster.kind.computes_elsewhere:  # never unasked where they were not measured
            have += [name for name, one in KNOWN.items() if one.elsewhere and self.asked("precision", name)]
        if have == ["float64"]:
            return have
        for name in set(KNOWN) - set(PRECISIONS):
            if self.asked("precision", name):
                return [name] if name in have else []
        usable = [p for p in PRECISIONS if p in have and self.admits("precision", p)]
        # The 16-bit kind with the wider exponent needs no loss scaling; the other only where the device has no such.
        return [p for p in usable if p != "float16" or "bfloat16" not in usable]

    def bases(self) -> Iterator[Layout]:
        """Every (data, tensor, pipeline, microbatches, precision, threads, sequence and sample parallelism, expert), most ranks first."""
        precisions = self.precisions()
        is_fixed = False
        for ranks in wanted_ranks(self.cluster, self.constraints):
            if is_fixed and self.cluster.num_devices > 16 and not self.fewer:
                return
            for mesh in self._meshes(ranks):
                if not self.admits("compress", self.compress):
                    continue
                for layout in self._bases(mesh, precisions):
                    try:
                        layout = replace(
                            layout, compress=self.compress, staleness=self.fewest("staleness"), lend=self.lend, batch_norm=self.batch_norm,
                            servers=self.fewest("servers"),
                            compile="on" if self.asked("compile", "on") else "off",
                        )
                    except LayoutError:  # has no replicas to compress for, or no late updates
                        continue
                    is_fixed = True
                    yield layout

    def _meshes(self, ranks: int) -> Iterator[Layout]:
        named = [int(c.value) for c in self.constraints if c.key == "branch" and c.relation == "="]
        for branch in dict.fromkeys((1, *self.branches, *named)):
            if ranks % branch or not self.admits("branch", branch):
                continue
            # Which of two groups is close makes a difference where not all devices are.
            beside = [w for w in (BRANCH, DATA) if self.admits("neighbours", w)] if ranks > self.cluster.node_size else [BRANCH]
            for mesh in self._of_positions(ranks // branch):
                # Ranks of branches stand in the place of replicas; beside others they are priced where somebody asks for them.
                alone = branch in named or mesh.replica_ranks * mesh.pipeline == 1
                if branch == 1 and not self.asked("neighbours", PIPELINE):
                    yield mesh
                elif branch == 1 and mesh.pipeline > 1:
                    yield replace(mesh, neighbours=PIPELINE)
                elif alone and self.batch_size % (mesh.data * branch) == 0:
                    yield from (replace(mesh, branch=branch, neighbours=near) for near in beside)

    def _of_positions(self, ranks: int) -> Iterator[Layout]:
        named = [int(c.value) for c in self.constraints if c.key == "channel" and c.relation == "="]
        channels = [n for n in dict.fromkeys((1, *named)) if self.admits("channel", n)]  # where asked: tensor ranks cut them too
        for (context, spatial), channel in product(self._sharing(), channels):
            sharing = context * spatial_ranks(spatial) * channel
            if ranks % sharing:
                continue
            for data, tensor, pipeline in self._of_samples(ranks // sharing):
                # Ranks that share an image have no use for one another's features, unless somebody asks for both.
                if spatial == "1" or tensor == 1 or self.asked("tensor", tensor):
                    for word in self._attention(context, tensor):
                        yield Layout(data, tensor, pipeline, context=context, attention=word, spatial=spatial, channel=channel)

    def _sharing(self) -> Iterator[tuple[int, str]]:
        """Ranks that share a sequence, and ways in which ranks share an image: long sequences and large images, and what is asked for."""
        asked = {key: [c.value for c in self.constraints if c.key == key and c.relation == "="] for key in ("context", "spatial")}
        for context in dict.fromkeys((1, *self.contexts, *(int(n) for n in asked["context"]))):
            for spatial in dict.fromkeys(("1", *self.images, *(str(word) for word in asked["spatial"]))):
                if self.admits("context", context) and self.admits("spatial", spatial) and (context == 1 or spatial == "1"):
                    yield context, spatial

    def _attention(self, context: int, tensor: int) -> tuple[str, ...]:
        """How ranks that share a sequence attend to one another's positions."""
        if context == 1:
            return (AUTO,)
        named = [str(c.value) for c in self.constraints if c.key == "attention" and c.relation == "="]
        ways = (*self.attention, *both_ways(self.attention, context, self.heads // tensor, self.cluster.node_size // tensor))
        words = [word for word in named or (*ways, *ATTENTION) if self.admits("attention", word) and divides(word, context)]
        return tuple(word for word in words if word in ways) or tuple(words[:1])

    def _of_samples(self, ranks: int) -> Iterator[tuple[int, int, int]]:
        for tensor in divisors(ranks):
            apart = tensor > self.cluster.node_size and not self.grid and not self._cuts_samples
            if apart or (self.grid and tensor != prod(parse_grid(self.grid))) or not self.admits("tensor", tensor):
                continue
            for pipeline in divisors(ranks // tensor):
                data = ranks // tensor // pipeline
                deep = pipeline > self.num_chunks and not self.asked("pipeline", pipeline)
                if deep or pipeline > self.num_layers or not self.admits("pipeline", pipeline):
                    continue
                if self._worth_cutting(data) and self.admits("data", data):
                    yield data, tensor, pipeline

    def _worth_cutting(self, data: int) -> bool:
        """Whether so many replicas divide the batch, or nearly: the one with most samples has little more than an equal part."""
        most = -(-self.batch_size // data) * data
        return data <= self.batch_size and most <= (1 + WASTED) * self.batch_size

    def _bases(self, mesh: Layout, precisions: Sequence[str]) -> Iterator[Layout]:
        data, tensor = mesh.data, mesh.tensor
        threads = self._threads(mesh.num_ranks)
        sequences = [s for s in (("off", "on") if tensor > 1 else ("off",)) if self.admits("sequence_parallel", s)]
        equal = self.batch_size % data == 0 and mesh.branch == 1
        experts = [e for e in divisors(data) if e <= self.experts and self.admits("expert", e)]
        experts = experts if equal else [e for e in experts if e == 1]  # which cut the samples of replicas once more
        each = -(-self.batch_size // data) // mesh.branch
        # Unequal microbatches only where they are asked for: as many as divide the batch are about as good.
        named = {int(c.value) for c in self.constraints if c.key == "microbatches" and c.relation == "="}
        for microbatches in range(1, min(self.batch_size // mesh.replicas, MOST_MICROBATCHES) + 1):
            if (each % microbatches and microbatches not in named) or not self.admits("microbatches", microbatches):
                continue
            samples = self._samples(tensor, each if equal else 0, microbatches)
            for precision, count, sequence, sample, expert in product(precisions, threads, sequences, samples, experts):
                yield replace(
                    mesh, microbatches=microbatches, precision=precision, threads=count, sequence_parallel=sequence,
                    sample_parallel=sample, expert=expert, all_reduce=self.sums, grid=self.grid or "",
                )  # fmt: skip

    def _samples(self, tensor: int, each: int, microbatches: int) -> list[str]:
        """Whether tensor ranks cut samples: where there is something to choose, and every microbatch divides among them. `each`: samples
        of a replica, 0 where replicas differ."""
        divides = each > 0 and each % (microbatches * tensor) == 0
        may = tensor > 1 and not self.grid and divides and self._cuts_samples
        ways = [s for s in (("off", "on") if may else ("off",)) if self.admits("sample_parallel", s)]
        # Ranks that talk in every layer stay within a node, as far as that may be chosen.
        return [s for s in ways if s == "on" or tensor <= self.cluster.node_size or self.grid]

    @property
    def _cuts_samples(self) -> bool:
        return self.mixed_traffic or self.asked("sample_parallel", "on")

    def _threads(self, ranks: int) -> list[int]:
        if not self.cluster.kind.shares_hosts:
            return [0] if self.admits("threads", 0) else []
        share = self.cluster.threads_of(ranks)
        counts = [t for t in (0, *(t for t in divisors(share) if t < share)) if self.admits("threads", t)]
        return counts or [share] * self.admits("threads", share)

    def schedules(self, base: Layout) -> Iterator[Layout]:
        """The base under every schedule that differs from others there."""
        if base.pipeline == 1:
            if self.admits("chunks", 1):
                yield base
            return
        if self.admits("chunks", 1):
            names = ("1f1b", "gpipe") if base.microbatches > 1 else ("1f1b",)
            if self.asked("schedule", "sequential"):
                names = ("sequential",)
            elif base.microbatches == 1 and not self.admits("schedule", "1f1b"):
                names = ("gpipe",)
            yield from (replace(base, schedule=name) for name in names if self.admits("schedule", name))
        # Breadth-first keeps all activations to gather weights less often; it is priced where it is asked for.
        chunked = [one for one in CHUNKED if self.admits("schedule", one) and (one == "interleaved" or self.asked("schedule", one))]
        chunked = [] if base.inner else chunked
        updates_apart = base.staleness > 0 or base.servers > 0
        if base.microbatches > 1 and not updates_apart:
            for chunks in range(2, MOST_CHUNKS + 1):
                stages = base.pipeline * chunks
                even = stages <= self.num_chunks and -(-self.num_chunks // stages) * stages <= UNEVEN * self.num_chunks
                if self.admits("chunks", chunks) and (even or (self.asked("chunks", chunks) and stages <= self.num_layers)):
                    yield from (replace(base, schedule=name, chunks=chunks) for name in chunked)
        others = (name for name in SCHEDULES if name not in ("sequential", "gpipe", "1f1b", *CHUNKED))
        yield from (replace(base, schedule=name) for name in others if self._wants(name, base))

    def _wants(self, name: str, base: Layout) -> bool:
        """Whether a schedule with a split backward, or one that goes both ways, is for this base.

        The first are searched on GPUs: on processors splitting a backward costs more than the idle time that it fills. The others have
        every weight twice where zero bubble idles as little; they are priced where they are asked for.
        """
        asked = self.asked("schedule", name)
        chunks = chunks_of(name, 1)
        stages = base.pipeline * chunks
        updates_apart = base.staleness > 0 or base.servers > 0
        goes_with = ((base.compile == "on", COMPILE_WITH), (updates_apart, STALE_WITH), (base.inner, INNER_WITH))
        if any(is_so and name not in table["schedule"] for is_so, table in goes_with):
            return False
        if not self.admits("schedule", name) or not self.admits("chunks", chunks) or refuse_sizes(name, base.microbatches):
            return False
        if asked:
            return stages <= self.num_layers
        even = stages <= self.num_chunks and -(-self.num_chunks // stages) * stages <= UNEVEN * self.num_chunks
        pays = self.cluster.kind.splits_backward and base.microbatches >= base.pipeline and (chunks == 1 or even)
        return pays and not schedule_of(replace(base, schedule=name)).has_replicas

    def memory_options(self, layout: Layout) -> Iterator[Layout]:
        """The layout under every ZeRO stage, recomputation and offload, each after those that save less and cost no more."""
        for offload in self.words("offload"):
            for recompute in self.words("recompute"):
                zeros = (0, 1, 2, 3) if max(layout.weight_ranks, layout.replicas) > 1 else (0,)
                for segment, zero in product(self.segments(recompute, offload), zeros):
                    if not self.admits("zero", zero):
                        continue
                    with suppress(LayoutError):  # what does not go together, a layout says itself
                        yield replace(layout, zero=zero, recompute=recompute, offload=offload, segment=segment)

    def segments(self, recompute: str, offload: str) -> list[int]:
        """How many layers may be repeated together: powers of two up to the root of their number, since of L layers that keep as much as
        enters them segments of that length keep least (Chen et al. 2016), and shorter ones where they keep more; and what is asked for."""
        asked = {int(c.value) for c in self.constraints if c.key == "segment" and c.relation == "="}
        several = kind_of("recompute", recompute) == "full" and kind_of("offload", offload) in ("none", "optimizer")
        searched = {1 << j for j in range(1, isqrt(self.num_blocks).bit_length())}
        return [k for k in sorted({1} | (searched | asked if several else set())) if self.admits("segment", k)]

    def variants(self, base: Layout) -> Iterator[Layout]:
        """Every layout of the base."""
        for one in self.schedules(base):
            yield from self.memory_options(one)


def layouts(cluster: Cluster, batch_size: int, constraints: Sequence[Constraint] = (), num_layers: int = 1 << 30) -> Iterator[Layout]:
    """Every legal layout that the constraints admit, most ranks first. `num_layers`: places for stages, at most that many.

    On a large cluster fewer ranks than devices are only given where all of them give none.
    """
    space = Space(cluster, batch_size, constraints, num_layers)
    for base in space.bases():
        yield from space.variants(base)
