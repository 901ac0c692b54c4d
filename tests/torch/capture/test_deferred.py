"""Deferred construction against plain construction, bit for bit: values, pieces, random state, memory, and what cannot be deferred."""

from __future__ import annotations

import copy
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from shardwise.capture.fakes import fake_copy
from shardwise.capture.initialization import DeferredInit, materialize_shards, take_real_shards
from shardwise.capture.initialization.operator_log import bounds_of
from shardwise.errors import ModelError

Make = Callable[[], nn.Module]


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach() for name, t in (*module.named_parameters(), *module.named_buffers())}


def difference(make: Make, seed: int = 3, spoil: Callable[[DeferredInit], None] = lambda deferred: None) -> list[str]:
    """Names that differ between plain and deferred construction; "random state" where that does."""
    torch.manual_seed(seed)
    plain = tensors_of(make())
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    with DeferredInit() as deferred:
        net = make()
    assert all(deferred.is_fake(t) or not isinstance(t, nn.Parameter) for t in net.parameters())
    spoil(deferred)
    got = materialize_shards(deferred, net, lambda name, full: full)
    assert list(got) == list(plain)
    wrong = [n for n, t in plain.items() if t.dtype != got[n].dtype or not torch.equal(t.nan_to_num(), got[n].nan_to_num())]
    return wrong + ["random state"] * (not torch.equal(torch.get_rng_state(), state))


def block(width: int) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)


class Tricks(nn.Module):
    """What constructors do, all in one."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = nn.Parameter(torch.empty(60, 50))
        nn.init.trunc_normal_(self.loop, std=1, a=-1, b=1)  # rejects a third, many times over
        self.tail = nn.Parameter(torch.empty(40, 30))
        nn.init.trunc_normal_(self.tail, std=1, a=2, b=3)
        self.usual = nn.Parameter(torch.empty(40, 30))
        nn.init.trunc_normal_(self.usual, std=0.02)
        self.turn = nn.Parameter(torch.empty(8, 5))
        nn.init.orthogonal_(self.turn)
        self.holes = nn.Parameter(nn.init.sparse_(torch.empty(9, 4), 0.3))
        self.register_buffer("listed", torch.tensor([1.0, 2.0, 3.0]), persistent=False)
        self.register_buffer("from_numpy", torch.from_numpy(np.arange(4.0)) * 2)
        self.register_buffer("order", torch.randperm(9))
        own = torch.Generator().manual_seed(3)
        self.register_buffer("own", torch.randn(5, generator=own) + torch.randn(5, generator=own))
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.register_buffer("forked", torch.randn(5))
        self.register_buffer("after_fork", torch.randn(5))
        state = torch.get_rng_state()
        self.register_buffer("once", torch.randn(20))
        torch.set_rng_state(state)
        self.register_buffer("again", torch.randn(20))
        torch.manual_seed(3)
        self.register_buffer("reseeded", torch.randn(20))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.register_buffer("rate", torch.tensor(self.rates + torch.linspace(0, 1, 3).tolist()))
        self.register_buffer("where", torch.randn(30).gt(0).nonzero())
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
        self.flat = nn.Parameter(torch.randn(12))
        self.window = nn.Parameter(self.flat.data[2:8].view(2, 3))
        self.window.data.mul_(2)
        self.swapped = nn.Parameter(torch.zeros(3))
        self.swapped.data = torch.rand(4, 2)
        self.rows = nn.Embedding(7, 4)
        with torch.no_grad():
            self.rows.weight[2].zero_()
            self.rows.weight[3:5] = torch.ones(4)
            self.rows.weight[:, 1].normal_()
        self.twin = copy.deepcopy(self.rows)
        self.half = nn.Linear(3, 3).to(torch.bfloat16)
        self.seed = torch.initial_seed()
        self.bernoulli = nn.Parameter(torch.bernoulli(torch.full((20,), 0.5)) * torch.normal(torch.zeros(20), torch.ones(20)))


class Rare(nn.Module):
    """Operators whose draws depend on data, lists of tensors written at once, views that overlap, numbers through numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.power = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5))
        self.turn = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))
        self.list = nn.ParameterList([torch.randn(3), torch.randn(4)])
        torch._foreach_mul_([p.data for p in self.list], 2.0)
        made = {
            "mask": torch.tril(torch.ones(5, 5)).masked_fill(torch.tril(torch.ones(5, 5)) == 0, float("-inf")),
            "overlap": torch.arange(5)[None].expand(3, -1),
            "complex": torch.polar(torch.ones(3, 2), torch.rand(3, 2)),
            "stacked": torch.stack([torch.rand(3) for _ in range(3)]),
            "vectors": torch.linalg.svd(torch.randn(4, 3))[0],
            "largest": torch.randn(6).topk(3).values,
            "unique": torch.randint(0, 3, (9,)).unique(),
            "chosen": torch.randn(20)[torch.randn(20) > 0],
            "multinomial": torch.multinomial(torch.rand(5), 3),
            "poisson": torch.poisson(torch.rand(5) * 40),
            "dropped": nn.functional.dropout(torch.ones(30), 0.5),
            "through_numpy": torch.tensor(torch.rand(4).numpy() * 2),
            "transposed": torch.empty(3, 4).t().normal_(),
            "halves": torch.empty(40, dtype=torch.half).normal_(),
            "gamma": torch.distributions.Gamma(torch.ones(4), torch.ones(4)).sample(),
            "skipped": nn.utils.skip_init(nn.Linear, 3, 3).weight.data.fill_(2),
        }
        torch.poisson(torch.rand(5) * 40)  # dropped, but it draws as much as its argument makes it
        made["last"] = torch.rand(4)
        for name, tensor in made.items():
            self.register_buffer(name, tensor)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight


