"""Times on GPUs against closed forms: kernels, launches, recomputation, ZeRO, interleaving, stragglers; and bad efficiency sets."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import e, log, sqrt
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.validate.fit import fit, mean_abs
from shardwise.cluster.catalogue import catalogue_names, dump
from shardwise.cluster.cluster import Cluster, Device, Speed
from shardwise.cost.calibration.efficiency import EfficiencySet, parse_protocols, parse_stack, protocols_named, stack_of
from shardwise.cost.devices.compute import Seconds
from shardwise.cost.devices.gpus import straggler_slowdown, with_measured_rates
from shardwise.cost.devices.kernels import LocalKernel, optimizer_s, overlap_launches, scale_rows
from shardwise.cost.memory.memory import StageMemory
from shardwise.cost.network.network import RankGroup, collective_s, group_path
from shardwise.cost.step import Pricer, StageCost
from shardwise.errors import ConfigError, UsageError
from shardwise.model.dims.labels import expert_weights
from shardwise.model.graph import Graph, Operator, Ref, Tensor, Variable
from shardwise.plan.layout import Layout
from shardwise.plan.plan import MemoryBreakdown
from tests.support.gpt_graph import gpt

A100 = Cluster.parse("4xdgx-a100-80")
DEVICE = A100.device
IDEAL = EfficiencySet("ideal", matmul=1.0, operands=0.0, unaligned=0.5, bandwidth=1.0, traffic=1.0)
HALF = Layout(precision="float16")


def product(m: float, n: float, k: float) -> LocalKernel:
    return LocalKernel("linear", 2 * m * n * k, 4 * m * n * k, 4.0, 8.0, m, n, k)


def test_an_ideal_product_runs_at_the_peak() -> None:
    _, busy = product(8192, 8192, 8192).seconds(DEVICE, IDEAL, "float16")
    assert busy.forward == pytest.approx(2 * 8192**3 / 312e12)
    assert busy.backward == pytest.approx(2 * busy.forward)
    # A side that is no multiple of 8 keeps the matrix units half empty.
    assert product(8192, 8191, 8192).seconds(DEVICE, IDEAL, "float16")[1].forward == pytest.approx(2 * busy.forward, rel=1e-3)


@given(st.sampled_from([64, 128, 256, 512, 1024, 4096]), st.sampled_from([2, 4, 8]))
def test_efficiency_grows_with_every_side(size: int, by: int) -> None:
    def rate(m: int, n: int, k: int) -> float:
        return 2 * m * n * k / product(m, n, k).seconds(DEVICE, stack_of(DEVICE), "float16")[1].forward

    small = rate(size, size, size)
    assert rate(size * by, size, size) > small
    assert rate(size, size * by, size) > small
    assert rate(size, size, size * by) > small
    assert rate(size * by, size * by, size * by) < stack_of(DEVICE).matmul * 312e12


def test_operands_add_their_part_of_the_roofline() -> None:
    """flops/peak + part x bytes/bandwidth: for m = n = k = s that is 2s^3/P + 6s^2·part/B."""
    stack, size = replace(IDEAL, operands=0.5), 1024.0
    expected = 2 * size**3 / 312e12 + 0.5 * 2 * 3 * size**2 / DEVICE.memory_bandwidth_bytes_per_s
    assert product(size, size, size).seconds(DEVICE, stack, "float16")[1].forward == pytest.approx(expected)


def test_products_of_one_input_run_as_one() -> None:
    alone, fused = product(4096, 1024, 1024), replace(product(4096, 1024, 1024), n=3072.0, share=1 / 3)
    stack = replace(stack_of(DEVICE), product_s=0.0)
    assert fused.seconds(DEVICE, stack, "float16")[1].forward < alone.seconds(DEVICE, stack, "float16")[1].forward
    assert fused.seconds(DEVICE, replace(stack, operands=0.0), "float16")[1].forward == pytest.approx(
        alone.seconds(DEVICE, replace(stack, operands=0.0), "float16")[1].forward
    )


def test_scores_cost_their_bytes_and_fused_attention_none() -> None:
    kernel = LocalKernel("attention", 1e9, 2.5e9, 0.0, 1.0, scores=1e8, heads=16)
    kept = kernel.seconds(DEVICE, IDEAL, "float16")[1]
    fused = kernel.seconds(DEVICE, replace(IDEAL, attention="fused", attention_peak=1.0), "float16")[1]
    assert kept.forward - fused.forward == pytest.approx(13e8 / DEVICE.memory_bandwidth_bytes_per_s)
    # Where the fused softmax does not take this many heads, more kernels are launched.
    odd = kernel.seconds(DEVICE, replace(IDEAL, softmax_batches=3, launch_s=1e-5), "float16")[0]
    assert odd.total > kernel.seconds(DEVICE, replace(IDEAL, softmax_batches=4, launch_s=1e-5), "float16")[0].total


@given(st.lists(st.tuples(st.floats(1e-9, 1), st.floats(1e-9, 1)), min_size=1, max_size=8))
def test_host_and_device_together_take_the_longer_and_at_most_both(pairs: list[tuple[float, float]]) -> None:
    host, device = (np.array(column) for column in zip(*pairs, strict=True))
    total = overlap_launches(host, device).sum()
    assert total >= max(host.sum(), device.sum()) * (1 - 1e-9)
    assert total <= (host.sum() + device.sum()) * (1 + 1e-9)


def test_scaling_rows_scales_the_work() -> None:
    twice = scale_rows(product(512, 1024, 1024), Fraction(2))
    assert (twice.m, twice.n, twice.flops) == (1024, 1024, 2 * 2 * 512 * 1024 * 1024)


def test_adam_moves_its_bytes() -> None:
    assert optimizer_s(DEVICE, replace(IDEAL, optimizer_bytes=30.0), 1e9) == pytest.approx(30e9 / DEVICE.memory_bandwidth_bytes_per_s)


def pricer(layers: int = 4, stack: EfficiencySet | None = None, hidden: int = 256) -> Pricer:
    return Pricer(gpt(layers, hidden, 8, 128, 512, 8), A100, 64, stack=stack)


def test_recomputation_costs_attention_or_a_forward() -> None:
    p = pricer(stack=stack_of(DEVICE, "a100-megatron"))
    none, selective, full = (p.stages(replace(HALF, recompute=r))[0].backward_s for r in ("none", "selective", "full"))
    assert none < selective < full
    fused = pricer()
    assert fused.stages(replace(HALF, recompute="selective"))[0].backward_s == pytest.approx(fused.stages(HALF)[0].backward_s)


def test_equal_layers_cost_equally_much() -> None:
    """What a layer costs does not depend on how many there are: pricing repeats it, it does not price it again."""
    three, five, seven = (pricer(n).stages(HALF)[0].forward_s for n in (3, 5, 7))
    assert seven - five == pytest.approx(five - three, rel=1e-6)
    assert len(pricer(7).sharded_inventory(HALF).compute) == len(pricer(3).sharded_inventory(HALF).compute)


def test_zero_moves_what_rajbhandari_says() -> None:
    """Section 7: stages 1 and 2 as much as an all-reduce, stage 3 half as much again, where nothing hides and gradients move once."""
    stack = replace(stack_of(DEVICE), overlap=0.0, gradient_bytes=2.0, microbatch_s=0.0)
    p = pricer(stack=stack, hidden=2048)
    wide = replace(HALF, data=8)
    plain = p.stages(wide)[0].gradients_s
    assert p.stages(replace(wide, zero=1))[0].gradients_s == pytest.approx(plain, rel=0.3)
    third = p.stages(replace(wide, zero=3))[0]
    assert third.gradients_s == 0
    assert p.stages(replace(wide, zero=3))[0].collectives.total <= 2 * plain


def test_overlap_hides_sums_of_gradients() -> None:
    some, none = (pricer(stack=replace(stack_of(DEVICE), overlap=o), hidden=2048) for o in (0.9, 0.0))
    wide = replace(HALF, data=8)
    assert some.stages(wide)[0].gradients_s < none.stages(wide)[0].gradients_s


def test_an_interleaved_bubble_is_divided_by_its_chunks() -> None:
    """Narayanan et al. 2021, section 2.2.2: (p - 1)/(v·m) of the ideal time, for equal stages and free transfers."""
    p, m, v = 4, 8, 2
    one = StageCost(Seconds(1.0, 2.0), Seconds(), 0.0, 0.0, StageMemory(MemoryBreakdown()))
    priced = pricer(stack=replace(stack_of(DEVICE), step_s=0.0, spread=0.0))
    layout = Layout(pipeline=p, microbatches=m, precision="float16")
    plain = priced.predict(layout, [one] * p, [0.0] * (p - 1)).step_time_s
    half = replace(one, compute=Seconds(0.5, 1.0))
    chunked = priced.predict(replace(layout, schedule="interleaved", chunks=v), [half] * (p * v), [0.0] * (p * v - 1)).step_time_s
    assert plain == pytest.approx(3.0 * (m + p - 1))
    assert chunked == pytest.approx(3.0 * m * (1 + (p - 1) / (v * m)))


def test_the_slowest_of_many_is_a_few_deviations_slower() -> None:
    assert straggler_slowdown(1, 0.01) == 0
    assert straggler_slowdown(round(e**2), 0.01) == pytest.approx(0.01 * sqrt(2 * log(round(e**2))))


@given(st.sampled_from([2, 8, 16, 32]), st.floats(1, 1e10), st.floats(1.01, 10))
def test_more_bytes_take_longer(ranks: int, size: float, by: float) -> None:
    assert collective_s(A100, "all_reduce", size * by, RankGroup(ranks)) >= collective_s(A100, "all_reduce", size, RankGroup(ranks))


def test_a_group_lies_on_its_links() -> None:
    assert (group_path(A100, RankGroup(8)).inside, group_path(A100, RankGroup(8)).nodes) == (8, 1)
    across = group_path(A100, RankGroup(4, 8, 32))
    assert (across.inside, across.nodes) == (1, 4)
    link = A100.levels[1].link
    assert across.network_bytes_per_s == pytest.approx(link.bandwidth_bytes_per_s * link.efficiency / 8)


def test_bad_efficiency_sets_are_named() -> None:
    with pytest.raises(ConfigError, match="matmull is unknown"):
        parse_stack("x", {"matmull": 1})
    with pytest.raises(ConfigError, match=r"matmul = 1\.2"):
        parse_stack("x", {"matmul": 1.2})
    with pytest.raises(ConfigError, match="use scores or fused"):
        parse_stack("x", {"attention": "flash"})
    with pytest.raises(ConfigError, match="launch_s = -1"):
        parse_stack("x", {"launch_s": -1})
    with pytest.raises(ConfigError, match="stack 'none' is unknown"):
        stack_of(DEVICE, "none")
    with pytest.raises(ConfigError, match="protocol 'mpi' is unknown"):
        protocols_named("mpi")
    with pytest.raises(ConfigError, match="node_ll is missing"):
        parse_protocols("x", {})


def test_a_cluster_names_its_efficiency_set(tmp_path: Path) -> None:
    named = Cluster.parse("2xdgx-a100-80@a100-megatron-deepspeed")
    assert (named.num_devices, named.stack) == (16, "a100-megatron-deepspeed")
    assert Pricer(gpt(1), named, 8).devices.describe_efficiency("float16").startswith("a100-megatron-deepspeed")
    (tmp_path / "c.toml").write_text(dump(named))
    assert Cluster.parse(str(tmp_path / "c.toml")).stack == named.stack
    with pytest.raises(UsageError, match=r"did you mean a100-megatron\b"):
        Cluster.parse("2xdgx-a100-80@a100-megatro")


def test_an_unknown_device_has_shardwise_s_own_set_at_its_own_efficiency() -> None:
    device = Device("X1", "gpu", (("float16", 1e14),), 1e10, 1e12, 0.6, 3e-6)
    stack = stack_of(device)
    assert (stack.name, stack.device, stack.matmul, stack.launch_s) == ("torch", "", 0.6, 3e-6)
    assert "none was measured on X1" in stack.describe_source(device, "float32")


@pytest.mark.parametrize("machine", [name for name in catalogue_names() if not Cluster.parse(name).kind.shares_hosts])
def test_every_device_has_what_shardwise_runs_by_default(machine: str) -> None:
    """One set of figures for all, with each device's own where it was measured; others are had by name, and say so."""
    device = Cluster.parse(machine).device
    stack = stack_of(device)
    assert (stack.name, stack.attention) == ("torch", "fused")
    measured = device.name.startswith(("A100", "H100", "H200", "B200", "B300", "GB200", "GB300", "GH200"))
    assert (stack.device == device.name) is measured
    assert "fused attention" in stack.describe_source(device, "bfloat16")
    assert "of another framework" in stack_of(device, "a100-megatron").describe_source(device, "bfloat16")


