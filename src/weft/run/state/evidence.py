"""Locate silent data corruption in a suspect step by rerunning it. In: losses, norms, gradients before the update. Out: rank and tensor.

A rerun from the same state is bitwise reproducible. So a rank whose own numbers (its losses, its gradient norms before the reduction)
differ between the two runs was faulty; if all are equal, the hardware was not. The last differing parameter in the model's order is named,
since backward starts there and NaNs propagate to all earlier ones. Not modelled: a fault in messages during forward, after which all
ranks differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.run.state.fingerprints import fingerprint
from weft.run.state.parameters import FlatGroup


@dataclass(frozen=True)
class Evidence:
    """Numbers of one rank's step. `losses` by microbatch, `norms` by bucket, `gradients`: fingerprints after the reduction, by name.
    `not_finite`: names with a gradient that is not finite; `largest`: name with the largest gradient norm."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: dict[str, int]
    not_finite: frozenset[str]
    largest: str

    @classmethod
    @torch.no_grad()
    def of(cls, losses: Sequence[Tensor], norms: Sequence[Tensor], groups: Sequence[FlatGroup]) -> Evidence:
        """Collect the evidence of a step; reads all gradients."""
        flat_gradients = [(name, x.detach().clone().reshape(-1)) for name, x in _gradients(groups)]
        norm_by_name = {name: float(torch.linalg.vector_norm(x.float())) for name, x in flat_gradients if x.numel()}
        finite = {name: bool(x.isfinite().all()) for name, x in flat_gradients}
        return cls(
            tuple(float(x) for x in losses),
            tuple(float(x) for x in norms),
            {name: int(fingerprint(x)) for name, x in flat_gradients},
            frozenset(name for name, is_finite in finite.items() if not is_finite),
            max(norm_by_name, key=lambda name: norm_by_name[name], default=""),
        )


@dataclass(frozen=True)
class Finding:
    """Anomalies of one rank: a loss (1 + its microbatch), its own gradients, a parameter (1 + its index in the model); 0: none."""

    loss: int = 0
    gradients: int = 0
    parameter: int = 0

    @classmethod
    def between(cls, one: Evidence, other: Evidence, names: Sequence[str]) -> Finding:
        """Compare two runs of a step. Norms are skipped if their numbers differ, since one run was resumed between microbatches."""
        losses = [1 + m for m, pair in enumerate(zip(one.losses, other.losses, strict=False)) if _differ(*pair)]
        gradients = len(one.norms) == len(other.norms) and any(_differ(a, b) for a, b in zip(one.norms, other.norms, strict=True))
        differing = {name for name, value in one.gradients.items() if other.gradients.get(name) != value}
        return cls(min(losses, default=0), int(gradients), _last(differing, names))

    @classmethod
    def within(cls, one: Evidence, names: Sequence[str], is_doubted: bool) -> Finding:
        """Report what is not finite; else, if the gradients are suspect, the parameter with the largest one."""
        losses = [1 + m for m, x in enumerate(one.losses) if x - x != 0]
        gradients = any(x - x != 0 for x in one.norms)
        if gradients or one.not_finite or losses:
            return cls(min(losses, default=0), int(gradients), _last(one.not_finite, names))
        return cls(0, int(is_doubted), _last({one.largest}, names) if is_doubted else 0)


def words_of(findings: Sequence[Finding], names: Sequence[str]) -> str:
    """Describe the rank and tensor of an anomaly; empty if there is none.

    >>> words_of([Finding(), Finding(0, 1, 2)], ["a", "b"]), words_of([Finding(0, 0, 1), Finding(3, 1, 1)], ["a", "b"])
    ('the gradient of b on rank 1', 'the loss of microbatch 2 on rank 1')
    """
    losses = [(rank, finding.loss - 1) for rank, finding in enumerate(findings) if finding.loss]
    if losses:
        ranks = sorted({rank for rank, _ in losses})
        return f"the loss of microbatch {losses[0][1]} on rank {', '.join(map(str, ranks))}"
    ranks = [rank for rank, finding in enumerate(findings) if finding.gradients]
    parameter = max((finding.parameter for finding in findings), default=0)
    if not ranks and not parameter:
        return ""
    what = f"the gradient of {names[parameter - 1]}" if parameter else "the gradients"
    return f"{what} on rank {', '.join(map(str, ranks))}" if ranks else f"the sum of {what}"


def _last(odd: set[str] | frozenset[str], names: Sequence[str]) -> int:
    return max((1 + index for index, name in enumerate(names) if name in odd), default=0)


def _differ(a: float, b: float) -> bool:
    return a != b and not (a != a and b != b)


def _gradients(groups: Sequence[FlatGroup]) -> Iterator[tuple[str, Tensor]]:
    for group in groups:
        if group.scattered:
            for member, at, (first, last) in group.shares():
                yield member.name, group.grad[at : at + last - first]
        else:
            group.hold()
            yield from group.views.items()
