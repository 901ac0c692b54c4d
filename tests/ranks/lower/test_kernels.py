"""Operators that need other ranks when they are cut, on real ranks, against torch on the whole tensors in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.lower.kernels.randomness import DrawSite, DrawState, dropout
from shardwise.lower.kernels.sample_positions import DrawnShard
from shardwise.lower.kernels.statistics import group_norm, sharded_batch_norm
from shardwise.lower.kernels.vocabulary import cross_entropy, embedding
from shardwise.lower.redistribute import redistribute
from shardwise.plan.ir.placement import P, R
from shardwise.world.world import World

ROWS, CLASSES = 12, 12


def real(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def piece_of(x: Tensor, dim: int, world: World) -> Tensor:
    return x.chunk(world.num_ranks, dim)[world.rank].clone()


def equal(got: Tensor | None, want: Tensor | None) -> bool:
    return got is not None and want is not None and got.shape == want.shape and torch.allclose(got, want, rtol=1e-11, atol=1e-11)


def looked_up(world: World, padding: int) -> list[bool]:
    ids = torch.tensor([[0, 3, 11, 3], [5, 7, 0, 6]])
    table, seed = real(1, ROWS, 4).requires_grad_(), real(2, 2, 4, 4)
    want = F.embedding(ids, table, padding if padding >= 0 else None)
    want.backward(seed)
    mine = piece_of(table.detach(), 0, world).requires_grad_()
    got = redistribute(embedding(mine, ids, padding, 4 * world.rank), P, R, world.world_group)
    got.backward(seed)
    assert table.grad is not None
    return [equal(got, want), equal(mine.grad, piece_of(table.grad, 0, world))]


@pytest.mark.parametrize("padding", [-1, 0, 11])
def test_a_table_cut_by_rows(ranks: Callable[..., list[Any]], padding: int) -> None:
    assert ranks(looked_up, 3, padding) == [[True, True]] * 3


def classified(world: World, ignore: int, by: str) -> list[bool]:
    logits, target = real(3, 6, CLASSES).requires_grad_(), torch.tensor([0, 11, 4, 4, 2, 9])
    target[3] = ignore
    want = F.cross_entropy(logits, target, ignore_index=ignore)
    want.backward()
    assert logits.grad is not None
    dim = 1 if by == "classes" else 0
    mine = piece_of(logits.detach(), dim, world).requires_grad_()
    group = world.world_group
    if by == "classes":
        got = cross_entropy(mine, target, ignore, (), (4 * world.rank, group))
    else:
        got = redistribute(cross_entropy(mine, piece_of(target, 0, world), ignore, (group,), None), P, R, group)
    got.backward()
    return [equal(got, want), equal(mine.grad, piece_of(logits.grad, dim, world))]


@pytest.mark.parametrize("by", ["classes", "rows"])
@pytest.mark.parametrize("ignore", [-100, 4])
def test_cross_entropy_cut_by_classes_or_rows(ranks: Callable[..., list[Any]], ignore: int, by: str) -> None:
    """The mean is over the rows that count, however they are spread: one rank has fewer of them than the others."""
    assert ranks(classified, 3, ignore, by) == [[True, True]] * 3


def classified_both(world: World) -> list[bool]:
    """Rows over one axis and classes over the other, with extreme logits: the maximum is taken over all classes."""
    logits = (real(4, 4, CLASSES) * 300).requires_grad_()
    target = torch.tensor([0, 11, -100, 6])
    want = F.cross_entropy(logits, target)
    want.backward()
    assert logits.grad is not None
    row, column = divmod(world.rank, 2)
    rows, classes = world.group([column, column + 2]), world.group([2 * row, 2 * row + 1])
    mine = logits.detach().chunk(2, 0)[row].chunk(2, 1)[column].clone().requires_grad_()
    got = redistribute(cross_entropy(mine, target.chunk(2)[row], -100, (rows,), (6 * column, classes)), P, R, rows)
    got.backward()
    return [equal(got, want), equal(mine.grad, logits.grad.chunk(2, 0)[row].chunk(2, 1)[column])]


def test_cross_entropy_cut_both_ways(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(classified_both, 4) == [[True, True]] * 4


def normalised(world: World) -> list[bool]:
    x, seed = (real(5, 6, 3, 4) * 3 + 1000).requires_grad_(), real(6, 6, 3, 4)
    norm = torch.nn.BatchNorm1d(3).double()
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    results = []
    for _ in range(2):  # running statistics after two steps
        x.grad, norm.weight.grad, norm.bias.grad = None, None, None
        want = norm(x)
        want.backward(seed)
        mine = piece_of(x.detach(), 0, world).requires_grad_()
        weight, bias = torch.ones(3, dtype=torch.float64).requires_grad_(), torch.zeros(3, dtype=torch.float64).requires_grad_()
        got = sharded_batch_norm(mine, weight, bias, mean, var, 0.1, 1e-5, ((world.world_group, (1 / world.num_ranks,) * world.num_ranks),))
        got.backward(piece_of(seed, 0, world))
        assert x.grad is not None
        assert weight.grad is not None
        assert bias.grad is not None
        world.world_group.all_reduce(weight.grad)
        world.world_group.all_reduce(bias.grad)
        close = torch.allclose(got, piece_of(want, 0, world), atol=1e-8)
        results += [close, torch.allclose(mine.grad, piece_of(x.grad, 0, world), atol=1e-8)]  # type: ignore[arg-type]
        results += [torch.allclose(weight.grad, norm.weight.grad), torch.allclose(bias.grad, norm.bias.grad)]  # type: ignore[arg-type]
        results += [equal(mean, norm.running_mean), torch.allclose(var, norm.running_var, rtol=1e-9)]  # type: ignore[arg-type]
    return results


def test_batch_norm_over_a_cut_batch_has_the_serial_statistics(ranks: Callable[..., list[Any]]) -> None:
    """The mean is a thousand deviations from zero, where E[x^2] - E[x]^2 would lose its digits."""
    assert ranks(normalised, 3) == [[True] * 12] * 3


def _note_storage(seen: list[int], x: Tensor) -> Tensor:
    seen.append(x.untyped_storage().data_ptr())
    return x


def grouped(world: World) -> list[bool]:
    results = []
    for groups, has_weights in ((2, True), (6, True), (3, False)):
        x, seed = (real(7, 2, 6, 4, 5) + 100).requires_grad_(), real(8, 2, 6, 4, 5)
        weight, bias = real(9, 6).requires_grad_(), real(10, 6).requires_grad_()
        F.group_norm(x, groups, *((weight, bias) if has_weights else ())).backward(seed)
        mine = piece_of(x.detach(), 2, world).requires_grad_()
        own_weight, own_bias = (t.detach().clone().requires_grad_() for t in (weight, bias))
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(partial(_note_storage, saved), lambda t: t):
            weights = (own_weight, own_bias) if has_weights else (None, None)
            got = group_norm(mine, *weights, groups, 1e-5, ((world.world_group, (1 / world.num_ranks,) * world.num_ranks),))
        got.backward(piece_of(seed, 2, world))
        assert x.grad is not None
        assert mine.grad is not None
        results += [torch.allclose(mine.grad, piece_of(x.grad, 2, world), atol=1e-9), got.untyped_storage().data_ptr() not in saved]
        for own, whole in ((own_weight, weight), (own_bias, bias)) if has_weights else ():
            assert own.grad is not None
            world.world_group.all_reduce(own.grad)
            results.append(torch.allclose(own.grad, whole.grad))  # type: ignore[arg-type]
    return results


def test_group_norm_over_cut_positions_has_torchs_gradients_and_saves_no_more(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(grouped, 2) == [[True] * 10] * 2


def dropped(world: World) -> dict[str, list[float]]:
    draw = DrawState(seed=3, step=5)
    pieces = (DrawnShard((128,)), DrawnShard((128,), ((0, 64 * world.rank, 64),)))
    whole, mine = (DrawSite(7, 0, 0, place, torch.float32) for place in pieces)
    shared, own = dropout(torch.ones(128), 0.5, draw, whole), dropout(torch.ones(64), 0.5, draw, mine)
    again = dropout(torch.ones(64), 0.5, draw, mine)
    draw.step = 6
    later = dropout(torch.ones(64), 0.5, draw, mine)
    return {"shared": shared.tolist(), "own": own.tolist(), "again": again.tolist(), "later": later.tolist()}


def test_dropout_agrees_where_ranks_hold_the_same(ranks: Callable[..., list[Any]]) -> None:
    first, second = ranks(dropped, 2)
    assert first["shared"] == second["shared"], "what every rank holds is dropped alike"
    assert first["own"] + second["own"] == first["shared"], "pieces are pieces of what a rank drops that holds all"
    assert first["own"] == first["again"], "recomputation draws what the first forward drew"
    assert first["own"] != first["later"], "the next step draws anew"
    assert set(first["own"]) == {0.0, 2.0}