def held(layers: int, hidden: int, heads: int, samples: int, recompute: str) -> MemoryBreakdown:
    """On each of 8 A100 of 80 GB under ZeRO-3, 4,096 positions, GPT-NeoX's vocabulary."""
    graph = gpt(layers, hidden, heads, 4096, 50368, 8)
    p = Pricer(graph, Cluster.parse("dgx-a100-80"), 8 * samples)
    layout = Layout(data=8, zero=3, precision="bfloat16-mixed", recompute=recompute)
    prediction = p.predict(layout, p.stages(layout), [])
    p.check_memory(layout, prediction)  # both ran, and fit: mosaicml/llm-foundry, scripts/train/benchmarking
    return prediction.memory


def test_fused_attention_keeps_no_scores() -> None:
    """Korthikanti et al. 2022, equation 1, without 5as/h: 34 bytes of each layer's s·b·h, less masks where nothing drops out."""
    activations = held(32, 2560, 20, 5, "none").activations
    layers = 4096 * 5 * 2560 * 32
    logits = 4096 * 5 * 50368 * 4
    assert 28 * layers < activations < 34 * layers + 2 * logits
    assert activations < 60 * 2**30


def test_full_recomputation_keeps_what_enters_layers() -> None:
    activations = held(40, 5120, 40, 10, "full").activations
    assert 2 * 4096 * 10 * 5120 * 40 < activations < 2 * 4096 * 10 * 5120 * 40 + 34 * 4096 * 10 * 5120 + 8 * 4096 * 10 * 50368


