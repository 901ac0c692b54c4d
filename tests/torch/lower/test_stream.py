"""The stream of random numbers: one in both implementations, pieces of what the whole batch draws, and random."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from shardwise.lower.kernels import random_operators, random_stream
from shardwise.lower.kernels.sample_positions import DrawnShard, ElementBox, MicrobatchSamples
from shardwise.model.batch.random_draws import SampleFold

CPU = torch.device("cpu")
KEY = random_stream.key_of(1, 2, 3)
N = 1 << 18


@pytest.fixture(params=["compiled", "torch"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With the C library and without."""
    assert random_stream.native_library() is not None
    if request.param == "torch":
        monkeypatch.setattr(random_stream, "native_library", lambda: None)
    return request.param


def split_mix(number: int, key: random_stream.Key) -> int:
    """SplitMix64 in whole numbers, after Steele, Lea and Flood (2014), with the second key word."""
    whole = (1 << 64) - 1
    z = (number * 0x9E3779B97F4A7C15 + key.first) & whole
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & whole
    z = ((z ^ key.second ^ (z >> 27)) * 0x94D049BB133111EB) & whole
    return z ^ (z >> 31)


def numbers(box: ElementBox) -> list[int]:
    """The number of every element, in order."""
    steps = [step for steps in box.dims for step in steps]
    places = product(*(range(count) for count, _ in steps))
    return [box.base + sum(i * apart for i, (_, apart) in zip(at, steps, strict=True)) for at in places]


BOXES = [
    DrawnShard((3, 5)).box(),
    DrawnShard((4, 6, 8), ((2, 4, 4),)).box(),
    DrawnShard((4, 6, 8), ((0, 2, 2), (0, 1, 1))).box(),  # a piece of a piece
    DrawnShard((4, 6), ((0, 2, 2),), SampleFold(0)).box(MicrobatchSamples.contiguous(8, 4, 16)),
    DrawnShard((24, 2), ((0, 12, 12),), runs=((0, 4, 2, 1),)).box(),  # positions of samples that lie in one dimension
    DrawnShard((24,), (), SampleFold(0, 1, 6), ((0, 6, 3, 3),)).box(MicrobatchSamples(4, 16, ((2, 8), (2, 1)))),
    DrawnShard((3, 24, 2), ((1, 12, 12),), SampleFold(1, 2, 3)).box(MicrobatchSamples(4, 16, ((2, 8), (2, 1)))),
    ElementBox((1 << 63) + 12345, (((7, 1 << 40),),)),
    DrawnShard((0, 4)).box(),
]


@pytest.mark.parametrize("box", BOXES)
def test_words_are_those_of_the_formula(box: ElementBox, either: str) -> None:
    found = [int(x) % (1 << 64) for x in random_stream.random_words(KEY, box, CPU).flatten()]
    assert found == [split_mix(number, KEY) for number in numbers(box)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_dropout_keeps_what_even_numbers_say(dtype: torch.dtype, order: Sequence[int], either: str) -> None:
    """Bit for bit torch's product with a mask of its dtype, however the tensor lies in memory; and so its gradient, and in place."""
    box = DrawnShard((8, 6, 10), ((0, 4, 4),)).box()
    shape = [(4, 6, 10)[i] for i in order]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).permute([order.index(i) for i in range(3)])
    kept = random_stream.uniform_numbers(KEY, box, CPU) < 0.7
    mask = kept.to(dtype) * torch.tensor(1 / 0.7, dtype=dtype)
    leaf = x.detach().requires_grad_()
    made = random_stream.apply_dropout(leaf, random_stream.DropoutDraw(KEY, box, 1 - 0.7))
    assert torch.equal(made, x * mask)
    assert made.stride() == x.stride()
    made.backward(x)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, x * mask)
    assert torch.equal(random_stream.apply_dropout_(x.clone(), random_stream.DropoutDraw(KEY, box, 1 - 0.7)), made)


