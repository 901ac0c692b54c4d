"""The adapter for torch's products that are fused with collectives over symmetric memory: private names, used here alone.

In: a store, operands. Out: the products. A group is found by the name under which it was registered. On processors torch has only Python
fallbacks, which `run_fallbacks` makes callable: they prove the numbers over gloo. Not covered: products in 8 bits.

Shape letters: B leading dims of a rank's piece, I inputs, O outputs; the dim that is gathered or scattered is one of B, but not the last
of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed import distributed_c10d as c10d

NAMES: tuple[tuple[Any, str], ...] = (
    (dist, "_symmetric_memory"),
    (dist.ProcessGroup, "_register_backend"),
    (dist.ProcessGroup, "_set_group_name"),
    (torch._C._distributed_c10d, "_register_process_group"),
    (torch._C._distributed_c10d, "_SymmetricMemory"),
    (torch._C._distributed_c10d._SymmetricMemory, "set_group_info"),
    (torch, "_C"),
    (torch._C, "_distributed_c10d"),
    (symmetric, "_fused_all_gather_matmul_fallback"),
    (symmetric, "_fused_matmul_reduce_scatter_fallback"),
    (torch.ops.symm_mem, "fused_all_gather_matmul"),
    (torch.ops.symm_mem, "fused_matmul_reduce_scatter"),
    (torch.library.Library, "_destroy"),
)


def register_group(store: Any, rank: int, size: int, name: str, device: torch.device) -> object:
    """Register a group of `size` processes that share `store`, this one as `rank`, under a `name` that was never used.

    It is registered for as long as the returned object lives.
    """
    c10d_native: Any = torch._C._distributed_c10d
    group: Any = dist.ProcessGroup(store, rank, size)
    if device.type == "cpu":  # the fallbacks use its collectives; on GPUs the operators use the store and the memory alone
        backend = dist.ProcessGroup.BackendType.GLOO
        group._register_backend(device, backend, c10d.ProcessGroupGloo(store, rank, size))  # type: ignore[call-arg]
    group._set_group_name(name)
    c10d_native._register_process_group(name, group)
    if device.type != "cpu":
        c10d_native._SymmetricMemory.set_group_info(name, rank, size, store)
    return group


def gather_and_multiply(piece_BI: Tensor, matrices_IO: Sequence[Tensor], dim: int, name: str) -> list[Tensor]:
    """Return the products of the ranks' pieces, gathered along `dim`, with each matrix."""
    products: list[Tensor] = torch.ops.symm_mem.fused_all_gather_matmul(piece_BI, list(matrices_IO), dim, name, return_A=False)[1]
    return products


def multiply_and_scatter(x_BO: Tensor, matrix_OI: Tensor, dim: int, name: str) -> Tensor:
    """Return this rank's piece along `dim` of the sum over ranks of the products."""
    piece: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x_BO, matrix_OI, "sum", dim, name)
    return piece


@contextmanager
def run_fallbacks() -> Iterator[None]:
    """Run torch's fallbacks of the operators on processors within, for tests."""
    library = torch.library.Library("symm_mem", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul_fallback, "CPU")  # type: ignore[no-untyped-call]
    library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter_fallback, "CPU")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]