def test_fused_attention_skips_what_a_causal_mask_hides() -> None:
    """Rates rise with positions and with the size of heads; backward has a rate of its own."""
    stack = replace(IDEAL, attention="fused", attention_peak=0.5, attention_positions=1000.0, attention_head=64.0, attention_backward=0.25)
    full = LocalKernel("attention", 1e12, 2.5e12, 0.0, 1.0, scores=16 * 1000.0**2, heads=16, head_size=64.0)
    causal = replace(full, visible_fraction=0.5)
    rate = 312e12 * 0.5 / (2 * 2)
    assert full.seconds(DEVICE, stack, "float16")[1].forward == pytest.approx(1e12 / rate)
    assert causal.seconds(DEVICE, stack, "float16")[1].forward == pytest.approx(0.5e12 / rate)
    assert causal.seconds(DEVICE, stack, "float16")[1].backward == pytest.approx(0.5 * 2.5e12 / rate / 0.25)
    long = replace(causal, scores=16 * 4000.0**2)
    assert long.seconds(DEVICE, stack, "float16")[1].forward < causal.seconds(DEVICE, stack, "float16")[1].forward


def test_causal_attention_is_read_from_the_graph() -> None:
    def visible(**kwargs: object) -> float:
        graph = gpt(1)
        graph = replace(graph, operators=tuple(
            replace(op, kwargs=tuple(kwargs.items())) if "attention" in op.target else op for op in graph.operators
        ))  # fmt: skip
        kernels = [local.kernel for local in Pricer(graph, A100, 8).sharded_inventory(HALF).compute]
        return next(k.visible_fraction for k in kernels if k.kind == "attention")

    assert (visible(is_causal=True), visible(is_causal=False), visible()) == (0.5, 1.0, 1.0)


