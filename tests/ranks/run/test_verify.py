"""The proof by sample: parallel runs against serial ones in float64, and broken twins that the proof must find.

`scripts/verify_all` runs every model under every layout; here is one layout of each kind, over models of each kind.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]

import shardwise  # noqa: E402
from shardwise.errors import Infeasible, ModelError  # noqa: E402
from shardwise.lower import redistribute  # noqa: E402
from shardwise.lower.kernels import statistics  # noqa: E402
from shardwise.ops import Rule, rule_of  # noqa: E402
from shardwise.plan.ir.placement import P, R, is_shard  # noqa: E402
from shardwise.plan.layout import Layout  # noqa: E402
from shardwise.run.engine import Engine  # noqa: E402
from shardwise.run.verify.verify import Verification  # noqa: E402
from shardwise.world.launch.launch import launch  # noqa: E402
from shardwise.world.world import World  # noqa: E402
from shardwise.zoo.resolve import resolve  # noqa: E402
from tests.support.verified_models import SCHEDULES, Row, Subject, factorisations, layouts, random_layouts, run_case  # noqa: E402

ODD = "tests/support/odd_models.py"
TOLERANCE = 1e-9


def check(subject: Subject, layout: str, eager: str = "free links", **options: Any) -> Verification:
    """Verify a layout in float64, cut as these prices have it."""
    return subject.check(replace(Layout.parse(layout), precision="float64"), eager=eager, **options)


@pytest.mark.parametrize(
    ("name", "layout", "eager"),
    [
        ("gpt-tiny", "data=2 tensor=2 pipeline=2 microbatches=2 zero=1", "free links"),
        ("gpt-tiny", "tensor=2 pipeline=2 microbatches=4 schedule=gpipe recompute=full", "dear links"),
        ("llama-tiny", "tensor=4 microbatches=2 recompute=full", "free links"),
        ("gpt-tiny", "data=2 tensor=2 pipeline=2 microbatches=2 sequence_parallel=on", "free links"),
        ("t5-tiny", "tensor=2 sequence_parallel=on recompute=full", "dear links"),
        ("t5-tiny", "tensor=2 pipeline=2 microbatches=2 schedule=sequential zero=1", "dear links"),
        ("moe-tiny", "data=2 tensor=2 zero=1", "free links"),
        ("lstm-tiny", "tensor=2 microbatches=2 zero=1", "dear links"),
        ("resnet-tiny", "data=2 tensor=2 microbatches=2 recompute=full", "free links"),
        ("unet-tiny", "data=2 pipeline=2 microbatches=4", "dear links"),
        ("hf:tests/torch/hf/bert.json", "data=2 tensor=2", "free links"),
        ("examples/own_model.py:make", "data=2 tensor=2", "dear links"),
        (f"{ODD}:alexnet", "tensor=4 sample_parallel=on", "dear links"),
        (f"{ODD}:alexnet", "data=2 tensor=2 microbatches=2 zero=1 sample_parallel=on", "dear links"),
        ("moe-tiny", "data=2 tensor=2 pipeline=2 microbatches=2 sample_parallel=on", "free links"),
        (f"{ODD}:two_inputs", "data=2 pipeline=2 microbatches=2", "free links"),
        (f"{ODD}:encoder", "data=2 tensor=2", "dear links"),
        (f"{ODD}:frozen", "data=2 pipeline=2 microbatches=2 zero=1", "free links"),
        (f"{ODD}:norms", "data=4 recompute=full", "dear links"),
        (f"{ODD}:shared", "data=2 pipeline=2 microbatches=2 zero=1", "free links"),
        (f"{ODD}:losses", "data=2 tensor=2", "dear links"),
        (f"{ODD}:fourier", "data=2 pipeline=2 microbatches=2", "free links"),
        (f"{ODD}:rotary", "data=2 tensor=2", "free links"),
        (f"{ODD}:statistics", "data=4 microbatches=2", "dear links"),
        (f"{ODD}:writes", "pipeline=2 microbatches=4 schedule=gpipe recompute=full", "free links"),
        ("gpt-tiny", "data=2 tensor=2 microbatches=2 zero=3 sequence_parallel=on recompute=full", "free links"),
        ("gpt-tiny", "data=2 pipeline=2 microbatches=4 zero=3 recompute=selective offload=optimizer", "free links"),
        ("t5-tiny", "data=2 tensor=2 zero=2 recompute=selective", "dear links"),
        ("resnet-tiny", "data=2 pipeline=2 microbatches=2 zero=3 offload=all", "free links"),
        (f"{ODD}:shared", "data=2 pipeline=2 microbatches=2 zero=3", "free links"),
        (f"{ODD}:frozen", "data=4 microbatches=2 zero=2", "free links"),
        (f"{ODD}:slices", "data=2 recompute=selective offload=all", "free links"),
        (f"{ODD}:convnext", "data=2 pipeline=2 microbatches=2 schedule=zb-h1 zero=3", "free links"),
        ("lstm-tiny", "pipeline=2 microbatches=2 schedule=zb-v chunks=2 offload=all", "free links"),  # of four stages one has no operators
    ],
)
def test_parallel_equals_serial(subject: Callable[[str], Subject], name: str, layout: str, eager: str) -> None:
    found = check(subject(name), layout, eager)
    assert found.ok, found
    assert found.tolerance == TOLERANCE
    assert {"loss", "gradients", "weights"} <= found.worst.keys()


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        ("data=2 tensor=2", {"name": "sgd", "lr": 0.1, "momentum": 0.9, "clip": 0.05}),
        ("tensor=2 pipeline=2 microbatches=2", {"clip": 0.05}),
        ("data=2 pipeline=2 zero=1 microbatches=2", {"clip": 0.05, "decay": "matrices"}),
        ("data=2 tensor=2 zero=1", {"name": "sgd", "momentum": 0.9, "weight_decay": 0.1, "clip": 0.05}),
        ("data=2 zero=1", {"name": "nadam", "weight_decay": 0.1}),
        ("tensor=2", {"name": "adam", "options": {"amsgrad": True}}),
        ("data=2 pipeline=2 zero=2 microbatches=2", {"name": "asgd"}),
        ("data=2 zero=3", {"name": "sgd", "momentum": 0.9, "options": {"dampening": 0.5}}),
        ("data=2", {"name": "rprop", "clip": 0.05}),
    ],
)
def test_optimizers_and_the_global_norm(subject: Callable[[str], Subject], layout: str, optimizer: dict[str, Any]) -> None:
    """`clip_grad_norm_` in one process is the reference; tied tables and cut tables are each counted once."""
    found = check(subject(f"{ODD}:shared"), layout, optimizer=optimizer, steps=3)
    assert found.ok, found


@pytest.mark.parametrize(("name", "layout", "batch"), [("t5-tiny", "tensor=2", None), ("resnet-tiny", "data=2", 12)])
def test_bfloat16_is_as_near_as_bfloat16_is(subject: Callable[[str], Subject], name: str, layout: str, batch: int | None) -> None:
    """After one step; in the second the ResNet's own rounding is a third of its gradients, in one process too, and with 16 samples in the
    first."""
    found = (Subject(name, batch) if batch else subject(name)).check(
        replace(Layout.parse(layout), precision="bfloat16"), steps=1, eager="free links" if "tensor" in layout else ""
    )
    assert found.ok, found
    assert found.in_noise
    assert found.tolerance == 4.0


def test_gradients_of_inputs_are_compared(subject: Callable[[str], Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    model = subject(f"{ODD}:two_inputs")
    assert "input_gradients" in check(model, "data=2").worst
    monkeypatch.setattr("shardwise.run.engine.input_gradients", _spoiled_inputs)
    found = check(model, "data=2")
    assert not found.ok
    assert "input_gradients of dense" in (found.first_difference or "")


def _spoiled_inputs(*args: Any) -> Any:
    from shardwise.run.sharded_state import input_gradients

    found = input_gradients(*args)
    return found and {name: x * (1 + 1e-8) for name, x in found.items()}


@pytest.mark.parametrize("layout", ["data=2", "tensor=2", "pipeline=2 microbatches=2", "data=2 zero=1"])
def test_a_spoiled_gradient_is_found_and_named(subject: Callable[[str], Subject], layout: str) -> None:
    found = check(subject(f"{ODD}:two_inputs"), layout, sabotage={"left.weight": 1 + 1e-8})
    assert not found.ok
    assert "gradients of left.weight in step 1" in (found.first_difference or "")


def test_a_gradient_of_rounding_alone_is_told_from_a_small_one(subject: Callable[[str], Subject]) -> None:
    """Both are about 1e-17. What the noise of the serial run excuses for the one is not excused for the other."""
    model = subject(f"{ODD}:small")
    for layout in ("data=2", "tensor=2", "data=2 tensor=2"):
        assert check(model, layout).ok
    for factor in (0.0, 1 + 1e-8, 0.5, -1.0):
        found = check(model, "data=2", sabotage={"faint.weight": factor})
        assert "gradients of faint.weight in step 1" in (found.first_difference or ""), factor
    found = check(model, "data=2", sabotage={"before.bias": 1e6})
    assert "gradients of before.bias in step 1" in (found.first_difference or ""), "noise has a size too"


def _softmax_in_pieces(op: Any, tensors: Any) -> Rule | None:
    """A wrong rule: every rank normalises its own piece."""
    if op.target.split(".")[1] != "softmax":
        return rule_of(op, tensors)
    labels = tuple("" for _ in tensors[op.inputs[0]].shape[:-1])
    return Rule(((*labels, "k"),), ((*labels, "k"),))


def test_a_rule_that_cuts_softmax_is_found(subject: Callable[[str], Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Subject(str(ROOT / f"{ODD}:slices"))  # its shardings are not to be kept
    monkeypatch.setattr("shardwise.model.graph.rule_of", _softmax_in_pieces)
    found = check(model, "tensor=2 sequence_parallel=on")
    assert not found.ok
    assert "loss in step 1" in (found.first_difference or "")


_BACKWARD = redistribute._Redistribute.backward


def _without_the_dual(ctx: Any, grad: torch.Tensor) -> Any:
    """Of a gradient whose summands are to be summed every rank takes its own."""
    return (grad, None, None, None, None) if ctx.way == (P, R) else _BACKWARD(ctx, grad)


@pytest.mark.parametrize(
    ("broken", "name", "layout", "eager"),
    [
        ((redistribute, "_all_reduced_copy"), f"{ODD}:two_inputs", "tensor=2", "free links"),  # a contracted sum that is dropped
        ((redistribute._Redistribute, "backward"), "gpt-tiny", "tensor=2", ""),  # its dual
        ((statistics, "all_reduce_over_groups"), f"{ODD}:norms", "data=2", ""),  # batch norm over a piece of the batch
    ],
)
def test_a_missing_collective_is_found(
    subject: Callable[[str], Subject], monkeypatch: pytest.MonkeyPatch, broken: tuple[Any, str], name: str, layout: str, eager: str
) -> None:
    kind, method = broken
    twins: dict[str, Any] = {
        "_all_reduced_copy": lambda x, group: x.clone(),
        "backward": staticmethod(_without_the_dual),
        "all_reduce_over_groups": lambda x, groups: x,
    }
    monkeypatch.setattr(kind, method, twins[method])
    assert not check(subject(name), layout, eager).ok


def test_a_model_that_cannot_be_captured_trains_by_data(subject: Callable[[str], Subject]) -> None:
    model = subject(f"{ODD}:branch")
    plan = shardwise.plan(model.make, model.batch, loss=model.loss, cluster="1xcpu-2", layout="data=2 zero=1")
    assert "data-dependent" in plan.uncaptured
    assert any("data-dependent" in why for _, why in plan.reasons)
    for layout in ("data=2", "data=2 zero=1 microbatches=2", "data=2 zero=2 microbatches=2 offload=optimizer"):
        found = shardwise.verify(model.make, layout, model.batch, loss=model.loss)
        assert found.ok, found
    with pytest.raises(Infeasible, match=r"could not be captured .*tensor=1"):
        shardwise.plan(model.make, model.batch, loss=model.loss, cluster="1xcpu-2", layout="tensor=2")


def test_batch_norm_that_cannot_be_captured_is_refused_by_name(subject: Callable[[str], Subject]) -> None:
    model = subject(f"{ODD}:branch_norm")
    assert check(model, "data=1").ok
    with pytest.raises(Infeasible, match="norm takes statistics over the whole batch, which data=2 would divide"):
        check(model, "data=2")


def test_a_module_that_is_already_made_is_verified() -> None:
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    before = module[0].weight.detach().clone()
    found = shardwise.verify(module, "data=2", (torch.randn(8, 4),), loss=lambda output, batch: output.square().mean())
    assert found.ok, found
    assert torch.equal(module[0].weight, before)


def _dropped(world: World, layout: str, model: Subject) -> dict[str, Any]:
    """Loss of two steps, and by parameter the largest difference between ranks that hold the same block."""
    plan = model.plan(replace(Layout.parse(layout), precision="float64"))
    engine = Engine(plan, model.source, model.batch, model.loss, world, seed=0)
    losses = [engine.step(model.batch).loss for _ in range(2)]
    spread = 0.0
    for name, p in engine.parameters.items():
        v = next(v for v in engine.rank_model.graph.parameters if v.name == name)
        for axis, form in engine.rank_model.sharding.placements[v.value].items():
            if not is_shard(form):
                group = world.group(engine.mesh.group(world.rank, axis))
                high, low = p.detach().clone(), p.detach().clone()
                group.all_reduce(high, op="max")
                group.all_reduce(low, op="min")
                spread = max(spread, float((high - low).abs().max()))
    return {"losses": losses, "spread": spread}


@pytest.mark.parametrize("name", ["gpt-tiny:dropout=0.2,layers=2", f"{ODD}:noisy"])
@pytest.mark.parametrize("layout", ["data=2 tensor=2", "tensor=2 pipeline=2 microbatches=2"])
def test_ranks_that_hold_the_same_draw_the_same(subject: Callable[[str], Subject], name: str, layout: str) -> None:
    model = subject(name)
    found = launch(lambda world: _dropped(world, layout, model), 4, show=False)
    assert [rank["spread"] for rank in found] == [0.0] * 4
    for recompute in ("selective", "full"):
        again = launch(lambda world, kind=recompute: _dropped(world, f"{layout} recompute={kind}", model), 4, show=False)
        # What is run again draws what the first run drew.
        assert again[0]["losses"] == pytest.approx(found[0]["losses"], rel=1e-12)
    assert found[0]["losses"][0] != found[0]["losses"][1]


def test_an_operator_without_float64_is_told_by_name() -> None:
    name = str(ROOT / ODD) + ":single"
    model = resolve(name)
    batch = model.batch(model.default_batch)
    with pytest.raises(ModelError, match=r"cannot compute in float64 .*got Double.*--dtype float32"):
        shardwise.verify(model.make, "data=1", batch)
    assert shardwise.verify(model.make, "data=1", batch, dtype="float32").ok


def test_microbatches_whose_parts_would_be_unequal_are_refused(subject: Callable[[str], Subject]) -> None:
    """16 samples in 3 microbatches: 6 are cut over two ranks where an operator reads them, 5 cannot be."""
    with pytest.raises(Infeasible, match=r"microbatches of 5 samples .*does not divide over tensor=2"):
        check(subject(f"{ODD}:encoder"), "tensor=2 microbatches=3 sequence_parallel=on")
    assert check(subject(f"{ODD}:encoder"), "tensor=2 microbatches=4 sequence_parallel=on").ok


def test_a_model_that_draws_is_refused_by_name(subject: Callable[[str], Subject]) -> None:
    with pytest.raises(ModelError, match=r"draws random numbers at recurrent/gru, which a serial run draws"):
        check(subject(f"{ODD}:noisy"), "data=2")
    # Where there is no graph that would say so, too.
    with pytest.raises(ModelError, match="draws random numbers, which a serial run draws differently"):
        check(subject(f"{ODD}:branch_noise"), "data=1")


def test_rows_tell_refusals_from_failures(subject: Callable[[str], Subject]) -> None:
    model = subject("gpt-tiny")
    row = run_case(model, Layout(microbatches=17, precision="float64"), "", 60.0)
    assert (row.status, "too few for microbatches=17" in row.note) == ("refused", True)
    assert isinstance(row, Row)


def test_every_factorisation_is_listed() -> None:
    assert [len(list(factorisations(n))) for n in (1, 2, 4, 8)] == [1, 3, 6, 10]
    assert set(factorisations(4)) == {(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)}
    cases = [layout for layout, _ in layouts((1, 2, 4, 8), 16, "all")]
    assert {x.num_ranks for x in cases} == {1, 2, 4, 8}
    assert {x.grid for x in cases} == {"", "2x2", "2x4", "4x2", "2x2x2"}
    assert {x.schedule for x in cases} == set(SCHEDULES)
    assert {x.schedule for x in cases if x.pipeline > 1} == set(SCHEDULES)
    assert {(x.zero, x.recompute) for x in cases} >= {(0, "none"), (1, "none"), (1, "full"), (0, "full")}


def test_random_layouts_hang_on_the_seed_and_put_everything_together() -> None:
    def cases(seed: int) -> list[tuple[Layout, str]]:
        return list(random_layouts((1, 2, 4), 16, 300, random.Random(seed)))

    found = [layout for layout, _ in cases(1)]
    assert (cases(1), cases(2)) == (cases(1), cases(2))
    assert cases(1) != cases(2)
    assert {x.num_ranks for x in found} == {1, 2, 4}
    assert {x.schedule for x in found if x.pipeline > 1} == set(SCHEDULES)
    assert {x.zero for x in found if x.schedule.startswith("zb")} == {0, 1, 2, 3}
    assert {x.staleness for x in found} == {0, 1}
    assert any(16 % (x.data * x.microbatches) for x in found)
    assert {x.recompute for x in found} >= {"none", "selective", "full", "full:1", "full:2"}
