"""Counter-based random numbers: a 64-bit word for every element of every draw, a function of a key and the element's number only.

Words, uniform and normal numbers, and dropout, from a key (seed, step, which draw) and the numbers of a shard's elements. SplitMix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) of the element's number, with a second key word
between its products, so that no two draws are shifted copies of one another.

On the host a C library draws (compiled on first use, see `shardwise.world.native_build`); on other devices, and without a compiler, torch's
operators on int64 give the same bits.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int, c_int64, c_uint64, c_void_p
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.lower.kernels.sample_positions import ElementBox, merge_steps
from shardwise.world.native_build import build_library, load_library

SOURCE = Path(__file__).with_name("stream.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=gnu11", "-fPIC", "-shared")
MAX_DIMS = 16  # dimensions, as in the C source
MIN_ELEMENTS_PER_THREAD = 32768  # elements per thread below which another thread does not pay
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_KINDS = {torch.bfloat16: 16, torch.float32: 32, torch.float64: 64}
_DIGITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # bits of the significand; 53 for all others


class Key(NamedTuple):
    """Two 64-bit words."""

    first: int
    second: int


class DropoutDraw(NamedTuple):
    """A dropout: the key of a draw, the numbers of a shard's elements, and the drop probability."""

    key: Key
    box: ElementBox
    p: float


def key_of(*numbers: int) -> Key:
    """Return the key of some whole numbers.

    >>> key_of(0, 1, 2) == key_of(0, 1, 2), key_of(0, 1) == key_of(1, 0)
    (True, False)
    """
    first = second = 0
    for number in numbers:
        first = _mix_bits((first ^ number) + _GOLDEN)
        second = _mix_bits(second + first)
    return Key(first, second)


def random_words(key: Key, box: ElementBox, device: torch.device) -> Tensor:
    """Return a word for every element, as int64, in the shard's shape."""
    shape = [math.prod(count for count, _ in steps) for steps in box.dims]
    library = native_library() if device.type == "cpu" else None
    if library is None:
        return _torch_words(key, box, device).view(shape)
    out = torch.empty(shape, dtype=torch.int64)
    _draw_native(library, key, _element_numbers(box, tuple(range(len(shape)))), 0, None, out, 0, 0.0)
    return out


def uniform_numbers(key: Key, box: ElementBox, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return uniform numbers in [0, 1): as many bits as the dtype has, truncated from those of a wider dtype."""
    digits = _DIGITS.get(dtype, 53)
    return _shift_right(random_words(key, box, device), 64 - digits).to(dtype).mul_(2.0**-digits)


def normal_numbers(key: Key, box: ElementBox, device: torch.device) -> Tensor:
    """Return normal numbers in float64: the inverse distribution function at the middle of each of 2^52 equal parts."""
    middle = _shift_right(random_words(key, box, device), 12).to(torch.float64).add_(0.5)
    return torch.erfinv(middle.mul_(2.0**-51).sub_(1.0)).mul_(math.sqrt(2.0))


def word_bound(chance: float) -> int:
    """Return the bound on a word's upper 53 bits that corresponds to uniform numbers less than `chance`."""
    return math.ceil(min(max(chance, 0.0), 1.0) * 2.0**53)


def apply_dropout(x: Tensor, draw: DropoutDraw) -> Tensor:
    """Return x / (1 - p) where the uniform number is less than 1 - p, 0 elsewhere. Backward redraws, so that no mask is saved."""
    out: Tensor = _Dropout.apply(x, draw)  # type: ignore[no-untyped-call]
    return out


def apply_dropout_(x: Tensor, draw: DropoutDraw) -> Tensor:
    """Apply the same in place, without a gradient."""
    return _compute_dropout(x, draw, True)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, draw: DropoutDraw) -> Tensor:
        ctx.drawn = draw
        return _compute_dropout(x, draw)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return apply_dropout(gradient, ctx.drawn), None


