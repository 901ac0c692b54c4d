"""scatter=last: one reduce-scatter of each bucket a step with zero=2 and 3; the sums are those of the serial model under every axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import shardwise
from shardwise.errors import Infeasible, LayoutError
from shardwise.plan.layout import Layout
from shardwise.plan.plan_file import format_plan, parse_plan
from shardwise.run.engine import Engine
from shardwise.run.state.optimizer import OptimizerSpec
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

GPT = "gpt:layers=2,hidden=32,heads=4,sequence=16,vocabulary=64"
LAYOUTS = [
    "data=2 microbatches=3 zero=2 scatter=last",
    "data=2 microbatches=2 zero=3 scatter=last recompute=full",
    "data=2 pipeline=2 microbatches=4 zero=2 schedule=zb-h1 scatter=last",
    "data=2 tensor=2 microbatches=2 zero=3 scatter=last",
    "data=2 branch=1 microbatches=2 zero=2 scatter=last offload=all",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_equals_the_serial_model(layout: str) -> None:
    model = resolve(GPT)
    found = shardwise.verify(model.make, layout, model.batch(12), loss=model.loss)
    assert found.ok, found.first_difference


def count_scatters(world: World, plans: list[str]) -> list[int]:
    """Reduce-scatters that a step begins, by layout."""
    model, counts = resolve(GPT), []
    for text in plans:
        engine = Engine(parse_plan(text), model.make, model.batch(8), model.loss, world, OptimizerSpec.of("adamw"), seed=0)
        begun = 0
        for scatterer in engine.gradients._scatterers.values():
            group = scatterer._reduction_group
            original = group.reduce_scatter_into

            def counted(*args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                nonlocal begun
                begun += 1
                return original(*args, **kwargs)

            scatterer._reduction_group = _Counting(group, counted)  # type: ignore[assignment]
        engine.step(model.batch(8))
        counts.append(begun)
    return counts


class _Counting:
    """A group that counts its reduce-scatters."""

    def __init__(self, group: Any, counted: Callable[..., Any]) -> None:
        self._group, self.reduce_scatter_into = group, counted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def test_a_step_has_one_scatter_of_each_bucket(ranks: Callable[..., Any]) -> None:
    model = resolve(GPT)
    layouts = [f"data=2 microbatches=4 zero=2 scatter={word}" for word in ("last", "each")]
    plans = [shardwise.plan(model.make, model.batch(8), loss=model.loss, cluster="1xcpu-2", layout=layout) for layout in layouts]
    last, each = ranks(count_scatters, 2, [format_plan(plan) for plan in plans])[0]
    assert each == 4 * last > 0


def test_it_is_priced_as_one_sum_and_whole_gradients() -> None:
    model = resolve(GPT)
    layouts = [f"data=16 microbatches=4 zero=2 scatter={word} precision=bfloat16-mixed" for word in ("last", "each")]
    last, each = (
        shardwise.plan(model.make, model.batch(64), loss=model.loss, cluster="2xdgx-a100-80", layout=layout).prediction
        for layout in layouts
    )
    assert last is not None
    assert each is not None
    assert last.step_time_s < each.step_time_s
    assert last.memory.gradients == pytest.approx(each.memory.gradients * 17, rel=0.01)


def test_what_does_not_go_with_it_is_refused() -> None:
    with pytest.raises(Infeasible, match=r"shardwise.accumulate.*leave scatter out"):
        shardwise.auto_parallelize(resolve(GPT).make(), resolve(GPT).batch(4), plan="zero=2 scatter=last")
    with pytest.raises(LayoutError, match="scatter=lst is unknown"):
        Layout.parse("scatter=lst")
