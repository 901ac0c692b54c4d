"""Parallel autoregressive decoding with a paged key-value cache and continuous batching.

Each rank has its shards of the weights and, for its own layers and heads, the keys and values of all tokens so far, in pages. Sequences of
different lengths are computed together; each replica (`data`) has its own sequences. If it cannot be shown that a model's tokens depend on
earlier ones by causal attention alone, every sequence is recomputed for each token.

Not modelled: beam search, positions beyond the longest sequence, shared prefixes, several microbatches at once in a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.capture import CapturedGraph, Loss
from shardwise.capture.modes import Modes, evaluation_modes, in_modes
from shardwise.capture.nesting import tensors_of
from shardwise.errors import Infeasible, ModelError, UsageError
from shardwise.lower.kernels.paged import PagedCache, SequenceSpan
from shardwise.lower.torch_calls import lower_arguments, torch_operator
from shardwise.model.graph import Graph
from shardwise.model.positions import decoder_at_positions
from shardwise.model.sharding.sharding import Prices
from shardwise.plan.ir.axis import PIPELINE, axis_of, sample_axes
from shardwise.plan.plan import Plan
from shardwise.run.parts.rank_model import RankModel
from shardwise.run.rank_model.build import BuildRequest, build_rank_model
from shardwise.run.rank_model.model_source import ModelSource
from shardwise.run.residency.host_store import HostStore
from shardwise.run.residency.weight_gatherer import WeightGatherer
from shardwise.run.sharded_state import narrow_to
from shardwise.run.state.precision import LossScale, set_matmul_precision
from shardwise.run.step.executors import ExecutorCache
from shardwise.world.memory import Accounts
from shardwise.world.world import World

MIN_TOKENS = 2  # tokens of a step: models may run other operators with one
DECODE_PRICES = Prices(latency_s=0.0, samples=64)  # reads of weights and keys dominate, whatever the number of tokens
NUM_PROBE_TOKENS = 12  # tokens computed with and without the cache before generation


@dataclass(frozen=True, slots=True)
class Paging:
    """The key-value cache. `size`: tokens of a page. `pages`: of each replica; 0 for as many as `sequences` of the longest take.
    `rows`: most tokens of a step."""

    size: int = 16
    pages: int = 0
    sequences: int = 8
    rows: int = 64


@dataclass
class Decoder:
    """A decoder; every rank builds one and calls `generate` with the same arguments. `max_length`: tokens of a sequence, prompt included.
    `example`: a batch of the model. `build_executors`: lowers a capture over the existing weights, laid out as a template if given."""

    plan: Plan
    source: ModelSource
    example: Any
    build_executors: Callable[[BuildRequest, RankModel | None], ExecutorCache]
    world: World
    max_length: int
    paging: Paging = Paging()
    recomputes: str = ""  # why sequences are recomputed for each token; empty if there is a key-value cache
    pages: PagedCache = field(init=False)
    _executors_by_size: dict[tuple[int, bool], ExecutorCache] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layout, paging = self.plan.layout, self.paging
        unsupported = [axis for axis, n in layout.axes if n > 1 and (axis_of(axis).shards_positions or axis_of(axis).owns_operators)]
        if self.plan.uncaptured or layout.inner or unsupported:
            raise Infeasible(f"{layout}: a decoder is sharded by tensor, pipeline, expert and data only; leave the rest out")
        if self.max_length < MIN_TOKENS:
            raise UsageError(f"the longest sequence has {self.max_length} tokens; at least {MIN_TOKENS} are needed")
        self._mesh = layout.mesh_of(self.world.rank)
        self._coordinates = self._mesh.coordinates(self.world.rank)
        self.num_replicas = layout.data
        self._replica = self._mesh.index_along(self.world.rank, sample_axes(self._mesh.stage_axes))
        count = paging.pages or -(-self.max_length // paging.size) * paging.sequences
        self.pages = PagedCache(count, paging.size)
        self._decode_source = DecodeModelSource(
            self.source.model, self.source.deferred, DECODE_PRICES, longest_batch=self._example_inputs(self.max_length)
        )
        if not self.recomputes:
            self.recomputes = self._why_cache_is_unusable()
        if self.recomputes:
            self.pages, self._executors_by_size = (
                PagedCache(0, paging.size),
                {key: executors for key, executors in self._executors_by_size.items() if not key[1]},
            )

    @property
    def cache_bytes(self) -> int:
        """Bytes of the key-value cache on this rank."""
        return self.pages.size_bytes

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, temperature: float = 0.0, seed: int = 0, stop: int | None = None
    ) -> list[list[int]]:
        """Return each prompt continued by `num_tokens` tokens, or up to and including `stop`.

        Tokens are the likeliest ones at temperature 0, else sampled, for each prompt independently of the rest of the batch.

        Raises:
            UsageError: a prompt is empty, or would exceed the longest sequence or the pages.
        """
        most = min(self.max_length, self.max_length if self.recomputes else self.pages.num_pages * self.pages.page_size)
        for i, prompt in enumerate(prompts):
            length = len(prompt) + num_tokens
            if not len(prompt) or length > most:
                raise UsageError(
                    f"prompt {i} has {len(prompt)} tokens and is to have {length}; the longest sequence of this decoder has "
                    f"{self.max_length}, and its pages hold {most}"
                )
        sequences = [DecodeSequence(i, list(map(int, prompt)), len(prompt) + num_tokens) for i, prompt in enumerate(prompts)]
        if num_tokens < 1:
            return [sequence.tokens for sequence in sequences]
        draws = [torch.Generator().manual_seed(seed + i) for i in range(len(sequences))] if temperature else []
        rows, pages, size = self.paging.rows, self.pages.num_pages, self.pages.page_size
        if self.recomputes:  # every prompt at once, and no cache
            rows, pages, size = self.max_length * len(sequences), len(sequences), self.max_length
        queues = [ContinuousBatcher(rows, pages, size) for _ in range(self.num_replicas)]
        for sequence in sequences:
            queues[sequence.number % self.num_replicas].add(sequence)
        while any(chunks := [queue.next_chunks() for queue in queues]):
            if self.recomputes:  # one sequence of each replica at a time, of equal length
                chunks = _select_equal_lengths(chunks)
            logits = self._recomputed_logits(chunks) if self.recomputes else self._cached_logits(chunks)
            tokens = self._choose_tokens(chunks, logits, temperature, draws)
            for queue, replica_chunks, next_tokens in zip(queues, chunks, tokens, strict=True):
                queue.record_tokens(replica_chunks, next_tokens, stop)
        return [sequence.tokens for sequence in sequences]

    def _choose_tokens(
        self, chunks: Sequence[Sequence[TokenChunk]], logits: Tensor | None, temperature: float, draws: Sequence[torch.Generator]
    ) -> list[list[int]]:
        """Return the token after each chunk on every rank; a rank of each replica's last stage chooses. `logits`: [chunk, vocabulary]."""
        most = max(map(len, chunks))
        chosen = torch.zeros(self.num_replicas, most, dtype=torch.float64, device=self.world.device)  # exact for whole numbers
        first = all(at == 0 for axis, at in self._coordinates.items() if axis != PIPELINE and not axis_of(axis).shards_samples)
        local_chunks = chunks[self._replica]
        if logits is not None and first and local_chunks:
            tokens = logits.argmax(-1)
            for i, chunk in enumerate(local_chunks if temperature else ()):
                if chunk.is_last:
                    shares = torch.softmax(logits[i].double().cpu() / temperature, -1)
                    tokens[i] = torch.multinomial(shares, 1, generator=draws[chunk.sequence.number])
            chosen[self._replica, : len(local_chunks)] = tokens.to(chosen)
        self.world.world_group.all_reduce(chosen)
        return [row[: len(replica_chunks)] for row, replica_chunks in zip(chosen.long().tolist(), chunks, strict=True)]

    def _cached_logits(self, chunks: Sequence[Sequence[TokenChunk]]) -> Tensor | None:
        """Return logits [chunk, vocabulary] of the token after each of this replica's chunks; None on ranks without the last stage."""
        most = max(sum(chunk.count for chunk in replica_chunks) for replica_chunks in chunks)
        tokens = max(MIN_TOKENS, 1 << (most - 1).bit_length())
        ids = torch.zeros(self.num_replicas, tokens, dtype=torch.int64)
        for row, replica_chunks in zip(ids, chunks, strict=True):
            token_ids = [t for chunk in replica_chunks for t in chunk.sequence.tokens[chunk.first : chunk.first + chunk.count]]
            row[: len(token_ids)] = torch.tensor(token_ids)
        runs, positions, offset = [], torch.zeros(tokens, dtype=torch.int64), 0
        for chunk in chunks[self._replica]:
            runs.append(SequenceSpan(offset, offset + chunk.count, chunk.first, torch.tensor(chunk.sequence.pages)))
            positions[offset : offset + chunk.count] = torch.arange(chunk.first, chunk.first + chunk.count)
            offset += chunk.count
        self.pages.start_step(runs, self.world.device)
        rows = self._run_step(self._executors_for(tokens, is_paged=True), ids, positions)
        return None if rows is None else rows[[run.end_row - 1 for run in runs]]

    def _recomputed_logits(self, chunks: Sequence[Sequence[TokenChunk]]) -> Tensor | None:
        """Return logits as `_cached_logits` does, of one sequence of each replica, all of equal length."""
        length = max(len(chunk.sequence.tokens) for replica_chunks in chunks for chunk in replica_chunks)
        ids = torch.zeros(self.num_replicas, max(length, MIN_TOKENS), dtype=torch.int64)
        for row, replica_chunks in zip(ids, chunks, strict=True):
            for chunk in replica_chunks:
                row[:length] = torch.tensor(chunk.sequence.tokens)
        rows = self._run_step(self._executors_for(ids.shape[1], is_paged=False), ids)
        return None if rows is None else rows[[length - 1] * len(chunks[self._replica])]

    def _run_step(self, executors: ExecutorCache, ids: Tensor, positions: Tensor | None = None) -> Tensor | None:
        """Run a step; return the logits of this replica's tokens [token, vocabulary], None on ranks without the last stage."""
        parts, inputs = executors.rank_model, {}
        for v in parts.graph.inputs:
            x = ids if v.value == parts.graph.inputs[0].value else positions
            assert x is not None
            inputs[v.value] = narrow_to(x, parts.sharding.stored(v.value, x.shape, self._coordinates)).to(self.world.device)
        model = self.source.model
        with in_modes(model, evaluation_modes(model)), torch.no_grad():
            result = executors.executor_for((self.num_replicas,)).run([inputs], is_training=False)
        executors.gathered.release_all()
        if not result.losses:
            return None
        logits = result.losses[0]
        return logits[self._replica if logits.shape[0] > 1 else 0]

    def _executors_for(self, num_tokens: int, is_paged: bool) -> ExecutorCache:
        """Return the executors for steps of so many tokens."""
        key = (num_tokens, is_paged)
        if key not in self._executors_by_size:
            source = self._decode_source if is_paged else ModelSource(self.source.model, self.source.deferred)
            request = BuildRequest(
                self.plan,
                source,
                self._example_inputs(num_tokens),
                None,
                self.world,
                modes=evaluation_modes(self.source.model),
                runs_backward=False,
                returns_outputs=True,
                microbatch_size=self.num_replicas,
                kv_pages=self.pages if is_paged else None,
            )
            template = self._executors_by_size.get((MIN_TOKENS, True))  # it shares the cache, in the same layout
            with self.world.pace.untimed():
                executors = self.build_executors(request, template.rank_model if is_paged and template is not None else None)
            self._executors_by_size[key] = replace(executors, compile=False)  # attention reads other pages in each step
        return self._executors_by_size[key]

    def _example_inputs(self, num_tokens: int) -> Any:
        """Return inputs of the model for so many tokens."""
        ids = torch.zeros(self.num_replicas, num_tokens, dtype=torch.int64)
        if not isinstance(self.example, Mapping):
            return (ids,)
        names = [name for name, x in tensors_of(self.example).items() if x.dim() == 2 and not x.is_floating_point() and "." not in name]
        return {"input_ids" if "input_ids" in names or not names else names[0]: ids}

    def _why_cache_is_unusable(self) -> str:
        """Return why the key-value cache cannot be used, by shapes or a trial with some tokens; empty if it can. Equal on every rank."""
        length = min(NUM_PROBE_TOKENS, self.max_length)
        try:
            self._executors_for(MIN_TOKENS, is_paged=True)
        except ModelError as error:
            return str(error)
        ids = torch.randint(
            _vocabulary_size(self._executors_by_size[MIN_TOKENS, True]), (length,), generator=torch.Generator().manual_seed(0)
        ).tolist()
        sequences = [DecodeSequence(r, list(ids), length + 1) for r in range(self.num_replicas)]
        for sequence in sequences:
            sequence.pages = list(range(-(-length // self.pages.page_size)))
        is_different, worst, position = 0, 0.0, 0
        full = self._run_step(self._executors_for(length, is_paged=False), torch.tensor([ids] * self.num_replicas))
        for count in (length // 2, *[1] * (length - length // 2)):
            rows = self._cached_logits([[TokenChunk(sequence, position, count)] for sequence in sequences])
            position += count
            if rows is not None and full is not None:
                worst = max(worst, float((rows[0] - full[position - 1]).abs().max() / full.abs().max()))
                is_different |= worst > min(0.1, 1e5 * torch.finfo(rows.dtype).eps)
        (is_different,) = self.world.all_reduce_max([is_different])
        return "a token's output depends on earlier tokens by more than attention's keys and values" if is_different else ""


def _vocabulary_size(executors: ExecutorCache) -> int:
    graph = executors.rank_model.graph
    return graph.tensors[graph.outputs[0]].shape[-1]


def _select_equal_lengths(chunks: Sequence[Sequence[TokenChunk]]) -> list[list[TokenChunk]]:
    """Select one sequence of each replica: the shortest overall, and of the other replicas one of equal length."""
    length = min(len(chunk.sequence.tokens) for replica_chunks in chunks for chunk in replica_chunks)
    return [[chunk for chunk in replica_chunks if len(chunk.sequence.tokens) == length][:1] for replica_chunks in chunks]


@dataclass(frozen=True)
class DecodeModelSource(ModelSource):
    """A model source whose captures take tokens at any positions. `longest_batch`: the inputs for the longest sequence."""

    longest_batch: Any = None
    longest_captures: dict[Modes, CapturedGraph] = field(default_factory=dict)
    causal_masks: set[str] = field(default_factory=set)  # masks known to be causal

    def capture(
        self, batch: Any, loss: Loss | None, batch_size: int | None, outputs: bool = False, modes: Modes | None = None
    ) -> CapturedGraph:
        """Capture as `ModelSource` does. Raises ModelError if outputs depend on later tokens, or on others except by attention."""
        captured = super().capture(batch, None, batch_size, True, modes)
        key = modes or ()
        if key not in self.longest_captures:
            self.longest_captures[key] = super().capture(self.longest_batch, None, batch_size, True, modes)
        longest = self.longest_captures[key]
        graph, masks = decoder_at_positions(captured.graph, longest.graph)
        for mask in masks - self.causal_masks:
            _check_causal(mask, longest)
            self.causal_masks.add(mask)
        return replace(captured, graph=graph)


def _check_causal(mask: str, captured: CapturedGraph) -> None:
    bias = _constant_value(mask, captured.graph, dict(captured.constants))
    shows = bias if bias.dtype is torch.bool else bias == 0
    if not torch.equal(shows, torch.ones_like(shows).tril()) or (bias.dtype is not torch.bool and not bool((bias[~shows] < -1e4).all())):
        raise ModelError("its attention has a mask that is not the causal one: a window, documents, or padding")


def _constant_value(value: str, graph: Graph, constants: Mapping[str, Tensor]) -> Tensor:
    """Evaluate a value of a graph that depends on constants only."""
    producers, values, device = graph.producers, dict(constants), torch.device("cpu")
    pending, order = [value], []
    while pending:
        name = pending.pop()
        if name in values:
            continue
        if name not in producers:
            raise ModelError("its attention has a mask that depends on the batch or on its weights")
        order.append(producers[name])
        pending += producers[name].inputs
    places = graph.producer_index
    for op in sorted({op.name: op for op in order}.values(), key=lambda op: places[op.outputs[0]]):
        args, kwargs = lower_arguments(op, [values[v] for v in op.inputs], device)
        out = torch_operator(op.target)(*args, **kwargs)
        values.update(zip(op.outputs, out if op.returns_sequence else (out,), strict=True))
    return values[value]


@dataclass
class DecodeSequence:
    """One sequence. `tokens`: prompt and generated tokens; `num_computed`: of these; `pages`: pages of its key-value cache."""

    number: int
    tokens: list[int]
    final_length: int  # when finished
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class TokenChunk:
    """`count` tokens of a sequence, beginning at position `first`."""

    sequence: DecodeSequence
    first: int
    count: int

    @property
    def is_last(self) -> bool:
        """Return whether its last token is the sequence's newest, whose logits give the next token."""
        return self.first + self.count == len(self.sequence.tokens)


class ContinuousBatcher:
    """The sequences of one replica; a step has at most `max_tokens` tokens."""

    def __init__(self, max_tokens: int, num_pages: int, page_size: int) -> None:
        self.max_tokens, self.page_size = max_tokens, page_size
        self.free_pages = list(range(num_pages))
        self.waiting: list[DecodeSequence] = []
        self.running: list[DecodeSequence] = []

    def add(self, sequence: DecodeSequence) -> None:
        self.waiting.append(sequence)

    def next_chunks(self) -> list[TokenChunk]:
        """Return the chunks of the next step; none if all sequences are finished."""
        num_reserved = sum(self._num_pages(sequence.final_length) - len(sequence.pages) for sequence in self.running)
        while (
            self.waiting
            and len(self.running) < self.max_tokens
            and self._num_pages(self.waiting[0].final_length) <= len(self.free_pages) - num_reserved
        ):
            self.running.append(self.waiting.pop(0))
            num_reserved += self._num_pages(self.running[-1].final_length)
        num_free, chunks = self.max_tokens - len(self.running), []
        for sequence in self.running:
            num_extra = min(num_free, len(sequence.tokens) - sequence.num_computed - 1)
            num_free -= num_extra
            chunks.append(TokenChunk(sequence, sequence.num_computed, 1 + num_extra))
            num_missing = self._num_pages(sequence.num_computed + 1 + num_extra) - len(sequence.pages)
            sequence.pages += [self.free_pages.pop(0) for _ in range(num_missing)]
        return chunks

    def record_tokens(self, chunks: Sequence[TokenChunk], tokens: Sequence[int], stop: int | None = None) -> list[DecodeSequence]:
        """Record that `chunks` were computed, with the token that follows each; return finished sequences, whose pages are freed."""
        for part, token in zip(chunks, tokens, strict=True):
            part.sequence.num_computed += part.count
            if part.is_last:
                part.sequence.tokens.append(token)
                if token == stop:
                    part.sequence.final_length = len(part.sequence.tokens)
        finished = [sequence for sequence in self.running if len(sequence.tokens) == sequence.final_length]
        for sequence in finished:
            self.running.remove(sequence)
            self.free_pages += sequence.pages
            sequence.pages = []
        return finished

    def _num_pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


def build_decoder(
    plan: Plan, source: ModelSource, batch: Any, loss: Loss | None, world: World, *, seed: int, max_length: int, paging: Paging
) -> Decoder:
    """Build a decoder from a model's initial weights, of which each rank takes its shards. Raises Infeasible for layouts with zero."""
    layout = plan.layout
    if layout.zero:
        raise Infeasible(f"{layout}: without gradients and an optimizer zero has nothing to shard; leave zero out")
    set_matmul_precision(layout.precision, world.device)
    parts = build_rank_model(BuildRequest(plan, source, batch, loss, world, seed=seed))
    for group in sorted({world.world_group, *(parts.lowering.groups.values() if parts.lowering else ())}, key=lambda g: g.ranks):
        group.connect()
    memory, gathered = Accounts(), WeightGatherer((), ())
    host, scale = HostStore(world.device, memory, parts.variables.values()), LossScale(world.device, layout.precision)
    executors = ExecutorCache(parts, plan, world, memory, None, gathered, host, layout.compile == "on", scale, runs_backward=False)

    def build_executors(request: BuildRequest, like: RankModel | None = None) -> ExecutorCache:
        return executors.for_capture(build_rank_model(request, like or parts), gathered, runs_backward=False)

    return Decoder(plan, source, batch, build_executors, world, max_length, paging)
