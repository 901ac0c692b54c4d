"""Paged attention for decoding: attention of a few tokens to all earlier ones, whose keys and values are in pages.

A page holds the keys of so many tokens of one sequence; a sequence's pages may be anywhere (Kwon et al. 2023, PagedAttention). A rank has
those of its own layers and heads. A step's rows are spans: consecutive tokens of one sequence each, its latest ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.world.attention_backend import scaled_dot_product_attention


@dataclass(frozen=True)
class SequenceSpan:
    """Rows `first_row` to `end_row` of a step: tokens of one sequence from `first_position` on. `pages`: page numbers of the sequence,
    int64."""

    first_row: int
    end_row: int
    first_position: int
    pages: Tensor


@dataclass
class PagedCache:
    """`num_pages` pages of `page_size` tokens. `spans`: of the current step, `row_slots`: slot of each of its rows, over all pages."""

    num_pages: int
    page_size: int
    keys: dict[str, Tensor] = field(default_factory=dict)  # by attention site: [tokens of all pages, heads, width]
    values: dict[str, Tensor] = field(default_factory=dict)
    spans: Sequence[SequenceSpan] = ()
    row_slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def start_step(self, runs: Sequence[SequenceSpan], device: torch.device) -> None:
        """Set the rows of the next step."""
        self.spans = runs
        rows = [torch.arange(run.first_position, run.first_position + run.end_row - run.first_row) for run in runs]
        places = [run.pages[row // self.page_size] * self.page_size + row % self.page_size for run, row in zip(runs, rows, strict=True)]
        self.row_slots = torch.cat([torch.empty(0, dtype=torch.int64), *places]).to(device)

    @property
    def size_bytes(self) -> int:
        """Bytes of this rank's keys and values."""
        return sum(x.nbytes for stored in (self.keys, self.values) for x in stored.values())

    def store(self, site: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store a step's keys and values [1, heads, rows, width] in their slots; return all of the site."""
        caches = []
        for stored, x in ((self.keys, k), (self.values, v)):
            if site not in stored:
                stored[site] = torch.zeros(self.num_pages * self.page_size, x.shape[1], x.shape[3], dtype=x.dtype, device=x.device)
            stored[site][self.row_slots] = x[0, :, : len(self.row_slots)].transpose(0, 1)
            caches.append(stored[site])
        return caches[0], caches[1]


def paged_attention(pages: PagedCache, site: str, scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention of queries [1, heads, rows, width] to their sequences' keys up to their positions; 0 for rows without token."""
    keys, values = pages.store(site, k, v)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    within = torch.arange(pages.page_size, device=q.device)
    attend, grouped = torch.ops.aten.scaled_dot_product_attention.default, q.shape[1] != k.shape[1]
    for run in pages.spans:
        length = run.first_position + run.end_row - run.first_row
        slots = (run.pages.to(q.device).unsqueeze(1) * pages.page_size + within).reshape(-1)[:length]
        keys_and_values = [x[slots].transpose(0, 1).unsqueeze(0) for x in (keys, values)]
        queries, mask = q[:, :, run.first_row : run.end_row], None
        if run.end_row - run.first_row > 1:
            mask = torch.arange(run.first_position, length, device=q.device).unsqueeze(1) >= torch.arange(length, device=q.device)
        out[:, :, run.first_row : run.end_row] = scaled_dot_product_attention(
            attend, queries, *keys_and_values, mask, 0.0, False, scale=scale, enable_gqa=grouped
        )
    return out
