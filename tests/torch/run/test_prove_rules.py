"""Rules of operators in a finite field, against torch's own results on whole numbers, which float64 computes exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from shardwise.run.prove import prove as _  # noqa: F401 - registers the rules
from shardwise.run.prove import rules
from shardwise.run.prove.field_tensor import (
    FieldMode,
    FieldTensor,
    NotProvable,
    have_equal_numbers,
    hidden_or_none,
    lift_constants,
    random_numbers,
    zeros_of,
)
from shardwise.run.prove.finite_field import P, constant_of
from tests.support.whole_numbers import check_on_whole_numbers

WINDOWS: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "max_pool2d": ((2, 3, 7, 5), partial(functional.max_pool2d, kernel_size=3, stride=2, padding=1)),
    "max_pool1d": ((2, 3, 7), partial(functional.max_pool1d, kernel_size=2)),
    "max_pool3d": ((1, 2, 4, 5, 4), partial(functional.max_pool3d, kernel_size=2, stride=1, padding=1)),
    "avg_pool1d": ((2, 3, 7), partial(functional.avg_pool1d, kernel_size=3, stride=2, padding=1)),
    "avg_pool2d": ((2, 3, 7, 6), partial(functional.avg_pool2d, kernel_size=3, stride=2, padding=1)),
    "avg_pool2d of what is there": ((2, 3, 7, 6), partial(functional.avg_pool2d, kernel_size=3, padding=1, count_include_pad=False)),
    "avg_pool3d": ((1, 2, 4, 5, 4), partial(functional.avg_pool3d, kernel_size=2, ceil_mode=True)),
    "adaptive_avg_pool1d": ((2, 3, 7), partial(functional.adaptive_avg_pool1d, output_size=3)),
    "adaptive_avg_pool2d": ((2, 3, 7, 5), partial(functional.adaptive_avg_pool2d, output_size=(3, 2))),
    "adaptive_avg_pool3d": ((1, 2, 4, 5, 4), partial(functional.adaptive_avg_pool3d, output_size=3)),
    "conv1d": ((2, 4, 7), lambda x: functional.conv1d(x, x[:, :2, :3], stride=2, padding=1, groups=2)),
    "conv2d": ((3, 2, 7, 5), lambda x: functional.conv2d(x, x[:, :, :3, :2], x[0, 0, 0, :3], padding=1, dilation=2)),
    "transposed conv2d": ((4, 4, 3, 5), lambda x: functional.conv_transpose2d(x, x[:, :2, :2, :3], stride=2, groups=2)),
    "conv3d": ((1, 3, 4, 5, 4), lambda x: functional.conv3d(x, x[:, :, :2, :2, :3])),
    "masked_scatter": ((3, 4), lambda x: (x * 2).masked_scatter(torch.eye(3, 4, dtype=torch.bool), x)),
    "upsample": ((1, 2, 3, 4), partial(functional.interpolate, scale_factor=2, mode="nearest")),
    "one of all": ((2, 4, 1, 5), partial(functional.adaptive_avg_pool2d, output_size=1)),
    "linear": ((1, 2, 5), partial(functional.interpolate, scale_factor=2, mode="linear")),
    "bilinear": ((1, 2, 3, 4), partial(functional.interpolate, size=(5, 2), mode="bilinear", align_corners=True)),
    "bicubic": ((1, 2, 4, 4), partial(functional.interpolate, scale_factor=(2.0, 0.5), mode="bicubic")),
    "trilinear": ((1, 1, 2, 3, 2), partial(functional.interpolate, scale_factor=2, mode="trilinear")),
    "reflect": ((1, 2, 5, 4), partial(functional.pad, pad=(1, 2, 2, 1), mode="reflect")),
    "triangular": ((2, 4, 4), lambda x: torch.linalg.solve_triangular(x.tril(-1), x, upper=False, unitriangular=True)),
    "triangular from the right": (
        (1, 3, 3),
        lambda x: torch.linalg.solve_triangular(x[0].triu(1), x, upper=True, left=False, unitriangular=True),
    ),
    "replicate": ((1, 2, 5), partial(functional.pad, pad=(1, 2), mode="replicate")),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_equal_torch_on_whole_numbers(name: str) -> None:
    check_on_whole_numbers(*WINDOWS[name])


def test_exponents_do_not_depend_on_how_a_sum_is_split() -> None:
    x, y = random_numbers((4, 8), "x", 0), random_numbers((8, 3), "y", 0)
    whole: Any = (x @ y).exp()
    split: Any = x[:, :3] @ y[:3] + (x[:, 3:] * 2 @ y[3:]) / 2
    assert have_equal_numbers(whole, split.exp())
    assert not have_equal_numbers(whole, (split * (1 + 1e-15)).exp())


def test_softmax_does_not_depend_on_a_shift() -> None:
    """A mask of ones that is added to scores, as a traced model may have where the eager one has no mask, changes nothing."""
    x: Any = random_numbers((3, 8), "x", 0) * 2 + random_numbers((3, 8), "y", 0)
    ones: Any = lift_constants(torch.ones(3, 8, dtype=torch.bool))
    assert have_equal_numbers(x.softmax(-1), (x + ones).softmax(-1))
    assert have_equal_numbers(x.log_softmax(-1), (x - 3).log_softmax(-1))
    ones.a[0, 0] = 0
    assert not have_equal_numbers(x.softmax(-1), (x + ones).softmax(-1))


def test_softmax_can_be_merged_from_blocks() -> None:
    """As attention over a ring does: each block relative to its own largest value and sum."""
    x: Any = random_numbers((3, 8), "x", 0)
    blocks = x[:, :5], x[:, 5:]
    log_sums: list[Any] = [part.amax(1, True) + (part - part.amax(1, True)).exp().sum(1, True).log() for part in blocks]
    largest = torch.maximum(*log_sums)
    total = sum((log_sum - largest).exp() for log_sum in log_sums)
    merged = torch.cat([(part - s).exp() * (s - largest).exp() / total for part, s in zip(blocks, log_sums, strict=True)], 1)
    assert have_equal_numbers(merged, x.softmax(1))
    wrong = torch.cat([(part - s).exp() / total for part, s in zip(blocks, log_sums, strict=True)], 1)
    assert not have_equal_numbers(wrong, x.softmax(1))


def test_exponents_of_their_own_pass_buffers_and_views() -> None:
    x: Any = random_numbers((4,), "x", 0)
    with FieldMode():  # type: ignore[no-untyped-call]
        buffer: Any = torch.zeros(2, 4, dtype=torch.float64)
    buffer.view(-1)[4:].copy_(x.exp().sum().log())
    assert have_equal_numbers((x - buffer[1]).exp(), x.softmax(0))
    buffer.copy_(x)
    assert not buffer.has_own_exponents


def test_a_row_that_sees_nothing_is_zero() -> None:
    q, k, v = (random_numbers((1, 1, 3, 4), name, 0) for name in "qkv")
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    out: Any = functional.scaled_dot_product_attention(q, k, v, mask)
    assert isinstance(out, FieldTensor)
    assert not out.a[..., 1, :].any()
    assert out.a[..., (0, 2), :].all()


@pytest.mark.parametrize("n", [3, 4096, 100_003, 3_000_000])
def test_constants_of_means_are_exact(n: int) -> None:
    assert constant_of(2 / n) * n % P == 2
    assert constant_of((2 / n) * (1 + 1e-15)) * n % P != 2


@pytest.mark.parametrize("n", [2, 3, 5, 8, 20])
def test_a_root_of_a_root_squares_to_the_root(n: int) -> None:
    assert constant_of(n**-0.25) ** 2 % P == constant_of(n**-0.5)
    assert constant_of(n**-0.5) ** 2 * n % P == 1
    assert constant_of(n**-0.25 * (1 + 2e-15)) ** 2 % P != constant_of(n**-0.5)


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_hidden_lies_where_its_numbers_lie(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minus infinity that is written into a view of a buffer, as a stage receives it, is read from the buffer; twin: views of their own."""
    if not shared:
        monkeypatch.setattr(rules, "view_of", lambda x, numbers: FieldTensor(numbers, degree=x.degree))
    buffer = zeros_of((2, 3))
    buffer.view(-1).detach()[1:].copy_(lift_constants(torch.tensor([-torch.inf, 2.0, 3.0, -torch.inf, 4.0])))
    expected = torch.tensor([[False, True, False], [False, True, False]])
    assert torch.equal(hidden_or_none(buffer), expected) is shared
    assert torch.equal(hidden_or_none(buffer.t()[1]), expected[:, 1]) is shared
    assert buffer.a.tolist() == [[0, 0, 2], [3, 0, 4]]


