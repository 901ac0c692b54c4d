"""Which tokens of which sequences the next step computes. In: prompts, lengths, pages. Out: runs of tokens, step by step.

Sequences join as soon as pages are free and leave when they are done, whatever the others do (Yu et al. 2022, Orca). A step has the newest
token of each, and with what room is left parts of prompts (Agrawal et al. 2024, Sarathi-Serve). Every rank keeps the same queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Text:
    """One text. `tokens`: prompt and what came since; `done`: how many of them have been computed; `pages`: where their keys lie."""

    number: int
    tokens: list[int]
    length: int  # in the end
    done: int = 0
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """`count` tokens of a sequence from position `first` on."""

    of: Text
    first: int
    count: int

    @property
    def ends(self) -> bool:
        """Whether the next token follows from its last."""
        return self.first + self.count == len(self.of.tokens)


class Queue:
    """The sequences of one replica. `rows`: tokens of a step, at most; `pages` of `size` tokens."""

    def __init__(self, rows: int, pages: int, size: int) -> None:
        self.rows, self.size = rows, size
        self.free = list(range(pages))
        self.waiting: list[Text] = []
        self.running: list[Text] = []

    def add(self, one: Text) -> None:
        self.waiting.append(one)

    def step(self) -> list[Part]:
        """What is computed next; nothing where all is done."""
        promised = sum(self._pages(one.length) - len(one.pages) for one in self.running)
        while self.waiting and len(self.running) < self.rows and self._pages(self.waiting[0].length) <= len(self.free) - promised:
            self.running.append(self.waiting.pop(0))
            promised += self._pages(self.running[-1].length)
        left, parts = self.rows - len(self.running), []
        for one in self.running:
            more = min(left, len(one.tokens) - one.done - 1)
            left -= more
            parts.append(Part(one, one.done, 1 + more))
            missing = self._pages(one.done + 1 + more) - len(one.pages)
            one.pages += [self.free.pop(0) for _ in range(missing)]
        return parts

    def took(self, parts: Sequence[Part], tokens: Sequence[int], stop: int | None = None) -> list[Text]:
        """`parts` are computed; what follows them, of those that end. The sequences that are over, whose pages are free again."""
        for part, token in zip(parts, tokens, strict=True):
            part.of.done += part.count
            if part.ends:
                part.of.tokens.append(token)
                if token == stop:
                    part.of.length = len(part.of.tokens)
        over = [one for one in self.running if len(one.tokens) == one.length]
        for one in over:
            self.running.remove(one)
            self.free += one.pages
            one.pages = []
        return over

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.size)
