"""A decoder divided over ranks. In: prompts. Out: what the model continues them with, token by token.

Each rank has its shards of weights and, of its own layers and heads, the keys and values of all tokens so far, in pages. Sequences of any
lengths are computed together; each replica (`data`) has sequences of its own. A model of which it cannot be seen that a token's output
follows from earlier ones by causal attention alone computes every sequence anew for each token.

Not modelled: beams, positions beyond the longest sequence, prefixes that sequences share, several microbatches at once in a pipeline.
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

FEWEST = 2  # tokens of a step: models take other ways with one
AT_ONCE = Prices(latency_s=0.0, samples=64)  # what is read and kept of weights and keys counts, not how few tokens a step may have
PROBE = 12  # tokens that are computed in both ways before anything is generated


@dataclass(frozen=True, slots=True)
class Paging:
    """`size`: tokens of a page. `pages`: of each replica; 0 for as many as `sequences` of the longest take. `rows`: tokens of a step, at
    most."""

    size: int = 16
    pages: int = 0
    sequences: int = 8
    rows: int = 64


@dataclass
class Decoder:
    """Every rank makes one and calls `generate` alike. `longest`: tokens of a sequence, prompt included. `example`: a batch of the model.
    `lowered`: the executors of a capture, made over weights that are there, arranged as another where that is given."""

    plan: Plan
    source: Source
    example: Any
    lowered: Callable[[Asked, Source, Parts | None], Executors]
    world: World
    longest: int
    paging: Paging = Paging()
    recomputes: str = ""  # why each token takes its whole sequence; empty where keys and values are kept
    pages: Pages = field(init=False)
    _steps: dict[tuple[int, bool], Executors] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layout, paging = self.plan.layout, self.paging
        others = [axis for axis, n in layout.axes if n > 1 and (axis_of(axis).cuts_positions or axis_of(axis).owns)]
        if self.plan.uncaptured or layout.inner or others:
            raise Infeasible(f"{layout}: a decoder is divided by tensor, pipeline, expert and data; leave the rest out")
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
            self.pages, self._steps = Pages(0, paging.size), {key: one for key, one in self._steps.items() if not key[1]}

    @property
    def cache_bytes(self) -> int:
        """That keys and values take on this rank."""
        return self.pages.bytes

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, temperature: float = 0.0, seed: int = 0, stop: int | None = None
    ) -> list[list[int]]:
        """Each prompt with `num_tokens` more, or up to and with `stop`. The likeliest tokens at temperature 0; otherwise drawn, of each
        prompt alike whatever is computed beside it.

        Raises:
            UsageError: an empty prompt, one that becomes longer than the longest sequence, or than all pages hold.
        """
        most = min(self.longest, self.longest if self.recomputes else self.pages.number * self.pages.size)
        for i, prompt in enumerate(prompts):
            length = len(prompt) + num_tokens
            if not len(prompt) or length > most:
                raise UsageError(
                    f"prompt {i} has {len(prompt)} tokens and is to have {length}; the longest sequence of this decoder has "
                    f"{self.longest}, and its pages hold {most}"
                )
        texts = [Text(i, list(map(int, prompt)), len(prompt) + num_tokens) for i, prompt in enumerate(prompts)]
        if num_tokens < 1:
            return [text.tokens for text in texts]
        draws = [torch.Generator().manual_seed(seed + i) for i in range(len(texts))] if temperature else []
        rows, pages, size = self.paging.rows, self.pages.number, self.pages.size
        if self.recomputes:  # every prompt at once, and nothing that lies anywhere
            rows, pages, size = self.longest * len(texts), len(texts), self.longest
        queues = [Queue(rows, pages, size) for _ in range(self.replicas)]
        for text in texts:
            queues[text.number % self.replicas].add(text)
        while any(parts := [queue.step() for queue in queues]):
            if self.recomputes:  # one sequence of each replica at a time, of one length
                parts = _of_one_length(parts)
            logits = self._recomputed_logits(parts) if self.recomputes else self._logits(parts)
            tokens = self._chosen(parts, logits, temperature, draws)
            for queue, mine, chosen in zip(queues, parts, tokens, strict=True):
                queue.took(mine, chosen, stop)
        return [text.tokens for text in texts]

    def _chosen(
        self, parts: Sequence[Sequence[Part]], logits: Tensor | None, temperature: float, draws: Sequence[torch.Generator]
    ) -> list[list[int]]:
        """The token after each part, on every rank: one rank of each replica's last stage chooses. `logits`: [parts, vocabulary]."""
        most = max(map(len, parts))
        chosen = torch.zeros(self.replicas, most, dtype=torch.float64, device=self.world.device)  # exact for whole numbers
        first = all(at == 0 for axis, at in self._at.items() if axis != PIPELINE and not axis_of(axis).cuts_samples)
        mine = parts[self._replica]
        if logits is not None and first and mine:
            tokens = logits.argmax(-1)
            for i, part in enumerate(mine if temperature else ()):
                if part.ends:
                    shares = torch.softmax(logits[i].double().cpu() / temperature, -1)
                    tokens[i] = torch.multinomial(shares, 1, generator=draws[part.of.number])
            chosen[self._replica, : len(mine)] = tokens.to(chosen)
        self.world.everyone.all_reduce(chosen)
        return [row[: len(those)] for row, those in zip(chosen.long().tolist(), parts, strict=True)]

    def _logits(self, parts: Sequence[Sequence[Part]]) -> Tensor | None:
        """Of this replica's parts [parts, vocabulary], of the token after each; None on ranks without the last stage."""
        most = max(sum(part.count for part in those) for those in parts)
        tokens = max(FEWEST, 1 << (most - 1).bit_length())
        ids = torch.zeros(self.replicas, tokens, dtype=torch.int64)
        for row, those in zip(ids, parts, strict=True):
            said = [t for part in those for t in part.of.tokens[part.first : part.first + part.count]]
            row[: len(said)] = torch.tensor(said)
        runs, positions, at = [], torch.zeros(tokens, dtype=torch.int64), 0
        for part in parts[self._replica]:
            runs.append(Run(at, at + part.count, part.first, torch.tensor(part.of.pages)))
            positions[at : at + part.count] = torch.arange(part.first, part.first + part.count)
            at += part.count
        self.pages.begin(runs, self.world.device)
        rows = self._run(self._executors(tokens, paged=True), ids, positions)
        return None if rows is None else rows[[run.end - 1 for run in runs]]

    def _recomputed_logits(self, parts: Sequence[Sequence[Part]]) -> Tensor | None:
        """As `_logits`, of one sequence of each replica, all of one length."""
        length = max(len(part.of.tokens) for those in parts for part in those)
        ids = torch.zeros(self.replicas, max(length, FEWEST), dtype=torch.int64)
        for row, those in zip(ids, parts, strict=True):
            for part in those:
                row[:length] = torch.tensor(part.of.tokens)
        rows = self._run(self._executors(ids.shape[1], paged=False), ids)
        return None if rows is None else rows[[length - 1] * len(parts[self._replica])]

    def _run(self, executors: Executors, ids: Tensor, positions: Tensor | None = None) -> Tensor | None:
        """Logits of this replica's row of tokens."""
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
        """What computes steps of so many tokens."""
        key = (tokens, paged)
        if key not in self._steps:
            modes, pages = evaluation_modes(self.source.model), self.pages if paged else None
            asked = Asked(modes, self._called(tokens), outputs=True, size=self.replicas, pages=pages)
            source = self._decoding if paged else Source(self.source.model, self.source.deferred)
            like = self._steps.get((FEWEST, True))  # whose keys lie where they lie
            with self.world.pace.long():
                executors = self.lowered(asked, source, like.parts if paged and like is not None else None)
            self._steps[key] = replace(executors, compile=False)  # whose steps differ in what attention reads
        return self._steps[key]

    def _called(self, tokens: int) -> Any:
        """What the model is called with for so many tokens."""
        ids = torch.zeros(self.replicas, tokens, dtype=torch.int64)
        if not isinstance(self.example, Mapping):
            return (ids,)
        names = [name for name, x in tensors_of(self.example).items() if x.dim() == 2 and not x.is_floating_point() and "." not in name]
        return {"input_ids" if "input_ids" in names or not names else names[0]: ids}

    def _why_recomputes(self) -> str:
        """Why keys and values cannot be kept: what shapes tell, or some tokens computed in both ways. The same on every rank."""
        length = min(PROBE, self.longest)
        try:
            self._executors(FEWEST, paged=True)
        except ModelError as error:
            return str(error)
        ids = torch.randint(_vocabulary(self._steps[FEWEST, True]), (length,), generator=torch.Generator().manual_seed(0)).tolist()
        texts = [Text(r, list(ids), length + 1) for r in range(self.replicas)]
        for text in texts:
            text.pages = list(range(-(-length // self.pages.size)))
        differs, worst, at = 0, 0.0, 0
        full = self._run(self._executors(length, paged=False), torch.tensor([ids] * self.replicas))
        for count in (length // 2, *[1] * (length - length // 2)):
            rows = self._logits([[Part(text, at, count)] for text in texts])
            at += count
            if rows is not None and full is not None:
                worst = max(worst, float((rows[0] - full[at - 1]).abs().max() / full.abs().max()))
                differs |= worst > min(0.1, 1e5 * torch.finfo(rows.dtype).eps)
        (differs,) = self.world.maximum([differs])
        return "of the tokens before, more than attention's keys and values counts for a token's output" if differs else ""


def _vocabulary(executors: Executors) -> int:
    graph = executors.parts.graph
    return graph.tensors[graph.outputs[0]].shape[-1]


def _of_one_length(parts: Sequence[Sequence[Part]]) -> list[list[Part]]:
    """One sequence of each replica: the shortest, and of other replicas those that are as long."""
    length = min(len(part.of.tokens) for those in parts for part in those)
    return [[part for part in those if len(part.of.tokens) == length][:1] for those in parts]
