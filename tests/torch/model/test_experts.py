"""Mixtures of experts without a limit of tokens: the operators against a loop over tokens, and what is captured of the library's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.capture import experts as operators
from shardwise.errors import LayoutError
from shardwise.model.dims.expert_rows import expert_rows
from shardwise.model.sharding.propagate import propagate
from shardwise.model.stages.stages import split, stage_cuts
from shardwise.model.work import operator_flops
from shardwise.plan.ir.placement import is_shard
from shardwise.run.parts.microbatch_variants import check_divisible
from shardwise.run.rank_model.model_source import ModelSource
from shardwise.zoo.resolve import resolve

CONFIGS = sorted((Path(__file__).parents[1] / "hf_experts").glob("*.json"))
TOKENS, WIDTH, INNER, EXPERTS, CHOICES = 11, 5, 6, 4, 2


def _drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _which(seed: int = 0) -> Tensor:
    """Two experts of each token, of which one gets none."""
    scores = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    scores[:, 2] = -1
    return scores.topk(CHOICES).indices


def _loop(x: Tensor, which: Tensor, share: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    """Token by token."""
    rows = []
    for n in range(len(x)):
        each = (share[n, t] * (torch.tanh(up[e] @ x[n] + bias[e]) @ down[e]) for t, e in enumerate(which[n].tolist()))
        rows.append(torch.stack(list(each)).sum(0))
    return torch.stack(rows)


def _sorted(x: Tensor, which: Tensor, share: Tensor, up: Tensor, bias: Tensor, down: Tensor, first: int = 0, number: int = -1) -> Tensor:
    mine = slice(first, first + number if number >= 0 else None)
    rows, ids, order = torch.ops.shardwise.to_experts(x, which, EXPERTS, first, number)
    inner = torch.tanh(torch.ops.shardwise.of_experts(rows, ids, up[mine], bias[mine], False, first))
    rows = torch.ops.shardwise.of_experts(inner, ids, down[mine], None, True, first)
    made: Tensor = torch.ops.shardwise.from_experts(rows, order, share, EXPERTS)
    return made


def _tensors() -> list[Tensor]:
    shapes = [(TOKENS, WIDTH), (TOKENS, CHOICES), (EXPERTS, INNER, WIDTH), (EXPERTS, INNER), (EXPERTS, INNER, WIDTH)]
    return [_drawn(*shape, seed=i) for i, shape in enumerate(shapes)]


def _gradients(made: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(made, tensors, _drawn(*made.shape, seed=9).detach())


def test_rows_sorted_by_expert_equal_a_loop_over_tokens() -> None:
    which, (x, share, up, bias, down) = _which(), (tensors := _tensors())
    want, made = (f(x, which, share, up, bias, down) for f in (_loop, _sorted))
    torch.testing.assert_close(made, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(_gradients(made, tensors), _gradients(want, tensors), rtol=1e-12, atol=1e-12)


def test_ranks_that_have_some_experts_each_make_summands() -> None:
    which, (x, share, up, bias, down) = _which(), (tensors := _tensors())
    want = _sorted(x, which, share, up, bias, down)
    made = sum(_sorted(x, which, share, up, bias, down, first, number) for first, number in ((0, 1), (1, 3)))
    assert isinstance(made, Tensor)
    torch.testing.assert_close(made, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(_gradients(made, tensors), _gradients(want, tensors), rtol=1e-12, atol=1e-12)


def _whole_numbers(*shape: int, seed: int) -> Tensor:
    """Small whole numbers, whose sums of products are exact in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float().requires_grad_()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("first", "number"), [(0, 5), (1, 3), (2, 1)])
def test_grouped_products_with_offsets_on_the_device_are_those_of_each_expert(
    monkeypatch: pytest.MonkeyPatch, transposed: bool, first: int, number: int
) -> None:
    """As bfloat16 takes them on a GPU: rows of other experts before and behind, and an expert without any."""
    ids = torch.tensor([0, 0, 1, 1, 1, 3, 3, 4])
    rows, weight, bias = _whole_numbers(8, 8, seed=0), _whole_numbers(number, 8, 8, seed=1), _whole_numbers(number, 8, seed=2)
    grad = _whole_numbers(8, 8, seed=3).detach()

    def found(each: Tensor) -> tuple[Tensor, ...]:
        out = torch.ops.shardwise.of_experts(rows, each, weight, bias, transposed, first)
        return (out, *torch.autograd.grad(out, (rows, weight, bias), grad))

    want = found(ids.clone())
    monkeypatch.setattr(operators, "takes_grouped_products", lambda rows, weight: True)
    monkeypatch.setattr(operators, "_rows_by_expert", None)  # nothing asks for spans on the host
    for a, b in zip(found(ids.clone()), want, strict=True):
        assert torch.equal(a, b)
    broken = found((ids + 1).clamp(max=4))  # the rows of other experts
    assert not all(torch.equal(a, b) for a, b in zip(broken, want, strict=True))


