"""Search space: every legal layout of a batch on a cluster that constraints admit, or `Infeasible` naming what leaves none.

On CPUs any number of ranks is tried, each with its share of the cores or fewer;
on GPUs all devices are used, or as many as the batch lets, where it does not divide.

Each layout is there once, in one form: no sequence parallelism without tensor ranks, no ZeRO without replicas, no schedule without a
pipeline, no expert parallelism where the model has no experts. Gradients are compressed only where a constraint says so, since that changes
the result. Tensor ranks are in a line, or as a constraint arranges them: the search arranges those of the leading layouts, and some on
several nodes. A `base` is what operators' seconds depend on; `variants` are its schedules and what trades time for memory. Not searched:
microbatch counts beyond `MAX_MICROBATCHES`, chunks beyond `MAX_CHUNKS` or of uneven size, more stages than layers and float64 unless a
constraint names them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import isqrt, prod

from shardwise.cluster.cluster import Cluster
from shardwise.errors import Infeasible, LayoutError
from shardwise.plan.compatibility import COMPILE_WITH, INNER_WITH, STALE_WITH
from shardwise.plan.ir.axis import ATTENTION, BRANCH, DATA, PIPELINE, spatial_ranks
from shardwise.plan.ir.choice import AUTO
from shardwise.plan.ir.grid import parse_grid
from shardwise.plan.ir.precision import MIXED
from shardwise.plan.ir.precision import PRECISIONS as KNOWN
from shardwise.plan.ir.schedule_sizes import CHUNKED, SCHEDULES, chunks_of, refuse_sizes
from shardwise.plan.layout import Layout
from shardwise.plan.layout_words import CHOICES
from shardwise.plan.residency import LAYER_WORDS, strip_layers
from shardwise.schedules import schedule_of
from shardwise.solve.axis_candidates import is_valid_attention, ulysses_ring_candidates
from shardwise.solve.constraints import Constraint

MAX_MICROBATCHES = 512
MAX_CHUNKS = 8
MAX_LAYER_IMBALANCE = 1.1  # layers of the largest of several stages a rank over the mean, at most
MAX_IDLE_FRACTION = 1 / 8  # of a step, at most, that replicas with a sample less than others wait
PRECISIONS = ("float32", "float16", "bfloat16")  # others only where a constraint names them: float64, and those that change results


def divisors_of(number: int) -> list[int]:
    """Return all divisors, ascending.

    >>> divisors_of(12)
    [1, 2, 3, 4, 6, 12]
    """
    lower = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*lower, *(number // d for d in lower)})


def rank_counts(cluster: Cluster) -> list[int]:
    """Return the numbers of ranks to try: every count on a small cluster, else all, then its divisors (and see `smaller_rank_counts`)."""
    n = cluster.num_devices
    if n <= 16:
        return list(range(n, 0, -1))
    return list(reversed(divisors_of(n)))


def smaller_rank_counts(cluster: Cluster) -> list[int]:
    """Return smaller jobs on a large cluster of GPUs that may be faster than one on all of it: one of its units each, where its links are
    slow, then powers of two and units times those, most ranks first, where batch and model do not divide among all of them.

    >>> smaller_rank_counts(Cluster.parse("5xdgx-h100"))
    [8, 32, 16, 4, 2, 1]
    """
    n = cluster.num_devices
    if n <= 16 or cluster.kind.shares_hosts or cluster.parts:
        return []
    units = [prod(level.size for level in cluster.levels[:depth]) for depth in range(1, len(cluster.levels))]
    powers = {unit << j for unit in (1, *units) for j in range(n.bit_length())}
    return list(dict.fromkeys(k for k in (*units, *sorted(powers, reverse=True)) if k < n))


def admitted_rank_counts(cluster: Cluster, constraints: Sequence[Constraint]) -> list[int]:
    """Return the numbers of ranks that the constraints on `ranks` admit; one that is named exactly is tried even where cores are fewer."""
    of_ranks = [c for c in constraints if c.key == "ranks"]
    exact = [c.value for c in of_ranks if c.relation == "=" and isinstance(c.value, int)]
    counts = exact[:1] if exact and (cluster.kind.shares_hosts or exact[0] <= cluster.num_devices) else rank_counts(cluster)
    return [n for n in counts if all(c.admits(n) for c in of_ranks)]


@dataclass(frozen=True)
class SearchSpace:
    """Layouts of a batch on a cluster that constraints admit.

    `num_layers`: places for stages, at most that many. `num_chunks`: equal layers; more stages than those are tried only where a constraint
    names them, and several stages a rank divide them nearly evenly. `num_experts`: of the model's widest layer, 1 where it has none.
    `includes_smaller_jobs`: smaller jobs as well, where all devices give one (for objectives that a smaller job may win).
    `has_mixed_traffic`: whether products are so unlike that tensor ranks may better shard samples for some
    (`shardwise.solve.axis_candidates`).
    `num_blocks`: number of the model's layers that are recomputed as units. `spatial_words`, `context_sizes`: values of `spatial` and
    `context` (`shardwise.solve.axis_candidates`); `attention_words`: values of `attention_words`; `num_heads` that Ulysses may exchange.
    `branch_sizes`:
    numbers of ranks for the model's parallel branches (`shardwise.solve.axis_candidates`).
    """

    cluster: Cluster
    batch_size: int
    constraints: Sequence[Constraint] = ()
    num_layers: int = 1 << 30
    num_chunks: int = 1 << 30
    num_experts: int = 1
    includes_smaller_jobs: bool = False
    has_mixed_traffic: bool = False
    num_blocks: int = 1
    spatial_words: tuple[str, ...] = ()
    context_sizes: tuple[int, ...] = ()
    attention_words: tuple[str, ...] = (AUTO,)
    num_heads: int = 1
    branch_sizes: tuple[int, ...] = ()

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
    def all_reduce(self) -> str:
        """Name of the all-reduce algorithm for gradients: the first that is admitted, since nothing else depends on it."""
        return self._first_admitted("all_reduce")

    @property
    def compress(self) -> str:
        """Compression of gradients: as a constraint names it."""
        return next(map(str, self._requested("compress")), "none")

    @property
    def grid(self) -> str | None:
        """Arrangement of the tensor ranks where a constraint names one: "" for a line; None where none does."""
        return next((str(c.value) for c in self.constraints if c.key == "grid"), None)

    @property
    def lend(self) -> str:
        """Value of `lend`: the first that is admitted."""
        return self._first_admitted("lend")

    def _first_admitted(self, key: str) -> str:
        return next(word for word in CHOICES[key] if self.admits(key, word))

    @property
    def batch_norm(self) -> str:
        """Value of `batch_norm`: statistics of the whole batch unless a constraint says otherwise, since that trains something else."""
        return "local" if self.is_requested("batch_norm", "local") else "exact"

    def min_admitted(self, key: str) -> int:
        """Return the smallest number that constraints admit of a key that no search raises by itself."""
        most = max((int(c.value) for c in self.constraints if c.key == key), default=0)
        return next(k for k in range(most + 2) if self.admits(key, k))

    def _requested(self, key: str) -> list[int | str]:
        """Return the values of a key that constraints name."""
        return [c.value for c in self.constraints if c.key == key and c.relation == "="]

    def is_requested(self, key: str, value: int | str) -> bool:
        """Return whether a constraint names exactly this value."""
        return value in self._requested(key)

    def admitted_words(self, key: str) -> tuple[str, ...]:
        """Return the admitted words of a key: those for all layers, and those for some that a constraint names."""
        named = [str(c.value) for c in self.constraints if c.key == key and c.value not in CHOICES[key]] if key in LAYER_WORDS else []
        return tuple(word for word in dict.fromkeys((*CHOICES.get(key, ()), *named)) if self.admits(key, word))

    def precisions(self) -> list[str]:
        have = [p for p, _ in self.cluster.device.peak_flops]
        if self.cluster.kind.substitutes_precisions:  # only where a constraint names them: they were not measured
            have += [name for name, precision in KNOWN.items() if precision.substitute and self.is_requested("precision", name)]
        if have == ["float64"]:
            return have
        have += [name for name, one in KNOWN.items() if one.device_precision != name and one.device_precision in have]
        for name in set(KNOWN) - set(PRECISIONS):
            if self.is_requested("precision", name):
                return [name] if name in have else []
        usable = [p for p in PRECISIONS if p in have and self.admits("precision", p)]
        # bfloat16 needs no loss scaling, so float16 is tried only where the device has no bfloat16.
        usable = [p for p in usable if p != "float16" or "bfloat16" not in usable]
        # On GPUs weights of 16 bits take less room and no casts; the main weights are the optimizer's, which servers do not have.
        holds_narrow = not self.cluster.kind.shares_hosts and self.admits("precision", MIXED) and not self.min_admitted("servers")
        return [MIXED if p == "bfloat16" and holds_narrow else p for p in usable]

    def bases(self) -> Iterator[Layout]:
        """Yield every combination of what operators' seconds depend on, most ranks first."""
        precisions = self.precisions()
        is_fixed = False
        for ranks in admitted_rank_counts(self.cluster, self.constraints):
            if is_fixed and self.cluster.num_devices > 16 and not self.includes_smaller_jobs:
                return
            for mesh in self._meshes(ranks):
                if not self.admits("compress", self.compress):
                    continue
                for layout in self._bases_of_mesh(mesh, precisions):
                    with suppress(LayoutError):  # it has no replicas, for compression or late updates
                        base = self.with_fixed_keys(layout)
                        is_fixed = True
                        yield base

    def with_fixed_keys(self, layout: Layout) -> Layout:
        """Set the keys that are the same in the whole space. Raises LayoutError where the layout cannot have them."""
        return replace(
            layout, compress=self.compress, staleness=self.min_admitted("staleness"), lend=self.lend, batch_norm=self.batch_norm,
            servers=self.min_admitted("servers"), compile="on" if self.is_requested("compile", "on") else "off",
            gradients=self._first_admitted("gradients"), scatter=self._first_admitted("scatter"),
            loss_chunks=max(1, self.min_admitted("loss_chunks")), shard=next((int(n) for n in self._requested("shard")), 0),
        )  # fmt: skip

    def _meshes(self, ranks: int) -> Iterator[Layout]:
        named = [int(n) for n in self._requested("branch")]
        for branch in dict.fromkeys((1, *self.branch_sizes, *named)):
            if ranks % branch or not self.admits("branch", branch):
                continue
            # Which ranks are neighbours matters only on several nodes.
            neighbours = [w for w in (BRANCH, DATA) if self.admits("neighbours", w)] if ranks > self.cluster.node_size else [BRANCH]
            for mesh in self._position_meshes(ranks // branch):
                # Branch ranks take the place of replicas; with other axes they are priced only where a constraint names them.
                is_searched = branch in named or mesh.replica_ranks * mesh.pipeline == 1
                if branch == 1 and not self.is_requested("neighbours", PIPELINE):
                    yield mesh
                elif branch == 1 and mesh.pipeline > 1:
                    yield replace(mesh, neighbours=PIPELINE)
                elif is_searched and self.batch_size % (mesh.data * branch) == 0:
                    yield from (replace(mesh, branch=branch, neighbours=word) for word in neighbours)

    def _position_meshes(self, ranks: int) -> Iterator[Layout]:
        named = [int(n) for n in self._requested("channel")]
        channels = [n for n in dict.fromkeys((1, *named)) if self.admits("channel", n)]  # only if named: tensor ranks shard them too
        for (context, spatial), channel in product(self._position_sharing(), channels):
            ranks_of_sample = context * spatial_ranks(spatial) * channel
            if ranks % ranks_of_sample:
                continue
            for data, tensor, pipeline in self._sample_meshes(ranks // ranks_of_sample):
                # Spatial and tensor parallelism are combined only where a constraint names both.
                if spatial == "1" or tensor == 1 or self.is_requested("tensor", tensor):
                    for word in self._attention_options(context, tensor):
                        yield Layout(data, tensor, pipeline, context=context, attention=word, spatial=spatial, channel=channel)

    def _position_sharing(self) -> Iterator[tuple[int, str]]:
        """Yield (context, spatial): for long sequences and large images, and as constraints name them."""
        for context in dict.fromkeys((1, *self.context_sizes, *(int(n) for n in self._requested("context")))):
            for spatial in dict.fromkeys(("1", *self.spatial_words, *(str(word) for word in self._requested("spatial")))):
                if self.admits("context", context) and self.admits("spatial", spatial) and (context == 1 or spatial == "1"):
                    yield context, spatial

    def _attention_options(self, context: int, tensor: int) -> tuple[str, ...]:
        """Return the values of `attention_words` to try for ranks that share a sequence."""
        if context == 1:
            return (AUTO,)
        named = [str(word) for word in self._requested("attention")]
        searched = (
            *self.attention_words,
            *ulysses_ring_candidates(self.attention_words, context, self.num_heads // tensor, self.cluster.node_size // tensor),
        )
        words = [word for word in named or (*searched, *ATTENTION) if self.admits("attention", word) and is_valid_attention(word, context)]
        return tuple(word for word in words if word in searched) or tuple(words[:1])

    def _sample_meshes(self, ranks: int) -> Iterator[tuple[int, int, int]]:
        for tensor in divisors_of(ranks):
            is_multi_node = tensor > self.cluster.node_size and not self.grid and not self._may_shard_samples
            if is_multi_node or (self.grid and tensor != prod(parse_grid(self.grid))) or not self.admits("tensor", tensor):
                continue
            for pipeline in divisors_of(ranks // tensor):
                data = ranks // tensor // pipeline
                is_too_deep = pipeline > self.num_chunks and not self.is_requested("pipeline", pipeline)
                if is_too_deep or pipeline > self.num_layers or not self.admits("pipeline", pipeline):
                    continue
                if self._divides_batch(data) and self.admits("data", data):
                    yield data, tensor, pipeline

    def _divides_batch(self, data: int) -> bool:
        """Return whether so many replicas divide the batch, or nearly: the one with most samples has little more than an equal part."""
        padded = -(-self.batch_size // data) * data
        return data <= self.batch_size and padded <= (1 + MAX_IDLE_FRACTION) * self.batch_size

    def _bases_of_mesh(self, mesh: Layout, precisions: Sequence[str]) -> Iterator[Layout]:
        data, tensor = mesh.data, mesh.tensor
        threads = self._thread_counts(mesh.num_ranks)
        sequences = [s for s in (("off", "on") if tensor > 1 else ("off",)) if self.admits("sequence_parallel", s)]
        is_equal = self.batch_size % data == 0 and mesh.branch == 1
        experts = [e for e in divisors_of(data) if e <= self.num_experts and self.admits("expert", e)]
        experts = experts if is_equal else [e for e in experts if e == 1]  # which shard the samples of replicas once more
        samples_each = -(-self.batch_size // data) // mesh.branch
        # Unequal microbatches only where named: as many as divide the batch are about as good.
        named = {int(n) for n in self._requested("microbatches")}
        for microbatches in range(1, min(self.batch_size // mesh.replicas, MAX_MICROBATCHES) + 1):
            if (samples_each % microbatches and microbatches not in named) or not self.admits("microbatches", microbatches):
                continue
            samples = self._sample_parallel_options(tensor, samples_each if is_equal else 0, microbatches)
            for precision, count, sequence, sample, expert in product(precisions, threads, sequences, samples, experts):
                yield replace(
                    mesh, microbatches=microbatches, precision=precision, threads=count, sequence_parallel=sequence,
                    sample_parallel=sample, expert=expert, all_reduce=self.all_reduce, grid=self.grid or "",
                )  # fmt: skip

    def _sample_parallel_options(self, tensor: int, samples_per_replica: int, microbatches: int) -> list[str]:
        """Return values of `sample_parallel`: on only where every microbatch divides. `samples_per_replica`: 0 where unequal."""
        divides = samples_per_replica > 0 and samples_per_replica % (microbatches * tensor) == 0
        is_possible = tensor > 1 and not self.grid and divides and self._may_shard_samples
        options = [s for s in (("off", "on") if is_possible else ("off",)) if self.admits("sample_parallel", s)]
        # Ranks with collectives in every layer stay within a node, unless a constraint says otherwise.
        return [s for s in options if s == "on" or tensor <= self.cluster.node_size or self.grid]

    @property
    def _may_shard_samples(self) -> bool:
        return self.has_mixed_traffic or self.is_requested("sample_parallel", "on")

    def _thread_counts(self, ranks: int) -> list[int]:
        if not self.cluster.kind.shares_hosts:
            return [0] if self.admits("threads", 0) else []
        share = self.cluster.threads_of(ranks)
        counts = [t for t in (0, *(t for t in divisors_of(share) if t < share)) if self.admits("threads", t)]
        return counts or [share] * self.admits("threads", share)

    def schedules(self, base: Layout) -> Iterator[Layout]:
        """Yield the base under every schedule that differs from others there."""
        if base.pipeline == 1:
            if self.admits("chunks", 1):
                yield base
            return
        if self.admits("chunks", 1):
            names = ("1f1b", "gpipe") if base.microbatches > 1 else ("1f1b",)
            if self.is_requested("schedule", "sequential"):
                names = ("sequential",)
            elif base.microbatches == 1 and not self.admits("schedule", "1f1b"):
                names = ("gpipe",)
            yield from (replace(base, schedule=name) for name in names if self.admits("schedule", name))
        # Breadth-first keeps all activations to gather weights less often; it is priced only where a constraint names it.
        chunked = [
            name for name in CHUNKED if self.admits("schedule", name) and (name == "interleaved" or self.is_requested("schedule", name))
        ]
        chunked = [] if base.inner else chunked
        has_late_updates = base.staleness > 0 or base.servers > 0
        if base.microbatches > 1 and not has_late_updates:
            for chunks in range(2, MAX_CHUNKS + 1):
                stages = base.pipeline * chunks
                is_even = self._divides_layers(stages)
                if self.admits("chunks", chunks) and (is_even or (self.is_requested("chunks", chunks) and stages <= self.num_layers)):
                    yield from (replace(base, schedule=name, chunks=chunks) for name in chunked)
        other_names = (name for name in SCHEDULES if name not in ("sequential", "gpipe", "1f1b", *CHUNKED))
        yield from (replace(base, schedule=name) for name in other_names if self._includes_schedule(name, base))

    def _divides_layers(self, stages: int) -> bool:
        """Return whether so many stages have nearly equal numbers of layers; or one each, before and after them what is no layer."""
        if stages > self.num_chunks:
            return stages <= min(self.num_chunks + 2, self.num_layers)
        return -(-self.num_chunks // stages) * stages <= MAX_LAYER_IMBALANCE * self.num_chunks

    def _includes_schedule(self, name: str, base: Layout) -> bool:
        """Return whether a schedule with a split backward, or a bidirectional one, is searched for this base.

        The first are searched on GPUs: on CPUs splitting a backward costs more than the idle time that it fills. The others hold
        every weight twice where zero bubble idles as little; they are priced only where a constraint names them.
        """
        is_named = self.is_requested("schedule", name)
        chunks = chunks_of(name, 1)
        stages = base.pipeline * chunks
        has_late_updates = base.staleness > 0 or base.servers > 0
        requirements = ((base.compile == "on", COMPILE_WITH), (has_late_updates, STALE_WITH), (base.inner, INNER_WITH))
        if any(is_so and name not in table["schedule"] for is_so, table in requirements):
            return False
        if not self.admits("schedule", name) or not self.admits("chunks", chunks) or refuse_sizes(name, base.microbatches):
            return False
        if is_named:
            return stages <= self.num_layers
        divides = chunks == 1 or self._divides_layers(stages)
        pays = self.cluster.kind.splits_backward and base.microbatches >= base.pipeline and divides
        return pays and not schedule_of(replace(base, schedule=name)).has_replicas

    def memory_options(self, layout: Layout) -> Iterator[Layout]:
        """Yield the layout under every ZeRO stage, recomputation and offload, each after those that save less and cost no more."""
        for offload in self.admitted_words("offload"):
            for recompute in self.admitted_words("recompute"):
                zeros = (0, 1, 2, 3) if max(layout.weight_ranks, layout.replicas) > 1 else (0,)
                for segment, zero in product(self.segments(recompute, offload), zeros):
                    if not self.admits("zero", zero):
                        continue
                    with suppress(LayoutError):  # incompatible keys
                        yield replace(layout, zero=zero, recompute=recompute, offload=offload, segment=segment)

    def segments(self, recompute: str, offload: str) -> list[int]:
        """Return how many layers may be recomputed together: powers of two up to the root of their number, since segments of sqrt(L) of L
        equal layers save least (Chen et al. 2016), and shorter ones where layers save more than enters them; and what constraints name."""
        named = {int(n) for n in self._requested("segment")}
        may_group = strip_layers("recompute", recompute) == "full" and strip_layers("offload", offload) in ("none", "optimizer")
        searched = {1 << j for j in range(1, isqrt(self.num_blocks).bit_length())}
        return [k for k in sorted({1} | (searched | named if may_group else set())) if self.admits("segment", k)]

    def variants(self, base: Layout) -> Iterator[Layout]:
        """Yield every layout of the base."""
        for scheduled in self.schedules(base):
            yield from self.memory_options(scheduled)


def iterate_layouts(
    cluster: Cluster, batch_size: int, constraints: Sequence[Constraint] = (), num_layers: int = 1 << 30
) -> Iterator[Layout]:
    """Yield every legal layout that the constraints admit, most ranks first. `num_layers`: places for stages, at most that many.

    On a large cluster fewer ranks than devices are yielded only where all of them yield none.
    """
    space = SearchSpace(cluster, batch_size, constraints, num_layers)
    for base in space.bases():
        yield from space.variants(base)