def test_threads_change_nothing() -> None:
    """In a process of its own: ranks that are forked from one with a pool of threads wait for it."""
    code = f"""
import torch
from shardwise.lower.kernels import random_stream as stream
from shardwise.lower.kernels.sample_positions import DrawnShard

x, box = torch.randn(3, {N // 2 + 1}), DrawnShard((3, {N // 2 + 1})).box()
drawn = []
for threads in (1, 3):
    torch.set_num_threads(threads)
    drawn.append(stream.apply_dropout(x, stream.DropoutDraw(stream.key_of(1, 2, 3), box, 0.3)))
assert torch.equal(*drawn)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("whole", "fold", "count"),
    [
        ((12, 4), SampleFold(0), 3),
        ((4, 12), SampleFold(1), 4),
        ((24, 3), SampleFold(0, 1, 2), 2),
        ((24, 3), SampleFold(0, 2, 1), 3),
        ((48,), SampleFold(0, 2, 2), 6),
    ],
)
def test_microbatches_and_ranks_draw_pieces_of_the_whole_batch(whole: tuple[int, ...], fold: SampleFold, count: int) -> None:
    """`count` of 12 samples in every microbatch; two ranks of it where they can cut it; and the rows that a rank's loader gives it."""
    want = random_stream.random_words(KEY, DrawnShard(whole).box(), CPU)
    apart = want.unflatten(fold.dim, (fold.outer, 12, fold.inner))
    shape = tuple(n * count // 12 if dim == fold.dim else n for dim, n in enumerate(whole))
    for start in range(0, 12, count):
        wanted = apart.narrow(fold.dim + 1, start, count).flatten(fold.dim, fold.dim + 2)
        place = DrawnShard(shape, (), fold)
        assert torch.equal(random_stream.random_words(KEY, place.box(MicrobatchSamples.contiguous(start, count, 12)), CPU), wanted)
        if shape[fold.dim] % 2 == 0 and count % 2 == 0:
            pieces = [_half(shape, fold, part).box(MicrobatchSamples.contiguous(start, count, 12)) for part in (0, 1)]
            assert torch.equal(torch.cat([random_stream.random_words(KEY, box, CPU) for box in pieces], fold.dim), wanted)
    if count % 2 == 0 and fold.outer == 1:
        for begin in range(0, 6, count // 2):
            samples = MicrobatchSamples(begin, 12, ((2, 6), (count // 2, 1)))
            for part in (0, 1):
                mine = apart.narrow(fold.dim + 1, 6 * part + begin, count // 2).flatten(fold.dim, fold.dim + 2)
                got = random_stream.random_words(KEY, _half(shape, fold, part).box(samples), CPU)
                assert torch.equal(got, mine)


def _half(shape: tuple[int, ...], fold: SampleFold, part: int) -> DrawnShard:
    length = shape[fold.dim] // 2
    return DrawnShard(shape, ((fold.dim, part * length, length),), fold)


def test_pieces_that_differ_draw_theirs() -> None:
    """Three of five samples, which lie in rows of two, and two."""
    whole, fold = (10, 3), SampleFold(0, 1, 2)
    want = random_stream.random_words(KEY, DrawnShard((24, 3)).box(), CPU)[10:20]
    pieces = [
        DrawnShard(whole, ((0, start, count),), fold).box(MicrobatchSamples.contiguous(5, 5, 12)) for start, count in ((0, 6), (6, 4))
    ]
    assert torch.equal(torch.cat([random_stream.random_words(KEY, box, CPU) for box in pieces]), want)


def _correlation(x: Tensor, y: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


def test_numbers_are_evenly_distributed_and_independent() -> None:
    """Within five standard deviations: mean, variance, chi-square of 256 cells of upper and lower digits; neighbours and other keys."""
    box = DrawnShard((N,)).box()
    x = random_stream.uniform_numbers(KEY, box, CPU)
    assert float(x.min()) >= 0.0
    assert float(x.max()) < 1.0
    assert abs(float(x.mean()) - 0.5) < 5 / math.sqrt(12 * N)
    assert abs(float(x.var()) - 1 / 12) < 5 / math.sqrt(180 * N)
    for cells in ((x * 256).floor(), (x * 2**45).floor() % 256, (x * 16).floor() * 16 + (x.roll(1) * 16).floor()):
        counts = torch.bincount(cells.long(), minlength=256).double()
        chi_square = float(((counts - N / 256) ** 2).sum() / (N / 256))
        assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)
    others = [x.roll(1), x.roll(2), x.roll(64), x.roll(1024)]  # elements; steps, seeds and operators
    keys = [(1, 2, 4), (1, 3, 3), (2, 2, 3), (2, 1, 3), (1, 2, 3 + (1 << 32))]
    others += [random_stream.uniform_numbers(random_stream.key_of(*key), box, CPU) for key in keys]
    assert all(abs(_correlation(x, y)) < 5 / math.sqrt(N) for y in others)
    kept = [random_stream.uniform_numbers(random_stream.key_of(0, step, 7), DrawnShard((256,)).box(), CPU) < 0.9 for step in range(1024)]
    share = torch.stack(kept).double().mean(0)  # an element over steps
    assert float((share - 0.9).abs().max()) < 5.5 * math.sqrt(0.9 * 0.1 / 1024)


def test_narrow_numbers_are_the_wide_ones_cut_off() -> None:
    box = DrawnShard((4096,)).box()
    wide, narrow = (random_stream.uniform_numbers(KEY, box, CPU, dtype) for dtype in (torch.float64, torch.float32))
    assert torch.equal(narrow.double(), (wide * 2**24).floor() / 2**24)
    assert float(random_stream.uniform_numbers(KEY, box, CPU, torch.bfloat16).max()) < 1.0


def _drawn(name: str, *args: object, shape: tuple[int, ...] = (N,), dtype: torch.dtype = torch.float64) -> Tensor:
    return random_operators.draw_values(name, KEY, DrawnShard(shape).box(), dtype, CPU, args, {})


@pytest.mark.parametrize(
    ("name", "args", "mean", "variance"),
    [
        ("rand", (), 1 / 2, 1 / 12),
        ("randn", (), 0.0, 1.0),
        ("uniform", (None, -1.0, 3.0), 1.0, 16 / 12),
        ("over normal", (None, 2.0, 3.0), 2.0, 9.0),
        ("over bernoulli", (None, 0.3), 0.3, 0.21),
        ("exponential", (None, 2.0), 1 / 2, 1 / 4),
        ("randint", (2, 8), 4.5, 35 / 12),
    ],
)
def test_distributions_have_their_mean_and_variance(name: str, args: tuple[object, ...], mean: float, variance: float) -> None:
    x = _drawn(name, *args)
    fourth = float(((x - mean) ** 4).mean())
    assert abs(float(x.mean()) - mean) < 5 * math.sqrt(variance / N)
    assert abs(float(x.var()) - variance) < 5 * math.sqrt((fourth - variance**2) / N)


def test_normal_numbers_are_normal() -> None:
    x = _drawn("randn")
    edges = torch.linspace(-3, 3, 61, dtype=torch.float64)
    share = torch.special.ndtr(edges)
    below = torch.searchsorted(x.sort().values, edges).double() / N
    assert float((below - share).abs().max()) < 2 / math.sqrt(N)  # Kolmogorov and Smirnov; 2 is passed by one in 1,500


@pytest.mark.parametrize("repeats", [False, True])
def test_choices_have_their_weights(repeats: bool) -> None:
    weights = torch.tensor([1.0, 0.0, 2.0, 5.0]).expand(N // 8, 4)
    shape = (N // 8, 1) if repeats else (N // 8, 4)
    chosen = _drawn("multinomial", weights, 1, repeats, shape=shape, dtype=torch.int64)
    counts = torch.bincount(chosen.flatten(), minlength=4).double() / chosen.numel()
    for count, chance in zip(counts.tolist(), (1 / 8, 0.0, 2 / 8, 5 / 8), strict=True):
        assert abs(count - chance) <= 5 * math.sqrt(chance * (1 - chance) / chosen.numel())


def test_a_choice_without_repetition_and_a_permutation_have_each_once() -> None:
    chosen = _drawn("multinomial", torch.ones(50, 6), 6, False, shape=(50, 6), dtype=torch.int64)
    assert torch.equal(chosen.sort(-1).values, torch.arange(6).expand(50, 6))
    assert torch.equal(_drawn("randperm", 100, shape=(100,), dtype=torch.int64).sort().values, torch.arange(100))


@pytest.mark.parametrize("p", [0.0, 1.0])
@pytest.mark.parametrize("name", ["dropout", "feature_dropout", "alpha_dropout", "native_dropout"])
def test_dropout_of_nothing_and_of_all_is_torchs(name: str, p: float) -> None:
    """No numbers decide there, so that torch's own operators say what it is."""
    x = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0))
    box = DrawnShard((4, 6, 1) if name == "feature_dropout" else (4, 6, 5)).box()
    made, want = random_operators.apply_dropout_variant(name, x, random_stream.DropoutDraw(KEY, box, p)), getattr(torch, name)(x, p, True)
    for ours, theirs in zip(*((y if isinstance(y, tuple) else (y,)) for y in (made, want)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_dropout_is_that_of_its_formula(causal: bool) -> None:
    """Values and gradients of first and second order, with keys for two heads each; weights are dropped as their own numbers say."""
    made = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, 5, 3, dtype=torch.float64, generator=made).requires_grad_() for heads in (4, 2, 2))
    box = DrawnShard((2, 4, 5, 5)).box()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return random_operators.attention_with_dropout(q, k, v, None, causal, None, random_stream.DropoutDraw(KEY, box, 0.25))

    weights = (q @ k.repeat_interleave(2, 1).mT / math.sqrt(3)).masked_fill(torch.ones(5, 5).triu(1).bool() & causal, -math.inf).softmax(-1)
    want = (weights * (random_stream.uniform_numbers(KEY, box, CPU) < 0.75) / 0.75) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(run(q, k, v), want)
    assert torch.autograd.gradcheck(run, (q, k, v))
    assert torch.autograd.gradgradcheck(run, (q, k, v))


def test_attention_with_dropout_keeps_one_tensor_of_scores() -> None:
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        random_operators.attention_with_dropout(
            q, k, v, None, False, None, random_stream.DropoutDraw(KEY, DrawnShard((2, 4, 16, 16)).box(), 0.1)
        )
    assert len({x.data_ptr() for x in kept if x.shape[-2:] == (16, 16)}) == 1