def test_products_take_a_beginning_and_lose_rate_under_load() -> None:
    stack = replace(IDEAL, product_s=5e-6, sustained=0.5)
    busy = product(8192, 8192, 8192).seconds(DEVICE, stack, "float16")[1]
    assert busy.forward == pytest.approx(2 * 8192**3 / 156e12 + 5e-6)
    assert busy.backward == pytest.approx(2 * busy.forward)


def test_collectives_inside_a_node_follow_measured_curves() -> None:
    """nccl-tests on 8 H100, NCCL 2.29.2 (aiconfigurator): all-gather of 512 MiB in 1.40 ms, of 512 B in 10 us; all-reduce in 2.11 ms."""
    h100 = Cluster.parse("dgx-h100")
    assert collective_s(h100, "all_gather", 2.0**29, RankGroup(8)) == pytest.approx(1.4015e-3, rel=0.01)
    assert collective_s(h100, "all_reduce", 2.0**29, RankGroup(8)) == pytest.approx(2.11106e-3, rel=0.01)
    assert collective_s(h100, "all_gather", 512, RankGroup(8)) == pytest.approx(10.14e-6, rel=0.01)
    # Among 6, which were not measured, as many bytes through each port as among 8.
    assert collective_s(h100, "all_gather", 2.0**29 * (7 / 8) / (5 / 6), RankGroup(6)) == pytest.approx(1.4015e-3, rel=0.01)
    assert collective_s(h100, "all_gather", 2.0**20, RankGroup(2)) < collective_s(h100, "all_gather", 2.0**20, RankGroup(8))


