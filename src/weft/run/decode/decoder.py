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

from weft.capture.modes import evaluation_modes, in_modes
from weft.capture.nesting import tensors_of
from weft.errors import Infeasible, ModelError, UsageError
from weft.lower.kernels.paged import Pages, Run
from weft.model.sharding.sharding import Prices
from weft.plan.axis import PIPELINE, axis_of, sample_axes
from weft.plan.plan import Plan
from weft.run.build import Source
from weft.run.captures import Asked
from weft.run.decode.queue import Part, Queue, Text
from weft.run.decode.source import Decoding
from weft.run.sharded_state import narrowed
from weft.run.step.executors import Executors
from weft.run.training_parts import Parts
from weft.world.world import World

FEWEST = 2  # tokens of a step: models may run other operators with one
AT_ONCE = Prices(latency_s=0.0, samples=64)  # reads of weights and keys dominate, whatever the number of tokens
PROBE = 12  # tokens computed with and without the cache before generation


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
    source: Source
    example: Any
    lowered: Callable[[Asked, Source, Parts | None], Executors]
    world: World
    longest: int
    paging: Paging = Paging()
    recomputes: str = ""  # why sequences are recomputed for each token; empty if there is a key-value cache
    pages: Pages = field(init=False)
    _steps: dict[tuple[int, bool], Executors] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layout, paging = self.plan.layout, self.paging
        unsupported = [axis for axis, n in layout.axes if n > 1 and (axis_of(axis).cuts_positions or axis_of(axis).owns)]
        if self.plan.uncaptured or layout.inner or unsupported:
            raise Infeasible(f"{layout}: a decoder is sharded by tensor, pipeline, expert and data only; leave the rest out")
        if self.longest < FEWEST:
            raise UsageError(f"the longest sequence has {self.longest} tokens; at least {FEWEST} are needed")
        self._mesh = layout.mesh_of(self.world.rank)
        self._at = self._mesh.coordinates(self.world.rank)
        self.replicas = layout.data
        self._replica = self._mesh.place(self.world.rank, sample_axes(self._mesh.inside))
        count = paging.pages or -(-self.longest // paging.size) * paging.sequences
        self.pages = Pages(count, paging.size)
        self._decoding = Decoding(self.source.model, self.source.deferred, AT_ONCE, longest=self._called(self.longest))
        if not self.recomputes:
            self.recomputes = self._why_recomputes()
        if self.recomputes:
            self.pages, self._steps = Pages(0, paging.size), {key: executors for key, executors in self._steps.items() if not key[1]}

    @property
    def cache_bytes(self) -> int:
        """Bytes of the key-value cache on this rank."""
        return self.pages.bytes

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, temperature: float = 0.0, seed: int = 0, stop: int | None = None
    ) -> list[list[int]]:
        """Return each prompt continued by `num_tokens` tokens, or up to and including `stop`.

        Tokens are the likeliest ones at temperature 0, else sampled, for each prompt independently of the rest of the batch.

        Raises:
            UsageError: a prompt is empty, or would exceed the longest sequence or the pages.
        """
        most = min(self.longest, self.longest if self.recomputes else self.pages.number * self.pages.size)
        for i, prompt in enumerate(prompts):
            length = len(prompt) + num_tokens
            if not len(prompt) or length > most:
                raise UsageError(
                    f"prompt {i} has {len(prompt)} tokens and is to have {length}; the longest sequence of this decoder has "
                    f"{self.longest}, and its pages hold {most}"
                )
        sequences = [Text(i, list(map(int, prompt)), len(prompt) + num_tokens) for i, prompt in enumerate(prompts)]
        if num_tokens < 1:
            return [sequence.tokens for sequence in sequences]
        draws = [torch.Generator().manual_seed(seed + i) for i in range(len(sequences))] if temperature else []
        rows, pages, size = self.paging.rows, self.pages.number, self.pages.size
        if self.recomputes:  # every prompt at once, and no cache
            rows, pages, size = self.longest * len(sequences), len(sequences), self.longest
        queues = [Queue(rows, pages, size) for _ in range(self.replicas)]
        for sequence in sequences:
            queues[sequence.number % self.replicas].add(sequence)
        while any(chunks := [queue.step() for queue in queues]):
            if self.recomputes:  # one sequence of each replica at a time, of equal length
                chunks = _of_one_length(chunks)
            logits = self._recomputed_logits(chunks) if self.recomputes else self._logits(chunks)
            tokens = self._chosen(chunks, logits, temperature, draws)
            for queue, replica_chunks, next_tokens in zip(queues, chunks, tokens, strict=True):
                queue.took(replica_chunks, next_tokens, stop)
        return [sequence.tokens for sequence in sequences]

    def _chosen(
        self, parts: Sequence[Sequence[Part]], logits: Tensor | None, temperature: float, draws: Sequence[torch.Generator]
    ) -> list[list[int]]:
        """Return the token after each chunk on every rank; a rank of each replica's last stage chooses. `logits`: [chunk, vocabulary]."""
        most = max(map(len, parts))
        chosen = torch.zeros(self.replicas, most, dtype=torch.float64, device=self.world.device)  # exact for whole numbers
        first = all(at == 0 for axis, at in self._at.items() if axis != PIPELINE and not axis_of(axis).cuts_samples)
        local_chunks = parts[self._replica]
        if logits is not None and first and local_chunks:
            tokens = logits.argmax(-1)
            for i, chunk in enumerate(local_chunks if temperature else ()):
                if chunk.ends:
                    shares = torch.softmax(logits[i].double().cpu() / temperature, -1)
                    tokens[i] = torch.multinomial(shares, 1, generator=draws[chunk.of.number])
            chosen[self._replica, : len(local_chunks)] = tokens.to(chosen)
        self.world.everyone.all_reduce(chosen)
        return [row[: len(replica_chunks)] for row, replica_chunks in zip(chosen.long().tolist(), parts, strict=True)]

    def _logits(self, parts: Sequence[Sequence[Part]]) -> Tensor | None:
        """Return logits [chunk, vocabulary] of the token after each of this replica's chunks; None on ranks without the last stage."""
        most = max(sum(chunk.count for chunk in replica_chunks) for replica_chunks in parts)
        tokens = max(FEWEST, 1 << (most - 1).bit_length())
        ids = torch.zeros(self.replicas, tokens, dtype=torch.int64)
        for row, replica_chunks in zip(ids, parts, strict=True):
            token_ids = [t for chunk in replica_chunks for t in chunk.of.tokens[chunk.first : chunk.first + chunk.count]]
            row[: len(token_ids)] = torch.tensor(token_ids)
        runs, positions, offset = [], torch.zeros(tokens, dtype=torch.int64), 0
        for chunk in parts[self._replica]:
            runs.append(Run(offset, offset + chunk.count, chunk.first, torch.tensor(chunk.of.pages)))
            positions[offset : offset + chunk.count] = torch.arange(chunk.first, chunk.first + chunk.count)
            offset += chunk.count
        self.pages.begin(runs, self.world.device)
        rows = self._run(self._executors(tokens, paged=True), ids, positions)
        return None if rows is None else rows[[run.end - 1 for run in runs]]

    def _recomputed_logits(self, parts: Sequence[Sequence[Part]]) -> Tensor | None:
        """Return logits as `_cached_logits` does, of one sequence of each replica, all of equal length."""
        length = max(len(chunk.of.tokens) for replica_chunks in parts for chunk in replica_chunks)
        ids = torch.zeros(self.replicas, max(length, FEWEST), dtype=torch.int64)
        for row, replica_chunks in zip(ids, parts, strict=True):
            for chunk in replica_chunks:
                row[:length] = torch.tensor(chunk.of.tokens)
        rows = self._run(self._executors(ids.shape[1], paged=False), ids)
        return None if rows is None else rows[[length - 1] * len(parts[self._replica])]

    def _run(self, executors: Executors, ids: Tensor, positions: Tensor | None = None) -> Tensor | None:
        """Run a step; return the logits of this replica's tokens [token, vocabulary], None on ranks without the last stage."""
        parts, inputs = executors.parts, {}
        for v in parts.graph.inputs:
            x = ids if v.value == parts.graph.inputs[0].value else positions
            assert x is not None
            inputs[v.value] = narrowed(x, parts.sharding.held(v.value, x.shape, self._at)).to(self.world.device)
        model = self.source.model
        with in_modes(model, evaluation_modes(model)), torch.no_grad():
            result = executors.of((self.replicas,)).run([inputs], train=False)
        executors.gathered.release()
        if not result.losses:
            return None
        logits = result.losses[0]
        return logits[self._replica if logits.shape[0] > 1 else 0]

    def _executors(self, tokens: int, paged: bool) -> Executors:
        """Return the executors for steps of so many tokens."""
        key = (tokens, paged)
        if key not in self._steps:
            modes, pages = evaluation_modes(self.source.model), self.pages if paged else None
            request = Asked(modes, self._called(tokens), outputs=True, size=self.replicas, pages=pages)
            source = self._decoding if paged else Source(self.source.model, self.source.deferred)
            template = self._steps.get((FEWEST, True))  # it shares the cache, in the same layout
            with self.world.pace.long():
                executors = self.lowered(request, source, template.parts if paged and template is not None else None)
            self._steps[key] = replace(executors, compile=False)  # attention reads other pages in each step
        return self._steps[key]

    def _called(self, tokens: int) -> Any:
        """Return inputs of the model for so many tokens."""
        ids = torch.zeros(self.replicas, tokens, dtype=torch.int64)
        if not isinstance(self.example, Mapping):
            return (ids,)
        names = [name for name, x in tensors_of(self.example).items() if x.dim() == 2 and not x.is_floating_point() and "." not in name]
        return {"input_ids" if "input_ids" in names or not names else names[0]: ids}

    def _why_recomputes(self) -> str:
        """Return why the key-value cache cannot be used, by shapes or a trial with some tokens; empty if it can. Equal on every rank."""
        length = min(PROBE, self.longest)
        try:
            self._executors(FEWEST, paged=True)
        except ModelError as error:
            return str(error)
        ids = torch.randint(_vocabulary(self._steps[FEWEST, True]), (length,), generator=torch.Generator().manual_seed(0)).tolist()
        sequences = [Text(r, list(ids), length + 1) for r in range(self.replicas)]
        for sequence in sequences:
            sequence.pages = list(range(-(-length // self.pages.size)))
        is_different, worst, position = 0, 0.0, 0
        full = self._run(self._executors(length, paged=False), torch.tensor([ids] * self.replicas))
        for count in (length // 2, *[1] * (length - length // 2)):
            rows = self._logits([[Part(sequence, position, count)] for sequence in sequences])
            position += count
            if rows is not None and full is not None:
                worst = max(worst, float((rows[0] - full[position - 1]).abs().max() / full.abs().max()))
                is_different |= worst > min(0.1, 1e5 * torch.finfo(rows.dtype).eps)
        (is_different,) = self.world.maximum([is_different])
        return "a token's output depends on earlier tokens by more than attention's keys and values" if is_different else ""


def _vocabulary(executors: Executors) -> int:
    graph = executors.parts.graph
    return graph.tensors[graph.outputs[0]].shape[-1]


def _of_one_length(parts: Sequence[Sequence[Part]]) -> list[list[Part]]:
    """Select one sequence of each replica: the shortest overall, and of the other replicas one of equal length."""
    length = min(len(chunk.of.tokens) for replica_chunks in parts for chunk in replica_chunks)
    return [[chunk for chunk in replica_chunks if len(chunk.of.tokens) == length][:1] for replica_chunks in parts]
