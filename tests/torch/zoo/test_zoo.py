"""Models of the zoo against published counts, closed forms, and what must hold for any such model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwise.capture.capture import call_with_loss, capture
from shardwise.capture.initialization import DeferredInit
from shardwise.errors import ModelError
from shardwise.model.work import operator_work
from shardwise.zoo import bert, gpt, inception, lstm, moe, resnet_v2, shared_layers, t5, unet
from shardwise.zoo.names import FAMILIES, find, published_sizes

TINY = sorted(name for name in published_sizes() if name.endswith("-tiny"))
BIG = ("gpt-175b", "megatron-1t", "llama-405b")  # their layers are counted in closed form

# As the authors' released weights have them (torchvision for images, the original checkpoints for text), or as papers count them.
PUBLISHED = {
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "convlstm-7.6m": 7_585_296,
    "inception-v1": 6_624_904 + 16 * sum(before * filters for *_, before, filters, _ in inception.MODULES),  # whose 5x5 are 3x3 there
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "resnet-18": 11_689_512,
    "resnet-34": 21_797_672,
    "resnet-50": 25_557_032,
    "resnet-101": 44_549_160,
    "resnet-152": 60_192_808,
    "resnext-50": 25_028_904,
    "resnext-101": 44_177_704,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "unet3d-19m": 19_069_955,
    "vit-b": 86_567_656,
    "vit-l": 304_326_632,
    "vit-h": 632_045_800,
}

# As the papers round them.
ROUNDED = {
    "gpt-10m": 10e6, "gpt-50m": 50e6, "gpt-125m": 125e6, "gpt-350m": 350e6, "gpt-760m": 760e6, "gpt-1.3b": 1.3e9, "gpt-2.6b": 2.6e9,
    "gpt-6.7b": 6.7e9, "gpt-15b": 15e9, "gpt-39b": 39e9,
    "moe-380m": 380e6, "moe-690m": 690e6, "moe-1.3b": 1.3e9, "moe-2.4b": 2.4e9, "moe-10b": 10e9, "moe-27b": 27e9, "moe-70b": 70e9,
    "wide-resnet-250m": 250e6, "wide-resnet-500m": 500e6, "wide-resnet-1b": 1e9, "wide-resnet-2b": 2e9, "wide-resnet-4b": 4e9,
    "wide-resnet-6.8b": 6.8e9, "wide-resnet-13b": 13e9,
    "lstm-medium": 20e6, "lstm-large": 66e6, "resnet-1k": 30e6, "unet-31m": 31e6,
    "amoebanet-d-82m": 82e6, "amoebanet-d-318m": 318e6, "amoebanet-d-542m": 542e6, "amoebanet-d-1b": 1.05e9, "amoebanet-d-1.8b": 1.8e9,
    "dlrm-540m": 540e6,
}  # fmt: skip


def num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def on_meta(name: str) -> nn.Module:
    family, config = find(name)
    with torch.device("meta"):
        return family.make_model(config)


def tiny(name: str) -> tuple[nn.Module, dict[str, torch.Tensor], object]:
    family, config = find(name)
    torch.manual_seed(0)
    return family.make_model(config), family.example_batch(config, 8), family.loss


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert num_parameters(on_meta(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_are_as_many_as_the_papers_say(name: str) -> None:
    assert num_parameters(on_meta(name)) == pytest.approx(ROUNDED[name], rel=0.09 if name == "gpt-10m" else 0.04)


def test_every_size_is_counted() -> None:
    assert {*PUBLISHED, *ROUNDED, *TINY, *BIG, *(f"megatron-{size}" for size in MEGATRON)} == set(published_sizes())
    assert {name.removesuffix("-tiny") for name in TINY} - {"gshard", "resnext"} == set(FAMILIES)  # kinds of moe and resnet


@pytest.mark.parametrize("name", [name for name in gpt.SIZES if name not in BIG])
def test_a_gpt_has_the_parameters_of_the_closed_form(name: str) -> None:
    assert num_parameters(on_meta(name)) == find(name)[1].num_parameters


def test_the_largest_gpts_are_of_the_published_size() -> None:
    """Narayanan et al. 2021, equation 2, without the biases that it leaves out: 12 L D^2 (1 + 13/12D + (V + S)/12LD)."""
    for name, published in (("gpt-175b", 175e9), ("megatron-1t", 1008e9)):
        c = find(name)[1]
        equation = 12 * c.layers * c.hidden**2 * (1 + 13 / (12 * c.hidden) + (c.vocabulary + c.sequence) / (12 * c.layers * c.hidden))
        assert c.num_parameters == pytest.approx(equation, rel=1e-6)
        assert c.num_parameters == pytest.approx(published, rel=0.01)


# Narayanan et al. 2021, table 1, in billions; 22: Korthikanti et al. 2022, table 3.
MEGATRON = {
    "1.7b": 1.7, "3.6b": 3.6, "7.5b": 7.5, "18b": 18.4, "22b": 22, "39b": 39.1, "76b": 76.1, "145b": 145.6, "310b": 310.1, "530b": 529.6,
    "1t": 1008.0,
}  # fmt: skip


@pytest.mark.parametrize("size", MEGATRON)
def test_sizes_of_megatron_lm_are_as_published(size: str) -> None:
    config = find(f"megatron-{size}")[1]
    assert config.num_parameters / 1e9 == pytest.approx(MEGATRON[size], abs=0.06, rel=0.005)


def test_the_largest_llama_by_layers() -> None:
    """Two depths give what one layer has; 126 of them make the published 405,853,388,800."""
    one, two = (num_parameters(on_meta(f"llama-405b:layers={n}")) for n in (1, 2))
    assert one + 125 * (two - one) == 405_853_388_800


@settings(max_examples=20, deadline=None)
@given(
    heads=st.integers(1, 4), head_dim=st.sampled_from([2, 4, 6]), layers=st.integers(1, 3), vocabulary=st.integers(2, 40),
    sequence=st.integers(1, 20), inner=st.integers(0, 30), rotary=st.booleans(), tied=st.booleans(),
)  # fmt: skip
def test_any_gpt_has_the_parameters_of_the_closed_form(
    heads: int, head_dim: int, layers: int, vocabulary: int, sequence: int, inner: int, rotary: bool, tied: bool
) -> None:
    config = gpt.GPTConfig(vocabulary, sequence, heads * head_dim, layers, heads, inner, "rotary" if rotary else "learned", tied)
    model = gpt.GPT(config)
    assert num_parameters(model) == config.num_parameters
    assert model(gpt.example_batch(config, 2)["input_ids"]).shape == (2, sequence, vocabulary)


@pytest.mark.parametrize(("base", "depth", "classes"), [(64, 4, 2), (8, 2, 4)])
def test_a_unet_has_the_parameters_of_the_closed_form(base: int, depth: int, classes: int) -> None:
    """Two 3x3 convolutions and their norms a level on the way down, the same and a 2x2 convolution with bias on the way up."""
    widths = [base * 2**level for level in range(depth + 1)]
    down = sum(9 * (c * out + out * out) + 4 * out for c, out in zip([1, *widths], widths, strict=False))
    up = sum(4 * 2 * w * w + w + 9 * (2 * w * w + w * w) + 4 * w for w in widths[:-1])
    model = unet.UNet(unet.UNetConfig(base=base, depth=depth, image=32, classes=classes))
    assert num_parameters(model) == down + up + base * classes + classes


@pytest.mark.parametrize("name", ["lstm-tiny", "lstm-medium", "lstm-large"])
def test_an_lstm_has_the_parameters_of_the_closed_form(name: str) -> None:
    """Four gates of D x 2D and two biases a layer."""
    c = lstm.SIZES[name]
    assert num_parameters(on_meta(name)) == 2 * c.vocabulary * c.hidden + c.vocabulary + c.layers * 4 * (2 * c.hidden**2 + 2 * c.hidden)


def test_resnet_1k_has_1001_layers() -> None:
    convolutions = sum(isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1) for m in on_meta("resnet-1k").modules())
    assert convolutions == 1 + 3 * 111  # a stem, and one 3x3 in each of 3 x 111 bottlenecks of three layers
    assert 9 * resnet_v2.SIZES["resnet-1k"].blocks + 2 == 1001


@pytest.mark.parametrize("name", TINY)
def test_a_step_reaches_every_parameter(name: str) -> None:
    model, batch, loss = tiny(name)
    value = call_with_loss(model, batch, loss)
    value.backward()
    assert torch.isfinite(value)
    without = [n for n, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all() or not p.grad.abs().sum()]
    assert without == []


@pytest.mark.parametrize("name", TINY)
def test_a_model_starts_from_about_the_uniform_loss(name: str) -> None:
    model, batch, loss = tiny(name)
    config = find(name)[1]
    uniform = math.log(getattr(config, "vocabulary", None) or config.classes)
    # T5 starts from logits of variance 1, networks with norms before the head from a little spread.
    assert uniform - 0.5 < call_with_loss(model, batch, loss).item() < uniform + 1.5


@pytest.mark.parametrize("name", TINY)
def test_a_model_runs_in_float64(name: str) -> None:
    model, batch, loss = tiny(name)
    single = call_with_loss(model.eval(), batch, loss).item()
    double = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    value = call_with_loss(model.double(), double, loss)
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(single, rel=1e-4)


@pytest.mark.parametrize("name", TINY)
def test_a_model_is_exported_in_train_mode(name: str) -> None:
    family, config = find(name)
    with DeferredInit() as deferred:
        model = family.make_model(config)
    captured = capture(model, family.example_batch(config, 8), family.loss, fake_mode=deferred.fake_mode)
    assert captured.graph.num_parameters == num_parameters(on_meta(name))
    assert len(captured.graph.operators) >= 8  # that eight stages can be cut


@pytest.mark.parametrize("name", TINY)
def test_samples_do_not_mix(name: str) -> None:
    """In evaluation, a sample's output is its own, whatever else is in the batch."""
    model, batch, _ = tiny(name)
    model.eval()
    # Norms of images start with running statistics of 0 and 1, as good as any.
    outputs = [model(**batch), model(**{k: v[3:4] for k, v in batch.items()})]
    whole, alone = (output[0] if isinstance(output, tuple) else output for output in outputs)
    torch.testing.assert_close(whole[3:4], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TINY)
