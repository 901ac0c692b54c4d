"""Every redistribution on real ranks, forward and backward, against the definition of the forms.

The global tensor X and the gradient C of a scalar with respect to it are known to every rank; what a rank holds of both in a form
follows from the form's meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.lower.redistribute import redistribute
from shardwise.plan.ir.placement import D, P, R, Shard, is_shard, shard_of_runs
from shardwise.world.launch.launch import launch
from shardwise.world.memory import accounts_of
from shardwise.world.world import World

PAIRS = (
    (P, R), (R, D), (P, D), (R, Shard(0)), (R, Shard(1)), (D, Shard(0)), (D, Shard(2)), (Shard(0), R), (Shard(2), R), (Shard(1), D),
    (P, Shard(0)), (P, Shard(1)), (Shard(0), Shard(1)), (Shard(2), Shard(0)), (Shard(1), Shard(2)),
)  # fmt: skip

RUNS, ROWS = shard_of_runs(1, ((1, 2, 1), (3, 2, 3))), shard_of_runs(0, ((1, 1, 1), (1, 1, 1)))  # pieces of two runs
A, B = Shard(0, (3, 1, 2)), Shard(1, (5, 5, 2))
UNEQUAL = (
    (R, A), (D, A), (A, R), (A, D), (P, A), (A, B), (B, Shard(0)), (Shard(2), A),
    (R, RUNS), (D, RUNS), (RUNS, R), (RUNS, D), (P, RUNS), (RUNS, Shard(2)), (A, RUNS), (RUNS, ROWS), (ROWS, R),
)  # between three  # fmt: skip


def global_tensor(seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(6, 12, 6, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def summand(x: Tensor, index: int, size: int, seed: int) -> Tensor:
    """Rank `index`'s part of a random sum that is `x`."""
    parts = [torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed + i)) for i in range(size - 1)]
    return parts[index] if index < size - 1 else x - sum(parts, torch.zeros_like(x))


def held(x: Tensor, form: str, world: World) -> Tensor:
    """What this rank holds of a value in `form`."""
    if form is P:
        return summand(x, world.rank, world.num_ranks, 100)
    return piece_of(x, form, world).clone() if is_shard(form) else x.clone()


def piece_of(x: Tensor, form: Shard, world: World) -> Tensor:
    spans = form.spans(x.shape[form.dim], world.num_ranks, world.rank)
    return torch.cat([x.narrow(form.dim, start, stop - start) for start, stop in spans], form.dim)


def gradient(c: Tensor, form: str, world: World) -> Tensor:
    """What this rank's gradient of a value in `form` is: of a summand it is the whole, of D a summand."""
    if form is D:
        return summand(c, world.rank, world.num_ranks, 200)
    return piece_of(c, form, world) if is_shard(form) else c


def moved(world: World, dtype: str) -> list[str]:
    wrong = []
    x, c = (global_tensor(seed, getattr(torch, dtype)) for seed in (1, 2))
    for source, target in (*PAIRS, *(UNEQUAL if world.num_ranks == 3 else ())):
        mine = held(x, source, world).requires_grad_()
        out = redistribute(mine, source, target, world.world_group)
        if not torch.allclose(out, held(x, target, world)):
            wrong.append(f"{source} -> {target} forward")
        out.backward(gradient(c, target, world))
        got = mine.grad
        assert got is not None
        if source is D:
            got = got.clone()
            world.world_group.all_reduce(got)
            want = c
        else:
            want = gradient(c, source, world)
        if got.shape != want.shape or not torch.allclose(got, want):
            wrong.append(f"{source} -> {target} backward")
        if not torch.equal(mine.detach(), held(x, source, world)):
            wrong.append(f"{source} -> {target} writes its input")
    numbers = torch.arange(6 * 6).view(6, 6)
    whole = redistribute(numbers.chunk(world.num_ranks, 0)[world.rank], Shard(0), R, world.world_group)
    if not torch.equal(whole, numbers):
        wrong.append("integers")
    # A broken twin: the wrong dual is found by this very comparison.
    mine = held(x, R, world).requires_grad_()
    redistribute(mine, R, D, world.world_group).backward(gradient(c, R, world))
    assert mine.grad is not None
    if torch.allclose(mine.grad, gradient(c, R, world)):
        wrong.append("a wrong gradient is not found")
    return wrong


@pytest.mark.parametrize(("num_ranks", "dtype"), [(2, "float64"), (3, "float64"), (2, "complex128")])
def test_every_redistribution_is_its_definition(ranks: Callable[..., list[Any]], num_ranks: int, dtype: str) -> None:
    assert ranks(moved, num_ranks, dtype) == [[]] * num_ranks


def _taken(world: World) -> list[float]:
    """What exchanges along an inner dimension take while they run, in sizes of what each rank gives."""
    memory = accounts_of(world.device)
    group = world.group(tuple(range(world.num_ranks)))
    x = torch.randn(64, 64, 64)[:, :, ::2]  # does not lie in order
    found = []
    for move in (lambda: group.reduce_scatter(x, 2), lambda: group.all_to_all(x, 2, 0)):
        with memory.counting("buffers"):
            move()
            memory.reset_peak()
            before = memory.current().total
            made = move()
            found.append((memory.peak().total - before) / (x.numel() * x.element_size()))
            del made
    return found


def test_pieces_are_packed_without_copies_in_between() -> None:
    """The pieces once in order, and what comes: half of it summed; all of it, or what came and that joined, of an all-to-all."""
    for scattered, exchanged in launch(_taken, 2, show=False):
        assert scattered == pytest.approx(1.5, abs=0.05)
        assert exchanged == pytest.approx(2.0, abs=0.05)
