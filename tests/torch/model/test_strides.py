"""How values lie in memory is as torch has it: views, permutations, products by letters and their gradients, copies that products keep."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwise.capture.capture import capture
from shardwise.model.strides.strides import GraphStrides, dim_order, strides_in_order, view_strides


@st.composite
def _seen(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A shape, the order in which its dimensions lie, and another shape of as many elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3]), min_size=1, max_size=5))

    def grouped() -> tuple[int, ...]:
        found = [1]
        for factor in factors:
            if draw(st.booleans()):
                found.append(factor)
            else:
                found[-1] *= factor
        return tuple(found)

    shape = grouped()
    return shape, tuple(draw(st.permutations(range(len(shape))))), grouped()


@settings(max_examples=200, deadline=None)
@given(_seen())
def test_a_view_needs_a_copy_where_torch_says_so(case: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]) -> None:
    shape, order, into = case
    strides = strides_in_order(shape, order)
    x = torch.arange(prod(shape)).as_strided(shape, strides)
    found = view_strides(shape, strides, into)
    try:
        view = x.view(into)
    except RuntimeError:
        assert found is None
        return
    assert found is not None
    assert dim_order(into, found) == dim_order(into, view.stride())
    assert torch.equal(torch.as_strided(x, into, found), view)


class _Layers(nn.Module):
    """One of each: what it makes is in `made`, by a mark of its size."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.filters = nn.Linear(6, 7), nn.Conv2d(5, 8, 3, padding=1)

    def forward(self, x: Tensor, w: Tensor, images: Tensor) -> Tensor:
        products = torch.einsum("btd,edh->bteh", x, w)  # (2, 3, 4, 5)
        back = torch.einsum("bteh,edh->ebtd", torch.sigmoid(products), w)  # (4, 2, 3, 6)
        turned = torch.tanh(x.transpose(1, 2))  # (2, 6, 3)
        rows = self.rows(x.transpose(0, 1).relu())  # (3, 2, 7)
        made = self.filters(images.permute(0, 3, 1, 2)).relu_()  # (2, 8, 9, 9)
        part = w[..., :2].reshape(4, 3, 4)  # of (4, 6, 2), between which other numbers lie
        return part.sum() + products.sum() + back.sum() + turned.sum() + rows.sum() + made.sum()


def _batch() -> dict[str, Tensor]:
    return {"x": torch.randn(2, 3, 6), "w": torch.randn(4, 6, 5), "images": torch.randn(2, 9, 9, 5)}


def test_what_operators_make_lies_as_torch_has_it() -> None:
    graph = capture(_Layers(), _batch(), None, batch_size=2).graph
    layouts, real = GraphStrides(graph), {}

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dim() > 2:
                real[tuple(out.shape)] = out.stride()
            return out

    with Watch():
        _Layers()(**_batch())
    compared = 0
    for op in graph.operators:
        for value in op.outputs:
            shape = graph.tensors[value].shape
            if shape in real and len(shape) > 2:
                compared += 1
                told = layouts.strides_of(value)
                assert [told[d] for d, n in enumerate(shape) if n > 1] == [real[shape][d] for d, n in enumerate(shape) if n > 1], op.name
    assert compared >= 8
    assert {v for op in graph.operators for v in op.outputs if "reshape" in op.name} <= layouts.copied_values, "rows with gaps are no view"
    assert any(layouts.has_channels_last(v) for op in graph.operators for v in op.outputs)
    copied = {op.name: layouts.row_copies(op) for op in graph.operators if "linear" in op.name}
    assert all(len(values) == 1 for values in copied.values()), "a product of rows that do not lie as rows copies them"


@pytest.mark.parametrize(
    "equation",
    [
        "bteh,ehd->bted",
        "btd,edh->bteh",
        "bij,bjk->bik",
        "bhid,bhjd->bhij",
        "bhij,bhdj->bhdi",  # the second operand's letters come first: multiplied the other way round
        "dche,cagde->gheac",  # not where they are mixed
        "ghde,edahgf->afdh",  # summed letters in order of the alphabet
    ],
)
def test_gradients_of_products_by_letters_lie_as_torch_makes_them(equation: str) -> None:
    sizes = dict(zip("btehdijkacfg", (2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5), strict=True))
    terms = equation.partition("->")[0].split(",")

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn([sizes[x] for x in terms[1]]))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum(equation, x * self.scale, self.weight).sum()

    x = torch.randn([sizes[c] for c in terms[0]])
    graph = capture(Product(), {"x": x}, None, batch_size=x.shape[0]).graph
    layouts = GraphStrides(graph)
    product = next(op for op in graph.operators if "einsum" in op.name)
    leaves = [torch.randn([sizes[c] for c in term], requires_grad=True) for term in terms]
    out = torch.einsum(equation, *leaves)
    found = torch.autograd.grad(out, leaves, torch.ones_like(out))
    for value, real in zip(product.inputs, found, strict=True):
        shape = tuple(real.shape)
        told = layouts.gradient_strides.get(value, strides_in_order(shape, range(len(shape))))
        assert dim_order(shape, told) == dim_order(shape, real.stride()), value
