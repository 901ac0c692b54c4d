"""Functions with a backward of the user's own: how each can be cut, numerically against the whole; what they cost; what is refused.

The rules that are expected are written down by hand, from what each function does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_capture import equal_to_eager
from torch import Tensor, nn
from torch.autograd import Function

import shardwise
from shardwise.errors import LayoutError, ModelError
from shardwise.model.gradients import parameters_with_gradient
from shardwise.model.graph import Operator
from shardwise.model.work import operator_flops, operator_work
from shardwise.ops import Rule
from shardwise.plan.ir.placement import Shard
from shardwise.run.rank_model.model_source import ModelSource
from tests.support import function_models as models
from tests.support.rule_cases import Case, check, choices, difference, function_case


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


X, W = (12, 6), (18, 6)
# (name, the call, by every input its labels over 2 ranks: samples s, features f, both; - for what stays whole)
CASES: list[tuple[str, Callable[[], Case], set[str]]] = [
    ("elementwise", lambda: function_case(models.Quick, real(*X)), {"x0.0", "x0.1"}),
    ("a backward of another function", lambda: function_case(models.Otherwise, real(*X)), {"x0.0", "x0.1"}),
    ("gradient reversal", lambda: function_case(models.Reversed, real(*X), 0.3), {"x0.0", "x0.1"}),
    ("straight through, with a mask that writes", lambda: function_case(models.Sign, real(*X)), {"x0.0", "x0.1"}),
    ("linear", lambda: function_case(models.Product, real(*X), real(*W), real(18)), {"x0.0", "x1.0 x2.0"}),
    ("linear without bias: summands", lambda: function_case(models.Product, real(*X), real(*W)), {"x0.0", "x1.0", "x0.1 x1.1"}),
    ("softmax of rows", lambda: function_case(models.Softmax, real(*X)), {"x0.0"}),
    ("outputs without gradients", lambda: function_case(models.Best, real(*X)), {"x0.0"}),
    ("two outputs", lambda: function_case(models.Two, real(*X)), {"x0.0", "x0.1"}),
    ("new style", lambda: function_case(models.Clamped, real(*X), real(6), (-0.5, 1.0)), {"x0.0", "x0.1 x1.0"}),
    ("a mean", lambda: function_case(models.Distance, real(*X), real(*X)), {"x0.0 x1.0", "x0.1 x1.1"}),
    ("a sum", lambda: function_case(models.Summed, real(*X), 32.0), {"x0.0", "x0.1"}),
    ("the mean of samples inside", lambda: function_case(models.Centered, real(*X)), {"x0.1"}),
    ("the number of samples read", lambda: function_case(models.Counted, real(*X)), {"x0.1"}),
    ("nearest rows of a table", lambda: function_case(models.Looked, real(*X), real(3, 6)), {"x0.0"}),
]


def cut(case: Case) -> set[str]:
    """What each label that is offered cuts: `x0.1` is dimension 1 of the first tensor."""
    rule = case.op.function.rule
    found = set()
    for choice in choices(case, 2):
        rows = ((v, row.index(choice.label)) for v, row in zip(case.op.inputs, rule.inputs, strict=True) if choice.label in row)
        found.add(" ".join(f"{v}.{dim}" for v, dim in rows))
    return found


@pytest.mark.parametrize(("make", "wanted"), [(m, w) for _, m, w in CASES], ids=[name for name, *_ in CASES])
def test_what_can_be_cut_is_cut_and_is_the_function(make: Callable[[], Case], wanted: set[str]) -> None:
    torch.manual_seed(0)
    made = make()
    assert cut(made) == wanted
    assert not check(made)


@pytest.mark.parametrize("number", [4, 5, 10], ids=["linear", "summands", "mean"])
def test_two_axes_at_once(number: int) -> None:
    torch.manual_seed(0)
    made = CASES[number][1]()
    for first in choices(made, 2, "data"):
        for second in choices(made, 2, "tensor"):
            if first.label != second.label:
                assert not difference(made, {"data": (2, first), "tensor": (2, second)})


ALL = Rule((("a", "b"),), (("a", "b"),))
WRONG: list[tuple[str, Callable[[], Case], Rule]] = [
    ("the mean of samples", lambda: function_case(models.Centered, real(*X)), ALL),
    ("the number of samples", lambda: function_case(models.Counted, real(*X)), ALL),
    ("rows of a softmax", lambda: function_case(models.Softmax, real(*X)), ALL),
    (
        "a mean that is summed",
        lambda: function_case(models.Distance, real(*X), real(*X)),
        Rule((("a", ""), ("a", "")), ((),), {"a": "summands"}),
    ),
    (
        "a sum that is averaged",
        lambda: function_case(models.Summed, real(*X), 32.0),
        Rule((("a", ""),), ((),), {"a": "average"}),
    ),
    (
        "a bias on every rank",
        lambda: function_case(models.Product, real(*X), real(*W), real(18)),
        Rule((("", "k"), ("", "k"), ("",)), (("", ""),), {"k": "summands"}),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "wrong"), [(m, r) for _, m, r in WRONG], ids=[name for name, *_ in WRONG])
def test_a_wrong_rule_is_caught(make: Callable[[], Case], wrong: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it runs, by trying the function on the pieces; without that the numbers would show it."""
    torch.manual_seed(0)
    made = make()
    op = made.op
    broken = replace(op, args=(replace(op.function, rule=wrong), *op.args[1:]))
    made = Case(replace(made.graph, operators=(broken,)), made.tensors)
    tried = [choice for choice in choices(made, 2) if not cut_is_right(made, choice)]
    assert tried
    for choice in tried:
        if choice.label in wrong.kernels and wrong.kernels[choice.label] in ("summands", "average") and op.function.rule.kernels:
            continue  # the pieces are right, and only what is made of them is not
        with pytest.raises(LayoutError, match=f"{op.function.name} computes something else on shards"):
            difference(made, {"tensor": (2, choice)})
    monkeypatch.setattr("shardwise.lower.operator_lowering.check_sharded_function", lambda *given: None)
    assert all(difference(made, {"tensor": (2, choice)}) for choice in tried)


