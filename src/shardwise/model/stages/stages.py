"""Pipeline stages: partition a graph at given sites into stages with their operators, receives and sends.

An operator that depends on the batch and constants only (masks, position numbers, shifted labels) belongs to no stage: every stage that
needs it computes it, so it is never sent. A value that several stages need is sent to each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwise.errors import Infeasible, LayoutError
from shardwise.model.dataflow import cached_on_graph, propagate_forward, reachable_elements
from shardwise.model.dims.expert_rows import expert_rows
from shardwise.model.gradients import values_depending_on
from shardwise.model.graph import Graph, Operator, buffers_written_in_place, writes_buffer, written_buffers
from shardwise.ops import is_random, record_of


@dataclass(frozen=True, slots=True)
class StageCut:
    """A stage may begin at operator number `index` (its `site`); `values` are then sent from earlier stages to this or later ones."""

    index: int
    site: str
    values: tuple[str, ...]
    size_bytes: float


@dataclass(frozen=True)
class Stage:
    """One stage: its operators in order, the variables it reads, and what it receives and sends, by the other stage."""

    index: int
    operators: tuple[Operator, ...]
    variables: tuple[str, ...]  # values of parameters, buffers, inputs and constants, in the graph's order
    receives: tuple[tuple[int, tuple[str, ...]], ...]
    sends: tuple[tuple[int, tuple[str, ...]], ...]
    results: tuple[str, ...]  # the loss or the outputs that this stage computes


@cached_on_graph
def batch_only_operators(graph: Graph) -> frozenset[str]:
    """Return names of operators that depend on the batch and constants only: no parameter, nothing random, nothing written."""
    varying = {value for op in graph.operators if is_random(op) or writes_buffer(op, graph.state) for value in op.outputs}
    varying |= {v.value for v in graph.parameters} | buffers_written_in_place(graph)
    varying |= {value for op in graph.operators if record_of(op).statistics.positions for value in op.inputs if value in graph.state}
    varying = propagate_forward(graph.operators, varying)
    return frozenset(op.name for op in graph.operators if varying.isdisjoint(op.outputs))


def stage_cuts(graph: Graph) -> tuple[StageCut, ...]:
    """Return every site where a stage may begin, in order, with the values sent there (global bytes of one microbatch)."""
    free = batch_only_operators(graph)
    last: dict[str, int] = {}
    for i, op in enumerate(graph.operators):
        if op.name not in free:
            for value in op.inputs:
                last[value] = i
    for value in (graph.loss, *graph.outputs):
        last[value] = len(graph.operators)
    fixed = indivisible_operators(graph)
    cuts_here = []
    live: dict[str, None] = {}
    for i, op in enumerate(graph.operators):
        if op.name in free:
            continue
        for value in [v for v in live if last.get(v, -1) < i]:
            del live[value]
        # Complex numbers cannot be sent.
        if live and i not in fixed and not any(graph.tensors[v].dtype.startswith("complex") for v in live):
            cuts_here.append(StageCut(i, op.site, tuple(live), float(sum(graph.tensors[v].size_bytes for v in live))))
        live.update(dict.fromkeys(v for v in op.outputs if last.get(v, -1) > i))
    return tuple(cuts_here)


@cached_on_graph
def indivisible_operators(graph: Graph) -> set[int]:
    """Return operators before which no stage can begin: those between two uses of a buffer that is written while the model runs, and those
    between rows of experts and their readers (messages have static lengths, and these rows are data-dependent)."""
    indivisible: set[int] = set()
    for value in {value for value, _ in expert_rows(graph)}:
        indivisible.update(range(graph.producer_index[value] + 1, graph.last_reader_index.get(value, 0) + 1))
    written = written_buffers(graph)
    uses: dict[str, list[int]] = {}
    for i, op in enumerate(graph.operators):
        for value in op.inputs:
            if value in written:
                uses.setdefault(value, []).append(i)
    for places in uses.values():
        indivisible.update(range(places[0] + 1, places[-1] + 1))
    return indivisible


def check_trains(graph: Graph) -> None:
    """Raise Infeasible where no trainable parameter leads to the loss, or the model detaches what leads there."""
    trainable = {v.value for v in graph.parameters if v.trainable}
    if not graph.outputs and graph.loss not in values_depending_on(graph, trainable):
        raise Infeasible(
            "no parameter leads to the model's loss, so there is nothing to train; give the model a parameter that requires_grad, "
            "and a loss that is not detached"
        )


def split(graph: Graph, sites: Sequence[str], is_trained: bool = True) -> tuple[Stage, ...]:
    """Partition the graph into `len(sites) + 1` stages that begin at these sites. `trains`: it must be trainable.

    Raises:
        LayoutError: a site that the graph does not have, or sites out of order.
        Infeasible: a stage without operators, or a loss to which no parameter leads.
    """
    if is_trained:
        check_trains(graph)
    starts = _stage_starts(graph, sites)
    stage_operators, stage_of = _assign_operators(graph, starts)
    finals = graph.outputs or (graph.loss,)
    last = len(starts) - 1
    results = [tuple(v for v in finals if stage_of.get(v, last) == s) for s in range(len(starts))]
    needed, reads = _stage_reads(graph, stage_operators, [v for v in finals if v not in stage_of])
    place = graph.producer_index
    receives: list[dict[int, dict[str, None]]] = [{} for _ in starts]
    sends: list[dict[int, dict[str, None]]] = [{} for _ in starts]
    for s in range(len(starts)):
        for value in sorted((v for v in reads[s] if v in place), key=place.__getitem__):
            if stage_of.get(value, s) != s:
                receives[s].setdefault(stage_of[value], {})[value] = None
                sends[stage_of[value]].setdefault(s, {})[value] = None
    variables = {v.value: i for i, v in enumerate(graph.variables)}
    return tuple(
        Stage(
            s,
            tuple([graph.operators[i] for i in sorted({*stage_operators[s], *needed[s]})]),
            tuple(sorted((v for v in {*reads[s], *results[s]} if v in variables), key=variables.__getitem__)),
            tuple((p, tuple(values)) for p, values in sorted(receives[s].items())),
            tuple((q, tuple(values)) for q, values in sorted(sends[s].items())),
            results[s],
        )
        for s in range(len(starts))
    )


def _stage_starts(graph: Graph, sites: Sequence[str]) -> list[int]:
    """Return the index of each stage's first operator."""
    order, starts = graph.index_of_site, [0]
    for site in sites:
        if site not in order:
            raise LayoutError(
                f"the plan begins a stage at {site!r}, but the model has no such operator; plan again for this model, "
                f"which may compute something else for {graph.batch_size} samples than for the whole batch"
            )
        if order[site] <= starts[-1]:
            raise LayoutError(f"the plan's stage at {site!r} begins before or with the one before it; list stages in the model's order")
        if order[site] in indivisible_operators(graph):
            raise LayoutError(
                f"no stage can begin at {site!r}: a buffer that the model writes, or rows of experts, are used before and after it; "
                "move the cut"
            )
        starts.append(order[site])
    return starts