def test_batches_are_reproducible_and_samples_differ(name: str) -> None:
    family, config = find(name)
    batch, again, other = (family.example_batch(config, 8, seed) for seed in (0, 0, 7))
    for key, value in batch.items():
        assert value.shape[0] == 8
        assert torch.equal(value, again[key])
        assert not torch.equal(value, other[key])
    first = next(iter(batch.values()))
    assert len({tuple(row.flatten().tolist()) for row in first}) == 8


@pytest.mark.parametrize("name", TINY)
def test_batches_are_in_range(name: str) -> None:
    family, config = find(name)
    batch = family.example_batch(config, 64)
    for key, value in batch.items():
        if key in ("input_ids", "decoder_input_ids", "labels"):
            most = config.classes if hasattr(config, "classes") else config.vocabulary
            kept = value[value != -100]
            assert kept.min() >= 0
            assert most / 2 <= kept.max() < most


def test_bert_hides_what_it_asks_for() -> None:
    config = bert.SIZES["bert-tiny"]
    batch = bert.example_batch(config, 64)
    asked = batch["labels"] != -100
    assert (batch["input_ids"][asked] == config.mask_id).all()
    assert asked.sum(1).min() >= 1
    assert asked.float().mean().item() == pytest.approx(0.15, abs=0.02)
    assert set(batch["token_type_ids"].unique().tolist()) == {0, 1}


