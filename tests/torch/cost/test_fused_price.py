"""The price of products fused with tensor collectives: only where they would run, with their workspace; a published figure as check."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cli.pricing_context import PricingContext
from shardwise.cluster.cluster import Cluster
from shardwise.cost.calibration.efficiency import stack_of
from shardwise.cost.step import Pricer
from shardwise.plan.layout import Layout
from tests.support.gpt_graph import gpt

GRAPH = gpt(2, hidden=256, heads=8, sequence=64, batch=8)
CLUSTER = Cluster.parse("2xdgx-h100@torch-symmetric")
RUNS = "data=2 tensor=8 sequence_parallel=on precision=bfloat16-mixed"
PLAIN = (  # whole sequences between layers, ranks of two hosts, 8 bits, a divided backward
    "data=2 tensor=8 precision=bfloat16-mixed", "tensor=16 sequence_parallel=on precision=bfloat16-mixed",
    "data=2 tensor=8 sequence_parallel=on precision=float8",
    "tensor=8 pipeline=2 microbatches=4 sequence_parallel=on schedule=zb-h1 precision=bfloat16-mixed",
)  # fmt: skip


def pricers(**changes: float) -> tuple[Pricer, Pricer]:
    """Pricers with fused products, and of the same set without."""
    fused, plain = (replace(stack_of(CLUSTER.device, name), **changes) for name in ("torch-symmetric", "torch"))
    return Pricer(GRAPH, CLUSTER, 32, stack=fused), Pricer(GRAPH, CLUSTER, 32, stack=plain)


@pytest.mark.parametrize("text", PLAIN)
def test_where_they_would_not_run_nothing_is_cheaper_and_no_room_is_taken(text: str) -> None:
    fused, plain = pricers()
    layout = Layout.parse(text)
    assert [seconds.tolist() for seconds in fused.operator_seconds(layout)] == [s.tolist() for s in plain.operator_seconds(layout)]
    assert fused.fused_workspace_bytes(layout) == 0.0


def test_gathers_of_forward_and_scatters_of_backward_show_a_part() -> None:
    """By the collectives themselves: a linear layer that scatters its result waits as before, and so does its gather in backward. Beside a
    set whose products hide nothing."""
    fused, plain = pricers(overlap=0.0, zero_overlap=0.0)
    layout = Layout.parse(RUNS)
    parts = plain.sharded_inventory(layout)
    seconds = [plain.collective(one.name, size, plain.collective_group(layout, one)) for one, size in zip(
        parts.collectives, plain.collective_bytes(layout), strict=True
    )]  # fmt: skip
    saved = [
        (1 - 0.56) * sum(seconds[i] for i in entries if (parts.collectives[i].axis, parts.collectives[i].name) == ("tensor", name))
        for (_, entries), name in ((parts.forward, "all_gather"), (parts.backward, "reduce_scatter"))
    ]
    before, after = plain.operator_seconds(layout), fused.operator_seconds(layout)
    assert [float((before[i] - after[i]).sum()) for i in (2, 3)] == pytest.approx(saved)
    assert min(saved) > 0
    assert sum(saved) < 0.44 * float(before[2].sum() + before[3].sum())  # not all are fused


def test_their_workspace_is_two_pieces_of_what_is_gathered() -> None:
    """torch's scatter sends from two buffers in turn, each one rank's piece of 16-bit sums."""
    fused, plain = pricers()
    layout = Layout.parse(RUNS)
    memories = [one.stages(layout)[0].memory.alone.total for one in (fused, plain)]
    piece = (32 / 2) * 64 * 256 * 2 / 8
    assert memories[0] - memories[1] == pytest.approx(2 * piece, rel=0.2)  # and the margin over it
    assert fused.fused_workspace_bytes(layout) == pytest.approx(2 * piece)


def test_the_share_is_what_a_published_run_gained() -> None:
    """torchtitan 2025-06: 597 and 652 tokens a second and GPU at 70 B, 256 H100, tensor=8, all tensor collectives fused; by layers."""
    steps = []
    for layers in (2, 6):
        model = f"llama:vocabulary=128256,sequence=8192,hidden=8192,layers={layers},heads=64,kv_heads=8,inner=28672"
        layout = Layout.parse("data=32 tensor=8 zero=3 recompute=full sequence_parallel=on precision=bfloat16-mixed")
        cluster = Cluster.parse("32xhgx-h100-96@torchtitan")
        context = PricingContext(model, cluster, 512)
        shares, own = [], replace(stack_of(cluster.device), name="torchtitan")  # it waits for each collective, and repeats no gather
        for stack in (own, replace(own, tensor=0.56), stack_of(cluster.device, "torchtitan-vanilla")):
            cost = Pricer(context.graph, cluster, 512, stack=stack).stages(layout)[0]
            shares.append(cost.forward_s + cost.backward_s)
        steps.append(shares)
    plain, hidden, vanilla = (steps[1][i] - steps[0][i] for i in range(3))
    assert plain / hidden == pytest.approx(652 / 597, abs=0.02)
    assert 80 / 4 * vanilla == pytest.approx(16 * 8192 / 8 / 597, rel=0.05)  # and the step itself
