"""The arithmetic of `finite_field` in C (`field.c`), compiled on first use: a call where torch needs ten to a hundred small operators.

In: int64 tensors of residues with memory. Out: the same bits as torch's operators give; None where there is no compiler, or for tensors
without data, for which the caller computes by torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_uint64, c_void_p
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from shardwise.world.native_build import build_library, load_library

SOURCE = Path(__file__).with_name("field.c")
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared")
MODULUS_BITS = 62
MAX_PRODUCTS = 1 << 22  # of a matrix product, above which torch's products of limbs are as fast
_ELEMENTWISE = (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_uint64)


class Subgroup(ctypes.Structure):
    """The elements of an order, sorted, the exponent of each, and what an exponent adds modulo all orders."""

    _fields_ = (("elements", c_void_p), ("exponents", c_void_p), ("order", c_uint64), ("weight", c_uint64))


@cache
def native_library(folder: Path | None = None, compiler: str = "cc") -> ctypes.CDLL | None:
    """Return the C library; None where it cannot be compiled."""
    signatures = {
        "field_multiply": (None, _ELEMENTWISE),
        "field_add": (None, (*_ELEMENTWISE, c_int)),
        "field_invert": (None, (c_void_p, c_void_p, c_int64, c_uint64)),
        "field_exponential": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_uint64)),
        "field_logarithm": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_uint64)),
        "field_random": (None, (c_void_p, c_uint64, c_void_p, c_int64, c_uint64)),
        "field_exponent": (None, (c_void_p, c_uint64, c_int, c_void_p, c_int64, c_uint64)),
        "field_matrix": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_uint64)),
        "field_sum": (None, (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_uint64)),
        "field_combine": (None, (c_void_p, c_int, c_int, c_void_p, c_int64, c_uint64)),
    }
    library = load_library(partial(build_library, "field", [SOURCE], SOURCE, FLAGS, compiler, folder), signatures)
    return None if isinstance(library, str) else library


def _library_for(modulus: int, *tensors: Tensor) -> ctypes.CDLL | None:
    """Return the library for tensors with memory, and a modulus of as many bits as it reduces by."""
    is_native = modulus.bit_length() == MODULUS_BITS and all(type(x) is Tensor and x.dtype is torch.int64 for x in tensors)
    return native_library() if is_native else None


def _align_operands(x: Tensor, y: Tensor) -> tuple[Tensor, int, Tensor, int, torch.Size]:
    """Return contiguous operands with their steps, 0 for one number, and the shape of the result."""
    if x.shape == y.shape:
        return x.contiguous(), 1, y.contiguous(), 1, x.shape
    if y.numel() == 1 and y.dim() <= x.dim():
        return x.contiguous(), 1, y, 0, x.shape
    if x.numel() == 1 and x.dim() <= y.dim():
        return x, 0, y.contiguous(), 1, y.shape
    x, y = torch.broadcast_tensors(x, y)  # type: ignore[no-untyped-call]
    return x.contiguous(), 1, y.contiguous(), 1, x.shape


def multiply(x: Tensor, y: Tensor, modulus: int) -> Tensor | None:
    """Return products of residues."""
    if (library := _library_for(modulus, x, y)) is None:
        return None
    x, step_x, y, step_y, shape = _align_operands(x, y)
    out = torch.empty(shape, dtype=torch.int64)
    library.field_multiply(x.data_ptr(), step_x, y.data_ptr(), step_y, out.data_ptr(), out.numel(), modulus)
    return out


def add(x: Tensor, y: Tensor, modulus: int, sign: int) -> Tensor | None:
    """Return sums of residues, or differences if the sign is negative."""
    if (library := _library_for(modulus, x, y)) is None:
        return None
    x, step_x, y, step_y, shape = _align_operands(x, y)
    out = torch.empty(shape, dtype=torch.int64)
    library.field_add(x.data_ptr(), step_x, y.data_ptr(), step_y, out.data_ptr(), out.numel(), modulus, sign)
    return out


def invert(x: Tensor, modulus: int) -> Tensor | None:
    """Return reciprocals; 0 where x is 0."""
    if (library := _library_for(modulus, x)) is None:
        return None
    x, out = x.contiguous(), torch.empty(x.shape, dtype=torch.int64)
    library.field_invert(x.data_ptr(), out.data_ptr(), out.numel(), modulus)
    return out


def raise_base(exponent: Tensor, tables: Sequence[Tensor], modulus: int) -> Tensor | None:
    """Return a base to exponents, from tables of its powers to digits of 16 bits."""
    if (library := _library_for(modulus, exponent, *tables)) is None:
        return None
    exponent, out = exponent.contiguous(), torch.empty(exponent.shape, dtype=torch.int64)
    pointers = (c_void_p * len(tables))(*(table.data_ptr() for table in tables))
    library.field_exponential(exponent.data_ptr(), ctypes.addressof(pointers), out.data_ptr(), out.numel(), modulus)
    return out


def take_logarithm(x: Tensor, groups: ctypes.Array[Subgroup], modulus: int) -> Tensor | None:
    """Return exponents, from the subgroups of four orders."""
    if (library := _library_for(modulus, x)) is None:
        return None
    x, out = x.contiguous(), torch.empty(x.shape, dtype=torch.int64)
    library.field_logarithm(x.data_ptr(), ctypes.addressof(groups), out.data_ptr(), out.numel(), modulus)
    return out


def draw(x: Tensor, offset: int, modulus: int) -> Tensor | None:
    """Return a random function of whole numbers."""
    if (library := _library_for(modulus, x)) is None:
        return None
    x, out = x.contiguous(), torch.empty(x.shape, dtype=torch.int64)
    library.field_random(x.data_ptr(), offset, out.data_ptr(), out.numel(), modulus)
    return out


def draw_exponents(x: Tensor, offset: int, last_bits: int, modulus: int) -> Tensor | None:
    """Return the exponents of numbers."""
    if (library := _library_for(modulus, x)) is None:
        return None
    x, out = x.contiguous(), torch.empty(x.shape, dtype=torch.int64)
    library.field_exponent(x.data_ptr(), offset, last_bits, out.data_ptr(), out.numel(), modulus)
    return out


def _flatten_batch(x: Tensor, shape: torch.Size) -> Tensor:
    """Return matrices as one batch of `shape` in all; of a single matrix a batch of one."""
    matrix = x.shape[-2:]
    return x.expand(*shape, *matrix).reshape(shape.numel(), *matrix) if x.dim() > 2 else x.unsqueeze(0)


def multiply_matrices(x: Tensor, y: Tensor, modulus: int) -> Tensor | None:
    """Return a product of matrices, or of batches of them; None, too, for a large one."""
    if (library := _library_for(modulus, x, y)) is None or x.dim() < 2 or y.dim() < 2:
        return None
    (n, k), m = x.shape[-2:], y.shape[-1]
    shape = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])  # type: ignore[no-untyped-call]
    batch = shape.numel()
    if y.shape[-2] != k or batch * n * k * m > MAX_PRODUCTS:
        return None
    x, y = (_flatten_batch(part, shape) for part in (x, y))
    out = torch.empty((*shape, n, m), dtype=torch.int64)
    steps = [(c_int64 * 3)(part.stride(0) if len(part) > 1 else 0, part.stride(1), part.stride(2)) for part in (x, y)]
    addresses = [ctypes.addressof(each) for each in steps]
    library.field_matrix(x.data_ptr(), addresses[0], y.data_ptr(), addresses[1], out.data_ptr(), batch, n, k, m, modulus)
    return out


def add_over(x: Tensor, dims: Sequence[int], keepdim: bool, modulus: int) -> Tensor | None:
    """Return sums over some dims."""
    if (library := _library_for(modulus, x)) is None or not (x.dim() and len(dims)):
        return None
    summed = sorted(dim % x.dim() for dim in dims)
    shape = [1 if dim in summed else n for dim, n in enumerate(x.shape) if keepdim or dim not in summed]
    if summed != list(range(summed[0], summed[0] + len(summed))):
        kept = [dim for dim in range(x.dim()) if dim not in summed]
        x = x.permute(*kept, *summed)
        summed = list(range(len(kept), x.dim()))
    x, out = x.contiguous(), torch.empty(shape, dtype=torch.int64)
    sizes = (x.shape[: summed[0]].numel(), x.shape[summed[0] : summed[-1] + 1].numel(), x.shape[summed[-1] + 1 :].numel())
    library.field_sum(x.data_ptr(), out.data_ptr(), *sizes, modulus)
    return out


def combine(parts: Sequence[Tensor], bits: int, modulus: int) -> Tensor | None:
    """Return the sum of `parts[i] << (i bits)`."""
    if (library := _library_for(modulus, *parts)) is None:
        return None
    shape = parts[0].shape
    if any(part.shape != shape for part in parts):
        return None
    parts = [part.contiguous() for part in parts]
    out = torch.empty(shape, dtype=torch.int64)
    pointers = (c_void_p * len(parts))(*(part.data_ptr() for part in parts))
    library.field_combine(ctypes.addressof(pointers), len(parts), bits, out.data_ptr(), out.numel(), modulus)
    return out
