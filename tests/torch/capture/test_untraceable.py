"""What a trace cannot see: refused by name, or captured as eager PyTorch computes it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_capture import captured_and_run, equal_to_eager
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.capture.module_state import changed_attributes, set_state, state_of
from shardwise.errors import ModelError
from shardwise.run.rank_model.model_source import ModelSource

Forward = Callable[[Any, Tensor], Tensor]
X = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)


class Model(nn.Module):
    """A layer, some buffers, some state in Python, and a forward pass that is given."""

    average: Tensor
    queue: Tensor

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        with torch.no_grad():
            self.layer.weight.copy_(torch.linspace(-0.5, 0.9, 30).view(5, 6))
        self.register_buffer("average", torch.full((5,), 0.25))
        self.register_buffer("queue", torch.ones(8, 5))
        self.count, self.seen, self.known, self.last = 0, [1], {"a": 1}, None
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


reverse = Reversed.apply


def reversed_gradient(model: Any, x: Tensor) -> Tensor:
    return Reversed.apply(model.layer(x)).sum() + (reverse(model.layer(x).tanh()) * x[:, :5]).sum()  # type: ignore[no-any-return,no-untyped-call]


def hooked(model: Any, x: Tensor) -> Tensor:
    y = model.layer(x)
    y.register_hook(lambda grad: grad * 0.5)
    return y.sum()  # type: ignore[no-any-return]


def penalty(model: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = model.layer(x).square().sum()
    return y + torch.autograd.grad(y, x, create_graph=True)[0].square().sum()  # type: ignore[no-any-return]


def counting(model: Any, x: Tensor) -> Tensor:
    model.count += 1
    return model.layer(x).sum() * model.count  # type: ignore[no-any-return]


def listing(model: Any, x: Tensor) -> Tensor:
    model.seen.append(1)
    return model.layer(x).sum() * len(model.seen)  # type: ignore[no-any-return]


def remembering(model: Any, x: Tensor) -> Tensor:
    before = model.last
    model.last = model.layer(x).detach()
    return model.layer(x).sum() if before is None else (model.layer(x) * before).sum()  # type: ignore[no-any-return]


def remembering_weights(model: Any, x: Tensor) -> Tensor:
    model.last = model.layer.weight.detach().sum() if model.last is None else model.last
    return (model.layer(x) * model.last).sum()  # type: ignore[no-any-return]


def remembering_noise(model: Any, x: Tensor) -> Tensor:
    model.last = torch.rand(()) if model.last is None else model.last
    return (model.layer(x) * model.last).sum()  # type: ignore[no-any-return]


def remembering_more(model: Any, x: Tensor) -> Tensor:
    model.last = torch.ones(()) if model.last is None else model.last + 1.0
    return (model.layer(x) * model.last).sum()  # type: ignore[no-any-return]


def another_at_first(model: Any, x: Tensor) -> Tensor:
    first = model.last is None
    model.last = torch.linspace(0.0, 1.0, 5) if first else model.last
    return (model.layer(x) * model.last * (2.0 if first else 1.0)).sum()  # type: ignore[no-any-return]


def python_random(model: Any, x: Tensor) -> Tensor:
    return model.layer(x).sum() * random.random()  # type: ignore[no-any-return]


def numpy_random(model: Any, x: Tensor) -> Tensor:
    return model.layer(x).sum() * float(np.random.rand())  # type: ignore[no-any-return]


def clamped_weight(model: Any, x: Tensor) -> Tensor:
    model.layer.weight.data.clamp_(-0.1, 0.1)
    return model.layer(x).sum()  # type: ignore[no-any-return]


def new_weight(model: Any, x: Tensor) -> Tensor:
    model.layer.weight.data = model.layer.weight.data * 0.5
    return model.layer(x).sum()  # type: ignore[no-any-return]


def moved_weights(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch._foreach_mul_(list(model.layer.parameters()), 0.5)
        torch._foreach_add_([model.layer.bias], [model.average], alpha=2.0)
        torch._foreach_addcmul_([model.average], [model.average], [model.average], value=0.5)
        norms = torch._foreach_norm([model.layer.weight, model.average])
    return model.layer(x).sum() * norms[0] * norms[1]  # type: ignore[no-any-return]


def shared_memory(model: Any, x: Tensor) -> Tensor:
    model.layer.bias.data = model.average
    return model.layer(x).sum()  # type: ignore[no-any-return]


def new_parameter(model: Any, x: Tensor) -> Tensor:
    model.layer.weight = nn.Parameter(model.layer.weight * 0.5)
    return model.layer(x).sum()  # type: ignore[no-any-return]


def old_and_new_parameter(model: Any, x: Tensor) -> Tensor:
    y = model.layer(x).sum()
    model.layer.weight = nn.Parameter(model.layer.weight * 0.5)
    return y  # type: ignore[no-any-return]


def written_by_a_list(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch._foreach_maximum_([model.average], [model.average * 2])
    return model.layer(x).sum()  # type: ignore[no-any-return]


@torch.library.custom_op("shardwise_tests::halve", mutates_args=("x",))
def _halve(x: Tensor) -> None:
    x.mul_(0.5)


def written_by_an_operator(model: Any, x: Tensor) -> Tensor:
    _halve(model.average)
    return (model.layer(x) * model.average).sum()  # type: ignore[no-any-return]


def grown_buffer(model: Any, x: Tensor) -> Tensor:
    model.queue = torch.cat((model.queue, model.layer(x).detach()))
    return model.layer(x).sum()  # type: ignore[no-any-return]


def strides(model: Any, x: Tensor) -> Tensor:
    return model.layer(x).t().as_strided((4, 5), (5, 1)).sum()  # type: ignore[no-any-return]


def unclear_write(model: Any, x: Tensor) -> Tensor:
    y = model.layer(x)
    with torch.no_grad():
        y.unfold(1, 2, 2)[:] = 0.0
    return y.square().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (hooked, "registers a hook on a tensor"),
        (penalty, "calls torch.autograd.grad"),
        (counting, "changes its attribute count"),
        (listing, "changes its attribute seen"),
        (remembering, "changes its attribute last"),
        (remembering_weights, "changes its attribute last"),
        (remembering_noise, "changes its attribute last"),
        (remembering_more, "changes its attribute last"),
        (another_at_first, "changes its attribute last"),
        (python_random, "draws from Python's or numpy's random numbers"),
        (numpy_random, "draws from Python's or numpy's random numbers"),
        (shared_memory, r"assigns to the \.data of a tensor"),
        (new_parameter, "puts a new parameter in the place of layer.weight"),
        (old_and_new_parameter, "puts a new parameter in the place of layer.weight"),
        (written_by_a_list, "writes its argument self in place"),
        (written_by_an_operator, "writes its argument x in place"),
        (grown_buffer, "replaces its buffer queue by another kind of tensor"),
        (strides, "depends on how its tensor is laid out in memory"),
        (unclear_write, "in a way that cannot be followed, beside a block without gradients"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused_by_name(forward: Forward, said: str) -> None:
    for model in (lambda: Model(forward), Model(forward)):
        with pytest.raises(ModelError, match=said):
            ModelSource.from_model(model).capture((X.float(),), None, None)


def table_made_once(model: Any, x: Tensor) -> Tensor:
    if model.last is None:
        model.last = torch.linspace(0.0, 1.0, 5, dtype=x.dtype).cumsum(0)
    return (model.layer(x) * model.last).sum()  # type: ignore[no-any-return]


def tables_in_a_list(model: Any, x: Tensor) -> Tensor:
    if not isinstance(model.seen[-1], Tensor):
        model.seen.append(torch.arange(5).to(x.dtype))
    return (torch.tanh(model.layer(x) + model.seen[-1]) * model.seen[-1].cos()).sum()  # type: ignore[no-any-return]


def causal_mask_made_once(model: Any, x: Tensor) -> Tensor:
    y = model.layer(x)
    if model.last is None or model.last.shape[0] != len(y):
        model.last = torch.log(torch.tril(torch.ones(len(y), len(y), dtype=x.dtype)))
    return F.scaled_dot_product_attention(y, y, y, attn_mask=model.last).sum()


@pytest.mark.parametrize("forward", [table_made_once, tables_in_a_list, causal_mask_made_once])
def test_what_is_made_of_constants_at_first_and_kept_in_an_attribute_is_captured(forward: Forward) -> None:
    model = Model(forward).double()
    for _ in range(2):
        equal_to_eager(model, (X,))


@torch.library.custom_op("shardwise_tests::cubed", mutates_args=())
def _cubed(x: Tensor) -> Tensor:
    return x**3


@_cubed.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _kept(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_cubed.register_autograd(lambda ctx, grad: 3 * ctx.saved_tensors[0] ** 2 * grad, setup_context=_kept)


def test_an_operator_with_a_registered_backward_is_captured() -> None:
    """Its backward is Python too, but belongs to the operator, which the graph holds."""

    def custom(model: Any, x: Tensor) -> Tensor:
        return _cubed(model.layer(x)).sum()  # type: ignore[no-any-return]

    graph = equal_to_eager(Model(custom).double(), (X,)).graph
    assert "shardwise_tests.cubed.default" in [op.target for op in graph.operators]


@torch.library.custom_op("shardwise_tests::relu", mutates_args=())
def _named_alike(x: Tensor) -> Tensor:
    return x - x.mean(0)


_named_alike.register_fake(torch.empty_like)
_named_alike.register_autograd(lambda ctx, grad: grad - grad.mean(0))


def test_an_operator_of_somebody_elses_is_not_taken_for_torchs_of_that_name() -> None:
    def custom(model: Any, x: Tensor) -> Tensor:
        return _named_alike(model.layer(x)).square().sum()  # type: ignore[no-any-return]

    graph = equal_to_eager(Model(custom).double(), (X,)).graph
    assert graph.rules[next(op.name for op in graph.operators if op.target == "shardwise_tests.relu.default")] is None


def attention_in_full_precision(model: Any, x: Tensor) -> Tensor:
    q = model.layer(x).view(2, 4, 5)
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(q, q, q).sum()


def test_hooks_of_parameters_and_modules_are_refused() -> None:
    def plain(model: Any, x: Tensor) -> Tensor:
        return model.layer(x).sum()  # type: ignore[no-any-return]

    model = Model(plain)
    model.layer.weight.register_hook(lambda grad: grad * 0.5)
    with pytest.raises(ModelError, match=r"parameter layer\.weight has a gradient hook"):
        ModelSource.from_model(model).capture((X.float(),), None, None)
    model = Model(plain)
    model.layer.register_full_backward_hook(lambda module, given, made: None)
    with pytest.raises(ModelError, match="BackwardHookFunction, whose backward is Python code"):
        ModelSource.from_model(model).capture((X.float(),), None, None)
    model = Model(plain)
    model.layer.register_forward_hook(lambda module, given, made: made * 2)
    equal_to_eager(model.double(), (X,))


def behind_gradients(model: Any, x: Tensor) -> Tensor:
    y = model.layer(x)
    early = y[:, 1:3]
    with torch.no_grad():
        y[:, 0] = 0.0
        y[y > 0.5] = 0.5
        y.mul_(2.0).add_(0.125)
        early.clamp_(max=0.4)
    return (y**3).sum() + (early**2).sum()  # type: ignore[no-any-return]


def through_data(model: Any, x: Tensor) -> Tensor:
    y = model.layer(x)
    y.data.mul_(2.0)
    y.detach()[0] = 0.25
    return (y * y).sum() + (y.data * y).sum()  # type: ignore[no-any-return]


def infinite(model: Any, x: Tensor) -> Tensor:
    y = model.layer(x).masked_fill(x[:, :5] > 0, -torch.inf)
    with torch.no_grad():
        y[:, 1] = 1.0
    return y.softmax(-1).square().sum()  # type: ignore[no-any-return]


def averages(model: Any, x: Tensor) -> Tensor:
    y = model.layer(x)
    with torch.no_grad():
        model.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
        model.queue[2:4] = y[:2]
        model.queue[:, 0].add_(1.0)
        torch.div(y[0], 2.0, out=model.average)
    near = y @ model.queue.clone().t()
    model.average = model.average * 0.5 + y.detach()[0]
    model.average.data.copy_(model.average + 1.0)
    return (near - model.average.sum()).square().mean()  # type: ignore[no-any-return]


def diagonal(model: Any, x: Tensor) -> Tensor:
    y = model.layer(x)
    gram = y.t() @ y
    gram.fill_diagonal_(0.5)
    return gram.square().sum()  # type: ignore[no-any-return]


def reentrant(model: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda t: torch.tanh(model.layer(t)), x.requires_grad_(), use_reentrant=True).square().sum()  # type: ignore[no-any-return]


def logging(model: Any, x: Tensor) -> Tensor:
    """State that nobody reads in the next step does no harm."""
    model.last, model.count = model.layer(x), model.count + 1
    model.known["b"] = x.shape[0]
    return F.relu(model.last).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "forward",
    [
        behind_gradients,
        through_data,
        infinite,
        averages,
        diagonal,
        reentrant,
        logging,
        reversed_gradient,
        attention_in_full_precision,
        clamped_weight,
        new_weight,
        moved_weights,
    ],
)
def test_what_can_be_held_is_what_eager_computes(forward: Forward) -> None:
    """Loss, gradients and buffers."""
    model = Model(forward).double()
    equal_to_eager(model, (X.clone(),))


def test_a_capture_leaves_the_module_as_it_was() -> None:
    model = Model(logging)
    before = state_of(model)
    captured_and_run(model.double(), (X,))
    assert not changed_attributes(before, state_of(model))
    assert (model.count, model.known, model.last) == (0, {"a": 1}, None)


def collecting(model: Any, x: Tensor) -> Tensor:
    """Hangs a hook on a part when it is first called, and remembers that it did, as transformers does to collect hidden states."""
    if not getattr(model, "hooked", False):
        model.layer.register_forward_hook(lambda module, given, made: model.kept.append(made))
        model.hooked = True
    model.kept = []
    model.layer(x)
    assert len(model.kept) == 1, "the hook hangs there twice"
    return model.kept.pop().square().sum()  # type: ignore[no-any-return]


def test_hooks_that_a_call_hangs_on_are_put_back_with_the_rest() -> None:
    source = ModelSource.from_model(lambda: Model(collecting))  # which is traced itself, not a copy
    for size in (8, 4):
        source.capture((X.float(),), None, size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_another_dtype_are_refused_by_name(dtype: torch.dtype) -> None:
    batch = (torch.ones(4, 6, dtype=dtype),)

    def make() -> nn.Module:
        return nn.Linear(6, 5, dtype=dtype)

    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.abs().mean()

    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ModelError, match=f"parameter weight is {name}, and precision=float32 trains weights of float32"):
        shardwise.parallelize(make, batch, loss=loss, plan="data=1", seed=0)


def test_complex_weights_are_trained_as_torch_trains_them_and_handed_out_as_they_were() -> None:
    x = torch.complex(torch.linspace(-1, 1, 24), torch.linspace(2, -1, 24)).view(4, 6)

    def make() -> nn.Module:
        return nn.Linear(6, 5, dtype=torch.complex64)

    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.abs().square().mean()

    torch.manual_seed(0)
    plain = make()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    engine = shardwise.parallelize(make, (x,), loss=loss, optimizer={"name": "adamw", "lr": 1e-2}, plan="data=1", seed=0)
    for _ in range(3):
        want = loss(plain(x), None)
        optimizer.zero_grad()
        want.backward()
        optimizer.step()
        assert engine.step((x,)).loss == pytest.approx(float(want.detach()), rel=1e-5)
    state = engine.full_state_dict()
    assert state is not None
    for name, p in plain.named_parameters():
        assert state[name].dtype is torch.complex64
        assert torch.allclose(state[name], p.detach(), rtol=1e-4, atol=1e-6)
    with pytest.raises(ModelError, match="parameter w is complex, and the model writes it while it runs"):
        shardwise.parallelize(HeldComplex, (x,), loss=loss, plan="data=1", seed=0)


class HeldComplex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(6, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.w.mul_(0.5)
        return x * self.w


def test_state_is_compared_and_put_back() -> None:
    model = Model(logging)
    before = state_of(model)
    model.count, model.known["c"], model.extra = 3, 1, 5
    model.seen.append(2)
    assert changed_attributes(before, state_of(model)) == ["count", "extra", "known", "seen"]
    set_state(model, before)
    assert not changed_attributes(before, state_of(model))
    assert (model.count, model.seen, model.known, hasattr(model, "extra")) == (0, [1], {"a": 1}, False)