@pytest.mark.parametrize("name", ["gpt-tiny", "gpt-tiny:positions=rotary", "llama-tiny", "moe-tiny", "lstm-tiny"])
def test_a_decoder_does_not_see_the_future(name: str) -> None:
    model, batch, _ = tiny(name)
    ids = batch["input_ids"]
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 96
    before, after = (output[0] if isinstance(output, tuple) else output for output in (model(ids), model(changed)))
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert ((before[:, 9:] - after[:, 9:]).abs().amax((0, 2)) > 0).all()


def test_an_encoder_sees_all() -> None:
    """The twin of the test above: BERT fails it."""
    model, batch, _ = tiny("bert-tiny")
    changed = batch["input_ids"].clone()
    changed[:, 9] = (changed[:, 9] + 1) % 96
    before, after = (model(ids, batch["token_type_ids"]) for ids in (batch["input_ids"], changed))
    assert not torch.allclose(before[:, :9], after[:, :9])


def test_experts_are_those_of_a_loop_over_tokens() -> None:
    config = moe.MoEConfig(hidden=6, heads=1, experts=4, inner=10, layers=1)
    torch.manual_seed(0)
    experts = moe.Experts(config).double()
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    got, imbalance = experts(x)
    expected_imbalance = 0.0
    for sample in range(3):
        shares = torch.softmax(x[sample] @ experts.gate.weight.T, -1)
        counts = torch.bincount(shares.argmax(-1), minlength=4) / 5
        expected_imbalance += 4 * (counts * shares.mean(0)).sum().item() / 3
        for token in range(5):
            first, second = shares[token].argsort(descending=True)[:2].tolist()
            total = shares[token, first] + shares[token, second]
            expected = sum(
                shares[token, e] / total * (nn.functional.gelu(x[sample, token] @ experts.up[e]) @ experts.down[e]) for e in (first, second)
            )
            torch.testing.assert_close(got[sample, token], expected)
    assert imbalance.item() == pytest.approx(expected_imbalance)