def _assign_operators(graph: Graph, starts: Sequence[int]) -> tuple[list[list[int]], dict[str, int]]:
    """Return the indices of every stage's operators, and by value the stage that computes it; batch-only operators are in none."""
    stage_of: dict[str, int] = {}
    stage_operators: list[list[int]] = []
    for s, (start, end) in enumerate(pairwise([*starts, len(graph.operators)])):
        stage_operators.append([i for i in range(start, end) if graph.operators[i].name not in batch_only_operators(graph)])
        stage_of.update((value, s) for i in stage_operators[s] for value in graph.operators[i].outputs)
        if not stage_operators[s]:
            raise Infeasible(f"stage {s} of {len(starts)} has no operator; use fewer stages")
    return stage_operators, stage_of


def _stage_reads(
    graph: Graph, stage_operators: Sequence[Sequence[int]], batch_only_results: Sequence[str]
) -> tuple[list[set[int]], list[set[str]]]:
    """Return by stage the batch-only operators that it needs, and the values that it reads.

    Batch-only values are computed wherever they are read (and on the last stage, where they are results: `batch_only_results`).
    """
    place, free = graph.producer_index, batch_only_operators(graph)
    needed, reads = [], []

    def batch_only_producer(value: str) -> int | None:
        at = place.get(value)
        return at if at is not None and graph.operators[at].name in free else None

    def inputs_of(value: str) -> Sequence[str]:
        at = batch_only_producer(value)
        return () if at is None else graph.operators[at].inputs

    for s, numbers in enumerate(stage_operators):
        start = {v for i in numbers for v in graph.operators[i].inputs}
        reads.append(reachable_elements(start.union(batch_only_results if s == len(stage_operators) - 1 else ()), inputs_of))
        needed.append({at for value in reads[s] if (at := batch_only_producer(value)) is not None})
    return needed, reads


def stage_links(stages: Sequence[Stage]) -> tuple[tuple[int, int], ...]:
    """Return (producer stage, consumer stage) of every pair between which something is sent, in order."""
    pairs = {(p, stage.index) for stage in stages for p, _ in stage.receives}
    return tuple(sorted(pairs))