def test_spans_on_the_host_are_read_once_for_all_products(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, tolist = [], Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: reads.append(x) or tolist(x))  # type: ignore[func-returns-value]
    tensors, which = _tensors(), _which()
    _gradients(_sorted(tensors[0], which, *tensors[1:]), tensors)
    assert len(reads) == 1  # two products and their backwards


@pytest.mark.parametrize("operator", [operators.to_experts, operators.of_experts, operators.from_experts], ids=lambda o: o._name)
def test_a_trace_sees_what_an_operator_makes(operator: Any) -> None:
    x, share, up, bias, _ = _tensors()
    rows, ids, order = torch.ops.shardwise.to_experts(x, _which(), EXPERTS)
    given: dict[Any, tuple[Any, ...]] = {operators.to_experts: (x, _which(), EXPERTS), operators.of_experts: (rows, ids, up, bias, False)}
    given[operators.from_experts] = rows, order, share, EXPERTS
    torch.library.opcheck(operator, given[operator], test_utils=("test_schema", "test_faketensor"))


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_experts_of_the_library_are_captured_with_the_work_of_those_that_are_chosen(transformers: Any, file: Path) -> None:
    """T of E experts a token: 6 x T x D x F FLOPs each, two matrices into the gate and one out of it."""
    model, values = resolve(f"hf:{file}"), json.loads(file.read_text())
    graph = ModelSource.from_model(model.make).capture(model.batch(2), model.loss, None).graph
    found = [operator_flops(op, graph.tensors) for op in graph.operators if op.target.startswith("shardwise.of_experts")]
    layers = values["num_hidden_layers"] - values.get("first_k_dense_replace", 0)
    inner = values.get("moe_intermediate_size", values["intermediate_size"])
    rows = 2 * values["max_position_embeddings"] * values["num_experts_per_tok"]
    assert sum(found) == layers * 6 * rows * values["hidden_size"] * inner


def test_experts_are_theirs_again_after_a_capture(transformers: Any) -> None:
    interface = pytest.importorskip("transformers.integrations.moe").ExpertsInterface
    before = vars(interface)["get_interface"]
    model = resolve(f"hf:{CONFIGS[0]}")
    ModelSource.from_model(model.make).capture(model.batch(2), model.loss, None)
    assert vars(interface)["get_interface"] is before


def test_no_stage_begins_among_rows_of_experts(transformers: Any) -> None:
    """These are as many as data says, and messages between stages as long as the graph says; before and behind them stages begin."""
    model = resolve(f"hf:{CONFIGS[0].parent / 'mixtral.json'}")
    graph = ModelSource.from_model(model.make).capture(model.batch(2), model.loss, None).graph
    sites = {cut.site for cut in stage_cuts(graph)}
    layer = [op.site for op in graph.operators if op.site.startswith("model.layers.0.mlp.experts")]
    begins, *rows, ends = layer[: 1 + next(i for i, site in enumerate(layer) if site.endswith("/from_experts"))]
    assert begins.endswith("/to_experts")
    assert begins in sites
    assert sites.isdisjoint((*rows, ends))
    assert layer[layer.index(ends) + 1] in sites
    with pytest.raises(LayoutError, match=f"no stage can begin at '{rows[0]}': .*rows of experts.* move the cut"):
        split(graph, [rows[0]])


def test_rows_of_experts_need_not_divide(transformers: Any) -> None:
    """Of microbatches of another size: 64 tokens have 128 rows, of which each of three ranks has those of its tokens."""
    model = resolve(f"hf:{CONFIGS[0].parent / 'mixtral.json'}")
    graph = ModelSource.from_model(model.make).capture(model.batch(2), model.loss, None).graph
    sharding = propagate(graph, {"context": 3})
    rows = [value for value, dim in expert_rows(graph) if dim == 0 and is_shard(sharding.placements[value]["context"])]
    assert {graph.tensors[value].shape[0] for value in rows} == {128}
    check_divisible(sharding, graph)
