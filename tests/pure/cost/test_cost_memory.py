"""Memory against published formulas: activations of Korthikanti et al. 2022, state of Rajbhandari et al. 2020, interleaved microbatches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cluster.cluster import Cluster
from shardwise.cost.calibration.efficiency import EfficiencySet, stack_of
from shardwise.cost.devices import devices_of
from shardwise.cost.devices.devices import Devices
from shardwise.cost.step import Pricer
from shardwise.plan.layout import Layout
from shardwise.schedules import schedule_of
from tests.support.gpt_graph import gpt

S, B, H, A = 128, 4, 256, 8  # sequence, microbatch, hidden, heads
A100 = Cluster.parse("4xdgx-a100-80")
PLAIN = Layout(precision="float16")


def pricer(layers: int, attention: str = "scores") -> Pricer:
    graph = gpt(layers, H, A, S, 64, B)
    return Pricer(graph, A100, B, stack=replace(stack_of(A100.device), attention=attention))


def layer_bytes(layout: Layout, attention: str = "scores") -> float:
    """Activations of one layer: what two more layers add, halved; the first and the last are not like the others."""
    few, more = (pricer(n, attention).stages(layout)[0].memory.alone.activations for n in (3, 5))
    return (more - few) / 2


def test_activations_of_a_layer_are_korthikantis() -> None:
    """Equation 1, sbh(34 + 5as/h), less the two masks of dropout (2sbh) that this model does not have; its scores with masks (5as/h)."""
    assert layer_bytes(PLAIN) == pytest.approx(S * B * H * (32 + 5 * A * S / H), rel=0.01)


def test_selective_recomputation_keeps_no_scores() -> None:
    """Section 5: 34sbh."""
    assert layer_bytes(replace(PLAIN, recompute="selective")) == pytest.approx(S * B * H * 32, rel=0.01)
    assert layer_bytes(PLAIN, "fused") == pytest.approx(S * B * H * 32, rel=0.01)


def test_full_recomputation_keeps_what_enters_a_layer() -> None:
    """Section 5: 2sbh."""
    assert layer_bytes(replace(PLAIN, recompute="full")) == pytest.approx(2 * S * B * H, rel=0.01)


def test_tensor_parallelism_leaves_ten_parts_whole_and_sequence_parallelism_none() -> None:
    """Equations 2 and 4: sbh(10 + 24/t + 5as/(ht)), and all of it divided by t; less the masks."""
    t = 4
    wide = replace(PLAIN, tensor=t)
    assert layer_bytes(wide) == pytest.approx(S * B * H * (8 + 24 / t + 5 * A * S / H / t), rel=0.02)
    cut = replace(wide, sequence_parallel="on")
    assert layer_bytes(cut) == pytest.approx(S * B * H * (32 + 5 * A * S / H) / t, rel=0.02)


def test_broken_twin_scores_that_are_not_counted_miss_the_formula() -> None:
    assert layer_bytes(PLAIN, "fused") < 0.9 * S * B * H * (32 + 5 * A * S / H)


@given(st.integers(0, 3), st.sampled_from([1, 2, 4]))
def test_state_in_mixed_precision_is_sixteen_bytes_a_parameter(zero: int, data: int) -> None:
    """2 + 2 + 12 bytes: weights and gradients in 16 bits, a float32 copy and two moments; each ZeRO stage divides one more."""
    p = PRICERS["two"]
    layout = replace(PLAIN, data=data, zero=zero)
    memory, number = p.stages(layout)[0].memory.alone, p.graph.num_parameters
    assert memory.parameters == pytest.approx(2 * number / (data if zero == 3 else 1))
    assert memory.gradients == pytest.approx(2 * number / (data if zero >= 2 else 1))
    assert memory.optimizer == pytest.approx(12 * number / (data if zero else 1))


PRICERS = {"two": pricer(2)}


def test_widths_by_precision_and_device() -> None:
    cores = devices_of(Cluster.parse("1xcpu-2"))
    gpus = devices_of(Cluster.parse("dgx-a100-80"), EfficiencySet("own", gradient_bytes=2.0))

    def total(devices: Devices, precision: str) -> float:
        w = devices.widths(Layout(precision=precision))
        return w.weight + w.gradient + w.copies + 2 * w.moment

    assert [total(one, "float32") for one in (cores, gpus)] == [16, 16]
    assert total(cores, "bfloat16") == 16  # autocast over float32 weights
    assert [total(gpus, "float16"), total(gpus, "bfloat16")] == [16, 18]
    assert [total(one, "float64") for one in (cores, gpus)] == [32, 32]


def test_interleaved_microbatches_in_flight() -> None:
    """Korthikanti et al. 2022, section 4.2.3: L(1 + (p - 1)/(pv)) layers' activations on the first rank."""
    p, v = 4, 3
    many, few = (schedule_of(Layout(pipeline=p, microbatches=m, schedule="interleaved", chunks=v)) for m in (64, 2))
    assert many.in_flight(0) == pytest.approx(p * (1 + (p - 1) / (p * v)))
    assert many.in_flight(p - 1) < many.in_flight(0)
    assert few.in_flight(0) == 2


def test_offload_empties_the_device() -> None:
    p = pricer(6)
    plain, moved = (p.stages(replace(PLAIN, offload=o))[0] for o in ("none", "all"))
    assert moved.memory.alone.optimizer == 0
    assert moved.memory.alone.activations < plain.memory.alone.activations
    assert moved.optimizer_s > plain.optimizer_s