def _compute_dropout(x: Tensor, draw: DropoutDraw, in_place: bool = False) -> Tensor:
    scale, bound = dropout_scale(draw.p, x.dtype), word_bound(1.0 - draw.p)
    kind = _KINDS.get(x.dtype)
    has_memory = x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter)  # a subclass may have elements of its own
    library = native_library() if has_memory and kind is not None else None
    if library is None or kind is None:
        mask = (_shift_right(random_words(draw.key, draw.box, x.device), 11) < bound).to(x.dtype).mul_(scale)
        return x.mul_(mask) if in_place else x * mask
    order: Sequence[int] = range(x.dim())
    out = x if in_place else torch.empty_like(x)
    if not x.is_contiguous():
        order = sorted(order, key=x.stride, reverse=True)  # in memory order
        if not x.permute(order).is_contiguous() or out.stride() != x.stride():
            x, order = x.contiguous(), range(x.dim())
            out = torch.empty_like(x)
    _draw_native(library, draw.key, _element_numbers(draw.box, tuple(order)), kind, x, out, bound, scale)
    return out


class _ElementNumbers(ctypes.Structure):
    _fields_ = (("base", c_uint64), ("dims", c_int64), ("count", c_int64 * MAX_DIMS), ("apart", c_int64 * MAX_DIMS))


def _draw_native(library: ctypes.CDLL, key: Key, numbers: Any, kind: int, x: Tensor | None, out: Tensor, bound: int, scale: float) -> None:
    total = out.numel()
    if not total:
        return
    threads = min(torch.get_num_threads(), max(1, total // MIN_ELEMENTS_PER_THREAD))
    source = None if x is None else x.data_ptr()
    library.shardwise_draw(numbers, *key, kind, source, out.data_ptr(), total, bound, scale, threads)


@cache
def dropout_scale(p: float, dtype: torch.dtype) -> float:
    """Return 1 / (1 - p) rounded to this dtype."""
    return float(torch.tensor(1.0 / (1.0 - p), dtype=dtype)) if p < 1.0 else 0.0


@cache
def _element_numbers(box: ElementBox, order: tuple[int, ...]) -> Any:
    """Return counts and distances of all dimensions in memory order, with adjacent ones merged."""
    jumps = merge_steps(step for dim in order for step in box.dims[dim])
    array = c_int64 * MAX_DIMS
    numbers = _ElementNumbers(box.base % (1 << 64), len(jumps), array(*(n for n, _ in jumps)), array(*(step for _, step in jumps)))
    return ctypes.pointer(numbers)


@cache
def native_library(folder: Path | None = None, compiler: str = "cc") -> ctypes.CDLL | None:
    """Return the C library; None where it cannot be compiled."""
    arguments = [POINTER(_ElementNumbers), c_uint64, c_uint64, c_int, c_void_p, c_void_p, c_int64, c_int64, c_double, c_int64]
    build = partial(build_library, "stream", [SOURCE], SOURCE, FLAGS, compiler, folder)
    library = load_library(build, {"shardwise_draw": (None, arguments)})
    return None if isinstance(library, str) else library


def _torch_words(key: Key, box: ElementBox, device: torch.device) -> Tensor:
    """Return the C library's words by torch's operators; flat."""
    number = torch.tensor(_as_signed(box.base), dtype=torch.int64, device=device)
    for count, distance in (step for steps in box.dims for step in steps):
        number = number.unsqueeze(-1) + torch.arange(count, dtype=torch.int64, device=device) * distance
    z = number.reshape(-1) * _as_signed(_GOLDEN) + _as_signed(key.first)
    z = (z ^ _shift_right(z, 30)) * _as_signed(_FIRST)
    z = (z ^ _shift_right(z, 27) ^ _as_signed(key.second)) * _as_signed(_SECOND)
    return z ^ _shift_right(z, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift right without sign extension."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _as_signed(word: int) -> int:
    return ((word + (1 << 63)) % (1 << 64)) - (1 << 63)


def _mix_bits(z: int) -> int:
    mask = (1 << 64) - 1
    z = ((z & mask) ^ ((z & mask) >> 30)) * _FIRST & mask
    z = (z ^ z >> 27) * _SECOND & mask
    return z ^ z >> 31
