"""Attention of a few tokens to all that came before, whose keys and values lie in pages. In: their queries, keys, values. Out: attention.

A page has the keys of so many tokens of one sequence; a sequence's pages lie anywhere (Kwon et al. 2023, PagedAttention). A rank keeps
those of its own layers and heads. A step's rows are runs: consecutive tokens of one sequence each, the last that it has so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.world.attention_backend import scaled_dot_product_attention


@dataclass(frozen=True)
class Run:
    """Rows `begin` to `end` of a step: tokens of one sequence from position `first` on. `pages`: where it lies, int64."""

    begin: int
    end: int
    first: int
    pages: Tensor


@dataclass
class Pages:
    """`number` pages of `size` tokens. `runs`: of the step under way, `places` where each of its rows lies, page by page."""

    number: int
    size: int
    keys: dict[str, Tensor] = field(default_factory=dict)  # by attention: [tokens of all pages, heads, width]
    values: dict[str, Tensor] = field(default_factory=dict)
    runs: Sequence[Run] = ()
    places: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def begin(self, runs: Sequence[Run], device: torch.device) -> None:
        """What the rows of the next step are."""
        self.runs = runs
        at = [torch.arange(run.first, run.first + run.end - run.begin) for run in runs]
        places = [run.pages[one // self.size] * self.size + one % self.size for run, one in zip(runs, at, strict=True)]
        self.places = torch.cat([torch.empty(0, dtype=torch.int64), *places]).to(device)

    @property
    def bytes(self) -> int:
        """That this rank's keys and values take."""
        return sum(x.nbytes for stored in (self.keys, self.values) for x in stored.values())

    def store(self, site: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put a step's keys and values [1, heads, rows, width] where they belong; all that lie there."""
        both = []
        for stored, x in ((self.keys, k), (self.values, v)):
            if site not in stored:
                stored[site] = torch.zeros(self.number * self.size, x.shape[1], x.shape[3], dtype=x.dtype, device=x.device)
            stored[site][self.places] = x[0, :, : len(self.places)].transpose(0, 1)
            both.append(stored[site])
        return both[0], both[1]


def paged_attention(pages: Pages, site: str, scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries [1, heads, rows, width] against the keys of their sequences up to their own positions; 0 for rows that are no tokens."""
    keys, values = pages.store(site, k, v)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    within = torch.arange(pages.size, device=q.device)
    attend, grouped = torch.ops.aten.scaled_dot_product_attention.default, q.shape[1] != k.shape[1]
    for run in pages.runs:
        length = run.first + run.end - run.begin
        at = (run.pages.to(q.device).unsqueeze(1) * pages.size + within).reshape(-1)[:length]
        mine = [x[at].transpose(0, 1).unsqueeze(0) for x in (keys, values)]
        queries, mask = q[:, :, run.begin : run.end], None
        if run.end - run.begin > 1:
            mask = torch.arange(run.first, length, device=q.device).unsqueeze(1) >= torch.arange(length, device=q.device)
        out[:, :, run.begin : run.end] = scaled_dot_product_attention(
            attend, queries, *mine, mask, 0.0, False, scale=scale, enable_gqa=grouped
        )
    return out