def test_what_hides_takes_its_part_of_the_compute() -> None:
    """Of collectives that hide wholly, `contention` of their own time shows."""
    layout = replace(HALF, data=8, zero=3)
    none, half = (pricer(stack=replace(stack_of(DEVICE), contention=c), hidden=2048) for c in (0.0, 0.5))
    alone = pricer(stack=replace(stack_of(DEVICE), contention=1.0), hidden=2048).stages(layout)[0].collectives.total
    shown = none.stages(layout)[0].collectives.total
    assert half.stages(layout)[0].collectives.total == pytest.approx((shown + alone) / 2)


def test_a_fit_finds_its_constants_in_spite_of_an_outlier() -> None:
    x = np.linspace(1, 10, 30)
    y = 2.0 + 3.0 * x
    y[7] *= 2
    found = fit(lambda c: np.log((c["a"] + c["b"] * x) / y), {"a": 1.0, "b": 1.0}, limit=0.02)
    assert (found["a"], found["b"]) == (pytest.approx(2.0, rel=0.1), pytest.approx(3.0, rel=0.02))
    bounded = fit(lambda c: np.log((c["a"] + c["b"] * x) / y), {"a": 1.0, "b": 1.0}, bounds={"b": (0.5, 2.0)})
    assert bounded["b"] <= 2.0 + 1e-9
    assert mean_abs([0.1, -0.3]) == pytest.approx(20)
    with pytest.raises(ValueError, match="above zero"):
        fit(lambda c: np.zeros(1), {"a": 0.0})


