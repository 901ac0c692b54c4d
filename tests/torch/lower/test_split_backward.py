"""Backward in two parts, in one process: the same gradients as PyTorch's own, the work where it belongs, and twins that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import shardwise
from shardwise.lower.split_backward import FORMULAS, DelayedWeightGradients, GradientSink
from shardwise.ops import RECORDS
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.engine import Engine
from shardwise.world.launch.current import current_world

N = 8  # samples


def _text(num_microbatches: int, order: str) -> str:
    """One stage on one rank: `order` of a backward's parts, "IW", or "II" for all input parts first; "B": one is whole."""
    each = range(num_microbatches)
    if order == "B":
        split = [f"0F{m} 0I{m} 0W{m}" for m in range(num_microbatches - 1)]
        return "rank 0: " + " ".join([*split, f"0F{num_microbatches - 1} 0B{num_microbatches - 1}"])
    if order == "IW":
        return "rank 0: " + " ".join(f"0F{m} 0I{m} 0W{m}" for m in each)
    return "rank 0: " + " ".join([f"0F{m}" for m in each] + [f"0I{m}" for m in each] + [f"0W{m}" for m in each])


def _engine(make: Callable[[], nn.Module], batch: Any, *, order: str = "II", microbatches: int = 2, **layout: Any) -> Engine:
    layout = {"precision": "float64", **layout}
    mine = Layout(microbatches=microbatches, **layout).with_schedule("late.txt", _text(microbatches, order))
    return Engine(Plan(mine, "test", "here", N), make, batch, None, current_world(), {"name": "sgd", "lr": 0.1}, seed=0)


def _gradients(make: Callable[[], nn.Module], batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """PyTorch's own, in float64: of the whole batch, or of its two microbatches where a batch norm takes statistics of each."""
    torch.manual_seed(0)
    model = make().double()
    microbatches = 2 if any(isinstance(part, nn.BatchNorm2d) for part in model.modules()) else 1
    for m in range(microbatches):
        rows = [x.chunk(microbatches)[m] for x in batch]
        (model(*(x.double() if x.is_floating_point() else x for x in rows)) / microbatches).backward()
    return {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}


def _equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-11, atol=1e-13, msg=name)


class Tied(nn.Module):
    """One table for look-up and for the head, read straight, through a view, and by a sum that is not linear in an input."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(11, 6, padding_idx=3), nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.up(self.table(ids)).tanh()
        logits = x @ self.table.weight.t() + F.linear(x, self.table.weight)
        return logits.logsumexp(-1).mean() + self.table.weight.square().sum()


class Views(nn.Module):
    """One weight that is sliced, reshaped and transposed before it is used, so that parts of it are several operators' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 5))
        self.bias, self.unused = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        q = x @ self.weight[0]
        k = F.linear(q, self.weight[1])
        v = torch.addmm(self.bias, k, self.weight[2].t())
        return (q * v).sum() + torch.bmm(x.view(-1, 1, 5).expand(-1, 3, 5).transpose(0, 1).contiguous(), self.weight).pow(2).mean()


