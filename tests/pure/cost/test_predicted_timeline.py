"""The timeline of a predicted step beside its prediction: equal ends, and collectives hidden where the run hides them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cluster.cluster import Cluster
from shardwise.cost.calibration.efficiency import stack_of
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.predicted_timeline import step_timeline
from shardwise.cost.step_time.timing import PricedLayout, price, simulate_time
from shardwise.plan.ir.timeline import COMPUTE_LANE, STEP_LANE, TENSOR_LANE, Span, Timeline
from shardwise.plan.layout import Layout
from tests.support.gpt_graph import gpt

GRAPH = gpt(8, hidden=512, heads=8, vocabulary=1024, batch=8)
CLUSTER = Cluster.parse("4xdgx-h100")
LAYOUTS = (
    "data=32 zero=0", "data=32 zero=1", "data=32 zero=1 shard=8", "data=16 tensor=2 zero=1 microbatches=2",
    "data=32 zero=2 microbatches=2", "data=32 zero=2 microbatches=2 scatter=last", "data=32 zero=3", "data=32 zero=3 recompute=full",
    "data=8 pipeline=4 microbatches=8 zero=1", "data=8 pipeline=4 microbatches=8 schedule=gpipe",
    "data=8 pipeline=2 chunks=2 microbatches=4 tensor=2 schedule=interleaved zero=1",
    "data=8 pipeline=4 microbatches=4 schedule=zb-h1 zero=1", "data=16 pipeline=2 microbatches=4 zero=3",
    "data=32 zero=1 offload=optimizer", "data=32 staleness=1", "pipeline=8 tensor=4 microbatches=32",
    "data=4 tensor=8 sequence_parallel=on zero=3 microbatches=2", "data=4 tensor=8 sequence_parallel=on recompute=full",
    "pipeline=4 tensor=8 sequence_parallel=on microbatches=8", "pipeline=4 tensor=8 sequence_parallel=on microbatches=8 schedule=zb-h1",
)  # fmt: skip


def priced_and_shown(text: str, contention: float = 0.12) -> tuple[PricedLayout, Timeline]:
    """Price a layout where collectives overlap with compute, and return it with its timeline."""
    stack = replace(stack_of(CLUSTER.device), overlap=1.0, contention=contention)
    pricer = Pricer(GRAPH, CLUSTER, 512, stack=stack)
    priced = simulate_time(pricer, price(pricer, Layout.parse(text)))
    return priced, step_timeline(pricer, priced)


def spans_of(timeline: Timeline, kind: str) -> list[Span]:
    """The collectives of a kind on the first rank."""
    lane = TENSOR_LANE if kind == TENSOR_LANE else "collective"
    return [span for span in timeline.spans if (span.rank, span.lane, span.kind) == (0, lane, kind) and span.duration_s > 0]


@pytest.mark.parametrize("text", LAYOUTS)
def test_the_timeline_ends_with_the_predicted_step(text: str) -> None:
    """And no hidden collective lies outside of it, or before its start."""
    priced, shown = priced_and_shown(text)
    assert shown.total_s == pytest.approx(priced.prediction.step_time_s, rel=1e-9)
    program_end_s = max(span.end_s for span in shown.spans if span.lane == COMPUTE_LANE)
    for span in shown.spans:
        assert span.start_s >= shown.start_s - 1e-12
        if span.lane in ("collective", TENSOR_LANE) and span.duration_s:
            assert span.end_s <= program_end_s + 1e-12, f"{text}: {span}"


@pytest.mark.parametrize("text", [text for text in LAYOUTS if "staleness" not in text])  # of those the window is the next step
def test_shown_and_hidden_collectives_are_all_that_a_network_alone_would_take(text: str) -> None:
    """Beside the same layout on a stack that hides nothing; a twin without the hidden spans would fall short where something is hidden."""
    priced, shown = priced_and_shown(text, contention=0.0)
    stack = stack_of(CLUSTER.device)
    overlapping = Pricer(GRAPH, CLUSTER, 512, stack=replace(stack, overlap=1.0, contention=0.0))
    pricer = Pricer(GRAPH, CLUSTER, 512, stack=replace(stack, overlap=1e-12, zero_overlap=0.0, contention=0.0))  # 0: no buckets
    pricer = pricer.with_buckets_of(overlapping, priced.layout, priced.sites)
    alone = price(pricer, priced.layout, priced.sites)
    computes = [span for span in shown.spans if span.rank == 0 and span.lane == COMPUTE_LANE]
    stages = sorted({int(span.name.partition(span.kind)[0]) for span in computes})
    m = priced.layout.microbatches

    def exposed_s(which: PricedLayout) -> float:
        return sum(which.costs[s].gradients_s + m * which.costs[s].collectives.total for s in stages)

    hidden_s = sum(span.duration_s for kind in ("UNSHARD", "REDUCE_GRAD", TENSOR_LANE) for span in spans_of(shown, kind))
    assert exposed_s(priced) + hidden_s == pytest.approx(exposed_s(alone), rel=1e-6)


def test_gathers_of_updated_weights_lie_behind_the_first_forward_and_sums_behind_the_last_backward() -> None:
    """ZeRO-1 in a pipeline; with an optimizer on the host every gather is waited for, and nothing of it is hidden."""
    _, shown = priced_and_shown("data=8 pipeline=4 microbatches=8 zero=1")
    computes = sorted((span for span in shown.spans if (span.rank, span.lane) == (0, COMPUTE_LANE)), key=lambda span: span.start_s)
    (gather,), (reduction,) = spans_of(shown, "UNSHARD"), spans_of(shown, "REDUCE_GRAD")
    assert (gather.start_s, computes[0].kind) == (computes[0].start_s, "F")
    assert gather.end_s <= computes[0].end_s + 1e-12
    assert (reduction.end_s, computes[-1].kind) == (computes[-1].end_s, "B")
    assert reduction.start_s >= computes[-1].start_s - 1e-12
    _, on_host = priced_and_shown("data=32 zero=1 offload=optimizer")
    assert not spans_of(on_host, "UNSHARD")
    assert spans_of(on_host, "REDUCE_GRAD")
    assert any(span.lane == STEP_LANE for span in on_host.spans)


def test_gathers_of_zero_3_lie_beside_every_compute() -> None:
    """Two microbatches: gathers beside both forwards, gathers and scatters beside both backwards."""
    _, shown = priced_and_shown("data=32 zero=3 microbatches=2")
    assert [len(spans_of(shown, kind)) for kind in ("UNSHARD", "REDUCE_GRAD")] == [2, 2]


def test_collectives_inside_layers_lie_beside_every_undivided_backward() -> None:
    """One span a backward, as long as what the products hide; what a run measures has none, since they are no actions of its program."""
    text = "pipeline=4 tensor=8 sequence_parallel=on microbatches=8"
    priced, shown = priced_and_shown(text)
    backwards = [span for span in shown.spans if (span.rank, span.lane, span.kind) == (0, COMPUTE_LANE, "B")]
    found = spans_of(shown, TENSOR_LANE)
    assert [span.start_s for span in found] == [span.start_s for span in backwards]
    assert {round(span.duration_s, 12) for span in found} == {round(priced.costs[0].hidden.layers_s, 12)}
    assert not spans_of(shown.program, TENSOR_LANE)
    assert not spans_of(priced_and_shown(text + " schedule=zb-h1")[1], TENSOR_LANE)
