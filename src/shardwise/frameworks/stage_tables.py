"""Pipeline schedules as tables of actions that torch.distributed.pipelining reads: a row a rank, `0F1,0I1,0W1`, commas between.

`F` forward, `B` whole backward, `I` input gradients, `W` weight gradients, before it the stage, behind it the microbatch. An empty cell
is a time step in which the rank waits. Tables are for schedules in which no stage is on two ranks.
"""

from __future__ import annotations

from shardwise.errors import ShardwiseError
from shardwise.plan.ir.program import chain_links
from shardwise.plan.layout import Layout
from shardwise.schedules import layout_computes_by_rank

NAMED_TABLES = ("zb-h1", "zb-h2")  # of our named schedules those that torch has no name for


def table_of_layout(layout: Layout) -> list[list[str]]:
    """Return each rank's actions in order, aligned by time steps.

    >>> table_of_layout(Layout.parse("pipeline=2 microbatches=2"))
    [['0F0', '0F1', '', '0B0', '', '0B1'], ['', '1F0', '1B0', '1F1', '1B1', '']]
    """
    return _align_steps([[str(compute) for compute in rank] for rank in layout_computes_by_rank(layout, chain_links(layout.num_stages))])


def write_table(layout: Layout) -> str:
    """Return the table as CSV."""
    return "\n".join(",".join(row) for row in table_of_layout(layout)) + "\n"


def parse_table(text: str) -> list[list[str]]:
    """Return each rank's actions in order, without the waiting."""
    return [[cell.strip() for cell in line.split(",") if cell.strip()] for line in text.strip().splitlines()]


def schedule_of_table(text: str, pipeline: int, microbatches: int) -> tuple[str, int] | None:
    """Return name and chunks of the named schedule that a table is; None where it is none."""
    rows = parse_table(text)
    for name in ("zb-h1", "zb-h2", "zb-v", "1f1b", "gpipe", "interleaved", "breadth-first"):
        for chunks in (1, 2, 3, 4):
            try:
                layout = Layout(pipeline=pipeline, microbatches=microbatches, schedule=name, chunks=chunks)
                if parse_table(write_table(layout)) == rows:
                    return name, layout.chunks
            except ShardwiseError:
                continue
    return None


def _align_steps(rows: list[list[str]]) -> list[list[str]]:
    """Insert empty cells where a rank waits for a neighbour's result, with a time step an action."""
    done: dict[str, int] = {}
    at, table, step = [0] * len(rows), [list[str]() for _ in rows], 0
    stages = 1 + max(_split(word)[0] for row in rows for word in row)
    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        finished = []
        for rank, row in enumerate(rows):
            word = row[at[rank]] if at[rank] < len(row) else ""
            if word and all(done.get(need, step) < step for need in _needed_actions(word, stages, done)):
                finished.append(word)
                at[rank] += 1
                table[rank].append(word)
            else:
                table[rank].append("")
        if not finished:
            return rows
        done |= dict.fromkeys(finished, step)
        step += 1
    return table


def _split(word: str) -> tuple[int, str, int]:
    place = next(i for i, char in enumerate(word) if char.isalpha())
    return int(word[:place]), word[place], int(word[place + 1 :])


def _needed_actions(word: str, stages: int, done: dict[str, int]) -> list[str]:
    """Return the actions that must have finished: of the neighbouring stage, which may have its backward in one or in two parts."""
    stage, kind, microbatch = _split(word)
    if kind == "F":
        return [f"{stage - 1}F{microbatch}"] if stage else []
    if kind == "W":
        return [f"{stage}I{microbatch}"]
    later = stage + 1
    if later == stages:
        return [f"{stage}F{microbatch}"]
    return [f"{later}I{microbatch}" if f"{later}I{microbatch}" in done else f"{later}B{microbatch}"]
