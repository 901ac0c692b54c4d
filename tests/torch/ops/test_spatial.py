"""Windows on pieces of an image: every operator that slides windows, cut along each of its positions into uneven pieces, is the operator.

Kernels, strides, dilations, paddings, groups and sizes are drawn; outputs and all gradients are compared in float64 with the operator on
the whole image. Ranks are threads.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.lower.kernels import halo as kernel
from shardwise.ops.sliding_window import ResamplingWindow, SlidingWindow, TransposedWindow, Window
from shardwise.plan.ir.axis import POSITIONS
from shardwise.plan.ir.placement import Halo, even_shard_ranges, halo_placement
from tests.support.rule_cases import Case, case, check, choices, difference

Draw = Callable[[st.SearchStrategy[Any]], Any]
KERNELS, STRIDES, DILATIONS = st.integers(1, 5), st.integers(1, 3), st.integers(1, 2)


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def image(draw: Draw, dims: int, channels: int = 2, least: int = 9) -> Tensor:
    return real(draw(st.integers(1, 2)), channels, *(draw(st.integers(least, 15 if dims < 3 else 11)) for _ in range(dims)))


def several(draw: Draw, of: st.SearchStrategy[int], dims: int) -> list[int]:
    return [draw(of) for _ in range(dims)]


def convolution(draw: Draw, dims: int) -> Case:
    groups = draw(st.sampled_from((1, 2)))
    size, dilation = several(draw, KERNELS, dims), several(draw, DILATIONS, dims)
    size = [k if d == 1 else min(k, 3) for k, d in zip(size, dilation, strict=True)]
    stride, padding = several(draw, STRIDES, dims), several(draw, st.integers(0, 4), dims)
    bias = real(4) if draw(st.booleans()) else None
    return case(f"conv{dims}d.default", image(draw, dims), real(4, 2 // groups, *size), bias, stride, padding, dilation, groups)


def same_convolution(draw: Draw, dims: int) -> Case:
    size, dilation = several(draw, KERNELS, dims), several(draw, DILATIONS, dims)
    return case(f"conv{dims}d.padding", image(draw, dims), real(4, 2, *size), real(4), [1] * dims, "same", dilation, 1)


def transposed(draw: Draw, dims: int) -> Case:
    stride, dilation = several(draw, STRIDES, dims), several(draw, DILATIONS, dims)
    size = several(draw, KERNELS, dims)
    padding = [draw(st.integers(0, d * (k - 1))) for k, d in zip(size, dilation, strict=True)]
    more = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
    bias = real(4) if draw(st.booleans()) else None
    target = f"conv_transpose{dims}d.{'default' if dims == 1 else 'input'}"
    return case(target, image(draw, dims), real(2, 4, *size), bias, stride, padding, more, 1, dilation)


def largest(draw: Draw, dims: int) -> Case:
    size = several(draw, st.integers(2, 4), dims)
    stride, padding = several(draw, STRIDES, dims), [draw(st.integers(0, k // 2)) for k in size]
    return case(f"max_pool{dims}d.default", image(draw, dims), size, stride, padding, [1] * dims, draw(st.booleans()))


def average(draw: Draw, dims: int) -> Case:
    size = several(draw, st.integers(2, 4), dims)
    stride, padding = several(draw, STRIDES, dims), [draw(st.integers(0, k // 2)) for k in size]
    return case(f"avg_pool{dims}d.default", image(draw, dims), size, stride, padding, False, draw(st.booleans()))


def bins(draw: Draw, dims: int) -> Case:
    made = several(draw, st.sampled_from((1, 3, 4)), dims)
    shape = [n * draw(st.integers(2, 4)) for n in made]
    return case(f"adaptive_avg_pool{dims}d.default", real(2, 2, *shape), made)


def padded(draw: Draw, dims: int) -> Case:
    pads = several(draw, st.integers(0, 3), 2 * dims)
    return case("constant_pad_nd.default", image(draw, dims), pads, draw(st.sampled_from((0.0, 1.5))))


def nearest(draw: Draw, dims: int) -> Case:
    x = image(draw, dims)
    if draw(st.booleans()):
        return case(f"upsample_nearest{dims}d.vec", x, None, [draw(st.sampled_from((2.0, 1.5, 3.0))) for _ in range(dims)])
    return case(f"upsample_nearest{dims}d.vec", x, [draw(st.integers(5, 20)) for _ in range(dims)], None)


def linear(draw: Draw, dims: int) -> Case:
    name, x, aligned = {1: "linear1d", 2: "bilinear2d", 3: "trilinear3d"}[dims], image(draw, dims), draw(st.booleans())
    if draw(st.booleans()):
        return case(f"upsample_{name}.vec", x, None, aligned, [draw(st.sampled_from((2.0, 1.5, 3.0))) for _ in range(dims)])
    return case(f"upsample_{name}.vec", x, [draw(st.integers(5, 20)) for _ in range(dims)], aligned, None)


OPERATORS = (convolution, same_convolution, transposed, largest, average, bins, padded, nearest, linear)


@pytest.mark.parametrize("make", OPERATORS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dims", [1, 2, 3])
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_windows_on_pieces_are_windows_on_the_whole(make: Callable[[Draw, int], Case], dims: int, data: st.DataObject) -> None:
    made = make(data.draw, dims)
    for axis in POSITIONS[-dims:]:
        assert not check(made, (2, 3), axis)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.parametrize("make", [convolution, transposed, largest, linear], ids=lambda f: f.__name__)
def test_height_and_width_at_once(make: Callable[[Draw, int], Case], data: st.DataObject) -> None:
    """The second axis' exchange carries what the first one fetched: corners come from ranks that are no neighbours."""
    made = make(data.draw, 2)
    tall, wide = choices(made, 2, "height"), choices(made, 3, "width")
    for one, other in product(tall, wide):
        assert not difference(made, {"height": (2, one), "width": (3, other)})


