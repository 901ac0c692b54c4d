"""What each layer costs under each way of cutting it, against closed forms and against the prices of the whole model."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from shardwise.cli import run
from shardwise.cli.pricing_context import PricingContext
from shardwise.cluster.cluster import Cluster
from shardwise.cost.operators.layers import Layer, LayerSharding, price_layers
from shardwise.cost.operators.operators import OperatorPricer
from shardwise.cost.operators.sharded_inventory import total_saved
from shardwise.plan.layout import Layout

BATCH, RANKS = 8, 4
GPT, SEQUENCE, HIDDEN, VOCABULARY = "gpt:layers=3,hidden=64,heads=4,sequence=32,vocabulary=128", 32, 64, 128
RESNET, IMAGE = "resnet-18:image=64", 64
HALO = (RANKS - 1) / RANKS  # of the whole that a rank sends to gather or scatter it


def of(model: str, cluster: str = "1xcpu-8", ranks: int = RANKS, precision: str = "float32") -> tuple[PricingContext, tuple[Layer, ...]]:
    setting = PricingContext(model, Cluster.parse(cluster), BATCH)
    return setting, price_layers(setting.graph, setting.cluster, BATCH, ranks, precision)


def way(found: tuple[Layer, ...], site: str, kind: str) -> LayerSharding:
    (layer,) = (one for one in found if one.site.startswith(site))
    return next(one for one in layer.shardings if one.kind == kind)


@pytest.fixture(scope="module")
def gpt() -> tuple[PricingContext, tuple[Layer, ...]]:
    return of(GPT)


def test_a_product_sends_what_the_lecture_says(gpt: tuple[PricingContext, tuple[Layer, ...]]) -> None:
    """Outputs cut: the gradient of B x C_in is summed; inputs: the result of B x C_out; samples: that of C_out x C_in (and the bias)."""
    rows, up = BATCH * SEQUENCE * 4.0, HIDDEN * 4
    by = {kind: way(gpt[1], "layers.*.mlp.up", kind) for kind in ("samples", "outputs", "inputs", "positions")}
    assert (by["outputs"].forward_bytes, by["outputs"].backward_bytes) == (0.0, 2 * HALO * rows * HIDDEN)
    assert (by["inputs"].forward_bytes, by["inputs"].backward_bytes) == (2 * HALO * rows * up, 0.0)
    assert (by["samples"].forward_bytes, by["samples"].gradient_bytes) == (0.0, 2 * HALO * 4 * (HIDDEN * up + up))
    assert by["positions"].gradient_bytes == by["samples"].gradient_bytes
    assert by["outputs"].gradient_bytes == by["inputs"].gradient_bytes == 0.0  # the bias is added once, to the sum
    assert {one.flops for one in by.values()} == {6 * BATCH * SEQUENCE * HIDDEN * up / RANKS}
    # Beside whole neighbours the result is gathered, and the gradient of what was sliced.
    assert by["outputs"].moved_bytes == pytest.approx(HALO * rows * up)
    assert by["inputs"].moved_bytes == pytest.approx(HALO * rows * HIDDEN)


def test_attention_by_positions_gathers_keys_and_values(gpt: tuple[PricingContext, tuple[Layer, ...]]) -> None:
    """As context parallelism has it: of keys and values a rank gathers what others have, and scatters their gradients."""
    found = way(gpt[1], "layers.*.attention/scaled_dot_product", "positions")
    both = 2 * BATCH * SEQUENCE * HIDDEN * 4.0
    assert (found.forward_bytes, found.backward_bytes) == (HALO * both, HALO * both)
    assert found.layout.startswith("data=1 tensor=1 pipeline=1 context=4")
    heads = way(gpt[1], "layers.*.attention/scaled_dot_product", "heads")
    assert (heads.forward_bytes, heads.flops) == (0.0, found.flops)


def test_pieces_of_an_image_send_their_borders() -> None:
    """A kernel of 3 with stride 1 reads a row of each neighbour: B x C x W entries, of two neighbours where a rank has both."""
    _, found = of(RESNET)
    alike = [one for one in found if one.operator == "conv2d" and one.shape == (BATCH, 64, IMAGE // 4, IMAGE // 4)]
    layer = alike[0]
    strips = next(one for one in layer.shardings if one.kind == "height")
    border = BATCH * 64 * (IMAGE // 4) * 4.0
    assert (strips.forward_bytes, strips.backward_bytes) == (2 * border, 2 * border)
    assert sum(one.count for one in alike) == 4  # both convolutions of two blocks
    filters = next(one for one in layer.shardings if one.kind == "outputs")
    assert filters.backward_bytes == 2 * HALO * BATCH * 64 * (IMAGE // 4) ** 2 * 4
    assert (filters.parameter_bytes, strips.parameter_bytes) == (64 * 64 * 9, 64 * 64 * 9 * 4.0)


@pytest.mark.parametrize("model", [GPT, RESNET, "lstm:layers=2,hidden=64", "moe-380m:layers=2"])
def test_whole_layers_make_up_the_whole_model(model: str) -> None:
    """FLOPs, weights, seconds and what is kept, summed over layers, are what one rank of the whole model has."""
    setting, found = of(model)
    pricer = OperatorPricer(setting.graph, setting.cluster, BATCH)

    def total(what: Callable[[LayerSharding], float]) -> float:
        return sum(one.count * what(one.shardings[0]) for one in found)

    assert total(lambda w: w.flops) == pytest.approx(sum(one.flops + one.backward_flops for one in pricer.inventory.works.values()))
    tied = sum(v.tensor.size_bytes * (sum(v.value in op.inputs for op in setting.graph.operators) - 1) for v in setting.graph.parameters)
    assert total(lambda w: w.parameter_bytes) == sum(v.tensor.size_bytes for v in setting.graph.parameters) + tied
    layout = Layout()
    kept = total_saved(pricer.sharded_inventory(layout), range(len(setting.graph.operators))).at(1.0, 1)
    assert total(lambda w: w.kept_bytes) == pytest.approx(kept, rel=1e-3)
    forward, backward, *_ = pricer.operator_seconds(layout)
    at = {op.name: i for i, op in enumerate(setting.graph.operators)}
    for one in found:
        assert one.shardings[0].compute_s == pytest.approx(float(forward[at[one.first]] + backward[at[one.first]]), rel=0.02), one.site


def test_autocast_keeps_copies_of_layers() -> None:
    """Of weights each once, of operands each for its operator: no less than the whole model keeps, and alike in both dtypes of 16 bits."""
    setting, narrow = of(GPT, ranks=1, precision="bfloat16")
    kept = [sum(one.count * one.shardings[0].kept_bytes for one in found) for found in (narrow, of(GPT, ranks=1, precision="float16")[1])]
    layout, pricer = Layout(precision="bfloat16"), OperatorPricer(setting.graph, setting.cluster, BATCH)
    assert kept[0] == kept[1] >= total_saved(pricer.cast_sharded_inventory(layout), range(len(setting.graph.operators))).at(1.0, 1)


def test_experts_exchange_tokens_where_replicas_sum_weights() -> None:
    """All-to-all of what is dispatched, E x C x M: of its piece a rank keeps one of n parts; weights are divided, and nothing is summed."""
    _, found = of("moe-380m:layers=2", "p3.16xlarge", precision="float16")
    layer = next(one for one in found if any(w.kind == "experts" for w in one.shardings))
    experts, samples = (next(w for w in layer.shardings if w.kind == kind) for kind in ("experts", "samples"))
    read = layer.shardings[0].kept_bytes  # what it reads, in 16 bits
    assert experts.forward_bytes == experts.backward_bytes == pytest.approx(read / RANKS * HALO)
    assert experts.parameter_bytes == samples.parameter_bytes / RANKS
    assert experts.gradient_bytes == 0 < samples.gradient_bytes
    assert experts.flops == samples.flops


def test_one_rank_has_no_way_but_whole(gpt: tuple[PricingContext, tuple[Layer, ...]]) -> None:
    assert all([w.kind for w in one.shardings] == ["whole"] for one in of(GPT, ranks=1)[1])
    assert all(one.shardings[0].communication_s == one.shardings[0].gradient_s == 0.0 for one in gpt[1])


def test_the_table_marks_what_a_plan_cuts(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    words = ["plan", GPT, "--cluster", "p4d.24xlarge", "--batch", "8", "--layout", "data=2 tensor=2", "--by-layer"]
    assert run([*words, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert answer["layer_ranks"] == 4
    by_site = {one["site"]: {w["kind"]: w["plan"] for w in one["ways"]} for one in answer["layers"]}
    assert by_site["layers.*.mlp.up/linear"] == {"whole": None, "samples": "data", "positions": None, "outputs": "tensor", "inputs": None}
    assert by_site["layers.*.mlp.down/linear"]["inputs"] == "tensor"
    assert run(words) == 0
    shown = capfd.readouterr().out
    assert "layers.*.mlp.up x3" in shown