def cut_is_right(made: Case, choice: Any) -> bool:
    """Whether the right rule cuts the same dimensions, and leaves the same."""
    right = function_rule(made.op)
    wrong = made.op.function.rule
    places = {(i, row.index(choice.label)) for i, row in enumerate(wrong.inputs) if choice.label in row}
    for label in right.labels:
        same = {(i, row.index(label)) for i, row in enumerate(right.inputs) if label in row} == places
        if same and right.kernels.get(label) == wrong.kernels.get(choice.label):
            return True
    return False


def function_rule(op: Operator) -> Rule:
    """The rule that is followed, whatever the operator has."""
    from shardwise.capture.autograd_functions import call_of, function_of
    from shardwise.model.graph import Tensor as Spec

    shapes = {"Distance": (X, X), "Product": (X, W, (18,))}.get(op.function.name, (X,))
    return function_of(call_of(op.function), tuple(Spec(s, "float64") for s in shapes), {})[0].rule


@pytest.mark.parametrize("name", [name for name in models.NAMES if name != "narrow"])  # which is told float32
def test_gradients_are_those_of_the_users_backward(name: str) -> None:
    model, batch = models.make(name)
    assert equal_to_eager(model.double(), tuple(x.double() for x in batch))


def test_the_forward_is_not_differentiated() -> None:
    """A twin whose backward is that of its forward has other gradients, and the same loss."""

    class Right(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad * ctx.saved_tensors[0]

    found = []
    for function in (models.Otherwise, Right):
        model = Calling(lambda m, x, function=function: function.apply(m.layer(x)).sum())
        equal_to_eager(model, (torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6),))
        found.append(model.layer.weight.grad.clone())
    assert not torch.allclose(*found)