def test_every_operator_that_slides_windows_is_cut() -> None:
    """What is drawn above is not empty: an image that is large enough is cut along each position."""
    x = real(1, 2, 12, 12)
    calls = (
        case("conv2d.default", x, real(4, 2, 3, 3), None, [1, 1], [1, 1]),
        case("max_pool2d.default", x, [3, 3], [2, 2], [1, 1]),
        case("avg_pool2d.default", x, [2, 2]),
        case("adaptive_avg_pool2d.default", x, [4, 4]),
        case("adaptive_avg_pool2d.default", x, [1, 1]),
        case("conv_transpose2d.input", x, real(2, 4, 2, 2), None, [2, 2]),
        case("upsample_nearest2d.vec", x, None, [2.0, 2.0]),
        case("upsample_bilinear2d.vec", x, None, False, [2.0, 2.0]),
        case("upsample_bilinear2d.vec", real(1, 2, 12, 15), [9, 5], False, None),  # whose first entries nothing reads
        case("constant_pad_nd.default", x, [1, 1, 1, 1]),
    )
    for one, axis in product(calls, ("height", "width", "spatial")):
        assert choices(one, 3, axis), (one.op.target, axis)
        assert not check(one, (3,), axis)


def test_what_is_given_by_name_is_not_lost() -> None:
    """The number that is padded with: nothing is divided where windows are told from arguments by position."""
    made = case("pad.default", real(1, 2, 8, 8), [1, 1, 1, 1], value=1.5)
    assert not check(made, (2, 3), "height")


def test_one_window_is_not_divided() -> None:
    """A window as large as the image, and an image of one entry."""
    for size, window, padding in ((3, 3, [0, 1]), (2, 3, [1, 1]), (1, 1, [0, 1])):
        made = case("conv2d.default", real(2, 2, size, 6), real(4, 2, window, 3), None, [2, 1], padding)
        assert choices(made, 2, "height") == [] or not check(made, (2,), "height")
        assert not check(made, (2,), "width")


@pytest.mark.parametrize(
    "window",
    [
        SlidingWindow(3, 1, 1, 1),
        SlidingWindow(5, 2, 2, 4),
        SlidingWindow(2, 3),
        TransposedWindow(3, 2, 1, 1),
        TransposedWindow(4, 3),
        ResamplingWindow(1, 0.4),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_windows_read_all_that_they_need_and_nothing_else(window: Window, ranks: int) -> None:
    """Against enumeration: an entry of the input is read where some entry of a rank's piece of the output depends on it."""
    size = 23
    if isinstance(window, SlidingWindow):
        length = (size + 2 * window.padding_before - window.dilation * (window.kernel - 1) - 1) // window.stride + 1
        reads = {o: {o * window.stride - window.padding_before + t * window.dilation for t in range(window.kernel)} for o in range(length)}
    elif isinstance(window, TransposedWindow):
        length = (size - 1) * window.stride - 2 * window.padding_before + window.dilation * (window.kernel - 1) + 1
        taps = range(0, window.dilation * window.kernel, window.dilation)
        reads = {o: {i for i in range(size) for t in taps if i * window.stride - window.padding_before + t == o} for o in range(length)}
    else:
        length = round(size / window.scale)
        reads = {o: set(window.taps(o, size)[:2]) for o in range(length)}
    for start, stop in even_shard_ranges(length, ranks):
        wanted = {i for o in range(start, stop) for i in reads[o] if 0 <= i < size}
        placed = halo_placement(0, size, [window.input_range(start, stop, size)] * 2)
        assert isinstance(placed, Halo)
        assert placed.windows[0] == (min(wanted), max(wanted) + 1)


def test_broken_twin_padding_is_put_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As though every piece were an image of its own: the border between pieces is wrong."""
    made = case("conv2d.default", real(1, 2, 12, 12), real(4, 2, 3, 3), None, [1, 1], [1, 1])
    assert not check(made, (2,), "height")
    right = kernel.apply_windows

    def alone(target: Any, windows: Any, parts: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        inner = [x.narrow(2, part.output[0] - part.read[0], part.output[1] - part.output[0]) if part.dim == 2 else x for part in parts]
        return target(inner[0], *args)  # type: ignore[no-any-return]

    monkeypatch.setattr("shardwise.lower.call.apply_windows", alone)
    assert check(made, (2,), "height")
    monkeypatch.setattr("shardwise.lower.call.apply_windows", right)


def test_broken_twin_a_window_that_is_one_entry_short(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case("conv2d.default", real(1, 2, 12, 12), real(4, 2, 3, 3), None, [1, 1], [1, 1])
    needs = SlidingWindow.input_range
    monkeypatch.setattr(SlidingWindow, "input_range", lambda self, a, b, size: (needs(self, a, b, size)[0], needs(self, a, b, size)[1] - 1))
    assert check(made, (2,), "height")