PLAIN: dict[str, Make] = {
    "linear": lambda: nn.Linear(5, 3),
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose1d(4, 3, 2)),
    "embedding": lambda: nn.Embedding(9, 4, padding_idx=2),
    "lstm": lambda: nn.LSTM(4, 5, 2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
    "encoder": lambda: nn.TransformerEncoder(block(8), 3),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    "double": lambda: nn.TransformerEncoder(block(8), 2).double(),
    "bfloat16": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.bfloat16),
    "tied": Tied,
    "tricks": Tricks,
    "rare": Rare,
    "tricks in half": lambda: Tricks().half(),
}


@pytest.mark.parametrize("name", PLAIN)
def test_equals_plain_construction(name: str) -> None:
    assert difference(PLAIN[name]) == []


def hugging_face(name: str) -> nn.Module:
    hf = pytest.importorskip("transformers", reason="transformers is not installed")
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 48}
    image = {"image_size": 32, "patch_size": 8}
    tokens = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1}
    return {
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, **tokens)),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**small, **tokens)),
        "llama bfloat16": lambda: hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**small, **tokens), dtype=torch.bfloat16),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**small, vocab_size=64)),
        "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(d_model=32, num_layers=2, num_heads=2, d_ff=48, d_kv=16, vocab_size=64)),
        "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**small, **image)),
        "resnet": lambda: hf.ResNetForImageClassification(hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2])),
        "swin": lambda: hf.SwinForImageClassification(
            hf.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[1, 2], num_heads=[2, 2], window_size=4)
        ),
    }[name]()


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama bfloat16", "bert", "t5", "vit", "resnet", "swin"])
def test_equals_plain_construction_of_hugging_face_models(name: str) -> None:
    assert difference(lambda: hugging_face(name)) == []


def test_broken_twin_is_noticed() -> None:
    def skip_a_draw(deferred: DeferredInit) -> None:
        stream = next(iter(deferred.recording.streams.values()))
        stream.positions_before[3] = 2

    assert difference(PLAIN["encoder"], spoil=skip_a_draw)


