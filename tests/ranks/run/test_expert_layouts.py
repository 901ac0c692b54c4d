"""Experts spread among data replicas: equal to the serial model in every composition, bytes by count, broken twins."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.errors import LayoutError
from shardwise.ops.experts import expected_ranks_per_token
from shardwise.plan.ir.placement import even_shard_range
from shardwise.plan.layout import Layout
from shardwise.run.verify.verify import Verification
from shardwise.world.comm.group import Group
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve
from tests.support.twins import not_summed_over

GSHARD = "moe-tiny:layers=2,hidden=16,inner=24,heads=4,sequence=8"


CONFIGS = Path(__file__).parents[2] / "torch" / "hf_experts"


def verified(name: str, layout: str, batch: int = 8, **options: Any) -> Verification:
    model = resolve(name)
    return shardwise.verify(model.make, layout, model.batch(batch), loss=model.loss, cut_everything=True, **options)


@pytest.mark.parametrize(
    ("more", "layout"),
    [
        (",capacity=2", "data=2 expert=2"),
        (",capacity=2", "data=4 expert=2"),
        (",capacity=2", "data=4 expert=4 zero=3"),
        (",capacity=2", "data=4 expert=2 zero=2 microbatches=2"),
        (",capacity=2", "data=2 expert=2 tensor=2"),
        (",capacity=2", "data=2 expert=2 tensor=2 sequence_parallel=on"),
        (",capacity=2", "data=2 expert=2 tensor=2 sample_parallel=on"),
        (",capacity=2", "data=2 expert=2 pipeline=2 microbatches=2 schedule=zb-h1 zero=1"),
        (",capacity=2", "data=4 expert=2 tensor=2 zero=1 recompute=full"),
        (",capacity=2", "data=2 expert=2 recompute=selective offload=all"),
        (",capacity=2,experts=5", "data=2 expert=2"),
        (",capacity=2,experts=5", "data=4 expert=4 zero=2 recompute=full"),
        (",capacity=0", "data=4 expert=2 zero=1"),
    ],
)
def test_a_layout_that_spreads_experts_equals_serial(more: str, layout: str) -> None:
    found = verified(GSHARD + more, layout)
    assert found.ok, found
    assert found.tolerance == 1e-9
    share = found.divided["expert"]
    assert share["parameters"] > 0.4
    assert share["flops"] > 0.9


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mixtral", "data=2 expert=2"),
        ("mixtral", "data=4 expert=2 zero=2"),
        ("mixtral", "data=2 expert=2 tensor=2 recompute=full"),
        ("mixtral", "tensor=4"),
        ("mixtral", "data=2 expert=2 pipeline=2 microbatches=2"),
        ("mixtral", "context=2"),
        ("qwen3_moe", "data=2 expert=2"),
        ("qwen3_moe", "data=2 expert=2 tensor=2 zero=1"),
        ("olmoe", "data=2 expert=2"),
        ("olmoe", "data=4 expert=4 zero=3 recompute=full"),
        ("granitemoe", "data=2 expert=2"),
        ("granitemoe", "data=4 expert=2 tensor=2 recompute=selective"),
        ("gpt_oss", "data=2 expert=2"),
        ("gpt_oss", "tensor=2"),
        ("gpt_oss", "data=4 expert=2 zero=3"),
        ("deepseek_v3", "data=2 expert=2"),
        ("deepseek_v3", "data=2 tensor=2"),
        ("deepseek_v3", "data=2 expert=2 tensor=2 offload=all"),
    ],
)
def test_experts_of_a_library_without_a_limit_of_tokens_equal_serial(name: str, layout: str) -> None:
    """As many rows to each rank as its experts get; the serial model is the library's own loop over experts."""
    pytest.importorskip("transformers")
    found = verified(f"hf:{CONFIGS / name}.json", layout, 4)
    assert found.ok, found
    assert found.tolerance == 1e-9
    for axis, share in found.divided.items():
        assert share["flops"] > 0.8, (axis, share)
        whole = axis in ("data", "context") and "zero" not in layout
        assert whole or share["parameters"] > (0.3 if name == "deepseek_v3" else 0.6), (axis, share)


@pytest.mark.parametrize("layout", ["tensor=2x1x2", "tensor=2 pipeline=4"])
def test_experts_cut_twice_and_stages_around_them_equal_serial(layout: str) -> None:
    """Each axis of a grid has a piece of the experts that the other left; no message holds rows, whose number only data says."""
    pytest.importorskip("transformers")
    found = verified(f"hf:{CONFIGS / 'mixtral'}.json", layout, 4)
    assert found.ok, found
    assert found.tolerance == 1e-9


