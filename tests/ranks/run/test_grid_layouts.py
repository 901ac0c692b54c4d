"""Tensor ranks in grids: equal to the serial model, what each axis sends by count, checkpoints between arrangements, broken twins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import test_plain
import torch
from torch import Tensor

from shardwise.errors import LayoutError
from shardwise.model.sharding import propagate as propagate_module
from shardwise.plan.ir.placement import is_shard
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.engine import Engine
from shardwise.run.rank_model import model_source
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.run.verify.verify import verify_on_rank
from shardwise.world.comm.group import Group
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from tests.support.chain import Chain
from tests.support.traced import of, weights_after
from tests.support.twins import not_summed_over
from tests.support.verified_models import Subject


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt-tiny", "tensor=2x2 microbatches=2 recompute=full"),
        ("gpt-tiny", "data=2 tensor=2x2 zero=3"),
        ("bert-tiny", "tensor=2x2 sequence_parallel=on"),
        ("t5-tiny", "tensor=2x2 pipeline=2 microbatches=2"),
        ("llama-tiny", "tensor=2x1x2 sequence_parallel=on"),
        ("vit-tiny", "tensor=2x2 offload=all"),
        ("resnet-v2-tiny", "tensor=2x2"),  # whose statistics would be gathered over columns, and the copies written
        ("resnet-tiny", "data=2 tensor=2x2 zero=1 microbatches=2"),
        ("unet-tiny", "tensor=2x2"),
        ("moe-tiny", "tensor=2x2x2"),
    ],
)
def test_a_grid_equals_serial(name: str, layout: str) -> None:
    found = of(name).check(replace(Layout.parse(layout), precision="float64"), optimizer={"name": "adamw", "clip": 0.05})
    assert found.ok, found
    assert found.tolerance == 1e-9


@pytest.mark.parametrize("eager", ["free links", "dear links"])
def test_a_grid_that_cuts_whatever_it_can_equals_serial(eager: str) -> None:
    found = of("gpt-tiny").check(Layout.parse("tensor=2x2 precision=float64"), eager=eager)
    assert found.ok, found


def test_a_gradient_that_is_summed_along_one_axis_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken twin: gradients of parameters that rows have whole are not summed over them."""
    not_summed_over(monkeypatch, "rows")
    subject = Subject("gpt-tiny", 8)
    found = subject.check(Layout.parse("tensor=2x2 precision=float64"), eager="")
    assert not found.ok
    assert found.worst["gradients"] > 1e-3