class Program(nn.Module):
    """A random program on a few tensors: creations, fills of whole and part, views, arithmetic between tensors, numbers read back."""

    def __init__(self, steps: list[tuple[int, int, int]]) -> None:
        super().__init__()
        made = [torch.zeros(3, 4)]
        for kind, a, b in steps:
            x, y = made[a % len(made)], made[b % len(made)]
            match kind:
                case 0:
                    made.append(torch.randn(3, 4))
                case 1:
                    x.normal_(b, 2.0)
                case 2:
                    x[b % 3].uniform_()
                case 3:
                    x.mul_(y).clamp_(-9, 9)
                case 4:
                    x.t()[b % 4].copy_(y[a % 3, :3])
                case 5:
                    made.append(x + y)
                case 6:
                    x.copy_(y)
                case 7:
                    made.append(x.detach()[:])
                case 8:
                    x.fill_(0.5 if y.sum().item() > 1 else 0.25)
                case 9:
                    made[a % len(made)] = torch.bernoulli(y.clamp(0, 1)) + x
        for i, tensor in enumerate(made):
            self.register_buffer(f"t{i}", tensor)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7), st.integers(0, 7)), max_size=25))
def test_random_programs(steps: list[tuple[int, int, int]]) -> None:
    assert difference(lambda: Program(steps)) == []


def test_pieces_are_slices_and_own_their_memory() -> None:
    torch.manual_seed(1)
    plain = tensors_of(nn.TransformerEncoder(block(8), 2))
    torch.manual_seed(1)
    with DeferredInit() as deferred:
        net = nn.TransformerEncoder(block(8), 2)
    pieces = materialize_shards(deferred, net, lambda name, full: full.tensor_split(2)[1] if "linear" in name else None)
    assert pieces.keys() == {name for name in plain if "linear" in name}
    for name, piece in pieces.items():
        assert torch.equal(piece, plain[name].tensor_split(2)[1])
        assert piece.untyped_storage().nbytes() == piece.nbytes
    again = materialize_shards(deferred, net, lambda name, full: full[:1], dtype=torch.float64)
    assert all(torch.equal(again[name], t[:1].double()) for name, t in plain.items())
    real = take_real_shards(nn.Sequential(nn.BatchNorm1d(2)), lambda name, full: full if name != "0.bias" else None, dtype=torch.float64)
    assert {name: t.dtype for name, t in real.items()} == {
        "0.weight": torch.float64, "0.running_mean": torch.float64, "0.running_var": torch.float64, "0.num_batches_tracked": torch.int64,
    }  # fmt: skip


def test_take_is_called_once_for_a_tied_parameter() -> None:
    with DeferredInit() as deferred:
        net = Tied()
    names: list[str] = []
    materialize_shards(deferred, net, lambda name, full: names.append(name))  # type: ignore[func-returns-value]
    assert names == ["embed.weight"]


def test_random_state_belongs_to_the_user_between_block_and_materialize() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with DeferredInit() as deferred:
        net = nn.Linear(30, 30)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    expected = torch.get_rng_state()
    materialize_shards(deferred, net, lambda name, full: None)
    assert torch.equal(torch.get_rng_state(), expected)


