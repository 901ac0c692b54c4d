"""`shardwise.prove`: a plan without tolerance, on numbers of a finite field, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.api import Model, plan_to_verify, subject_of
from shardwise.capture.capture import Loss
from shardwise.errors import Infeasible, LayoutError, UsageError
from shardwise.plan.ir.patterns import expand_shards, pattern_of
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import read_plan
from shardwise.plan.reduced_layout import divisors_of, reduce_batch, reduce_layout
from shardwise.run.prove.proof import Proof
from shardwise.run.prove.prove import prove_plan
from shardwise.run.prove.serial_points import ProofModel, ProofOptions
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.run.state.optimizer import OptimizerSpec
from shardwise.zoo.reduced import count_parameters, reduce_name
from shardwise.zoo.resolve import resolve
from shardwise.zoo.resolved import ResolvedModel

MAX_WHOLE_RANKS = 16
MAX_WHOLE_PARAMETERS = 1 << 20  # of a zoo model: minutes
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
    whole: bool = False,
) -> Proof | tuple[Proof, ...]:
    """Prove that a plan computes what the serial model does: loss gradients, updated weights and optimizer state, without a tolerance.

    Every rank's engine runs as a thread of this process on numbers of a finite field, in which sums and products are exact, at random
    points. What only floating point can show (overflow, 16 bits, the order of sums) is left to `verify`.

    Args:
        model, batch, loss, layout, sequence: as for `verify`; several layouts give a tuple of proofs.
        cut_everything: shard weights wherever the rules allow, even where it does not pay; not for a plan, whose own shards are proven.
        max_error_probability: at most with which a wrong plan passes; it determines the number of points.
        ranks_per_axis: 2 or more reduces the plan first to so many ranks along every axis, and a zoo model to the smallest sizes that these
            divide as the plan divides its own (docs/proofs.md says why this suffices). 0 reduces what is too large to 2: more than 16
            ranks, or a zoo model of more than 2^20 parameters. The proof's `reduction` says what was reduced.
        whole: prove every plan as it is, however long that takes.

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
        sizes = [_choose_ranks_per_axis(model, each, sequence, ranks_per_axis, whole) for each in wanted]
        unreduced = iter(_build_cases(model, [each for each, size in zip(wanted, sizes, strict=True) if not size], batch, loss, sequence))
        cases = [
            _reduce_case(model, each, batch, loss, sequence, n) if n else next(unreduced) for each, n in zip(wanted, sizes, strict=True)
        ]
        proofs = tuple(_prove_case(case, options, cut_everything) for case in cases)
    finally:
        torch.random.set_rng_state(state)
    return proofs if isinstance(layout, Sequence) and not isinstance(layout, str) else proofs[0]


@dataclass(frozen=True)
class _ProofCase:
    """A plan to prove, with its captured model. `has_shards`: a plan's shards, not chosen by prices. `reduction`: what was reduced."""

    plan: Plan
    model: ProofModel
    has_shards: bool
    reduction: str = ""


def _prove_case(case: _ProofCase, options: ProofOptions, cut_everything: bool) -> Proof:
    proof = prove_plan(case.plan, case.model, options, cut_everything and not case.has_shards)
    return replace(proof, reduction=case.reduction)


def _choose_ranks_per_axis(model: Model, wanted: Any, sequence: int | None, ranks_per_axis: int, whole: bool) -> int:
    """Return to how many ranks an axis is reduced; 0 for a plan that is proven as it is."""
    if whole and ranks_per_axis:
        raise UsageError(f"whole=True proves the plan as it is, ranks_per_axis={ranks_per_axis} a smaller one; leave one of the two out")
    if ranks_per_axis == 1 or ranks_per_axis < 0:
        raise UsageError(f"ranks_per_axis={ranks_per_axis} leaves nothing divided; use 2 or 3, or whole=True for the plan as it is")
    if whole or ranks_per_axis:
        return ranks_per_axis
    layout = _layout_of(wanted)[1]
    if layout.num_ranks <= MAX_WHOLE_RANKS and not (_is_zoo_name(model) and count_parameters(str(model), sequence) > MAX_WHOLE_PARAMETERS):
        return 0
    try:
        reduce_layout(layout)
    except LayoutError:  # ranks unlike one another, or a file for as many
        return 0
    return 2


