"""What papers say that a schedule's ranks hold, by name and sizes: an oracle for what schedules answer of themselves."""

from __future__ import annotations

BOTH_WAYS = ("chimera", "gems-mast", "gems-master")  # two replicas of every stage, on ranks r and p-1-r
SPLIT = ("zb-h1", "zb-h2", "zb-v")  # whose backward is split into an input and a weights part


def in_flight(schedule: str, num_ranks: int, rank: int, microbatches: int, chunks: int = 1) -> float:
    """Microbatches whose activations a rank holds at most at once for each of its stages, on average over them; of GEMS for one of them.

    All (gpipe, breadth-first), p - rank (1f1b). Zero bubble, Qi et al. 2024: p (h1, and v of its two stages each), 2p - 1 (h2), where
    what waits for its weights part counts in full. Of Chimera a rank's two stages have half each of p + 1, and fewer with few
    microbatches towards the ends, where half of them arrive late.
    """
    p, m = num_ranks, microbatches
    inward = min(rank, p - 1 - rank)
    known = {
        "sequential": 1,
        "gpipe": m,
        "1f1b": min(m, p - rank),
        "interleaved": interleaved(p, m, chunks, rank) / chunks,
        "breadth-first": m,
        "zb-h1": min(m, p),
        "zb-h2": min(m, 2 * p - 1),
        "zb-v": min(m, p),
        "chimera": min(m, p + (m > p), m // 2 + 1 + inward) / (1 if 2 * rank == p - 1 else 2),
        "gems-mast": 1,
        "gems-master": 1,
    }
    return known[schedule]


def interleaved(num_ranks: int, microbatches: int, chunks: int, rank: int) -> int:
    """Forwards of one stage whose activations a rank holds at once, all its chunks together: Narayanan et al. 2021 run 2(p - r - 1) +
    (v - 1)p ahead, where p divides m; else groups are as equal as can be and larger than p."""
    if chunks == 1:
        return min(microbatches, num_ranks - rank)
    longest = -(-microbatches // max(1, microbatches // num_ranks))
    return min(microbatches * chunks, 2 * (num_ranks - 1 - rank) + (chunks - 1) * longest + 1)
