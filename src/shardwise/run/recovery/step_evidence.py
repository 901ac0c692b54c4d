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

from shardwise.run.recovery.fingerprints import fingerprint_of
from shardwise.run.state.parameters import FlatGroup


@dataclass(frozen=True)
class StepEvidence:
    """Numbers of one rank's step. `losses` by microbatch, `norms` by bucket, `gradients`: fingerprints after the reduction, by name.
    `not_finite`: names with a gradient that is not finite; `largest`: name with the largest gradient norm."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: dict[str, int]
    not_finite: frozenset[str]
    largest: str

    @classmethod
    @torch.no_grad()
    def of_step(cls, losses: Sequence[Tensor], norms: Sequence[Tensor], groups: Sequence[FlatGroup]) -> StepEvidence:
        """Collect the evidence of a step; reads all gradients."""
        flat_gradients = [(name, x.detach().clone().reshape(-1)) for name, x in _named_gradients(groups)]
        norm_by_name = {name: float(torch.linalg.vector_norm(x.float())) for name, x in flat_gradients if x.numel()}
        finite = {name: bool(x.isfinite().all()) for name, x in flat_gradients}
        return cls(
            tuple(float(x) for x in losses),
            tuple(float(x) for x in norms),
            {name: int(fingerprint_of(x)) for name, x in flat_gradients},
            frozenset(name for name, is_finite in finite.items() if not is_finite),
            max(norm_by_name, key=lambda name: norm_by_name[name], default=""),
        )


@dataclass(frozen=True)
class StepAnomaly:
    """Anomalies of one rank: a loss (1 + its microbatch), its own gradients, a parameter (1 + its index in the model); 0: none."""

    loss: int = 0
    gradients: int = 0
    parameter: int = 0

    @classmethod
    def between(cls, first: StepEvidence, second: StepEvidence, names: Sequence[str]) -> StepAnomaly:
        """Compare two runs of a step. Norms are skipped if their numbers differ, since one run was resumed between microbatches."""
        losses = [1 + m for m, (a, b) in enumerate(zip(first.losses, second.losses, strict=False)) if _values_differ(a, b)]
        gradients = len(first.norms) == len(second.norms) and any(
            _values_differ(a, b) for a, b in zip(first.norms, second.norms, strict=True)
        )
        differing = {name for name, value in first.gradients.items() if second.gradients.get(name) != value}
        return cls(min(losses, default=0), int(gradients), _last_parameter(differing, names))

    @classmethod
    def of_nonfinite(cls, evidence: StepEvidence, names: Sequence[str], is_suspect: bool) -> StepAnomaly:
        """Report what is not finite; else, if the gradients are suspect, the parameter with the largest one."""
        losses = [1 + m for m, x in enumerate(evidence.losses) if x - x != 0]
        gradients = any(x - x != 0 for x in evidence.norms)
        if gradients or evidence.not_finite or losses:
            return cls(min(losses, default=0), int(gradients), _last_parameter(evidence.not_finite, names))
        return cls(0, int(is_suspect), _last_parameter({evidence.largest}, names) if is_suspect else 0)


def describe_anomalies(anomalies: Sequence[StepAnomaly], names: Sequence[str]) -> str:
    """Describe the rank and tensor of an anomaly; empty if there is none.

    >>> describe_anomalies([StepAnomaly(), StepAnomaly(0, 1, 2)], ["a", "b"]), describe_anomalies([StepAnomaly(0, 0, 1), StepAnomaly(3, 1, 1)], ["a", "b"])
    ('the gradient of b on rank 1', 'the loss of microbatch 2 on rank 1')
    """  # noqa: E501
    losses = [(rank, finding.loss - 1) for rank, finding in enumerate(anomalies) if finding.loss]
    if losses:
        ranks = sorted({rank for rank, _ in losses})
        return f"the loss of microbatch {losses[0][1]} on rank {', '.join(map(str, ranks))}"
    ranks = [rank for rank, finding in enumerate(anomalies) if finding.gradients]
    parameter = max((finding.parameter for finding in anomalies), default=0)
    if not ranks and not parameter:
        return ""
    what = f"the gradient of {names[parameter - 1]}" if parameter else "the gradients"
    return f"{what} on rank {', '.join(map(str, ranks))}" if ranks else f"the sum of {what}"


def _last_parameter(suspects: set[str] | frozenset[str], names: Sequence[str]) -> int:
    return max((1 + index for index, name in enumerate(names) if name in suspects), default=0)


def _values_differ(a: float, b: float) -> bool:
    return a != b and not (a != a and b != b)


def _named_gradients(groups: Sequence[FlatGroup]) -> Iterator[tuple[str, Tensor]]:
    for group in groups:
        if group.is_scattered:
            for member, at, (first, last) in group.members_of_shards():
                yield member.name, group.grad[at : at + last - first]
        else:
            group.allocate()
            yield from group.views.items()