def test_pieces_that_are_put_together_out_of_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken twin: depth cuts every piece once more, also those that are gathered along the other axis alone."""

    def anything(decided: Any, sizes: Any, *_: Any) -> Any:
        return (
            {v: {f.dim: sizes[a] for a, f in by.items() if is_shard(f)} for v, by in decided.placements.items()},
            frozenset(),
            frozenset(),
        )

    monkeypatch.setattr(propagate_module, "nested_dims", anything)
    subject = Subject("gpt-tiny", 8)
    assert not subject.check(Layout.parse("tensor=2x1x2 precision=float64"), eager="free links").ok


def test_cuts_over_an_axis_that_the_layout_has_not_are_refused() -> None:
    subject = of("gpt-tiny")
    plan = replace(subject.plan(Layout.parse("tensor=2x2")), shards=(("tensor", (("tokens.weight", 0),)),))
    graph = subject.source.capture(subject.batch, subject.loss, subject.size).graph
    with pytest.raises(LayoutError, match=r"over tensor, and the tensor ranks of .* lie along rows, columns; leave \[shards.tensor\] out"):
        model_source.shard_graph(plan, graph)


def cut_thrice(world: World) -> dict[str, Any] | None:
    rows = tuple((f"layers.{i}.weight", i % 2) for i in range(4))
    shards = (("rows", rows), ("columns", tuple((name, 1 - dim) for name, dim in rows)), ("depth", rows))
    plan = Plan(Layout.parse("tensor=2x2x2 precision=float64"), "chain", "1xcpu-2", 8, shards=shards)
    batch = (torch.randn(8, WIDTHS[0], generator=torch.Generator().manual_seed(4)),)
    torch.manual_seed(0)
    found = verify_on_rank(world, plan, chain, batch, None, CachedModelSource.from_model(chain))
    return None if found is None else {"ok": found.ok, "worst": found.worst}


def test_weights_that_a_plan_cuts_thrice_equal_serial_with_few_samples() -> None:
    """So few that their pieces would rather be gathered than their products cut."""
    found = launch(cut_thrice, 8, timeout_s=120, show=False)[0]
    assert found is not None
    assert found["ok"], found


WIDTHS, BATCH = (64, 128, 64, 128, 64), 512  # so much work that products are cut, and no weight is gathered for them


def chain() -> Chain:
    return Chain(WIDTHS)


def counted(world: World) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of all tensors that this rank summed with others in a step: by axis, and those of the closed form."""
    summed: Counter[tuple[int, ...]] = Counter()
    all_reduce = Group.all_reduce

    def counting(self: Group, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.numel() > 1 and self.size > 1:
            summed[self.ranks] += x.numel() * x.element_size()
        return all_reduce(self, x, *args, **kwargs)

    turns = [0, 1, 0, 1]
    rows = tuple((f"layers.{i}.weight", dim) for i, dim in enumerate(turns))
    columns = tuple((name, 1 - dim) for name, dim in rows)
    layout = Layout.parse("tensor=2x2 precision=float64")
    plan = Plan(layout, "chain", "1xcpu-2", BATCH, shards=(("rows", rows), ("columns", columns)))
    batch = (torch.randn(BATCH, WIDTHS[0], generator=torch.Generator().manual_seed(3)),)
    engine = Engine(plan, CachedModelSource.from_model(chain), batch, None, world, optimizer="sgd", seed=0)
    Group.all_reduce = counting  # type: ignore[method-assign]
    try:
        engine.forward_backward(batch)
    finally:
        Group.all_reduce = all_reduce  # type: ignore[method-assign]
    want = dict.fromkeys(("rows", "columns"), 0)
    for i, (a, b) in enumerate(pairwise(WIDTHS)):
        inputs, outputs = ("columns", "rows") if turns[i] == 0 else ("rows", "columns")
        want[inputs] += 8 * BATCH * b // 2  # the output, summed over what cuts its inputs, in pieces of the other axis
        want[outputs] += 8 * BATCH * a // 2 if i else 0  # the gradient of its input
    return {axis: summed.pop(layout.mesh.group(world.rank, axis), 0) for axis in want} | {"others": sum(summed.values())}, want


def test_each_axis_sums_the_bytes_of_the_closed_form() -> None:
    """Agarwal et al. 1995 as AxoNN has it: an output over one axis forward, its input's gradient over the other backward."""
    for found, want in launch(counted, 4, timeout_s=120, show=False):
        assert found == want | {"others": 0}


@pytest.mark.parametrize(
    ("first", "second"), [("tensor=2x2", "data=2"), ("tensor=2", "data=2 tensor=1x2x2 zero=1"), ("tensor=2x2", "tensor=4")]
)
def test_training_goes_on_under_another_arrangement(tmp_path: Path, first: str, second: str) -> None:
    """A step, a checkpoint, and a step under the other layout, against two steps under the first: weights by name."""
    subject = of("gpt-tiny")

    def run(world: World, layout: str, steps: int, loads: bool) -> dict[str, list[float]]:
        plan = subject.plan(Layout.parse(f"{layout} precision=float64"))
        engine = Engine(plan, subject.source, subject.batch, subject.loss, world, seed=1 if loads else 0)
        return weights_after(steps, engine, subject.batch, tmp_path, loads)

    want = launch(lambda world: run(world, first, 2, False), Layout.parse(first).num_ranks, show=False)[0]
    got = launch(lambda world: run(world, second, 1, True), Layout.parse(second).num_ranks, show=False)[0]
    assert got.keys() == want.keys()
    for name, values in want.items():
        assert torch.allclose(torch.tensor(got[name]).double(), torch.tensor(values).double(), rtol=1e-9, atol=1e-9), name


def in_a_grid(world: World) -> dict[str, Any]:
    rows = (("up.weight", 0), ("up.bias", 0), ("down.weight", 1), ("emb.weight", 0))
    columns = (("up.weight", 1), ("down.weight", 0), ("down.bias", 0))
    shards = (("rows", rows), ("columns", columns))
    layout = Layout.parse("tensor=2x2 precision=float64")
    made, test_plain.plan_of = test_plain.plan_of, lambda _: Plan(layout, "Mixed", "1xcpu-2", test_plain.BATCH, shards=shards)
    try:
        return test_plain.divided(world, "tensor=2x2", 1)
    finally:
        test_plain.plan_of = made


def test_a_plain_loop_in_a_grid_is_the_serial_loop(ranks: Callable[..., list[Any]]) -> None:
    for found in ranks(in_a_grid, 4):
        assert found["losses"]
        assert set(found["cut"]) == {"up.weight", "up.bias", "down.weight", "down.bias", "emb.weight"}
        whole = {"up.weight", "down.weight"}  # cut along two dimensions, which `matches` does not look for
        assert not set(found["gradients"]) - whole
        assert not set(found["weights"]) - whole
