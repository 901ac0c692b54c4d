"""Ring attention alone, beside torch's own on one rank in float64: output and every gradient, what travels, broken twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.lower.kernels import attention_blocks as products
from shardwise.lower.kernels import random_operators
from shardwise.lower.kernels import ring as rings
from shardwise.lower.kernels.randomness import DrawSite, DrawState
from shardwise.lower.kernels.ring import Ring, local_causal_ring, num_hops_by_owner, ring_attention
from shardwise.lower.kernels.sample_positions import DrawnShard
from shardwise.plan.ir.placement import even_shard_ranges, zigzag_ranges
from shardwise.world.comm.group import Group
from shardwise.world.launch.launch import launch
from shardwise.world.world import World

Found = dict[str, dict[str, float]]
LEAST = torch.finfo(torch.float64).min


@dataclass(frozen=True)
class Case:
    """[2, heads, queries, width] and [2, few, keys, width], values of `values`. `mask`: made of (queries, keys)."""

    queries: int = 13
    keys: int = 13
    heads: int = 4
    few: int = 4
    width: int = 8
    values: int = 8
    causal: bool = False
    zigzag: bool = False
    mask: Callable[[int, int], Tensor] | None = None
    learns: bool = False
    scale: float | None = None
    p: float = 0.0
    flat: bool = False


def _window(s: int, t: int, back: int = 2) -> Tensor:
    apart = torch.arange(s).unsqueeze(-1) - torch.arange(t)
    return (apart >= 0) & (apart < back)


def _padding(s: int, t: int) -> Tensor:
    return torch.arange(t) < torch.tensor([[[[t]]], [[[t - 5]]]])


def _bias(s: int, t: int) -> Tensor:
    return torch.randn(1, 4, s, t, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def _row_bias(s: int, t: int) -> Tensor:
    return _bias(1, t)


def _least(s: int, t: int) -> Tensor:
    """Causal with padding in front, as numbers: the first rows are as far from all keys."""
    hidden = ~_window(s, t, t) | (torch.arange(t) < 3)
    return torch.zeros(s, t, dtype=torch.float64).masked_fill(hidden, LEAST)


def _blind(s: int, t: int) -> Tensor:
    return _window(s, t, t).logical_and(torch.arange(t) >= 5).expand(2, 1, s, t)


CASES = {
    "causal": Case(causal=True, zigzag=True),
    "causal in order": Case(causal=True),
    "causal over fewer keys": Case(queries=13, keys=7, causal=True),
    "causal over more keys": Case(queries=7, keys=13, causal=True, zigzag=True),
    "plain, wider values": Case(values=12),
    "padding, grouped heads": Case(few=2, mask=_padding),
    "causal, one head of keys": Case(few=1, causal=True, zigzag=True),
    "window": Case(queries=24, keys=24, mask=_window),
    "all": Case(queries=24, keys=24),
    "bias that learns": Case(mask=_bias, learns=True, few=2),
    "bias of all rows": Case(mask=_row_bias, learns=True),
    "least numbers": Case(mask=_least),
    "blind rows": Case(mask=_blind),
    "crosswise": Case(queries=7, keys=11, scale=0.3),
    "dropout": Case(p=0.3, few=2),
    "dropout, causal": Case(p=0.3, causal=True),
    "without heads": Case(flat=True, causal=True, zigzag=True),
}  # fmt: skip


def _whole(case: Case, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, case.heads, case.queries, case.width), (2, case.few, case.keys, case.width), (2, case.few, case.keys, case.values)]
    shapes += [(2, case.heads, case.queries, case.values)]
    made = [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
    return [x[:, 0] for x in made] if case.flat else made


def _drawing(case: Case, start: int, count: int) -> tuple[DrawState, DrawSite]:
    place = DrawnShard((2, case.heads, case.queries, case.keys), ((2, start, count),))
    return DrawState(seed=1, step=2), DrawSite(0, 0, 4, place, torch.float64)


def _serial(case: Case, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    if case.p:
        draw, where = _drawing(case, 0, case.queries)
        dropping = draw.dropout(where, case.p)
        return random_operators.attention_with_dropout(q, k, v, mask, case.causal, case.scale, dropping)
    if case.mask is _least:  # torch's kernel keeps a logarithm for backward, in which all but the least number is lost
        weights: Tensor = (q @ k.mT * q.shape[-1] ** -0.5 + mask).softmax(-1)
        return weights @ v
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, case.causal, scale=case.scale, enable_gqa=case.few < case.heads)


def _ranges(length: int, n: int, in_zigzag: bool) -> tuple[tuple[tuple[int, int], ...], ...]:
    if in_zigzag:
        return tuple(tuple(r for r in both if r[0] < r[1]) for both in zigzag_ranges(length, n))
    return tuple((one,) for one in even_shard_ranges(length, n))


def _of(x: Tensor, ranges: Any, dim: int = -2) -> Tensor:
    return torch.cat([x.narrow(dim, a, b - a) for a, b in ranges], dim).clone()


def difference(case: Case, world: World, dtype: torch.dtype = torch.float64) -> float:
    """The largest difference of this rank's output and gradients from the serial ones, over the largest number there."""
    group, (*whole, seed) = world.world_group, _whole(case, dtype)
    mask = None if case.mask is None else case.mask(case.queries, case.keys)
    asked = [x.requires_grad_() for x in whole] + ([mask.requires_grad_()] if mask is not None and case.learns else [])
    want = _serial(case, whole[0], whole[1], whole[2], mask)
    wants = [want, *torch.autograd.grad(want, asked, seed)]
    at = [_ranges(length, group.size, case.zigzag) for length in (case.queries, case.keys)]
    mine, theirs = (ranges[group.index] for ranges in at)
    local = [_of(x.detach(), ranges).requires_grad_() for x, ranges in zip(whole, (mine, theirs, theirs), strict=True)]
    rows = None if mask is None else mask.detach() if mask.shape[-2] == 1 else _of(mask.detach(), mine)
    if rows is not None and case.learns:
        local.append(rows.clone().requires_grad_())
        rows = local[3]
    drawing = _drawing(case, mine[0][0], mine[0][1] - mine[0][0]) if case.p else None
    ring = Ring(group, at[0], at[1], case.causal, case.scale, case.p, drawing)
    out = ring_attention(ring, local[0], local[1], local[2], rows)
    found = [out, *torch.autograd.grad(out, local, _of(seed, mine))]
    if case.learns and mask is not None and mask.shape[-2] == 1:
        group.all_reduce(found[4])
    parts = zip(found, wants, (mine, mine, theirs, theirs, mine), strict=False)
    pairs = [(one.detach(), (ref if ref.shape[-2] == 1 else _of(ref, ranges)).detach()) for one, ref, ranges in parts]
    return max(float((one - ref).abs().max() / ref.abs().max().clamp(min=0.1)) for one, ref in pairs)