def experts(count: int = 4) -> Graph:
    """One layer of experts: tokens [E, T, D] times [E, D, F] and back, and a loss that is their mean."""
    t, d, f = 32, 16, 64
    shapes = {"x": (count, t, d), "up": (count, d, f), "down": (count, f, d), "a": (count, t, f), "b": (count, t, d), "loss": ()}
    tensors = {name: Tensor(shape, "float32") for name, shape in shapes.items()}
    return Graph(
        tuple(Variable(v, f"layers.0.{v}", tensors[v], trainable=True) for v in ("up", "down")), (),
        (Variable("x", "x", tensors["x"], batched=True),), (),
        (
            Operator("bmm", "aten.bmm.default", (Ref("x"), Ref("up")), (), ("a",), "layers.0/bmm"),
            Operator("bmm_1", "aten.bmm.default", (Ref("a"), Ref("down")), (), ("b",), "layers.0/bmm#1"),
            Operator("mean", "aten.mean.default", (Ref("b"),), (), ("loss",), "/mean"),
        ),
        tensors, "loss", count,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("equation", "x", "weight", "made", "is_experts"),
    [
        ("ibh,hnd->ibnd", (4, 2, 8), (8, 4, 2), (4, 2, 4, 2), False),  # heads of queries
        ("ibnd,hnd->ibh", (4, 2, 4, 2), (8, 4, 2), (4, 2, 8), False),  # and of what comes out
        ("bind,snd->bnis", (4, 2, 4, 8), (2, 4, 8), (4, 4, 2, 2), False),  # a few directions of every head
        ("end,edf->enf", (4, 2, 8), (4, 8, 6), (4, 2, 6), True),
        ("nd,edf->enf", (2, 8), (4, 8, 6), (4, 2, 6), True),  # every token to every expert
    ],
)
def test_experts_are_told_from_other_weights_of_three_dimensions(
    equation: str, x: tuple[int, ...], weight: tuple[int, ...], made: tuple[int, ...], is_experts: bool
) -> None:
    tensors = {name: Tensor(shape, "float32") for name, shape in {"x": x, "w": weight, "y": made, "loss": ()}.items()}
    graph = Graph(
        (Variable("w", "w", tensors["w"], trainable=True),), (), (Variable("x", "x", tensors["x"], batched=True),), (),
        (
            Operator("einsum", "aten.einsum.default", (equation, (Ref("x"), Ref("w"))), (), ("y",), "/einsum"),
            Operator("mean", "aten.mean.default", (Ref("y"),), (), ("loss",), "/mean"),
        ),
        tensors, "loss", x[0],
    )  # fmt: skip
    assert expert_weights(graph) == ({"w": "einsum"} if is_experts else {})


def test_experts_are_spread_over_data_replicas_and_their_tokens_sent() -> None:
    """Lepikhin et al. 2021 (GShard): an expert's state is on 1/e of the ranks; tokens go there and back, forward and backward."""
    assert expert_weights(experts()) == {"up": "bmm", "down": "bmm_1"}
    p = Pricer(experts(), A100, 32)
    wide = replace(HALF, data=4)
    alone, spread = (p.stages(replace(wide, expert=e))[0] for e in (1, 4))
    assert spread.memory.alone.parameters == pytest.approx(alone.memory.alone.parameters / 4)
    local = 2.0 * 4 * 32 * 16 * 8 / 4  # 16-bit tokens of one replica's 8 of 32 samples, 4 samples a graph
    once = collective_s(A100, "all_to_all", 4 * local, RankGroup(4, 1, 4))
    assert spread.collectives.total - alone.collectives.total == pytest.approx(2 * (2 - stack_of(DEVICE).tensor_overlap) * once, rel=0.01)
    assert (alone.gradients_s > 0, spread.gradients_s) == (True, 0.0)
    # ZeRO divides them further, to the same share of all.
    whole, cut = (p.stages(replace(wide, expert=e, zero=1))[0].memory.alone.optimizer for e in (1, 4))
    assert cut == pytest.approx(whole)


