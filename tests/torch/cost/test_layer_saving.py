"""What software's layers save and run again (`cost.operators.layer_saving`), by closed forms of a Llama's layer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from shardwise.cli.pricing_context import PricingContext
from shardwise.cluster.cluster import Cluster
from shardwise.cost.calibration.efficiency import EfficiencySet, stack_of
from shardwise.cost.devices.devices import AS_COUNTED, LayerSaving
from shardwise.cost.operators.layer_saving import apply_layer_saving, without_last_products
from shardwise.cost.operators.sharded_inventory import ShardedInventory, total_saved
from shardwise.cost.step import Pricer
from shardwise.plan.layout import Layout

HIDDEN, KEYS, INNER, POSITIONS, VOCABULARY = 256, 64, 768, 128, 512
MODEL = f"llama:vocabulary={VOCABULARY},sequence={POSITIONS},hidden={HIDDEN},layers=3,heads=8,kv_heads=2,inner={INNER}"
PLAIN = Layout.parse("precision=bfloat16-mixed")


@cache
def pricer(machine: str = "dgx-h100@h100-megatron-core") -> Pricer:
    cluster = Cluster.parse(machine)
    return Pricer(PricingContext(MODEL, cluster, 8).graph, cluster, 8)


def changed(**figures: object) -> Pricer:
    """A pricer of torch's set with figures of other software."""
    base = pricer("2xdgx-h100")
    stack: EfficiencySet = replace(stack_of(base.cluster.device), **figures)  # type: ignore[arg-type]
    return base.with_changes(stack)


def inventory() -> ShardedInventory:
    return pricer().sharded_inventory(PLAIN)


def layer_bytes(parts: ShardedInventory) -> float:
    """16-bit bytes a token that the middle layer saves, besides statistics."""
    operators = [i for i, block in enumerate(parts.blocks) if block == "layers.1"]
    saved = total_saved(replace(parts, extra_bytes=np.zeros_like(parts.extra_bytes)), operators, half=True)
    return saved.at(1.0, 1) / (8 * POSITIONS)


def test_a_layer_saves_what_the_closed_forms_say() -> None:
    """Norms' and products' inputs, queries, keys, values and result of attention; gate, up and what is made of them."""
    attention, both = 2 * (2 * HIDDEN + 2 * KEYS), 2 * HIDDEN  # q, o, k, v; the input of a norm
    plain = layer_bytes(inventory())
    assert plain == pytest.approx(attention + 2 * both + 2 * 2 * HIDDEN + 2 * 4 * INNER, rel=0.01)
    fused = layer_bytes(apply_layer_saving(inventory(), LayerSaving(fuses_activations=True)))
    assert plain - fused == pytest.approx(2 * INNER)  # the activation itself
    narrow = layer_bytes(apply_layer_saving(inventory(), LayerSaving(fuses_activations=True, narrows_operands=True)))
    # Operands of products in 8 bits: of two norms and of the product that the activation ends in; the result of attention is there twice.
    assert narrow - fused == pytest.approx(-2 * HIDDEN - INNER + HIDDEN)
    compiled = layer_bytes(apply_layer_saving(inventory(), LayerSaving(fuses_layers=True)))
    assert compiled == pytest.approx(attention + 2 * both + 2 * 2 * INNER, rel=0.01)


def test_nothing_changes_where_nothing_is_asked_for() -> None:
    assert apply_layer_saving(inventory(), AS_COUNTED) is inventory()


@pytest.mark.parametrize(("fraction", "expected"), [(0.5, ["k", "o", "up"]), (0.0, ["q", "k", "v", "o", "gate", "up", "down"])])
def test_of_two_products_the_second_runs_again(fraction: float, expected: list[str]) -> None:
    """As torchtitan counts them: q, k, v, o, gate, up, down."""
    parts, operators = inventory(), pricer().graph.operators
    cheap = apply_layer_saving(parts, LayerSaving(saved_products=fraction)).cheap
    again = [i for i, block in enumerate(parts.blocks) if block == "layers.1" and cheap[i] and not parts.cheap[i]]
    assert [operators[i].site.rpartition("/")[0].rpartition(".")[2] for i in again] == expected


