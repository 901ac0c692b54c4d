"""Benchmark cases of compute. In: a device and threads. Out: a case for each kind of operator, forward and backward. [torch]"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import prod
from typing import Any

import torch
from torch.nn import functional as F
from torch.optim.adamw import adamw

from shardwise.cluster.block import LARGE_BLOCK, SMALL_BLOCK, ProbeBlock
from shardwise.cluster.cluster import GROUPED_RATE, LAUNCH_RATE, SCORE_RATE, STEP_RATE, TRAFFIC_RATE, WEIGHT_RATE
from shardwise.cluster.probe.machine import has_bfloat16
from shardwise.cluster.probe.sampling import ProbeCase
from shardwise.world.attention_backend import scaled_dot_product_attention

LAUNCH_OPERATORS, START_OPERATORS = 64, 16
WIDE, NARROW = 64, 16  # elements of a head
ROWS = {"linear": 16, "convolution": 8, "recurrent": 8}  # rows of products dominated by their weights
STATES, STEPS, SAMPLES = 256, 16, 64  # sizes of a recurrence
CHANNELS, TAPS = 64, 9  # sizes of a convolution; another has one tap
GROUPS = {1: 7, 4: 3}  # channels of a convolution's narrow groups, and its window
LARGE_GPU_BYTES = 15e9  # GPU memory from which on benchmark tensors are larger
PULSE = "pulse"


def operator_cases(device: torch.device, threads: int) -> Iterator[ProbeCase]:
    """Yield the cases. Units: `linear.P`, `attention.P`, `convolution.P`: a FLOP at precision P; `scores.P`: a score of heads of size
    `NARROW`; `launch`: one operator; `block.P`, `few.P`: a block of one thread's batch; `pulse_case`: one call; `start.KIND`: a nearly
    empty
    call; `weights.KIND`: a byte of weights, with `flops_per_weight_byte` FLOPs; `besides.convolution.P`: a byte, with few FLOPs;
    `grouped.N.P`: a FLOP of a convolution in groups of N channels; `stepped`: a step of a tiny GRU; the others: a byte that the operator
    must move.

    Tensors grow with the threads that share them, as a step's do: two threads on the tensors of one would find them in their caches.
    A GPU's are as large as its memory allows, so that the launch of a call and the wait for it are negligible.
    """
    precisions = {"float32": torch.float32, **({"bfloat16": torch.bfloat16} if has_bfloat16() else {})}
    big = device.type != "cpu"
    share = _gpu_size_factor(device) if big else threads
    for precision, dtype in precisions.items():
        yield from _product_cases(device, big, share, precision, dtype)
    double = torch.randn(512, 512, device=device, dtype=torch.float64)
    yield ProbeCase("linear.float64", 2.0 * 512**3, lambda: double @ double, keeps_busy=True)
    yield from _memory_cases(device, (16384 if big else 2048) * share, "bfloat16" in precisions)
    yield _optimizer_case(device, share if big else 1)
    if not big:
        yield pulse_case()
        yield from _block_cases(LARGE_BLOCK, share, precisions)
        yield from _block_cases(SMALL_BLOCK, 1, precisions)
        yield from _launch_cases()
        yield from _weight_cases()
    tiny = torch.ones(8, device=device, requires_grad=True)
    yield _training_case("launch", 3.0 * LAUNCH_OPERATORS, _repeat_call(lambda y: y + tiny, LAUNCH_OPERATORS), tiny)


def _gpu_size_factor(device: torch.device) -> int:
    """Return the size factor of tensors on a GPU: all of them take about 1.5 GiB per unit."""
    return 4 if torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU_BYTES else 1


def _repeat_call(call: Callable[[torch.Tensor], torch.Tensor], times: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def chain(y: torch.Tensor) -> torch.Tensor:
        for _ in range(times):
            y = call(y)
        return y

    return chain


def _launch_cases() -> Iterator[ProbeCase]:
    """Yield a nearly empty call of each kind whose launch takes longer than an addition's: it selects a kernel, or launches several.

    Products are just large enough not to skip that.
    """
    x, image, heads = torch.randn(32, 32), torch.randn(2, 32, 4, 4), torch.randn(1, 1, 8, 8)
    sequences, cell = torch.randn(2, 4, 32), torch.nn.LSTM(32, 32, bias=False)
    w, filters, gain = (torch.randn(*sizes, requires_grad=True) for sizes in ((32, 32), (32, 32, 3, 3), (32,)))
    calls: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[torch.Tensor, ...]]] = {
        "linear": (lambda y: F.linear(y, w), (x, w)),
        "convolution": (lambda y: F.conv2d(y, filters, padding=1), (image, filters)),
        "attention": (lambda y: scaled_dot_product_attention(F.scaled_dot_product_attention, y, y, y, is_causal=True), (heads,)),
        "recurrent": (lambda y: cell(y)[0], (sequences, *cell.parameters())),
        "norm": (lambda y: F.layer_norm(y, (32,), gain, gain), (x, gain)),
        "batch_norm": (lambda y: F.batch_norm(y, None, None, gain, gain, training=True), (image, gain)),
        "softmax": (lambda y: F.log_softmax(y, -1), (x,)),
        "activation": (lambda y: F.gelu(y, approximate="tanh"), (x,)),
    }
    for kind, (call, (first, *learned)) in calls.items():
        chain = _repeat_call(call, START_OPERATORS)
        yield _training_case(
            LAUNCH_RATE + kind, 3.0 * START_OPERATORS, lambda y, *_, chain=chain: chain(y), first.requires_grad_(), *learned
        )


def flops_per_weight_byte(kind: str) -> float:
    """Return FLOPs, forward and backward, per byte of weights in the `WEIGHT_RATE` cases: 2 per row and element of 4 bytes."""
    return ROWS[kind] / 2


def _weight_cases() -> Iterator[ProbeCase]:
    """Yield products of few rows with more weights than nearby caches hold: packed forward, for the input's gradient and for their own.

    A recurrence reads its weights at every step.
    """
    matrices = [torch.randn(1536, 1536, requires_grad=True) for _ in range(3)]
    filters = [torch.randn(384, 384, 3, 3, requires_grad=True) for _ in range(3)]

    def linear(y: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for w in weights:
            y = F.linear(y, w)
        return y

    def convolution(y: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for w in weights:
            y = F.conv2d(y, w, padding=1)
        return y

    x, image = torch.randn(ROWS["linear"], 1536, requires_grad=True), torch.randn(ROWS["convolution"] // 4, 384, 2, 2, requires_grad=True)
    yield _training_case(WEIGHT_RATE + "linear", 3.0 * sum(w.nbytes for w in matrices), linear, x, *matrices)
    yield _training_case(WEIGHT_RATE + "convolution", 3.0 * sum(w.nbytes for w in filters), convolution, image, *filters)
    cell = torch.nn.GRU(32, 32, bias=False)
    steps = torch.randn(STEPS, 2, 32, requires_grad=True)
    yield _training_case(STEP_RATE, 3.0 * STEPS, lambda x, *_: cell(x)[0], steps, *cell.parameters())
    yield _lstm_case(WEIGHT_RATE + "recurrent", ROWS["recurrent"], lambda sizes: 3.0 * STEPS * sizes)


def _lstm_case(name: str, samples: int, units: Callable[[float], float]) -> ProbeCase:
    """Return the case of a one-layer LSTM over `samples`. `units`: function of the bytes of its weights."""
    layer = torch.nn.LSTM(STATES, STATES, bias=False)
    x = torch.randn(STEPS, samples, STATES, requires_grad=True)
    weights = tuple(layer.parameters())
    return _training_case(name, units(sum(w.nbytes for w in weights)), lambda x, *_: layer(x)[0], x, *weights)


def pulse_case() -> ProbeCase:
    """Return a case that shows within a tenth of a second whether a core's speed has changed: a product and a norm, in its caches.

    In float64, whose products are the same in every process: the float32 kernel is a setting (`shardwise.world.matmul_backend`).
    """
    a, b, out = (torch.randn(256, 256, dtype=torch.float64) for _ in range(3))
    x, gain = torch.randn(256, 512), torch.ones(512)

    def call() -> None:
        torch.mm(a, b, out=out)
        F.layer_norm(x, (512,), gain, gain)

    return ProbeCase(PULSE, 1.0, torch.no_grad()(call))


def _product_cases(device: torch.device, big: bool, share: int, precision: str, dtype: torch.dtype) -> Iterator[ProbeCase]:
    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype, requires_grad=True)

    tokens, hidden, wide = (16384, 4096, 4096) if big else (512 * share, 384, 1536)
    yield _training_case(
        f"linear.{precision}", 6.0 * tokens * hidden * wide, F.linear, randn(tokens, hidden), randn(wide, hidden), keeps_busy=True
    )
    heads = (8 * share, 16, 1024, WIDE) if big else (2 * share, 6, 256, WIDE)
    flops = 4.0 * heads[0] * heads[1] * heads[2] ** 2 * heads[3]
    # Backward of attention recomputes the scores: 1 + 2.5 products in place of 1 + 2.
    attention = partial(scaled_dot_product_attention, F.scaled_dot_product_attention, is_causal=True)
    yield _training_case(f"attention.{precision}", 3.5 * flops, attention, *(randn(*heads) for _ in range(3)))
    if not big:
        narrow = (*heads[:3], NARROW)
        yield _training_case(f"{SCORE_RATE}{precision}", 3.5 * prod(heads[:3]) * heads[2], attention, *(randn(*narrow) for _ in range(3)))
    image = randn((32 if big else 2) * share, CHANNELS, 56, 56)
    filters = randn(CHANNELS, CHANNELS, 3, 3)
    yield _training_case(f"convolution.{precision}", 6.0 * image.numel() * CHANNELS * TAPS, partial(F.conv2d, padding=1), image, filters)
    if not big:
        yield _training_case(f"{TRAFFIC_RATE}convolution.{precision}", 5.0 * image.nbytes, F.conv2d, image, randn(CHANNELS, CHANNELS, 1, 1))
        map_ = randn(share, CHANNELS, 28, 28)
        for channels, size in GROUPS.items():
            call = partial(F.conv2d, padding=size // 2, groups=CHANNELS // channels)
            flops = 6.0 * map_.numel() * channels * size**2
            yield _training_case(f"{GROUPED_RATE}{channels}.{precision}", flops, call, map_, randn(CHANNELS, channels, size, size))
    if precision == "float32" and not big:
        yield _lstm_case(f"recurrent.{precision}", SAMPLES * share, lambda sizes: 6.0 * STEPS * SAMPLES * share * sizes / 4)


def _memory_cases(device: torch.device, rows: int, narrow: bool) -> Iterator[ProbeCase]:
    """Yield memory-bound operators: in float32, and the cast to bfloat16 if that is supported."""
    a, b = (torch.randn(rows, 1024, device=device) for _ in range(2))
    yield ProbeCase("elementwise", 3.0 * a.nbytes, lambda: a + b)
    if narrow:
        yield ProbeCase("cast", 1.5 * a.nbytes, lambda: a.to(torch.bfloat16))
    h = a.clone().requires_grad_()
    gain = torch.ones(1024, device=device, requires_grad=True)
    yield _training_case("activation", 5.0 * h.nbytes, partial(F.gelu, approximate="tanh"), h)
    yield _training_case("norm", 5.0 * h.nbytes, lambda h: F.layer_norm(h, (1024,), gain, gain), h)
    maps, channels = torch.randn(rows // 64, CHANNELS, 32, 32, device=device, requires_grad=True), torch.ones(CHANNELS, device=device)
    normed = partial(F.batch_norm, running_mean=None, running_var=None, weight=channels, bias=channels, training=True)
    yield _training_case("batch_norm", 5.0 * maps.nbytes, normed, maps)
    yield _training_case("softmax", 5.0 * h.nbytes, partial(F.log_softmax, dim=-1), h)


def _optimizer_case(device: torch.device, share: int) -> ProbeCase:
    """Return AdamW's update in one call: the function, since a `torch.optim.Optimizer` imports torch's compiler first, for a second."""
    size = share**2 << 20
    weights, gradients, first, second = ([torch.ones(size, device=device) for _ in range(4)] for _ in range(4))
    steps = [torch.zeros((), device=device) for _ in weights]
    call = partial(
        adamw, weights, gradients, first, second, [], steps, fused=True, amsgrad=False, maximize=False,
        beta1=0.9, beta2=0.999, lr=1e-4, weight_decay=0.01, eps=1e-8,
    )  # fmt: skip
    # It reads weight, gradient and two moments, and writes three of them.
    return ProbeCase("optimizer", 7.0 * sum(weight.nbytes for weight in weights), call)


def _training_case(
    name: str, units: float, call: Callable[..., torch.Tensor], *inputs: torch.Tensor, keeps_busy: bool = False
) -> ProbeCase:
    """Return a case of forward and backward, with a precomputed output gradient."""
    gradient = torch.ones_like(call(*inputs))
    return ProbeCase(name, units, lambda: torch.autograd.grad(call(*inputs), inputs, gradient), keeps_busy=keeps_busy)


def _block_cases(block: ProbeBlock, share: int, precisions: Iterable[str]) -> Iterator[ProbeCase]:
    """Yield forward and backward of a block, in every precision."""
    layers = ProbeLayers(block)
    x = torch.randn(block.sequences * share, block.sequence, block.hidden, requires_grad=True)
    inputs = (x, *layers.parameters())

    def step(narrow: bool) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            return torch.autograd.grad(layers(x).sum(), inputs)

    for precision in precisions:
        yield ProbeCase(block.rate_key(precision), share, partial(step, precision != "float32"))


class ProbeLayers(torch.nn.Module):
    """The layers of a `shardwise.cluster.block.ProbeBlock`: `x -> x`, [sequences, sequence, hidden]. Norms have no weights; attention is
    causal."""

    def __init__(self, block: ProbeBlock) -> None:
        super().__init__()
        h, self.heads = block.hidden, block.heads
        wide = {"qkv": (h, 3 * h), "out": (h, h), "up": (h, 4 * h), "down": (4 * h, h)}
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({name: torch.nn.Linear(*sizes) for name, sizes in wide.items()}) for _ in range(block.layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers in turn."""
        for layer in self.layers:
            qkv = layer["qkv"](F.layer_norm(x, x.shape[-1:]))  # type: ignore[index]
            q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
            mixed = scaled_dot_product_attention(F.scaled_dot_product_attention, q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + layer["out"](mixed)  # type: ignore[index]
            up = F.gelu(layer["up"](F.layer_norm(x, x.shape[-1:])), approximate="tanh")  # type: ignore[index]
            x = x + layer["down"](up)  # type: ignore[index]
        return x