def _unfaded(self: products.SoftmaxState, start: int, out: Tensor, top: Tensor, total: Tensor) -> None:
    count = top.shape[-1]
    self.out.narrow(-2, start, count).add_(out)
    self.weight_sum.narrow(-1, start, count).add_(total)
    self.max_score.narrow(-1, start, count).copy_(top)


def _forgetting(self: rings._KeyGradientRing, step: int, owner: int, mine: Tensor) -> None:
    if self.pending_receive is not None:
        self.pending_receive[0].wait()
    self.pending_receive = None
    PASS_ON(self, step, owner, mine)


PASS_ON = rings._KeyGradientRing.pass_on
TWINS = {
    "blocks are merged as if they had one largest score": (products.SoftmaxState, "add", _unfaded),
    "gradients of those before are lost": (rings._KeyGradientRing, "pass_on", _forgetting),
}


def _all(world: World) -> Found:
    """What the tests below ask of three ranks, in one start of them."""
    found: Found = {"at once": {name: difference(case, world) for name, case in CASES.items()}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "SCORES", 100)
        found["few rows"] = {name: difference(case, world) for name, case in CASES.items()}
    found["bfloat16"] = {name: difference(CASES[name], world, torch.bfloat16) for name in ("causal", "padding, grouped heads", "crosswise")}
    found["twins"], found["sent"], isend = {}, {}, Group.isend
    for name, twin in TWINS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*twin)
            found["twins"][name] = difference(CASES["plain, wider values"], world)

    def sending(group: Group, x: Tensor, to_index: int, tag: int = 0) -> Any:
        found["sent"][name] = found["sent"].get(name, 0) + x.numel()
        return isend(group, x, to_index, tag)

    for name in ("window", "all"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Group, "isend", sending)
            difference(CASES[name], world)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[Found]:
    return launch(_all, 3, show=False)


