"""`shardwise.prove`: a plan without tolerance, on numbers of a finite field, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.api import Model, plan_to_verify, subject_of
from shardwise.capture.capture import Loss
from shardwise.errors import UsageError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import read_plan
from shardwise.run.prove.proof import Proof
from shardwise.run.prove.prove import ProofOptions, prove_plan
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.run.state.optimizer import OptimizerSpec
from shardwise.zoo.resolve import resolve


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
) -> Proof | tuple[Proof, ...]:
    """Prove that a plan computes what the serial model does: loss gradients, updated weights and optimizer state, without a tolerance.

    Every rank's engine runs as a thread of this process on numbers of a finite field, in which sums and products are exact, at random
    points. What only floating point can show (overflow, 16 bits, the order of sums) is left to `verify`.

    Args:
        model, batch, loss, layout, sequence: as for `verify`; several layouts give a tuple of proofs.
        cut_everything: shard weights wherever the rules allow, even where it does not pay; not for a plan, whose own shards are proven.
        max_error_probability: at most with which a wrong plan passes; it determines the number of points.

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
    if isinstance(model, str):
        model = resolve(model, batch if isinstance(batch, int) else None, sequence)
    assert not isinstance(model, Path)
    subject = subject_of(model, batch, loss)
    _, make, inputs, loss = subject
    options = ProofOptions(max_error_probability, steps, optimizer=optimizer)
    state = torch.random.get_rng_state()
    try:
        source = CachedModelSource.from_model(make)
        plans = [(plan_to_verify(each, subject, source, None, None), isinstance(each, Layout | str)) for each in wanted]
        proofs = tuple(prove_plan(plan, make, inputs, loss, source, options, cut_everything and by_hand) for plan, by_hand in plans)
    finally:
        torch.random.set_rng_state(state)
    return proofs if isinstance(layout, Sequence) and not isinstance(layout, str) else proofs[0]
