"""`all_reduce=` of a layout: every algorithm trains as the serial model does in float64, alone and with ZeRO, tensor and pipeline ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.collectives import ALGORITHMS as COLLECTIVES
from shardwise.errors import LayoutError
from shardwise.plan.ir.choice import ALGORITHMS, NAMES, SCATTER_GATHER_HALVES, AllReduceChoices
from shardwise.plan.layout import Layout
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.run.verify.verify import verify_on_rank
from shardwise.world.comm.levels import HierarchicalReducer
from shardwise.world.comm.running import ProgramRunner
from shardwise.world.world import World

TWO_RINGS = Path(__file__).parents[3] / "examples" / "two_rings.txt"
WIDTH = 12  # of which 2, 3 and 4 are divisors: batches divide by as many ranks


class Net(torch.nn.Module):
    """Weights of several sizes; none a multiple of three or four elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, 10), torch.nn.Linear(10, WIDTH)
        self.last = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x))))).square().mean()


class Branching(Net):
    """No graph: it is trained whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if y > 0 else -y


def _batch() -> tuple[torch.Tensor]:
    return (torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1)),)


def _loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output


def checked(world: World, *layouts: str, make: Callable[[], torch.nn.Module] = Net) -> list[dict[str, int]]:
    """How many collectives ran from a program or in levels, by its name, for each of the layouts; all of which equal the serial run."""
    seen: Counter[str] = Counter()
    for kind, methods in (
        (ProgramRunner, ("all_reduce", "reduce_scatter", "all_gather")),
        (HierarchicalReducer, ("all_reduce", "reduce_scatter_into")),
    ):
        for method in methods:
            real = getattr(kind, method)

            def counted(self: Any, *args: Any, real: Any = real, method: str = method, **kwargs: Any) -> Any:
                name = args[0].name if isinstance(self, ProgramRunner) else "levels"
                seen[f"{method} {name}"] += 1
                return real(self, *args, **kwargs)

            setattr(kind, method, counted)
    torch.manual_seed(0)  # under which verify runs the serial model
    source, found = CachedModelSource.from_model(make), []
    first = shardwise.plan(make, _batch(), loss=_loss, layout=f"{layouts[0]} precision=float64", cluster="4xcpu-2")
    for layout in layouts:
        plan = replace(first, layout=Layout.parse(f"{layout} precision=float64"))
        result = verify_on_rank(world, plan, make, _batch(), _loss, source)
        assert result is None or result.ok, (layout, result)  # rank 0 compares
        found.append(dict(seen))
        seen.clear()
    return found


@pytest.mark.parametrize("data", [2, 3, 4])
def test_every_algorithm_equals_the_serial_model(ranks: Any, data: int) -> None:
    for every in ranks(checked, data, *(f"data={data} all_reduce={name}" for name in NAMES)):
        for name, seen in zip(NAMES, every, strict=True):
            # On one host the two levels are one, which is the transport's own.
            assert (seen.get(f"all_reduce {name}", 0) > 0) == (name not in ("native", "hierarchical")), (name, seen)


def test_an_all_reduce_of_ones_own_equals_the_serial_model(ranks: Any) -> None:
    """From its text, as `all_reduce=FILE` reads it: examples/two_rings.txt, of four ranks."""
    for (seen,) in ranks(checked, 4, f"data=4 all_reduce={TWO_RINGS}"):
        assert seen[f"all_reduce {TWO_RINGS}"] > 0


def test_zero_scatters_and_gathers_by_the_algorithm(ranks: Any) -> None:
    tried = [(name, zero) for name in SCATTER_GATHER_HALVES for zero in (1, 2)]
    for every in ranks(checked, 4, *(f"data=4 zero={zero} all_reduce={name}" for name, zero in tried)):
        for (name, _), seen in zip(tried, every, strict=True):
            assert seen[f"reduce_scatter {SCATTER_GATHER_HALVES[name][0]}"] > 0
            assert seen[f"all_gather {SCATTER_GATHER_HALVES[name][1]}"] > 0


@pytest.mark.parametrize("axes", ["tensor=2", "pipeline=2 microbatches=2"])
def test_with_other_axes_over_gloo(ranks: Any, axes: str) -> None:
    layouts = [f"data=2 {axes} all_reduce=tree", f"data=2 {axes} zero=1 all_reduce=ring"]
    for every in ranks(checked, 4, *layouts, env={"SHARDWISE_TRANSPORT": "gloo"}):
        assert all(sum(seen.values()) > 0 for seen in every)


def test_two_levels_equal_the_serial_model(ranks: Any) -> None:
    layouts = [f"zero={zero} all_reduce=hierarchical" for zero in (0, 1, 2)]
    for every in ranks(checked, 4, *(f"data=4 {layout}" for layout in layouts), env={"SHARDWISE_TRANSPORT": "boxes=2"}):
        for method, seen in zip(("all_reduce", "reduce_scatter_into", "reduce_scatter_into"), every, strict=True):
            assert seen[f"{method} levels"] > 0
    ranks(checked, 3, *(f"data=3 {layout}" for layout in layouts), env={"SHARDWISE_TRANSPORT": "boxes=2,1"})


def whole(world: World) -> list[dict[str, int]]:
    # A model that runs whole takes its place in the engine: each run makes its own.
    return [checked(world, layout, make=Branching)[0] for layout in ("data=2 all_reduce=ring", "data=2 zero=1 all_reduce=naive")]


def test_a_model_without_a_graph(ranks: Any) -> None:
    for summed, scattered in ranks(whole, 2):
        assert summed["all_reduce ring"] > 0
        assert scattered["reduce_scatter naive"] > 0


def plainly(world: World, name: str) -> list[list[float]]:
    """Weights after steps of a loop of one's own, and how often a program ran."""
    runs = [0]
    real = ProgramRunner.all_reduce

    def counted(self: ProgramRunner, *args: Any, **given: Any) -> Any:
        runs[0] += 1
        return real(self, *args, **given)

    ProgramRunner.all_reduce = counted  # type: ignore[method-assign]
    torch.manual_seed(5)
    (x,) = _batch()
    with shardwise.auto_parallelize(batch=(x,), plan=f"data=2 all_reduce={name}", world=world):
        model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x.chunk(2)[world.rank]).backward()
        optimizer.step()
    return [[p.double().sum().item() for p in model.parameters()], [float(runs[0])]]