@pytest.mark.parametrize("how", ["at once", "few rows"])
def test_it_equals_attention_on_one_rank(ranks: list[Found], how: str) -> None:
    """Every kind of mask, of heads and of lengths, also in products of a few rows at once."""
    for found in ranks:
        assert {name: off for name, off in found[how].items() if not off < 1e-12} == {}


def test_it_is_as_exact_in_bfloat16_as_one_kernel(ranks: list[Found]) -> None:
    """Blocks are merged in float32, so that a rank's result is rounded once."""
    assert max(max(found["bfloat16"].values()) for found in ranks) < 2**-6


def test_broken_twins_are_seen(ranks: list[Found]) -> None:
    for name in TWINS:
        assert max(found["twins"][name] for found in ranks) > 1e-3, name


def test_keys_go_no_further_than_they_are_seen(ranks: list[Found]) -> None:
    """Over 24 positions on 3 ranks each rank's keys of a window of two positions go to the next alone, both ways, and their gradients come
    back from there; without a mask keys go to all both ways, and their gradients after them and home."""
    keys = 2 * 2 * 4 * 8 * 8  # of keys and values: samples, heads, positions, width
    assert [found["sent"]["window"] for found in ranks] == [2 * keys, 3 * keys, keys]
    assert [found["sent"]["all"] for found in ranks] == [6 * keys] * 3


@pytest.mark.parametrize("lengths", [(13, 13), (13, 7), (7, 13)])
def test_a_rank_with_all_keys_computes_what_its_queries_see(lengths: tuple[int, int]) -> None:
    """Each of three ranks, without a mask where lengths are alike."""
    case = Case(*lengths, causal=True, few=2)
    *whole, seed = _whole(case, torch.float64)
    asked = [x.requires_grad_() for x in whole]
    want = _serial(case, whole[0], whole[1], whole[2], None)
    total = [torch.zeros_like(x) for x in whole]
    for mine in _ranges(case.queries, 3, True):
        ring = local_causal_ring(mine, case.keys)
        assert lengths[0] != lengths[1] or all(part.first is None for part in ring.merged_tiles[0][0])
        q = _of(whole[0].detach(), mine).requires_grad_()
        out = ring_attention(ring, q, whole[1], whole[2])
        assert torch.allclose(out, _of(want, mine), atol=1e-12)
        of_q, *found = torch.autograd.grad(out, (q, *asked[1:]), _of(seed, mine))
        assert torch.allclose(of_q, _of(torch.autograd.grad(want, asked, seed, retain_graph=True)[0], mine), atol=1e-12)
        for into, more in zip(total[1:], found, strict=True):
            into += more
    for into, one in zip(total[1:], torch.autograd.grad(want, asked, seed)[1:], strict=True):
        assert torch.allclose(into, one, atol=1e-12)


def test_how_far_keys_go() -> None:
    """Of causal attention in order to the last rank, in zig-zag order round to all."""
    order, both = (tuple(_ranges(16, 4, one)) for one in (False, True))
    far = [num_hops_by_owner([[bool(p) for p in row] for row in Ring(None, at, at, True).tiles]) for at in (order, both)]
    assert far == [(3, 2, 1, 0), (3, 3, 3, 3)]


def test_zigzag_gives_all_ranks_as_much_to_do() -> None:
    """Of 64 positions on 4 ranks: as many scores each, and all masks are whole triangles, which fused kernels know."""
    at = _ranges(64, 4, True)
    ring = Ring(None, at, at, True)
    done = [sum(p.rows * (p.rows + 1) // 2 if p.causal else p.rows * p.columns for owner in mine for p in owner) for mine in ring.tiles]
    assert done == [520] * 4
    assert all(part.first is None for mine in ring.tiles for owner in mine for part in owner)
    blocks = [part for mine in ring.merged_tiles for owner in mine for part in owner]
    assert len(blocks) == 16  # one a rank and step: a whole triangle, or all of half of the queries or of half of the keys
    assert sum(p.rows * (p.rows + 1) // 2 if p.causal else p.rows * p.columns for p in blocks) == 64 * 65 // 2