def test_a_number_as_a_truth_value_is_whether_it_is_not_zero() -> None:
    """Masks of experts are numbers first (DeepSeek-V3); minus infinity is rounded to no whole number."""
    values = torch.tensor([0.0, 3.0, -2.0, 0.5, -torch.inf])
    numbers = lift_constants(values)
    assert numbers.bool().tolist() == values.bool().tolist() == [False, True, True, True, True]
    with pytest.raises(NotProvable, match="minus infinity is rounded"):
        numbers.long()


@pytest.mark.parametrize("place", ["slice", "select", "scatter", "put"])
def test_what_is_hidden_stays_where_numbers_are_placed(place: str) -> None:
    """Windows and masks that begin as minus infinity (DeepSeek-V4); in place, functional and of torch's own numbers alike."""
    index = torch.tensor([[0], [2]])
    calls: dict[str, Callable[[Any, Any], Any]] = {
        "slice": lambda x, y: x.slice_scatter(y, 1, 1, 2),
        "select": lambda x, y: x.select_scatter(y[:, 0], 1, 1),
        "scatter": lambda x, y: x.scatter(1, index, y),
        "put": lambda x, y: x.index_put((torch.tensor([0, 1]), torch.tensor([2, 0])), y[:, 0]),
    }
    x, y = torch.full((2, 3), -torch.inf), torch.tensor([[1.0], [-torch.inf]])
    placed, expected = calls[place](lift_constants(x), lift_constants(y)), calls[place](x, y)
    assert torch.equal(hidden_or_none(placed), expected == -torch.inf)
    assert have_equal_numbers(placed, lift_constants(expected))
    assert not have_equal_numbers(placed, lift_constants(expected.nan_to_num(neginf=0.0)))


def test_another_number_in_a_mask_is_told() -> None:
    """A broken twin: a number that hides nothing in exact arithmetic, half in one place."""
    serial, parallel = (lift_constants(torch.tensor([0.0, least])) for least in (-1e30, -1e30 / 2))
    assert not have_equal_numbers(serial, parallel)
    least = [lift_constants(torch.tensor([0.0, torch.finfo(dtype).min])) for dtype in (torch.float16, torch.bfloat16, torch.float32)]
    assert all(have_equal_numbers(each, lift_constants(torch.tensor([0.0, -torch.inf]))) for each in least)
