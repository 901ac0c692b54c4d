"""`shardwise.prove`: a plan without tolerance, on numbers of a finite field, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.api import Model, ModelSubject, plan_to_verify, subject_of
from shardwise.capture.capture import Loss
from shardwise.errors import Infeasible, LayoutError, UsageError
from shardwise.plan.ir.patterns import expand_shards, pattern_of
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import read_plan
from shardwise.plan.reduced_layout import divisors_of, reduce_batch, reduce_layout
from shardwise.run.prove.proof import Proof
from shardwise.run.prove.prove import ProofOptions, prove_plan
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.run.state.optimizer import OptimizerSpec
from shardwise.zoo.reduced import reduce_name
from shardwise.zoo.resolve import resolve
from shardwise.zoo.resolved import ResolvedModel

_ENLARGED = (1, 2, 4, 8)  # lengths and images that are tried, until twice as much divides the same operators


def prove(  # noqa: PLR0913
    model: Model | Path,
    layout: Layout | Plan | str | Path | Sequence[Layout | Plan | str] | None = None,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerSpec | str | Mapping[str, Any] = "adamw",
    steps: int = 1,
    sequence: int | None = None,
    cut_everything: bool = True,
    max_error_probability: float = 1e-12,
    ranks_per_axis: int = 0,
) -> Proof | tuple[Proof, ...]:
    """Prove that a plan computes what the serial model does: loss gradients, updated weights and optimizer state, without a tolerance.

    Every rank's engine runs as a thread of this process on numbers of a finite field, in which sums and products are exact, at random
    points. What only floating point can show (overflow, 16 bits, the order of sums) is left to `verify`.

    Args:
        model, batch, loss, layout, sequence: as for `verify`; several layouts give a tuple of proofs.
        cut_everything: shard weights wherever the rules allow, even where it does not pay; not for a plan, whose own shards are proven.
        max_error_probability: at most with which a wrong plan passes; it determines the number of points.
        ranks_per_axis: 2 or more reduces the plan first to so many ranks along every axis, and a zoo model to the smallest sizes that these
            divide as the plan divides its own (docs/proofs.md says why this suffices); 0 proves the plan as it is.

    Raises:
        NotProvable: an operator has no exact form; the message names it. Infeasible, LayoutError, ModelError: as for `plan`.

    >>> import torch, shardwise
    >>> x, y = torch.randn(4, 4), torch.randn(4, 2)
    >>> def error(output, batch):
    ...     return torch.nn.functional.mse_loss(output, batch[1])
    >>> shardwise.prove(lambda: torch.nn.Linear(4, 2), "data=2", (x, y), loss=error).ok
    True
    """
    if str(model).endswith(".toml"):
        if layout is not None:
            raise UsageError(f"{model} is a plan, which has a layout of its own; give its model with other layouts")
        layout = read_plan(str(model))
        model, batch = layout.model, layout.batch_size if batch is None else batch
    wanted = list(layout) if isinstance(layout, Sequence) and not isinstance(layout, str) else ["data=2" if layout is None else layout]
    assert not isinstance(model, Path)
    options = ProofOptions(max_error_probability, steps, optimizer=optimizer)
    state = torch.random.get_rng_state()
    try:
        if ranks_per_axis:
            cases = [_reduce_case(model, each, batch, loss, sequence, ranks_per_axis) for each in wanted]
        else:
            cases = _build_cases(model, wanted, batch, loss, sequence)
        proofs = tuple(
            prove_plan(case.plan, *case.subject[1:], case.source, options, cut_everything and not case.has_shards) for case in cases
        )
    finally:
        torch.random.set_rng_state(state)
    return proofs if isinstance(layout, Sequence) and not isinstance(layout, str) else proofs[0]


@dataclass(frozen=True)
class _ProofCase:
    """A plan to prove, with its captured model. `has_shards`: the shards are a plan's, not chosen by prices."""

    plan: Plan
    subject: ModelSubject
    source: CachedModelSource
    has_shards: bool


def _build_cases(model: Model, wanted: Sequence[Any], batch: Any, loss: Loss | None, sequence: int | None) -> list[_ProofCase]:
    if isinstance(model, str):
        model = resolve(model, batch if isinstance(batch, int) else None, sequence)
    subject = subject_of(model, batch, loss)
    source = CachedModelSource.from_model(subject[1])
    return [
        _ProofCase(plan_to_verify(each, subject, source, None, None), subject, source, not isinstance(each, Layout | str))
        for each in wanted
    ]


def _reduce_case(model: Model, wanted: Any, batch: Any, loss: Loss | None, sequence: int | None, ranks_per_axis: int) -> _ProofCase:
    """Reduce a plan, and a model by name, to what is proven in their place."""
    if ranks_per_axis < 2:
        raise UsageError(f"ranks_per_axis={ranks_per_axis} leaves nothing divided; use 2 or 3, or 0 for the plan as it is")
    if isinstance(wanted, Path) or (isinstance(wanted, str) and wanted.endswith(".toml")):
        wanted = read_plan(wanted)
    layout = wanted.layout if isinstance(wanted, Plan) else Layout.parse(wanted) if isinstance(wanted, str) else wanted
    reduced = reduce_layout(layout, ranks_per_axis)
    if not (isinstance(model, str) and ".py" not in model and not model.startswith("hf:")):
        return _build_case(model, wanted, reduced, batch, loss, sequence)
    whole = batch if isinstance(batch, int) else wanted.batch_size if isinstance(wanted, Plan) else resolve(model).default_batch
    size = reduce_batch(whole, layout, reduced)
    previous: _ProofCase | None = None
    for factor in _ENLARGED:
        name = reduce_name(model, sequence, divisors_of(layout, reduced), reduced.pipeline * reduced.chunks, factor)
        try:
            case = _build_case(resolve(name, size), wanted, reduced, None, loss, None)
        except (Infeasible, LayoutError):
            if factor == _ENLARGED[-1]:
                raise
            continue
        if previous is not None and _replicated_sites(previous.plan) == _replicated_sites(case.plan):
            return previous
        previous = case
    assert previous is not None
    return previous


def _build_case(
    model: ResolvedModel | Model, wanted: Any, layout: Layout, batch: Any, loss: Loss | None, sequence: int | None
) -> _ProofCase:
    (case,) = _build_cases(model, [layout], batch, loss, sequence)
    if not isinstance(wanted, Plan) or not wanted.shards:
        return case
    names = {name for name, _ in (*case.source.model.named_parameters(), *case.source.model.named_buffers())}
    shards = tuple(
        (axis, tuple((name, dim) for name, dim in entries if name in names))
        for axis, entries in expand_shards(wanted.shards, names).items()
    )
    return replace(case, plan=replace(case.plan, shards=shards), has_shards=True)


def _replicated_sites(plan: Plan) -> set[str]:
    return {pattern_of(site) for site in plan.replicated_operators}
