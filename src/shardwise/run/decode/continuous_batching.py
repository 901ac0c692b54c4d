"""Continuous batching: the choice of the tokens that each decoding step computes, given prompts, lengths and free pages.

Sequences join as soon as pages are free and leave when they are finished, independently of the others (Yu et al. 2022, Orca). A step has
the newest token of each sequence; chunks of prompts fill the rest (Agrawal et al. 2024, Sarathi-Serve). Every rank has the same queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


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