class Convolutions(nn.Module):
    """Convolutions of every kind, with and without bias, groups, strides; a norm between, an operator in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second, self.up = nn.Conv2d(4, 4, (3, 2), padding="same", groups=2), nn.ConvTranspose2d(4, 2, 2, stride=2, output_padding=1)
        self.line = nn.Conv1d(2, 3, 3, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).relu_()
        both = self.second(hidden)
        both += hidden
        return self.up(both).square().mean() + self.line(x.flatten(2)).mean()


class Pointwise(nn.Module):
    """Convolutions that run as products, of maps and of sequences, whose weights are seen through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.line = nn.Conv2d(256, 256, 1), nn.Conv1d(256, 256, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(self.first(x).tanh().flatten(2)).square().mean()


class Outputs(nn.Module):
    """Operators with several outputs, one of them never differentiated, and one output read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.dead = nn.Linear(6, 12), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.wide(x).chunk(2, -1)
        values, places = (a * b.sigmoid() + a).sort(-1)
        return values.square().mean() + places.sum() * 0.0 + self.dead(x.detach()).detach().mean()


def _ids() -> tuple[Tensor, ...]:
    return (torch.arange(N * 4).reshape(N, 4) % 11,)


CASES: list[tuple[type[nn.Module], Callable[[], tuple[Tensor, ...]], set[str]]] = [
    (Tied, _ids, {"table.weight", "up.weight"}),
    (Views, lambda: (torch.randn(N, 5),), {"weight"}),
    (Convolutions, lambda: (torch.randn(N, 2, 8, 8),), {"first.weight", "second.weight", "up.weight", "line.weight"}),
    (Pointwise, lambda: (torch.randn(N, 256, 2, 2),), {"first.weight", "line.weight"}),
    (Outputs, lambda: (torch.randn(N, 6),), {"wide.weight"}),
]


@pytest.mark.parametrize("order", ["IW", "II"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("make", "batch", "late"), CASES)
def test_gradients_are_those_of_one_backward(make: Any, batch: Any, late: set[str], order: str, recompute: str) -> None:
    """Shared weights, views, several outputs, operators in place; and the weights that are to be late are."""
    torch.manual_seed(1)
    given_batch = batch()
    engine = _engine(make, given_batch, order=order, recompute=recompute)
    engine.forward_backward(given_batch)
    _equal(engine.full_gradients() or {}, _gradients(make, given_batch))
    (runner,) = engine.executor.runners.values()
    assert runner.delayed_gradients is not None
    assert late <= runner.delayed_gradients.names


@pytest.mark.parametrize(("make", "batch", "late"), CASES)
def test_values_of_weights_are_not_read(make: Any, batch: Any, late: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-3 gives a weight's memory back after the input part; its late gradient is the same."""
    deliver = DelayedWeightGradients.deliver

    def without_memory(self: DelayedWeightGradients, notes: list[Any], into: GradientSink) -> None:
        weights = {site.name: site.parameter.data for site in self.sites}
        assert late <= weights.keys()
        storages = [x.untyped_storage() for x in weights.values()]
        kept = [(storage.nbytes(), storage.clone()) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        deliver(self, notes, into)
        for storage, (size, values) in zip(storages, kept, strict=True):
            storage.resize_(size)
            storage.copy_(values)

    monkeypatch.setattr(DelayedWeightGradients, "deliver", without_memory)
    torch.manual_seed(1)
    given_batch = batch()
    engine = _engine(make, given_batch)
    engine.forward_backward(given_batch)
    _equal(engine.full_gradients() or {}, _gradients(make, given_batch))


class Deep(nn.Module):
    """Products of given widths."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(0, 1))
def test_work_of_the_two_parts(widths: list[int], deep: int) -> None:
    """W multiplies as often as F; I as often as F, but for the first layer, whose input needs no gradient."""
    x = torch.randn(N, *([3] * deep), widths[0])
    engine = _engine(lambda: Deep(widths), (x,), microbatches=1)
    flops: dict[str, int] = {}
    executor, counter = engine.executor, FlopCounterMode(display=False)

    def seen(action: Any, held: list[object]) -> None:
        flops[action.op.value] = counter.get_total_flops() - sum(flops.values())

    executor.on_action = seen
    with counter:
        engine.forward_backward((x,))
    rows = x.numel() // widths[0]
    every = [2 * rows * a * b for a, b in pairwise(widths)]
    assert flops == {"F": sum(every), "I": sum(every[1:]), "W": sum(every)}
    _equal(engine.full_gradients() or {}, _gradients(lambda: Deep(widths), (x,)))


def test_autocast_is_as_exact_as_one_backward() -> None:
    """In bfloat16 the products are those of torch's own backward, bit for bit."""
    x = torch.randn(N, 6)

    def make() -> nn.Module:
        return Deep([6, 8, 4])

    split = _engine(make, (x,), precision="bfloat16")
    whole = shardwise.parallelize(make, (x,), plan=Layout(microbatches=2, precision="bfloat16"), seed=0, optimizer="sgd")
    for engine in (split, whole):
        engine.forward_backward((x,))
    for name, want in (whole.full_gradients() or {}).items():
        torch.testing.assert_close((split.full_gradients() or {})[name], want, rtol=0, atol=0)


@pytest.mark.parametrize("twin", ["lost", "twice", "first only"])
def test_a_wrong_twin_is_found(twin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight gradient that is lost, delivered twice, or of one of a shared weight's two places is seen in the gradients."""
    deliver = DelayedWeightGradients.deliver

    def wrong(self: DelayedWeightGradients, notes: list[Any], into: GradientSink) -> None:
        if twin == "lost":
            notes = notes[:-1]
        elif twin == "twice":
            deliver(self, list(notes), into)
        else:
            notes = list({self.sites[note.site].name: note for note in notes}.values())
        deliver(self, notes, into)

    monkeypatch.setattr(DelayedWeightGradients, "deliver", wrong)
    engine = _engine(Tied, _ids())
    engine.forward_backward(_ids())
    with pytest.raises(AssertionError):
        _equal(engine.full_gradients() or {}, _gradients(Tied, _ids()))


def test_notes_are_gone_after_the_step() -> None:
    """What a step kept for late weights is not kept beyond it."""
    x = torch.randn(N, 6)
    engine = _engine(lambda: Deep([6, 8, 4]), (x,))
    engine.forward_backward((x,))
    (runner,) = engine.executor.runners.values()
    assert runner.delayed_gradients is not None
    assert not runner.delayed_gradients.notes


def test_weights_that_move_are_not_late() -> None:
    """Only a weight that an operator reads itself, or through views of it, is late: what is computed from it is differentiated at once."""

    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.tanh()).square().mean()

    x = torch.randn(N, 6)
    engine = _engine(Computed, (x,))
    engine.forward_backward((x,))
    (runner,) = engine.executor.runners.values()
    assert runner.delayed_gradients is not None
    assert not runner.delayed_gradients.names
    _equal(engine.full_gradients() or {}, _gradients(Computed, (x,)))


def test_a_whole_backward_beside_split_ones_makes_its_weights_gradients() -> None:
    """They were lost: the stage takes notes in every backward, and only W read them."""
    batch = (torch.randint(0, 11, (N, 3), generator=torch.Generator().manual_seed(1)),)
    engine = _engine(Tied, batch, order="B")
    engine.forward_backward(batch)
    found = {name: engine.gradient(name) for name in engine.parameters}
    _equal({name: x for name, x in found.items() if x is not None}, _gradients(Tied, batch))


def test_every_weight_gradient_of_a_record_has_its_formula() -> None:
    weights = {name: op.product.weight for name, op in RECORDS.items() if op.product.weight is not None}
    found = {f"{name}.{overload}": how for name, weight in weights.items() for overload, how in weight.formulas.items()}
    assert set(found.values()) == set(FORMULAS)
    for target in found:
        _, name, overload = target.split(".")
        assert hasattr(getattr(torch.ops.aten, name), overload), target
