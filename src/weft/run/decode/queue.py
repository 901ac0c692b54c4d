"""Continuous batching: the choice of the tokens that each decoding step computes, given prompts, lengths and free pages.

Sequences join as soon as pages are free and leave when they are finished, independently of the others (Yu et al. 2022, Orca). A step has
the newest token of each sequence; chunks of prompts fill the rest (Agrawal et al. 2024, Sarathi-Serve). Every rank has the same queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Text:
    """One sequence. `tokens`: prompt and generated tokens; `num_computed`: of these; `pages`: pages of its key-value cache."""

    number: int
    tokens: list[int]
    length: int  # when finished
    done: int = 0
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """`count` tokens of a sequence, beginning at position `first`."""

    of: Text
    first: int
    count: int

    @property
    def ends(self) -> bool:
        """Return whether its last token is the sequence's newest, whose logits give the next token."""
        return self.first + self.count == len(self.of.tokens)


class Queue:
    """The sequences of one replica; a step has at most `max_tokens` tokens."""

    def __init__(self, rows: int, pages: int, size: int) -> None:
        self.rows, self.size = rows, size
        self.free = list(range(pages))
        self.waiting: list[Text] = []
        self.running: list[Text] = []

    def add(self, one: Text) -> None:
        self.waiting.append(one)

    def step(self) -> list[Part]:
        """Return the chunks of the next step; none if all sequences are finished."""
        num_reserved = sum(self._pages(sequence.length) - len(sequence.pages) for sequence in self.running)
        while self.waiting and len(self.running) < self.rows and self._pages(self.waiting[0].length) <= len(self.free) - num_reserved:
            self.running.append(self.waiting.pop(0))
            num_reserved += self._pages(self.running[-1].length)
        num_free, chunks = self.rows - len(self.running), []
        for sequence in self.running:
            num_extra = min(num_free, len(sequence.tokens) - sequence.done - 1)
            num_free -= num_extra
            chunks.append(Part(sequence, sequence.done, 1 + num_extra))
            num_missing = self._pages(sequence.done + 1 + num_extra) - len(sequence.pages)
            sequence.pages += [self.free.pop(0) for _ in range(num_missing)]
        return chunks

    def took(self, parts: Sequence[Part], tokens: Sequence[int], stop: int | None = None) -> list[Text]:
        """Record that `chunks` were computed, with the token that follows each; return finished sequences, whose pages are freed."""
        for part, token in zip(parts, tokens, strict=True):
            part.of.done += part.count
            if part.ends:
                part.of.tokens.append(token)
                if token == stop:
                    part.of.length = len(part.of.tokens)
        finished = [sequence for sequence in self.running if len(sequence.tokens) == sequence.length]
        for sequence in finished:
            self.running.remove(sequence)
            self.free += sequence.pages
            sequence.pages = []
        return finished

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.size)