class Live(TorchDispatchMode):
    """The most bytes of real tensors alive at once, among those made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().device.type == "cpu":
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: (ref, size) for key, (ref, size) in self.alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


def redraw(m: nn.Module) -> None:
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight)


def scale(m: nn.Module) -> None:
    if isinstance(m, nn.Linear):
        m.weight.data.mul_(0.5)


def jitter(m: nn.Module) -> None:
    if isinstance(m, nn.Linear):
        m.weight.data.add_(torch.randn_like(m.weight))


def reject(m: nn.Module) -> None:
    if isinstance(m, nn.Linear):
        nn.init.trunc_normal_(m.weight, std=1, a=-1, b=1)


@pytest.mark.parametrize("after", [None, redraw, scale, jitter, reject])
def test_memory_is_that_of_a_few_tensors(after: Callable[[nn.Module], None] | None) -> None:
    layers, width = 24, 64

    def make() -> nn.Module:
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        return net.apply(after) if after else net

    assert difference(make) == []
    full = width * width * 4
    with Live() as live:
        with DeferredInit() as deferred:
            net = make()
        pieces = materialize_shards(deferred, net, lambda name, tensor: tensor[:1])
    kept = sum(piece.nbytes for piece in pieces.values())
    assert live.peak < kept + 12 * full < layers * full
    with Live() as everything:
        kept_all = materialize_shards(deferred, net, lambda name, tensor: tensor)
    assert everything.peak >= layers * full  # the meter sees a rank that keeps all
    assert len(kept_all) == 2 * layers


class Big(nn.Module):
    def __init__(self, init: Callable[..., object]) -> None:
        super().__init__()
        self.embed = nn.Embedding(51200, 8192)
        widths = (8192, 3 * 8192), (8192, 8192), (8192, 4 * 8192), (4 * 8192, 8192)
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(*w) for w in widths) for _ in range(48))
        for p in self.parameters():
            if p.dim() == 2:
                init(p, std=0.02)


@pytest.mark.parametrize("init", [nn.init.normal_, nn.init.trunc_normal_])
def test_39_billion_parameters_are_built_without_drawing_one(init: Callable[..., object]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with DeferredInit() as deferred:
        net = Big(init)
    assert sum(p.numel() for p in net.parameters()) > 39e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1e6  # KiB
    (stream,) = deferred.recording.streams.values()
    assert list(stream.states) == [0]


def test_bounds_hold_and_are_unknown_otherwise() -> None:
    aten = torch.ops.aten
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for mean, std in ((0.0, 1.0), (300.0, 0.1), (-2.0, 3.0)):
            known = bounds_of(aten.normal_.default, (None, mean, std), lambda _: None)
            draws = torch.empty(200_000, dtype=dtype).normal_(mean, std).double()
            assert known is not None
            assert known[0] <= draws.min()
            assert draws.max() <= known[1]
    inside = lambda _: (-1.0, 1.0)  # noqa: E731
    assert bounds_of(aten.lt.Scalar, (0, -1.0), inside) == (0, 0)
    assert bounds_of(aten.lt.Scalar, (0, 1.5), inside) == (1, 1)
    assert bounds_of(aten.lt.Scalar, (0, 1.0), inside) is None
    assert bounds_of(aten.gt.Scalar, (0, 1.0), inside) == (0, 0)
    assert bounds_of(aten.gt.Scalar, (0, -1.5), inside) == (1, 1)
    assert bounds_of(aten.gt.Scalar, (0, 0.5), inside) is None
    assert bounds_of(aten.any.default, (0,), lambda _: (1, 1)) is None
    assert bounds_of(aten.add.Tensor, (0, 0), inside) is None


def test_requests_for_a_device_are_built_on_the_cpu() -> None:
    def make(device: str = "cpu") -> nn.Module:
        net = nn.Sequential(nn.Linear(3, 3, device=device), nn.Linear(3, 3).to(device))
        net.register_buffer("b", torch.tensor([1.0], device=device) + torch.ones(1).to(torch.device(device), torch.float32))
        return net if device == "cpu" else net.cuda()

    torch.manual_seed(2)
    plain = tensors_of(make())
    torch.manual_seed(2)
    with DeferredInit() as deferred:
        net = make("cuda")
    assert {p.device.type for p in net.parameters()} == {"cpu"}
    assert all(torch.equal(t, plain[name]) for name, t in materialize_shards(deferred, net, lambda name, full: full).items())


def test_tensors_from_outside_keep_their_value_at_the_time() -> None:
    outside = torch.arange(6.0)
    target = torch.zeros(3)

    def make() -> nn.Module:
        net = nn.Linear(3, 2)
        net.weight.data.copy_(outside.view(2, 3))
        outside.add_(1)
        net.bias.data.copy_(outside[:2])
        target.copy_(net.weight.data[1])
        net.register_buffer("doubled", outside * 2)
        net.pretrained = nn.Parameter(outside)
        return net

    plain = {name: t.clone() for name, t in tensors_of(make()).items()}
    expected = target.clone()
    outside.copy_(torch.arange(6.0))
    with DeferredInit() as deferred:
        net = make()
    assert torch.equal(target, expected)
    for name, t in materialize_shards(deferred, net, lambda name, full: full).items():
        assert torch.equal(t, plain[name]), name


@pytest.mark.parametrize("assign", [False, True])
def test_weights_loaded_in_the_block(tmp_path: Path, assign: bool) -> None:
    torch.save(block(8).state_dict(), tmp_path / "w.pt")

    def make() -> nn.Module:
        net = block(8)
        net.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True), assign=assign)
        return net

    assert difference(make) == []


def test_what_cannot_be_deferred_is_named() -> None:
    with DeferredInit() as deferred:
        net = nn.Linear(2, 2, device="meta")
    with pytest.raises(ModelError, match=r"weight is on the meta device.*shardwise\.parallelize"):
        materialize_shards(deferred, net, lambda name, full: full)
    with DeferredInit():
        other = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="weight was made by another block"):
        materialize_shards(deferred, other, lambda name, full: full)
    outside = torch.zeros(2)
    with pytest.raises(ModelError, match=r"aten\.normal_.*outside"), DeferredInit():
        outside.normal_()
    library = torch.library.Library("shardwise_test_deferred", "DEF")
    library.define("odd(Tensor x) -> Tensor")
    library.define("odd_(Tensor(a!) x) -> Tensor")
    library.define("nowhere(Tensor(a!) x) -> ()")
    library.impl("odd", lambda x: x + 1, "CPU")
    with DeferredInit() as deferred:
        net = nn.BatchNorm1d(2)
        net.weight.data = torch.ops.shardwise_test_deferred.odd(net.weight.data)  # no shape rule, but a value
        with pytest.raises(ModelError, match=r"odd_.*cannot be deferred"):
            torch.ops.shardwise_test_deferred.odd_(net.bias.data)
    assert materialize_shards(deferred, net, lambda name, full: full)["weight"].tolist() == [2.0, 2.0]
    with DeferredInit() as deferred:
        net = nn.LayerNorm(2)
        torch.ops.shardwise_test_deferred.nowhere(net.weight.data)
    with pytest.raises(ModelError, match=r"nowhere.*cannot be replayed"):
        materialize_shards(deferred, net, lambda name, full: full)


def test_fake_copy_takes_no_memory_and_leaves_the_module_alone() -> None:
    net = nn.Sequential(Tied(), nn.Linear(512, 512), nn.BatchNorm1d(3))
    net.listed = [nn.Parameter(torch.ones(1000)), torch.ones(1000)]
    before = {name: t.clone() for name, t in tensors_of(net).items()}
    mode = DeferredInit().fake_mode
    originals: dict[int, torch.Tensor] = {}
    with Live() as live:
        twin = fake_copy(net, mode, originals)
    assert originals[id(twin.listed[1])] is net.listed[1]
    assert originals[id(twin[1].weight)] is net[1].weight
    assert live.peak <= 4000  # a view of the listed parameter, not a copy of the other megabyte
    assert twin[0].head.weight is twin[0].embed.weight
    assert [(n, t.shape, t.dtype) for n, t in tensors_of(twin).items()] == [(n, t.shape, t.dtype) for n, t in before.items()]
    assert all(t.fake_mode is mode for t in (*tensors_of(twin).values(), *twin.listed))
    assert all(torch.equal(t, before[name]) for name, t in tensors_of(net).items())
    with mode:
        assert twin[1](torch.empty(2, 512)).shape == (2, 512)
    net.lock = (i for i in range(3))
    with pytest.raises(ModelError, match="cannot be copied for tracing"):
        fake_copy(net, mode)