def test_room_for_all_gives_what_no_limit_gives() -> None:
    """A capacity of E: each expert has a place for every token of a sample."""
    config = moe.MoEConfig(hidden=6, heads=1, experts=4, inner=10, layers=1, sequence=5)
    torch.manual_seed(0)
    unlimited = moe.Experts(config).double()
    roomy = moe.Experts(replace(config, capacity=4.0)).double()
    roomy.load_state_dict(unlimited.state_dict())
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(roomy(x), unlimited(x))


def test_experts_that_are_full_are_gone_round() -> None:
    """Against a loop over tokens: first choices before second, earlier tokens before later, and who finds no place gets nothing."""
    config = moe.MoEConfig(hidden=6, heads=1, experts=4, inner=10, layers=1, sequence=8, capacity=1.0)
    assert config.expert_capacity == 2
    torch.manual_seed(0)
    experts = moe.Experts(config).double()
    x = torch.randn(2, 8, 6, dtype=torch.float64)
    got, _ = experts(x)
    left_out = 0
    for sample in range(2):
        shares = torch.softmax(x[sample] @ experts.gate.weight.T, -1)
        order = shares.argsort(-1, descending=True)[:, :2].tolist()
        expected, used = torch.zeros(8, 6, dtype=torch.float64), [0] * 4
        for choice in range(2):
            for token, chosen in enumerate(order):
                e = chosen[choice]
                used[e] += 1
                if used[e] > 2:
                    left_out += 1
                    continue
                weight = shares[token, e] / shares[token, chosen].sum()
                expected[token] += weight * (nn.functional.gelu(x[sample, token] @ experts.up[e]) @ experts.down[e])
        torch.testing.assert_close(got[sample], expected)
    assert left_out > 0


def test_the_work_of_a_mixture_is_that_of_its_capacity() -> None:
    """Two products of D x F for each of capacity x S places a sample, forward; without a limit E x S of them."""
    flops = {}
    for capacity in (0.0, 2.0):
        family, config = find(f"moe-tiny:experts=8,capacity={capacity}")
        with DeferredInit() as deferred:
            model = family.make_model(config)
        graph = capture(model, family.example_batch(config, 4), family.loss, fake_mode=deferred.fake_mode).graph
        up = [v.value for v in graph.parameters if v.name.endswith(("mlp.up", "mlp.down"))]
        flops[capacity] = sum(w.flops for op in graph.operators if set(op.inputs) & set(up) for w in [operator_work(graph)[op.name]])
    mixed = 2
    assert flops[2.0] == mixed * 2 * 2 * 64 * 128 * 4 * 32 * 2
    assert flops[0.0] == flops[2.0] * 8 / 2


def test_gpt_starts_as_published() -> None:
    """Radford et al. 2019, section 2.3: N(0, 0.02), projections into the residual stream smaller by sqrt(2 layers)."""
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(vocabulary=512, sequence=64, hidden=256, layers=8, heads=4))
    for name, weight in model.named_parameters():
        if name.endswith(("attention.o.weight", "mlp.down.weight")):
            assert weight.std().item() == pytest.approx(0.02 / 4, rel=0.03), name
        elif weight.dim() == 2:
            assert weight.std().item() == pytest.approx(0.02, rel=0.03), name
    assert model.head.weight is model.tokens.weight


