"""Layout: the parallel configuration as a person writes it, `data=2 tensor=2 pipeline=2 microbatches=4 schedule=1f1b zero=1`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter

from shardwise.errors import LayoutError, did_you_mean
from shardwise.plan.compatibility import (
    INNER_WITH,
    SPLIT_FIXED,
    refuse_combinations,
    refuse_incompatible,
    refuse_servers,
    refuse_staleness,
    refuse_zero,
    server_ranks,
)
from shardwise.plan.ir.axis import (  # fmt: skip
    BRANCH,
    CHANNEL,
    DATA,
    EXPERT,
    PIPELINE,
    normalize_attention,
    parse_spatial,
    sample_axes,
    spatial_ranks,
)
from shardwise.plan.ir.choice import AUTO, SYNONYMS, refuse_all_reduce
from shardwise.plan.ir.compression import Compression, refuse_compression, refuse_scaled_compression
from shardwise.plan.ir.custom_collective import collective_text_of, is_collective_file, refuse_custom_all_reduce
from shardwise.plan.ir.custom_schedule import (
    actions_of,
    check_schedule_name,
    custom_program,
    is_schedule_file,
    refuse_custom,
    with_fewer_microbatches,
)
from shardwise.plan.ir.grid import axes_of, normalize_grid
from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.ir.program import Program
from shardwise.plan.ir.schedule_sizes import CHUNKED, SCHEDULES, chunks_of, refuse_sizes
from shardwise.plan.layout_words import CHOICES, refuse_words, resolve_aliases
from shardwise.plan.residency import Residency, refuse_residency
from shardwise.plan.unequal_ranks import StageSizes, first_ranks_of_stages, format_shares, parse_inner, parse_shares

_choice_values = attrgetter(*(key for key in CHOICES if key != "schedule"))
COUNTS = ("data", "tensor", "pipeline", "microbatches", "chunks", "expert", "branch", "context", "channel", "segment", "loss_chunks")


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of every axis and the choices that go with them.

    `chunks`: stages of each pipeline rank (interleaved, breadth-first; of zb-v always 2). `expert`: data replicas among which the experts
    of a layer are distributed. `threads=0` shares the machine's cores among its ranks. `all_reduce`: the algorithm that reduces gradients;
    `auto`: by size, as in the plan. `recompute` and `offload`: a `Residency`. `compress`: gradient compression, a `Compression`.
    `inner`: data x tensor of every stage, where they differ; `data` and `tensor` are then the first stage's.
    `staleness`: a step's update is applied so many steps later, so that no replica waits for the others before.
    `servers`: replicas that are parameter servers as well, for a shard of the weights each; 0: every replica updates its own weights.
    `grid`: rows, columns and depth of the tensor ranks, if not a line; `tensor` is their number. Both print as `tensor=2x2`.
    `context`: ranks that share a sequence, each with a shard of its positions. `attention`: how they attend to one another's, by
    gathering all keys, by exchanging positions for heads (`ulysses`), by passing keys around (`ring`); `ulysses:2+ring`: two adjacent ranks
    exchange heads, and keys are passed around between such pairs (no number: as many as there are heads for); `auto`: fewest bytes.
    `spatial`: ranks that share an image, each with a shard of its positions: `4` of the outermost dimension, `2x2` of height and width.
    `channel`: ranks that share the channels and filters of convolutions, and the operators that read or write these.
    `branch`: ranks of a replica that share its samples, each of which runs some of the model's parallel branches on all of them.
    `neighbours`: whose ranks are adjacent, those of one replica's branches (`branch`), the replicas of one branch (`data`), or the
    stages of one replica's pipeline (`pipeline`).
    `lend`: whether pipeline ranks that wait lend their cores to those of their host that compute (CPUs only); `auto`: if a plan
    predicts that it pays, which then has `on`. Without a pipeline it has no effect.
    `shares`: the part of every batch that each data replica has, where these differ: `3/2/2/1`.
    `segment`: layers that `recompute=full` recomputes together, of which only the input of the first is saved.
    `batch_norm`: whether its statistics are those of the whole (micro)batch, or of each data replica's samples (`local`), which trains
    something else.
    `shard`: adjacent data replicas among which `zero` shards state, each such group holding all of it; 0: all. No effect without `zero`.
    `compile`: whether torch's computation between collectives is compiled, stage by stage, which takes a minute or more at the start.
    `gradients`: dtype in which they are summed over microbatches and ranks (with precision=bfloat16-mixed).
    `scatter`: whether, with zero=2 and 3, gradients are reduce-scattered in each microbatch, or in the last only.
    `loss_chunks`: parts of the rows of a microbatch in which logits and their cross-entropy are computed, one after another.
    `split`: whether every microbatch has the layout's data x context, or, by its length, the fastest split of the same ranks.
    `actions`: text of a custom schedule, whatever its file contains by now; empty for a named one. `collective`: likewise of an all-reduce.
    `begins`: of stages with unequal numbers of ranks (`inner`) the first rank of each, and the total.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    zero: int = 0
    recompute: str = "none"
    precision: str = "float32"
    threads: int = 0
    chunks: int = 1
    expert: int = 1
    sequence_parallel: str = "off"
    sample_parallel: str = "off"
    offload: str = "none"
    all_reduce: str = AUTO
    compress: str = "none"
    inner: str = ""
    staleness: int = 0
    servers: int = 0
    context: int = 1
    attention: str = AUTO
    spatial: str = "1"
    channel: int = 1
    branch: int = 1
    neighbours: str = BRANCH
    grid: str = ""
    lend: str = AUTO
    segment: int = 1
    shares: str = ""
    batch_norm: str = "exact"
    compile: str = "off"
    gradients: str = "float32"
    scatter: str = "each"
    split: str = SPLIT_FIXED
    shard: int = 0
    loss_chunks: int = 1
    actions: str = field(default="", repr=False)
    collective: str = field(default="", repr=False)
    begins: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_grid()
        parse_spatial(self.spatial)
        if self.threads < 0:
            raise LayoutError(f"threads={self.threads}; use threads=0 for an equal share of the cores, or a count")
        _raise_if_refused(refuse_zero(self))
        if self.shard == self.data:
            object.__setattr__(self, "shard", 0)
        self._check_custom()
        self._check_collective()
        self._check_words()
        _raise_if_refused(refuse_sizes(self.schedule, self.microbatches))
        _raise_if_refused(refuse_all_reduce(self.all_reduce, self.zero, self.data * self.tensor))
        self._check_chunks()
        self._check_residency()
        if self.data % self.expert:
            raise LayoutError(f"expert={self.expert} does not divide data={self.data}, over whose replicas experts are spread")
        if self.compress != "none":
            object.__setattr__(self, "compress", str(Compression.parse(self.compress)))  # canonical form
            refused = refuse_compression(self.compress, self.data, self.zero, self.all_reduce)
            _raise_if_refused(refused or refuse_scaled_compression(self.compress, self.precision))
        self._check_shares()
        self._check_inner()
        _raise_if_refused(refuse_staleness(self) or refuse_servers(self) or refuse_combinations(self))

    def _check_counts(self) -> None:
        for key in COUNTS:
            if getattr(self, key) < 1:
                raise LayoutError(f"{key}={getattr(self, key)}; it counts something, so use {key}=1 or more")

    def _check_grid(self) -> None:
        """Set `tensor` from a grid."""
        if not self.grid:
            return
        tensor, grid = normalize_grid(self.grid, self.tensor)
        object.__setattr__(self, "tensor", tensor)
        object.__setattr__(self, "grid", grid)
        if self.sample_parallel == "on":
            why = "tensor ranks that cut samples are in a line"
            raise LayoutError(f"sample_parallel=on with tensor={self.grid} is not supported: {why}; leave one out")

    def _check_words(self) -> None:
        """Refuse unknown words, and normalise synonyms and keys that have no effect in this layout."""
        if self.all_reduce in SYNONYMS:
            object.__setattr__(self, "all_reduce", SYNONYMS[self.all_reduce])
        named = "1f1b" if self.actions else self.schedule
        words = (named, *_choice_values(self))
        if self.collective:
            words = tuple(AUTO if word == self.all_reduce else word for word in words)
        _raise_if_refused(refuse_words(words))
        if (self.neighbours == DATA and self.branch == 1) or (self.neighbours == PIPELINE and self.pipeline == 1):
            object.__setattr__(self, "neighbours", BRANCH)
        if self.pipeline == 1:
            object.__setattr__(self, "lend", AUTO)
        object.__setattr__(self, "attention", normalize_attention(self.attention, self.context))

    def _check_chunks(self) -> None:
        """Set the chunks that the schedule has; 1 is a default."""
        chunks = chunks_of(self.schedule, self.chunks) if self.program is None else -(-self.program.num_stages // self.pipeline)
        if self.chunks == 1:
            object.__setattr__(self, "chunks", chunks)
        elif self.chunks != chunks:
            if self.program is not None:
                stages = self.program.num_stages
                raise LayoutError(f"chunks={self.chunks}, and schedule={self.schedule} has {stages} stages; leave chunks out")
            raise LayoutError(f"chunks={self.chunks} needs schedule={' or '.join(CHUNKED)}, and this is {self}")

    def _check_residency(self) -> None:
        residency = self.residency
        for choice in (residency.recompute, residency.offload):
            if choice.is_partial:
                object.__setattr__(self, choice.key, str(choice))  # canonical form
            if len(choice.counts) not in (0, 1, self.num_stages):
                raise LayoutError(
                    f"{choice.key}={choice} counts layers of {len(choice.counts)} stages, and there are {self.num_stages}: {self}"
                )
        _raise_if_refused(refuse_residency(residency, self.zero))

    def _check_custom(self) -> None:
        """Check a custom schedule against the ranks and microbatches; a named one has no actions."""
        if self.schedule in SCHEDULES:
            object.__setattr__(self, "actions", "")
        elif self.actions:
            check_schedule_name(self.schedule, SCHEDULES)
            if reason := refuse_custom(self.schedule, custom_program(self.schedule, self.actions), self.pipeline, self.microbatches):
                raise LayoutError(reason)
        elif is_schedule_file(self.schedule):
            raise LayoutError(f'schedule={self.schedule} is a file, which has not been read; Layout.parse("schedule={self.schedule}") does')

    def _check_collective(self) -> None:
        """Prove a custom all-reduce, and check it against the ranks; a named one has no text."""
        if not is_collective_file(self.all_reduce):
            object.__setattr__(self, "collective", "")
        elif not self.collective:
            raise LayoutError(
                f'all_reduce={self.all_reduce} is a file, which has not been read; Layout.parse("all_reduce={self.all_reduce}") does'
            )
        else:
            _raise_if_refused(refuse_custom_all_reduce(self.all_reduce, self.collective, self.weight_ranks))

    def _check_shares(self) -> None:
        """Reduce shares to lowest terms, and refuse keys that need equal samples on all replicas."""
        if not self.shares:
            return
        object.__setattr__(self, "shares", format_shares(parse_shares(self.shares, self.data)))
        set_keys = {"expert": self.expert > 1, "sample_parallel": self.sample_parallel == "on", "batch_norm": self.batch_norm == "local"}
        conflict = next((f"{key}={getattr(self, key)}" for key, is_so in set_keys.items() if is_so), "")
        if self.shares and conflict:
            raise LayoutError(f"shares={self.shares} with {conflict}, which needs equal samples on all replicas; leave one out")

    def _check_inner(self) -> None:
        """Check stages of different arrangements; `data` and `tensor` are then the first one's."""
        if not self.inner:
            return
        if self.grid:
            raise LayoutError(
                f"tensor={self.grid} with inner={self.inner} is not supported: tensor ranks of such stages are in a line; leave one out"
            )
        sizes = parse_inner(self.inner)
        data, tensor = sizes[0]
        if len(sizes) != self.pipeline:
            raise LayoutError(f"inner={self.inner} arranges {len(sizes)} stages, and pipeline={self.pipeline}; give data x tensor of each")
        if (self.data, self.tensor) not in ((1, 1), (data, tensor)):
            raise LayoutError(f"inner={self.inner} begins with {data}x{tensor}, and data={self.data} tensor={self.tensor}; leave those out")
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "tensor", tensor)
        if len(set(sizes)) == 1:
            object.__setattr__(self, "inner", "")
            object.__setattr__(self, "begins", ())
            return
        object.__setattr__(self, "begins", first_ranks_of_stages(sizes, self.position_ranks))
        word = f"stages that are arranged differently (inner={self.inner})"
        _raise_if_refused(refuse_incompatible(self, INNER_WITH, word, "leave inner out"))

    @property
    def stage_sizes(self) -> StageSizes:
        """Return (data, tensor) of every pipeline position."""
        return parse_inner(self.inner) if self.inner else ((self.data, self.tensor),) * self.pipeline

    def of_stage(self, stage: int) -> Layout:
        """Return the layout of one stage: with its own `data` and `tensor`."""
        if not self.inner:
            return self
        data, tensor = self.stage_sizes[stage]
        return replace(self, data=data, tensor=tensor, inner="")

    def mesh_of(self, rank: int) -> Mesh:
        """Return the mesh as a rank's own stage arranges it."""
        if not self.inner:
            return self.mesh
        stage = bisect_right(self.begins, rank) - 1 if self.begins else rank // self.stage_ranks
        return self.of_stage(min(stage, self.pipeline - 1)).mesh

    @property
    def replicas(self) -> int:
        """Number of replicas that the samples are divided among: the `data` of the stage that has most, and branch ranks."""
        return max(data for data, _ in self.stage_sizes) * self.branch

    @property
    def replica_shares(self) -> tuple[int, ...]:
        """Return the share of every replica; () where all are equal."""
        return parse_shares(self.shares, self.data)

    @property
    def residency(self) -> Residency:
        """Return which layers are recomputed in backward, and which are offloaded to the host until then."""
        return Residency.parse(self.recompute, self.offload, self.segment)

    @property
    def recomputes_layers(self) -> bool:
        """Return whether layers, some or all, are recomputed in backward, as a whole or their cheap operators."""
        return self.recompute.startswith(("full", "cheap"))

    @property
    def offloads_layers(self) -> bool:
        """Return whether activations of layers, some or all, are offloaded to the host until their backward."""
        return self.offload.startswith(("activations", "all"))

    @property
    def offloads_optimizer(self) -> bool:
        """Return whether the optimizer's state is offloaded to the host, and updates there."""
        return self.offload.startswith(("optimizer", "all"))

    @property
    def program(self) -> Program | None:
        """Return the program of a custom schedule; None for a named one."""
        return custom_program(self.schedule, self.actions) if self.actions else None

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages, `chunks` on every rank; of a custom schedule those that it computes."""
        return self.pipeline * self.chunks if self.program is None else self.program.num_stages

    @property
    def scatters_last(self) -> bool:
        """Return whether sharded gradients are reduce-scattered in the last microbatch only (with branches behind it): whole ones wait."""
        return self.zero >= 2 and (self.branch > 1 or (self.scatter == "last" and self.microbatches > 1))

    def with_schedule(self, name: str, actions: str) -> Layout:
        """Return the layout under a custom schedule, from a file called `name`."""
        check_schedule_name(name, SCHEDULES)
        return replace(self, schedule=name, actions=actions, chunks=1)

    def with_microbatches(self, count: int) -> Layout:
        """Return the layout with so many microbatches; a custom schedule, which is for one number, without the later ones."""
        actions = self.actions
        if self.program is not None and count != self.microbatches:
            actions = str(with_fewer_microbatches(self.program, count))
        return replace(self, microbatches=count, actions=actions)

    @property
    def num_ranks(self) -> int:
        return self.begins[-1] if self.begins else self.stage_ranks * self.pipeline

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of one pipeline stage; of the first, where they differ."""
        return self.replica_ranks * self.data

    def stage_rank_range(self, place: int) -> tuple[int, int]:
        """Return the first rank of a pipeline position, where stages follow one another, and the rank after its last.

        >>> Layout.parse("pipeline=2 inner=2x1/1x1").stage_rank_range(1)
        (2, 3)
        """
        if self.begins:
            return self.begins[place], self.begins[place + 1]
        return place * self.stage_ranks, (place + 1) * self.stage_ranks

    @property
    def stage_stride(self) -> int:
        """Distance between the ranks of one stage and the next."""
        return self.replica_ranks if self.neighbours == PIPELINE else self.stage_ranks

    @property
    def replica_ranks(self) -> int:
        """Number of ranks of one pipeline stage that share their samples."""
        return self.tensor * self.channel * self.position_ranks * self.branch

    @property
    def position_ranks(self) -> int:
        """Number of ranks of one pipeline stage that share the positions of their samples, of a sequence or an image."""
        return self.context * spatial_ranks(self.spatial)

    @property
    def mesh(self) -> Mesh:
        """Return the mesh: pipeline outermost, with the least traffic, unless its stages are neighbours; tensor innermost."""
        return Mesh(self.axes, self.begins)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Return the mesh's axes with their sizes, outermost first. With expert parallelism replicas are along two axes.

        >>> Layout(data=4, expert=2).axes
        (('pipeline', 1), ('data', 2), ('expert', 2), ('tensor', 1))
        """
        spread = ((DATA, self.data // self.expert), (EXPERT, self.expert)) if self.expert > 1 else ((DATA, self.data),)
        pipeline = (PIPELINE, self.pipeline)
        if self.neighbours == DATA:
            branch, *inner = self.inner_axes
            return (pipeline, branch, *spread, *inner)
        return (*spread, pipeline, *self.inner_axes) if self.neighbours == PIPELINE else (pipeline, *spread, *self.inner_axes)

    @property
    def local_statistics_axes(self) -> tuple[str, ...]:
        """Return the mesh axes along which ranks compute batch-norm statistics over their own samples."""
        return sample_axes(axis for axis, _ in self.axes) if self.batch_norm == "local" and self.data > 1 else ()

    @property
    def server_ranks(self) -> tuple[int, ...]:
        """Return the replicas that are parameter servers."""
        return server_ranks(self.data, self.servers)

    def replica_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's replica."""
        return self.mesh.group(rank, *(axis for axis, _ in self.axes if axis != DATA))

    def servers_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the weights of a rank for all replicas: in each server's replica the rank at the same position.

        >>> Layout(data=2, tensor=2, servers=1).servers_of(3)
        (1,)
        """
        replicas = self.mesh.group(rank, DATA) if self.servers else ()
        return tuple(replicas[server] for server in self.server_ranks)

    @property
    def weight_ranks(self) -> int:
        """Number of ranks of one pipeline stage that hold the same weights."""
        return self.data * self.position_ranks * self.branch

    @property
    def zero_groups(self) -> int:
        """Number of groups of these ranks that each hold all state under ZeRO, sharded among the ranks of a group."""
        return self.data // self.shard if self.shard and self.zero else 1

    @property
    def inner_axes(self) -> tuple[tuple[str, int], ...]:
        """Return the mesh axes of the ranks that share their samples, with their sizes, outermost first."""
        branch = ((BRANCH, self.branch),) if self.branch > 1 else ()
        context = (("context", self.context),) if self.context > 1 else ()
        channel = ((CHANNEL, self.channel),) if self.channel > 1 else ()
        return (*branch, *context, *parse_spatial(self.spatial), *channel, *self.tensor_axes)

    @property
    def tensor_axes(self) -> tuple[tuple[str, int], ...]:
        """Return the mesh axes of the tensor ranks with their sizes, outermost first: `tensor`, or those of a grid."""
        return axes_of(self.tensor, self.grid)

    def __str__(self) -> str:
        """Return axis sizes always, the rest where it differs from the default; `Layout.parse` reads it back."""
        always = ("data", "tensor", "pipeline")
        parts = []
        for key in KEYS:
            value = self.grid or self.tensor if key == "tensor" else getattr(self, key)
            if key in always or value != DEFAULTS[key]:
                parts.append(f"{key}={value}")
        return " ".join(parts)

    @classmethod
    def parse(cls, text: str, files: Mapping[str, str] | None = None) -> Layout:
        """Parse `key=value` words, `tp=2 vpp=2` of other programs too; keys not given keep their defaults.

        Args:
            files: texts of files of actions, by name; a schedule that names another file is read from it.

        Raises:
            LayoutError: an unknown key (names the nearest), a key given twice, a value of the wrong type. UsageError: a file that cannot
                be read. ProgramError: one that is no schedule.

        >>> str(Layout.parse("data=2 pipeline=2 microbatches=4"))
        'data=2 tensor=1 pipeline=2 microbatches=4'
        """
        types = {one.name: one.type for one in fields(cls) if one.name in KEYS}
        words: dict[str, int | str] = {}
        for key, value in resolve_aliases([_split_word(word) for word in text.replace(",", " ").split()]):
            if key not in types:
                raise LayoutError(f"unknown layout key {key}{did_you_mean(key, tuple(types))}; known: {', '.join(types)}")
            if key in words:
                raise LayoutError(f"layout key {key} is given twice")
            if key == "tensor" and "x" in value:
                words[key], words["grid"] = normalize_grid(value, 1)
            elif types[key] == "int":
                if not value.isdecimal() or len(value) > 9:
                    raise LayoutError(f"{key}={value}: {key} is a whole number, for example {key}=2")
                words[key] = int(value)
            else:
                words[key] = value
        texts = {
            "actions": actions_of(str(words.get("schedule", "")), files),
            "collective": collective_text_of(str(words.get("all_reduce", "")), files),
        }
        return cls(**words, **texts)  # type: ignore[arg-type]


# Those that a person writes.
KEYS = tuple(one.name for one in fields(Layout) if one.name not in ("grid", "actions", "collective", "begins"))
DEFAULTS = {one.name: one.default for one in fields(Layout)}


def _split_word(word: str) -> tuple[str, str]:
    key, eq, value = word.partition("=")
    if not eq or not value:
        raise LayoutError(f"layout word {word!r} is not key=value; for example data=2")
    return key, value


def _raise_if_refused(reason: str) -> None:
    if reason:
        raise LayoutError(reason)
