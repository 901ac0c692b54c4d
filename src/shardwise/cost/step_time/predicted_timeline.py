"""Timeline of a predicted step: the simulated program, the collectives that it hides, and what follows it.

Hidden collectives are shown where the run has them: gathers of updated weights (ZeRO-1 and 2) from a step's first forward on, since they
begin with the update before; reductions until the last backward; gathers and scatters of ZeRO-2 and 3 beside every compute; collectives
of tensor ranks, in groups of their own, beside every backward. Not modelled: when each bucket, or each layer's collective, begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from shardwise.cost.stages.gradients import HiddenCollectives
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.timing import PricedLayout, simulate_timeline
from shardwise.plan.ir.program import ManageOp
from shardwise.plan.ir.timeline import COMPUTE_LANE, STEP_LANE, TENSOR_LANE, Span, Timeline

COLLECTIVE_LANE = "collective"
FORWARD, BACKWARD = ("F",), ("B", "I")  # kinds of compute that gathers and scatters of a microbatch run beside


def step_timeline(pricer: Pricer, priced: PricedLayout) -> Timeline:
    """Return the whole predicted step: its program with the collectives hidden behind it, and after that on every rank the exposed
    collectives of gradients and weights, the optimizer and the rest. It ends when the prediction does."""
    program, prediction = simulate_timeline(pricer, priced), priced.prediction
    parts = dict(prediction.parts)
    summed_s = program.end_s + parts["gradients"]
    updated_s = summed_s + parts["optimizer"]
    step_spans = []
    for rank, costs in enumerate(pricer.by_rank(priced.layout, priced.costs)):
        spans_of = (
            ("gradients", program.end_s, program.end_s + sum(c.gradients_s for c in costs)),
            ("optimizer", summed_s, summed_s + sum(c.optimizer_s for c in costs)),
            ("overhead", updated_s, max(updated_s, program.start_s + prediction.step_time_s)),
        )
        step_spans += [Span(rank, STEP_LANE, name, start, end, name) for name, start, end in spans_of if end > start]
    step_spans += _hidden_spans(priced, program)
    return Timeline(program.name, program.num_ranks, (*program.spans, *step_spans))


def _hidden_spans(priced: PricedLayout, program: Timeline) -> Iterator[Span]:
    """Yield the collectives that run behind the computes of each stage on each rank."""
    computes: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in program.spans:
        if span.lane == COMPUTE_LANE:
            computes[span.rank, int(span.name.partition(span.kind)[0])].append(span)
    for (rank, stage), spans in computes.items():
        yield from _spans_behind(rank, stage, spans, priced.costs[stage].hidden)


def _spans_behind(rank: int, stage: int, spans: list[Span], hidden: HiddenCollectives) -> Iterator[Span]:
    """Yield the collectives of one stage on one rank, behind its computes `spans` in order."""
    gather, reduction = ManageOp.UNSHARD.value, ManageOp.REDUCE_GRAD.value
    if hidden.gathers_s:
        start = spans[0].start_s
        yield Span(rank, COLLECTIVE_LANE, f"{stage}{gather}", start, start + hidden.gathers_s, gather)
    for span in spans:
        inside = hidden.per_microbatch
        seconds = inside.forward * (span.kind in FORWARD) + inside.backward * (span.kind in BACKWARD)
        kind = gather if span.kind in FORWARD else reduction
        if seconds:
            yield Span(rank, COLLECTIVE_LANE, f"{stage}{kind}", span.start_s, span.start_s + seconds, kind)
        if hidden.layers_s and span.kind in BACKWARD:
            yield Span(rank, TENSOR_LANE, f"{stage}{TENSOR_LANE}", span.start_s, span.start_s + hidden.layers_s, TENSOR_LANE)
    if hidden.reductions_s:
        end = spans[-1].end_s
        yield Span(rank, COLLECTIVE_LANE, f"{stage}{reduction}", end - hidden.reductions_s, end, reduction)