class _Rows(torch.nn.Module):
    """Experts, between whose products something is done to all of their rows."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between
        self.gate, self.head = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)
        self.up, self.down = (torch.nn.Parameter(torch.randn(4, 6, 6) / 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight, which = self.gate(x).softmax(-1).topk(2)
        rows, ids, order = torch.ops.shardwise.to_experts(x, which, 4)
        rows = self.between(torch.ops.shardwise.of_experts(rows, ids, self.up, None, True))
        rows = torch.ops.shardwise.of_experts(rows, ids, self.down, None, True)
        made: Tensor = self.head(torch.ops.shardwise.from_experts(rows, order, weight, 4))
        return made.square().mean()


def _repeated(rows: Tensor) -> Tensor:
    """By norm, in a shape of its own: for each row by itself."""
    return (rows * rows.square().mean(-1, keepdim=True).rsqrt().expand(rows.shape)).view(len(rows), 2, 3).flatten(1)


@pytest.mark.parametrize(
    ("between", "layout"),
    [
        (_repeated, "data=2 expert=2"),
        (_repeated, "tensor=2"),
        (_repeated, "tensor=2 sample_parallel=on"),
        (lambda rows: rows - rows.mean(0), "data=2 expert=2"),
        (lambda rows: rows - rows.mean(0), "tensor=2"),
        (lambda rows: rows - rows.cumsum(0) / 8, "data=2"),
        (lambda rows: rows + torch.arange(len(rows)).unsqueeze(1) / 8, "data=2 expert=2"),
    ],
)
def test_what_is_done_to_rows_of_experts_equals_serial(between: Callable[[Tensor], Tensor], layout: str) -> None:
    """Each by itself in pieces; what needs all of them, in their order or by their number, has them whole. By token and by expert are
    other pieces."""
    batch = (torch.randn(8, 6, generator=torch.Generator().manual_seed(0)),)
    found = shardwise.verify(lambda: _Rows(between), layout, batch, loss=lambda output, _: output, cut_everything=True)
    assert found.ok, found
    assert found.tolerance == 1e-9


def test_broken_twin_gradients_of_other_weights_that_are_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    not_summed_over(monkeypatch, "expert")
    found = verified(GSHARD + ",capacity=2", "data=2 expert=2")
    assert not found.ok
    assert found.worst["gradients"] > 1e-3


def test_more_ranks_than_experts_are_refused() -> None:
    model = resolve(GSHARD)
    with pytest.raises(LayoutError, match="expert=16 spreads the experts of a layer, and of this model its widest layer has 8; use that"):
        shardwise.plan(model.make, model.batch(16), loss=model.loss, cluster="1xcpu-2", layout="data=16 expert=16")


def _sent(world: World, layout: str) -> int:
    """Bytes that this rank sends in exchanges of one step."""
    model, sent, right = resolve(GSHARD + ",capacity=2"), [], Group.exchange

    def counting(self: Group, given: Any, shapes: Any) -> Any:
        sent.extend(x.numel() * x.element_size() for i, x in enumerate(given) if i != self.index)
        return right(self, given, shapes)

    engine = shardwise.parallelize(model.make, model.batch(8), loss=model.loss, plan=layout, seed=0, world=world)
    Group.exchange = counting  # type: ignore[method-assign]
    try:
        engine.step(model.batch(8))
    finally:
        Group.exchange = right  # type: ignore[method-assign]
    return sum(sent)


@pytest.mark.parametrize(
    ("layout", "n", "tensor"), [("data=2 expert=2", 2, 1), ("data=4 expert=4", 4, 1), ("data=2 expert=2 tensor=2", 2, 2)]
)
def test_tokens_travel_as_the_formula_says(layout: str, n: int, tensor: int) -> None:
    """GShard, section 3.2: each of n ranks keeps 1/n of its own places, and sends the others: there and back, forward and backward."""
    samples, experts, places, hidden = 8, 8, 2 * 8 // 8, 16
    of_rank = 4 * samples // n * experts * places * hidden
    assert launch(_sent, n * tensor, layout, show=False) == [4 * of_rank * (n - 1) // n] * n * tensor


def _rows_sent(world: World, name: str) -> list[int]:
    """Of one step: bytes that this rank sends to others, and those to and from the experts of other ranks that its tokens chose, by what a
    run of the library's own modules tells."""
    model, sent, right = resolve(f"hf:{CONFIGS / name}.json"), [], Group.exchange
    batch, n, index = model.batch(4), world.num_ranks, world.rank

    def counting(self: Group, given: Any, shapes: Any) -> Any:
        sent.extend(x.numel() * x.element_size() for i, x in enumerate(given) if i != self.index)
        return right(self, given, shapes)

    engine = shardwise.parallelize(model.make, batch, loss=model.loss, plan=f"data={n} expert={n}", seed=0, world=world)
    Group.exchange = counting  # type: ignore[method-assign]
    try:
        engine.step(batch)
    finally:
        Group.exchange = right  # type: ignore[method-assign]
    torch.manual_seed(0)
    net, elsewhere = model.make(), [0]

    def chosen(module: Any, given: Any) -> None:
        x, which, _ = given
        ranks = which // (module.num_experts // n)
        home = (torch.arange(len(x)) // (len(x) // n)).unsqueeze(1)
        out, back = ((ranks != home) & (home == index)), ((ranks != home) & (ranks == index))
        reached = torch.zeros(len(x), n, dtype=torch.bool).scatter_(1, ranks, True)  # a token goes once to each rank
        away = reached & (torch.arange(n) != home)
        tokens = (away & (home == index)).sum() + away[:, index].sum()  # those that leave, and what comes back of others'
        counts = (module.num_experts // n + 1) * (n - 1) * 8
        # Of each choice which token it is of, its weight, and the weight's gradient.
        elsewhere[0] += 2 * int(tokens) * x.shape[1] * 4 + counts + int(out.sum()) * (4 + 4) + int(back.sum()) * 4

    for module in net.modules():
        if hasattr(module, "num_experts") and hasattr(module, "down_proj"):
            module.register_forward_pre_hook(chosen)
    net(**batch)
    return [sum(sent), elsewhere[0]]


def test_tokens_travel_once_to_each_rank_of_their_experts_and_to_no_others() -> None:
    """Forward a token goes there and what is made of it comes back; backward gradients take the same ways; and each layer says how many."""
    pytest.importorskip("transformers")
    for counted, formula in launch(_rows_sent, 2, "qwen3_moe", show=False):
        assert counted == formula


@pytest.mark.parametrize(("experts", "top", "ranks"), [(8, 2, 4), (7, 3, 2), (5, 1, 3), (6, 6, 2)])
def test_how_many_ranks_a_token_reaches_is_the_mean_over_all_choices(experts: int, top: int, ranks: int) -> None:
    """Counted for each choice of experts that there is; at most as many as it has experts, which is what is saved."""
    of = [rank for rank in range(ranks) for _ in range(even_shard_range(experts, ranks, rank)[1])]
    counts = [len({of[e] for e in chosen}) for chosen in combinations(range(experts), top)]
    assert expected_ranks_per_token(experts, top, ranks) == pytest.approx(sum(counts) / len(counts), rel=1e-12)
    assert max(counts) <= min(top, ranks)


def test_a_layout_with_experts_prints_and_its_replicas_lie_along_two_axes() -> None:
    layout = Layout.parse("data=4 expert=2 tensor=2")
    assert Layout.parse(str(layout)) == layout
    assert layout.mesh.stage_axes == ("data", "expert", "tensor")
    assert layout.num_ranks == 8
    assert Layout(data=4).mesh.stage_axes == ("data", "tensor")


def _in_a_loop(world: World, layout: str) -> list[float]:
    """Losses of the user's own loop over a model whose experts are spread."""
    model, losses = resolve(GSHARD + ",capacity=2"), []
    batch = model.batch(8)
    torch.manual_seed(0)
    if world.num_ranks == 1:
        net = model.make().double()
    else:
        with shardwise.auto_parallelize(batch=(batch["input_ids"],), plan=f"{layout} precision=float64", world=world):
            net = model.make().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    (mine,) = shardwise.shard([batch]) if world.num_ranks > 1 else [batch]
    for _ in range(3):
        optimizer.zero_grad()
        loss = model.loss(net(mine["input_ids"]), mine)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        world.world_group.all_reduce(total)
        losses.append(float(total) / world.num_ranks)
    return losses


def test_a_loop_of_ones_own_with_spread_experts_equals_serial() -> None:
    (want,) = launch(_in_a_loop, 1, "", show=False)
    for layout, ranks in (("data=2 expert=2", 2), ("data=4 expert=2", 4)):
        assert launch(_in_a_loop, ranks, layout, show=False) == [pytest.approx(want, rel=1e-12)] * ranks