def _is_zoo_name(model: Model) -> bool:
    return isinstance(model, str) and ".py" not in model and not model.startswith("hf:")


def _layout_of(wanted: Any) -> tuple[Plan | Any, Layout]:
    """Return a wanted plan or layout, a plan file read, and its layout."""
    if isinstance(wanted, Path) or (isinstance(wanted, str) and wanted.endswith(".toml")):
        wanted = read_plan(wanted)
    return wanted, wanted.layout if isinstance(wanted, Plan) else Layout.parse(wanted) if isinstance(wanted, str) else wanted


def _build_cases(model: Model, wanted: Sequence[Any], batch: Any, loss: Loss | None, sequence: int | None) -> list[_ProofCase]:
    if not wanted:
        return []
    if isinstance(model, str):
        model = resolve(model, batch if isinstance(batch, int) else None, sequence)
    subject = subject_of(model, batch, loss)
    source = CachedModelSource.from_model(subject[1])
    proven = ProofModel(*subject[1:], source)
    return [_ProofCase(plan_to_verify(each, subject, source, None, None), proven, not isinstance(each, Layout | str)) for each in wanted]


def _reduce_case(model: Model, wanted: Any, batch: Any, loss: Loss | None, sequence: int | None, ranks_per_axis: int) -> _ProofCase:
    """Reduce a plan, and a model by name, to what is proven in their place."""
    wanted, layout = _layout_of(wanted)
    reduced = reduce_layout(layout, ranks_per_axis)
    if not _is_zoo_name(model):
        case = _build_case(model, wanted, reduced, batch, loss, sequence)
        return replace(case, reduction=_describe_reduction(layout, reduced, ""))
    assert isinstance(model, str)
    whole = batch if isinstance(batch, int) else wanted.batch_size if isinstance(wanted, Plan) else 0
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
        case = replace(case, reduction=_describe_reduction(layout, reduced, name))
        replicated = _replicated_sites(case.plan)
        if not replicated:
            return case
        if previous is not None and _replicated_sites(previous.plan) == replicated:
            return previous
        previous = case
    assert previous is not None
    return previous


def _describe_reduction(layout: Layout, reduced: Layout, model: str) -> str:
    """Say what is proven in place of a plan, and why it suffices."""
    before, after = (dict(word.split("=", 1) for word in str(each).split()) for each in (layout, reduced))
    changed = [f"{key} {before[key]} -> {after.get(key, 1)}" for key in before if before[key] != after.get(key, "1")]
    ranks = f"{reduced.num_ranks} ranks in place of {layout.num_ranks} ({', '.join(changed)})" if changed else f"{layout.num_ranks} ranks"
    sizes = f" and the smallest sizes that they divide alike ({model})" if model else ""
    return (
        f"proven on {ranks}{sizes}: code that runs a rank depends on sizes only through bounds, members and factors that two ranks, two "
        "entries a shard and two equal layers show (docs/proofs.md); whole=True, or --whole, proves the plan as it is"
    )


def _build_case(
    model: ResolvedModel | Model, wanted: Any, layout: Layout, batch: Any, loss: Loss | None, sequence: int | None
) -> _ProofCase:
    (case,) = _build_cases(model, [layout], batch, loss, sequence)
    if not isinstance(wanted, Plan) or not wanted.shards:
        return case
    names = {name for name, _ in (*case.model.source.model.named_parameters(), *case.model.source.model.named_buffers())}
    shards = tuple(
        (axis, tuple((name, dim) for name, dim in entries if name in names))
        for axis, entries in expand_shards(wanted.shards, names).items()
    )
    return replace(case, plan=replace(case.plan, shards=shards), has_shards=True)


def _replicated_sites(plan: Plan) -> set[str]:
    return {pattern_of(site) for site in plan.replicated_operators}