def test_a_loop_of_ones_own(ranks: Any) -> None:
    native, tree = ranks(plainly, 2, "native")[0], ranks(plainly, 2, "tree")[0]
    assert native[0] == pytest.approx(tree[0], rel=1e-5)
    assert native[1] == [0.0]
    assert tree[1][0] >= 2


def test_names_are_those_of_the_collectives() -> None:
    assert set(ALGORITHMS) == set(COLLECTIVES["all_reduce"])
    for scatter, gather in SCATTER_GATHER_HALVES.values():
        assert scatter in COLLECTIVES["reduce_scatter"]
        assert gather in COLLECTIVES["all_gather"]


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"all_reduce=rign is unknown \(did you mean ring\?\)"):
        Layout.parse("data=2 all_reduce=rign")
    with pytest.raises(LayoutError, match=r"all_reduce=tree zero=1: .* tree has no such halves; use auto, native"):
        Layout.parse("data=2 zero=1 all_reduce=tree")
    with pytest.raises(LayoutError, match=r"all_reduce=ring compress=int8: .* use all_reduce=auto, or compress=none"):
        Layout.parse("data=2 compress=int8 all_reduce=ring")
    with pytest.raises(LayoutError, match=r"halves need a power of two of ranks, not data x tensor = 3; use ring"):
        Layout.parse("data=3 zero=2 all_reduce=halving_doubling")
    with pytest.raises(LayoutError, match=r"is unknown \(did you mean ring\?\)"):
        AllReduceChoices(((100, "rings"),))
    for text in ("ring to 5 B", "ring up to 5 B, native", "ring to 9 B, tree to 4 B, native", ""):
        with pytest.raises(LayoutError):
            AllReduceChoices.parse(text)
    assert str(Layout.parse("data=2 all_reduce=ring")).endswith("all_reduce=ring")