def test_dropout_is_off_unless_asked_for() -> None:
    config = gpt.GPTConfig(vocabulary=96, sequence=16, hidden=64, layers=1, heads=8)
    ids = gpt.example_batch(config, 2)["input_ids"]
    torch.manual_seed(0)
    model = gpt.GPT(config)
    assert torch.equal(model(ids), model(ids))
    _, config = find("gpt-tiny:dropout=0.5")
    noisy = gpt.GPT(config)
    assert not torch.equal(noisy(ids), noisy(ids))
    noisy.eval()
    assert torch.equal(noisy(ids), noisy(ids))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpt:hidden=10,heads=3", "hidden = 10 does not divide by heads = 3"),
        ("gpt:layers=0", "layers = 0 must be at least 1"),
        ("gpt:positions=alibi", "use learned or rotary"),
        ("gpt:dropout=1.0", "below 1"),
        ("llama-8b:kv_heads=5", "does not divide by kv_heads = 5"),
        ("vit:image=100", "does not divide by patch = 16"),
        ("moe:top=9", "only experts = 8"),
        ("moe:capacity=9.0", "from 0 to experts = 8"),
        ("resnet:bottleneck=false,width=2", "bottleneck=true"),
        ("resnet:blocks=3x0", "at least 1"),
        ("unet:image=100", "must divide by 16"),
        ("lstm:span=-1.0", "must not be negative"),
    ],
)
def test_sizes_that_make_no_model_are_refused(text: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        find(text)


def test_relative_positions_of_t5() -> None:
    """Exact to 8 (16 one way), then logarithmic, the last bucket from 128 on; ahead and behind do not share buckets."""
    assert [t5.relative_position_bucket(-d, both_ways=False) for d in (0, 1, 15, 16, 127, 128, 5000)] == [0, 1, 15, 16, 31, 31, 31]
    assert {t5.relative_position_bucket(d, both_ways=False) for d in range(1, 50)} == {0}
    behind, ahead = ({t5.relative_position_bucket(sign * d, both_ways=True) for d in range(1, 300)} for sign in (-1, 1))
    assert behind == set(range(1, 16))
    assert ahead == set(range(17, 32))


def successor(ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.one_hot((ids + 1) % 10, 10).float() * 50


def test_generation_continues_prompts() -> None:
    prompt = torch.tensor([[3], [8]])
    for temperature in (0.0, 1.0):
        assert gpt.generate(successor, prompt, 3, sequence=2, temperature=temperature).tolist() == [[3, 4, 5, 6], [8, 9, 0, 1]]
    draws = [
        gpt.generate(lambda ids: torch.zeros(*ids.shape, 10), prompt, 20, sequence=4, generator=torch.Generator().manual_seed(s)).tolist()
        for s in (0, 0, 1)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_generation_shows_the_model_no_more_than_its_window() -> None:
    lengths = []

    def logits_of(ids: torch.Tensor) -> torch.Tensor:
        lengths.append(ids.shape[1])
        return successor(ids)

    gpt.generate(logits_of, torch.tensor([[1, 2]]), 4, sequence=3)
    assert lengths == [2, 3, 3, 3]


def test_generation_refuses_nothing_to_go_on() -> None:
    with pytest.raises(ModelError, match="at least 1"):
        gpt.generate(successor, torch.zeros(1, 0, dtype=torch.long), 1, sequence=4)
    with pytest.raises(ModelError, match="negative"):
        gpt.generate(successor, torch.tensor([[1]]), 1, sequence=4, temperature=-1.0)


def test_rotation_depends_on_distance_alone() -> None:
    cos, sin = shared_layers.rotary_tables(12, 8, 1e4)
    q, k = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 12, 8)
    scores = shared_layers.apply_rotary(q, cos, sin)[0, 0] @ shared_layers.apply_rotary(k, cos, sin)[0, 0].T
    for offset in range(-11, 12):
        diagonal = scores.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(scores[0, 0], scores[0, 3])