def test_products_that_run_again_take_time_and_save_bytes() -> None:
    layout = replace(PLAIN, recompute="cheap")
    costs = [changed(saved_products=fraction).stages(layout)[0] for fraction in (1.0, 0.5, 0.0)]
    times, saved = [one.compute.backward for one in costs], [one.memory.saved_bytes for one in costs]
    assert times == sorted(times)
    assert saved == sorted(saved, reverse=True)
    assert len(set(times)) == len(set(saved)) == 3


def test_recomputation_that_stops_early_leaves_the_last_product_out() -> None:
    parts = inventory()
    operators = np.arange(len(parts.blocks))
    again = without_last_products(parts, operators, parts.in_block)
    names = [op.site for op, left_out in zip(pricer().graph.operators, parts.in_block & ~again, strict=True) if left_out]
    products = [name for name in names if name.endswith("linear")]
    assert products == [f"layers.{n}.mlp.down/linear" for n in range(3)]
    layout = replace(PLAIN, recompute="full")
    early, whole = (changed(stops_early=stops).stages(layout)[0].compute.backward for stops in (True, False))
    assert early < whole


def test_a_loss_in_place_saves_its_logits_alone() -> None:
    counted, in_place, wide = (
        changed(**figures).stages(PLAIN)[0].memory.alone for figures in ({}, {"has_loss_in_place": True}, {"has_float32_loss": True})
    )
    logits = 8 * POSITIONS * VOCABULARY
    assert counted.activations - in_place.activations == pytest.approx(2 * logits)
    assert wide.total > counted.total > in_place.total


def test_weights_are_gathered_once_for_recomputation_and_backward() -> None:
    layout = Layout.parse("data=16 zero=3 recompute=full precision=bfloat16-mixed")
    prices = [changed(gathers_once=once, overlap=0.0, zero_overlap=0.0, contention=0.0).stages(layout)[0] for once in (True, False)]
    once, twice = (one.collectives.backward for one in prices)
    assert twice - once == pytest.approx(prices[0].collectives.forward)


def test_what_lies_behind_samples_is_copied() -> None:
    """Gathers and scatters over tensor ranks read and write their whole tensor once more, but where there is one sample."""
    layout = Layout.parse("tensor=8 sequence_parallel=on precision=bfloat16-mixed")
    single = replace(layout, microbatches=8)
    for one, is_copied in ((layout, True), (single, False)):
        plain, copied = (changed(copies_pieces=copies).stages(one)[0].collectives.total for copies in (False, True))
        assert (copied > plain) is is_copied


def test_sums_of_gradients_that_a_pipeline_defers_hide_behind_nothing() -> None:
    layout = Layout.parse("data=4 pipeline=3 zero=2 microbatches=2 scatter=last precision=bfloat16-mixed")
    hidden, deferred = (changed(defers_sums=defers).with_buckets(1 << 16) for defers in (False, True))
    sites = hidden.even_stage_sites(layout)
    prices = [max(cost.gradients_s for cost in one.stages(layout, sites)) for one in (hidden, deferred)]
    assert prices[1] > prices[0]
    each = replace(layout, scatter="each")  # only what waits for the last microbatch is deferred
    assert hidden.stages(each, sites)[0].gradients_s == deferred.stages(each, sites)[0].gradients_s


def test_stages_receive_their_shard_of_what_others_send() -> None:
    """Positions that tensor ranks share are received as pieces, and counted as such."""
    layout = Layout.parse("tensor=8 pipeline=3 sequence_parallel=on precision=bfloat16-mixed microbatches=2")
    base = changed()
    whole, cut = (base.stages(one, base.even_stage_sites(one))[1].memory for one in (replace(layout, tensor=1), layout))
    assert whole.entering_bytes == pytest.approx(8 * cut.entering_bytes) == pytest.approx(2 * 4 * POSITIONS * HIDDEN)
