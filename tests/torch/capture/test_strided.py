"""`as_strided` as windows: the same elements as torch's own reads, for tensors that lie in memory in any order."""

from __future__ import annotations

import random

import pytest
import torch
from test_capture import equal_to_eager
from torch import Tensor, nn

from shardwise.model.strides.strided_views import Steps, as_strided_steps


def run(x: Tensor, steps: Steps) -> Tensor:
    for name, args in steps:
        packet, overload = name.split(".")
        x = getattr(getattr(torch.ops.aten, packet), overload)(x, *args)
    return x


def drawn(rng: random.Random) -> tuple[Tensor, list[int], list[int]]:
    """A tensor, and a way to read it: windows along some dimensions, in any order, some of it wrong."""
    shape = [rng.choice([2, 3, 4, 6, 8]) for _ in range(rng.randint(1, 4))]
    x = torch.arange(torch.Size(shape).numel()).view(shape).permute(rng.sample(range(len(shape)), len(shape)))
    dims: list[tuple[int, int]] = []
    for size, stride in zip(x.shape, x.stride(), strict=True):
        window, step = rng.choice([2, 3, 4]), rng.choice([1, 2, 3])
        if rng.random() < 0.5 and window < size:
            dims += [((size - window) // step + 1, step * stride), (window, stride)]
        else:
            dims.append((size, stride))
    at = rng.randrange(len(dims))
    dims[at] = (dims[at][0], dims[at][1] + rng.choice([0, 0, 0, 1, 2]))
    dims = rng.sample(dims, len(dims))
    return x, [size for size, _ in dims], [stride for _, stride in dims]


def test_windows_read_what_as_strided_reads() -> None:
    rng, tried, found = random.Random(0), 0, 0
    for _ in range(3000):
        x, sizes, strides = drawn(rng)
        if sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) >= x.numel():
            continue
        tried += 1
        dims = [tuple(zip(a, b, strict=True)) for a, b in ((x.shape, x.stride()), (sizes, strides))]
        steps = as_strided_steps(*dims)
        if steps is not None:
            found += 1
            assert torch.equal(run(x, steps), x.as_strided(sizes, strides)), (x.shape, x.stride(), sizes, strides)
    assert found > tried / 2 > 500


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (((4, 1), (6, 4)), ((4, 4), (5, 1))),  # part of a dimension
        (((4, 6), (6, 1)), ((2, 8), (3, 1))),  # across the ends of rows
        (((6, 1),), ((6, 0), (6, 1))),  # one element many times
        (((8, 1),), ((3, 3), (3, 1))),  # windows that leave some out behind the last
    ],
)
def test_what_is_no_window_is_left_alone(source: tuple[tuple[int, int], ...], wanted: tuple[tuple[int, int], ...]) -> None:
    steps = as_strided_steps(source, wanted)
    x = torch.arange(64.0).as_strided([n for n, _ in source], [s for _, s in source])
    want = x.as_strided([n for n, _ in wanted], [s for _, s in wanted])
    assert steps is None or torch.equal(run(x, steps), want)


def test_sliding_attention_of_what_is_turned_is_captured() -> None:
    """As Longformer takes its chunks, of a tensor whose heads lie inside of its positions."""

    class Sliding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x).transpose(0, 1).reshape(16, 2, 2, 4).permute(1, 2, 0, 3).reshape(4, 2, 8, 4)
            size, stride = list(h.shape), list(h.stride())
            size[1], stride[1] = size[1] * 2 - 1, stride[1] // 2
            return h.as_strided(size, stride).square().sum()

    graph = equal_to_eager(Sliding().double(), (torch.randn(2, 16, 6, dtype=torch.float64),)).graph
    names = [op.target.split(".")[1] for op in graph.operators]
    assert "unfold" in names
    assert "as_strided" not in names
