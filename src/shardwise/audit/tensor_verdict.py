"""How the ranks' shards of one tensor differ from the serial tensor: by a factor, by a reduction that is missing, or otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

import torch
from torch import Tensor

from shardwise.audit.match import GatheredShard

_TINY = 1e-300


@dataclass(frozen=True)
class TensorVerdict:
    """`kind`: equal, missing, factor, rank factors, sum, mean, replicas differ, or wrong. `error`: relative, of the worst rank.
    `factors`: the best factor of each rank; `ranks`: those whose own values are wrong."""

    kind: str
    error: float
    text: str = ""
    factors: dict[int, float] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()

    @property
    def factor(self) -> float:
        """The mean of the ranks' factors."""
        return mean(self.factors.values()) if self.factors else 1.0


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Return |a - b| / |b|, by the Euclidean norm.

    >>> relative_difference(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]))
    0.2
    """
    top = float((a - b).norm())
    return top / max(float(b.norm()), _TINY) if top else 0.0


def sum_partial(shards: Sequence[GatheredShard], size: int) -> Sequence[GatheredShard]:
    """Return summands of a full tensor as their sum on rank 0; other shards as they are."""
    if not any(s.partial for s in shards):
        return shards
    total = torch.zeros(size, dtype=torch.float64)
    for s in shards:
        total[s.index] += s.values
    return [GatheredShard(0, torch.arange(size), total, False)]


def judge_tensor(shards: Sequence[GatheredShard], serial: Tensor, tolerance: float) -> TensorVerdict:
    """Compare the shards of a tensor with the serial one, which is flat.

    >>> x = torch.arange(4.0).double()
    >>> judge_tensor([GatheredShard(0, torch.arange(4), 2 * x, False)], x, 1e-6).text
    '2.0000 x'
    """
    shards = [s for s in sum_partial(shards, serial.numel()) if s.values.numel()]
    usual = float(serial.norm()) / max(1, serial.numel()) ** 0.5  # size of a usual element
    total, count = torch.zeros_like(serial), torch.zeros_like(serial)
    factors: dict[int, float] = {}
    errors: dict[int, float] = {}
    rest = 0.0  # what no factor explains
    for s in shards:
        total[s.index] += s.values
        count[s.index] += 1
        expected = serial[s.index]
        scale = max(float(expected.norm()), usual * s.values.numel() ** 0.5, _TINY)
        difference = float((s.values - expected).norm()) / scale
        errors[s.rank] = max(errors.get(s.rank, 0.0), difference if difference == difference else float("inf"))
        c = float(s.values @ expected) / max(float(expected @ expected), _TINY)
        factors[s.rank] = c
        unexplained = float((s.values - c * expected).norm()) / scale / max(abs(c), 1e-3)
        rest = max(rest, unexplained if unexplained == unexplained else float("inf"))
    absent = int((count == 0).sum())
    if absent:
        return TensorVerdict("missing", 1.0, f"{absent} of {serial.numel()} elements are on no rank")
    worst = max(errors.values(), default=0.0)
    ranks = tuple(sorted(rank for rank, error in errors.items() if error > tolerance))
    if not ranks:
        return TensorVerdict("equal", worst)
    kind, text = _name_difference(shards, serial, tolerance, factors if rest <= tolerance else {})
    return TensorVerdict(kind, worst, text or f"relative error {worst:.2g}", factors, ranks)


def _name_difference(shards: Sequence[GatheredShard], serial: Tensor, tolerance: float, factors: dict[int, float]) -> tuple[str, str]:
    values = list(factors.values())
    if values and max(values) - min(values) <= 2 * tolerance * max(map(abs, values)):
        return "factor", f"{mean(values):.4f} x"
    total, count = torch.zeros_like(serial), torch.zeros_like(serial)
    for s in shards:
        total[s.index] += s.values
        count[s.index] += 1
    if values:
        return "rank factors", ", ".join(f"rank {rank}: {c:.4f} x" for rank, c in factors.items())
    average = total / count
    if float(count.max()) > 1:
        if relative_difference(total, serial) <= tolerance:
            return "sum", "the sum of the ranks' values is the serial one"
        if relative_difference(average, serial) <= tolerance:
            return "mean", "the mean of the ranks' values is the serial one"
    apart = float(torch.stack([(s.values - average[s.index]).norm() for s in shards]).max()) / max(float(average.norm()), _TINY)
    return ("wrong" if apart <= tolerance else "replicas differ"), ""