class Calling(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(6, 5).double(), nn.Linear(6, 5).double()
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def captured(forward: Callable[[Any, Tensor], Tensor]) -> Any:
    return ModelSource.from_model(Calling(forward)).capture((real(8, 6),), None, None).graph


def test_a_parameter_that_is_given_no_gradient_stays_as_it_is() -> None:
    """As in plain PyTorch, where its .grad is None and no optimizer touches it."""
    graph = ModelSource.from_model(models.make("looked")[0]).capture(models.make("looked")[1], None, None).graph
    functions = [op for op in graph.operators if op.function is not None]
    assert {op.function.requires_grad for op in functions} == {(True, False)}
    alone = captured(lambda m, x: models.Looked.apply(m.layer(x), m.other(x)).sum())
    assert {v.name for v in alone.parameters if v.value in parameters_with_gradient(alone)} == {"layer.weight", "layer.bias"}


def test_what_does_not_add_up_is_told() -> None:
    """Gradients that are clipped, or have something added, are not made of summands: they are summed before, and not at the parameter."""
    linear = {}
    for name in models.NAMES:
        linear |= {op.function.name: op.function.has_linear_backward for op in captured_model(name).operators if op.function is not None}
    # Of `Best`, which scatters into zeros, it is not known.
    assert {name for name, adds_up in linear.items() if not adds_up} == {"Otherwise", "Held", "Clipped", "Best"}


def test_what_a_function_costs_is_what_it_does() -> None:
    """A product of N x D by D x H: 2NDH forward, twice that backward; input and weight are kept."""
    n, d, h = models.N, models.D, models.H
    graph = captured_model("product")
    op = next(op for op in graph.operators if op.function is not None)
    done = operator_work(graph)[op.name]
    # The batch has a gradient to ask for, too: the function does not know that nobody will.
    assert (operator_flops(op, graph.tensors), done.backward_flops, done.kind) == (2 * n * d * h, 4 * n * d * h, "linear")
    assert done.saved == op.inputs[:2]
    assert done.extra_bytes == 0
    graph = captured_model("softmax")
    op = next(op for op in graph.operators if op.function is not None)
    assert operator_work(graph)[op.name].saved == op.outputs
    graph = captured_model("two")
    op = next(op for op in graph.operators if op.function is not None)
    assert operator_work(graph)[op.name].saved == op.inputs


def test_what_lies_there_in_backward_is_counted() -> None:
    """Of `Quick`: the gate, 1.702 x gate, 1 - gate and their product lie there together."""
    graph = captured_model("quick")
    op = next(op for op in graph.operators if op.function is not None)
    assert op.function.working_bytes == 4 * graph.tensors[op.outputs[0]].size_bytes


def captured_model(name: str) -> Any:
    model, batch = models.make(name)
    return ModelSource.from_model(model).capture(batch, None, None).graph


def test_what_is_kept_in_the_context_and_no_value_of_the_graph_is_counted() -> None:
    class Keeping(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.gate = torch.sigmoid(x)
            return x * ctx.gate

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.gate

    graph = captured(lambda m, x: Keeping.apply(m.layer(x)).sum())
    op = next(op for op in graph.operators if op.function is not None)
    assert operator_work(graph)[op.name].saved == ()
    assert operator_work(graph)[op.name].extra_bytes == 8 * 5 * 8


def test_equal_calls_are_one_and_others_are_told_apart() -> None:
    """Layers that call with another factor are no repeated layers."""
    graph = captured(lambda m, x: sum(models.Reversed.apply(m.layer(x), f).sum() for f in (0.5, 0.5, 0.25)))
    first, second, third = (op.function for op in graph.operators if op.function is not None)
    assert first == second != third
    assert hash(first) == hash(second)


def test_code_that_takes_another_way_at_a_size_is_not_cut_there() -> None:
    class Small(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.small = len(x) == 3
            return x * (0.5 if ctx.small else 1.0)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * (0.5 if ctx.small else 1.0)

    made = function_case(Small, real(12, 6))
    assert "x0.0" in cut(made), "pieces of 6 and 2 are the whole's"
    for choice in (c for c in choices(made, 4) if c.input_placements == (Shard(0),)):
        with pytest.raises(LayoutError, match=r"computes something else on shards of \[3, 6\], as under tensor=4"):
            difference(made, {"tensor": (4, choice)})


def test_a_size_that_only_scales_must_scale_as_it_should() -> None:
    """A mean's backward that forgets to divide, or divides by rows in place of elements, is the user's, and stays it."""

    class Forgets(models.Distance):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            x, y = ctx.saved_tensors
            return grad * (x - y), None

    class ByRows(models.Distance):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            x, y = ctx.saved_tensors
            return grad * (x - y) / len(x), None

    for function, wanted in ((Forgets, set()), (ByRows, {"x0.0 x1.0"})):
        made = function_case(function, real(*X), real(*X))
        assert cut(made) == wanted
        assert not check(made)


def test_numbers_that_a_function_draws_are_the_same_for_what_is_whole() -> None:
    class Noisy(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x + torch.rand_like(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    class OneForAll(Noisy):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x + torch.rand(x.shape[1], dtype=x.dtype)

    assert (function_case(Noisy, real(*X)).op.function.is_random, cut(function_case(Noisy, real(*X)))) == (True, {"x0.0", "x0.1"})
    assert cut(function_case(OneForAll, real(*X))) == {"x0.1"}


def odd(does: Callable[[Any, Tensor], Tensor], back: Callable[[Any, Tensor], Any] = lambda ctx, grad: grad) -> Any:
    return type("Odd", (Function,), {"forward": staticmethod(does), "backward": staticmethod(back)})


TABLE = torch.ones(5, dtype=torch.float64)


def fills(ctx: Any, x: Tensor) -> Tensor:
    ctx.mark_dirty(x)
    return x.fill_(1.0)


def writes_gradient(ctx: Any, grad: Tensor) -> Tensor:
    return grad.mul_(2.0)


def asks(ctx: Any, x: Tensor) -> Tensor:
    return x * (2.0 if float(x.sum()) > 0 else 1.0)


def picks(ctx: Any, x: Tensor) -> Tensor:
    return x[x > 0]


def drawing(ctx: Any, x: Tensor) -> Tensor:
    return x * random.random()


def outer(ctx: Any, x: Tensor) -> Tensor:
    return x * TABLE


def fails(ctx: Any, grad: Tensor) -> Tensor:
    """A backward that raises, as a user's may."""
    raise ValueError("no gradient here")


def same(ctx: Any, x: Tensor) -> Tensor:
    return x.clone()


class Times(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Any) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


count = [0]


def counts(ctx: Any, x: Tensor) -> Tensor:
    count[0] += 1
    return x * count[0]


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda m, x: odd(fills).apply(m.layer(x).clone()).sum(), r"cannot be followed .* in-place operation"),
        (lambda m, x: odd(same, writes_gradient).apply(m.layer(x)).sum(), "writes into a tensor that it is given"),
        (lambda m, x: odd(asks).apply(m.layer(x)).sum(), "reads values of tensors in forward"),
        (lambda m, x: odd(picks).apply(m.layer(x)).sum(), "makes tensors whose shape follows values"),
        (lambda m, x: odd(drawing).apply(m.layer(x)).sum(), "draws from Python's or numpy's random numbers"),
        (lambda m, x: odd(outer).apply(m.layer(x)).sum(), "reads a tensor that is none of its arguments"),
        (lambda m, x: odd(same, fails).apply(m.layer(x)).sum(), r"cannot be followed .* \(no gradient here\)"),
        (lambda m, x: odd(counts).apply(m.layer(x)).sum(), "computes something else when it is called again"),
        (lambda m, x: Times.apply(m.layer(x), m.other).sum(), r"a module \(Linear\)"),
        (lambda m, x: Times.apply(m.layer(x), m.other.forward).sum(), r"a module \(Linear\)"),
        (lambda m, x: Times.apply(m.layer(x), [m.other.weight]).sum(), "a tensor inside of another argument"),
        (lambda m, x: torch.vmap(models.Quick.apply)(m.layer(x)).sum(), "torch.vmap|Quick"),
    ],
    ids=["inputs", "gradients", "values", "shapes", "Python's numbers", "tensors", "fails", "state", "modules", "methods", "lists", "vmap"],
)  # fmt: skip
def test_what_no_graph_holds_is_refused_by_name(forward: Callable[[Any, Tensor], Tensor], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        ModelSource.from_model(Calling(forward)).capture((real(8, 6),), None, None)


class Halved(Function):
    """Keeps every element or drops it; backward drops the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        kept = torch.rand_like(x) < 0.5
        ctx.save_for_backward(kept)
        return x * kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return Halved.apply(self.weight).sum() + 0.0 * x.sum()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_function_that_draws_trains_and_draws_anew_in_each_step(recompute: str) -> None:
    """The gradient is the mask that made the loss, also where forward is run again; the same seed draws the same masks."""

    def masks(seed: int) -> list[Tensor]:
        engine = shardwise.parallelize(Halving, (torch.ones(4, 1),), plan=f"data=1 recompute={recompute}", optimizer="sgd", seed=seed)
        found = []
        for _ in range(2):
            result = engine.forward_backward((torch.ones(4, 1),))
            gradient = (engine.full_gradients() or {})["weight"].clone()
            assert set(gradient.tolist()) == {0.0, 1.0}
            assert engine.loss_of(result) == pytest.approx(float((gradient * engine.parameters["weight"].detach()).sum()))
            found.append(gradient)
            engine.update(0.0)
        return found

    first, second = masks(1)
    assert not first.equal(second)
    assert all(a.equal(b) for a, b in zip((first, second), masks(1), strict=True))
    assert not first.equal(masks(2)[0])


def test_sums_over_ranks_inside_of_a_function_are_refused() -> None:
    import torch.distributed as dist

    def talks(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    with pytest.raises(ModelError, match="Odd"):
        captured(lambda m, x: odd(talks).apply(m.layer(x)).sum())


def test_writes_into_what_a_function_hands_on_are_refused() -> None:
    """Its output is its input's memory: both would change."""

    def writing(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        z = models.Reversed.apply(y, 1.0)
        with torch.no_grad():
            z.mul_(2.0)
        return (y + z).sum()

    with pytest.raises(ModelError):
        captured(writing)


def test_pieces_on_which_the_code_fails_are_refused_as_a_layout() -> None:
    class Even(models.Quick):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            if len(x) == 3:
                raise ValueError("no three rows")
            return x * torch.sigmoid(1.702 * x)

    made = function_case(Even, real(12, 6))
    for choice in (c for c in choices(made, 4) if c.input_placements == (Shard(0),)):
        with pytest.raises(LayoutError, match=r"computes something else on shards of \[3, 6\]"):
            difference(made, {"tensor": (4, choice)})