def test_by_hand_stages_have_equally_many_layers() -> None:
    p = pricer(8)
    sites = p.even_stage_sites(Layout(pipeline=4))
    assert sites == tuple(s for s in sites if s.startswith(("h.2.", "h.4.", "h.6.")))
    assert len(sites) == 3
    times = [c.forward_s for c in p.stages(replace(HALF, pipeline=4, microbatches=4), sites)]
    assert times[1] == pytest.approx(times[2], rel=1e-6)
    assert p.even_stage_sites(Layout(pipeline=3)) == ()
    assert p.even_stage_sites(Layout()) == ()
    assert len(p.even_stage_sites(Layout(pipeline=4, microbatches=4, schedule="interleaved", chunks=2))) == 7
    assert Pricer(p.graph, Cluster.parse("4xcpu-2"), 64).even_stage_sites(Layout(pipeline=4)) == ()


def test_weights_that_move_do_so_every_microbatch() -> None:
    """Whatever batch a graph was captured at, the price is the same: weights that move are weighed once a microbatch."""
    layout = Layout.parse("tensor=4 data=2 microbatches=32 precision=float16")
    small, large = (Pricer(gpt(3, 256, 8, 128, 4096, batch), A100, 64) for batch in (2, 64))
    one, other = (p.stages(layout)[0] for p in (small, large))
    assert other.collectives.total == pytest.approx(one.collectives.total, rel=0.02)
    assert other.compute.total == pytest.approx(one.compute.total, rel=0.02)


def test_a_measured_card_is_priced_with_its_own_rates() -> None:
    """Each kernel takes its units over the rate that was measured of its kind and precision; what was not keeps the set's."""
    rates = (("convolution.float32", 2e13), ("convolution.bfloat16", 1e14), ("norm", 5e11), ("cast", 4e11))
    speed = Speed(1, 0, (("float32", 5e13), ("bfloat16", 8e14)), 1e12, 8e-6, rates)
    device = replace(DEVICE, peak_flops=speed.flops, memory_bandwidth_bytes_per_s=1e12)
    card = with_measured_rates(stack_of(device, "eager"), device, speed)
    assert (card.name, card.autocast, card.launch_s) == ("eager", True, 8e-6)
    convolution = LocalKernel("convolution", 1e12, 2e12, 1e9, 2e9)
    for precision, rate in (("float32", 2e13), ("bfloat16", 1e14)):
        busy = convolution.seconds(device, card, precision, eager=True)[1]
        assert (busy.forward, busy.backward) == (pytest.approx(1e12 / rate), pytest.approx(2e12 / rate))
    norm = LocalKernel("norm", 0.0, 0.0, 1e9, 2e9, cast_bytes=8e8)
    busy = norm.seconds(device, card, "bfloat16", eager=True)[1]
    assert (busy.forward, busy.backward) == (pytest.approx(1e9 / 5e11 + 8e8 / 4e11), pytest.approx(2e9 / 5e11))
    # Without rates of its own, convolutions reach what products do, and have their operands laid out anew.
    by_name = convolution.seconds(device, replace(card, convolution=()), "bfloat16", eager=True)[1]
    assert by_name.forward > 1e12 / 8e14 + 2e9 / 1e12 * 0.99


def test_autocast_keeps_weights_in_float32_and_compiled_operators_keep_16_bits() -> None:
    cluster = Cluster.parse("dgx-a100-80@eager")
    p = Pricer(gpt(4, 256, 8, 128, 512, 8), cluster, 8)
    eager, compiled = (p.stages(Layout(precision="bfloat16", compile=how))[0] for how in ("off", "on"))
    number = p.graph.num_parameters
    assert eager.memory.alone.parameters == compiled.memory.alone.parameters == pytest.approx(4 * number)
    assert eager.memory.alone.optimizer == pytest.approx(8 * number)
    assert eager.memory.alone.activations > 1.1 * compiled.memory.alone.activations
    assert eager.forward_s > compiled.forward_s
    assert eager.memory.alone.parameters == 2 * Pricer(p.graph, A100, 8).stages(HALF)[0].memory.alone.parameters
